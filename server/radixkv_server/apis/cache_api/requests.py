# SPDX-License-Identifier: Apache-2.0
"""The latest requests as JSON, and a stream of their changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from radixkv.cache.reporting.explain import MissReport
from radixkv_server.activity.activity import SeenRequest
from radixkv_server.apis.cache_api.advice import point_at
from radixkv_server.apis.cache_api.caller import Caller
from radixkv_server.apis.cache_api.evidence import explanation_of_request
from radixkv_server.apis.common.cache_diagnosis import finding_json
from radixkv_server.apis.common.explanation_json import around_json, explanation_json
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json, dump
from radixkv_server.errors import ApiError

LOOK_S = 0.5  # how often a stream looks for what has changed


def requests_json(context: ServerContext, caller: Caller, limit: int, after: int = 0) -> list[Json]:
    """Return the latest requests, newest first."""
    return [_summary(context, one, caller) for one in context.activity.latest(caller.scope, limit, after)]


def _summary(context: ServerContext, one: SeenRequest, caller: Caller) -> Json:
    may_read = caller.may_read(one.tenant, one.salt)
    progress, rate = one.progress, one.progress.tokens_per_s
    return {
        "id": one.id,
        "operation": one.operation,
        "adapter": one.lora or None,
        "state": one.state,
        "error_code": one.error_code,
        "started_at": round(one.started_at, 3),
        "prompt_tokens": progress.num_tokens,
        "cached_tokens": None if progress.outcome is None else progress.num_cached_tokens,
        "completion_tokens": progress.num_generated_tokens,
        "reason": None if one.report is None else one.report.reason,
        "comparison": None if one.finding is None else finding_json(one.compared_with, one.finding),
        "ttft_s": None if one.ttft_s is None else round(one.ttft_s, 4),
        "duration_s": round(one.duration_s if one.duration_s is not None else one.age_s, 4),
        "tokens_per_s": None if rate is None else round(rate, 1),
        "text": context.text_of(one.beginning) if may_read else None,
        "last_message": one.last_message or None if may_read else None,
        "tenant": one.tenant,
        "cache_salt": one.salt or None,
    }


async def request_json(context: ServerContext, caller: Caller, name: str) -> Json:
    """Return a request with the explanation of its miss, and the place of its prompt in the tree now.

    Raises:
        ApiError: 404 if it is not among the caller's latest.
    """
    one = context.activity.find(caller.scope, name)
    if one is None:
        raise ApiError(
            404, "No such request is among the latest ones of yours.", code="request_not_found", param="id"
        )
    shown: Json = {
        "object": "cache.request",
        **_summary(context, one, caller),
        "nodes": await _nodes(context, one),
        "explanation": None,
    }
    if one.report is not None:
        shown["explanation"] = await _explanation(context, caller, one, one.report)
    return shown


async def _nodes(context: ServerContext, one: SeenRequest) -> list[str]:
    """Return ids of the nodes with its cached prefix, from the root down; empty once it is forgotten."""
    if not one.prompt:
        return []
    path = await context.engine.cache.path(one.prompt.tolist(), one.owner)
    return [context.names.of(node) for node in path]


async def _explanation(context: ServerContext, caller: Caller, one: SeenRequest, report: MissReport) -> Json:
    group = None
    if report.reason == "diverged":
        group = await point_at(context, one.owner, one.beginning, report.num_hit_tokens)
    explanation = await explanation_of_request(context, one, report, group)
    if not caller.may_read(one.tenant, one.salt):
        return explanation_json(report, explanation.without_texts(), None, one.client_rule)
    around = None if explanation.place is None else around_json(explanation.place)
    return explanation_json(report, explanation, around, one.client_rule)


async def request_frames(context: ServerContext, caller: Caller, limit: int) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events: the latest requests, then changed ones, newest first.

    They have no ids: a client that reconnects gets the latest few again.
    """
    activity = context.activity
    version = activity.version
    yield _frame("snapshot", requests_json(context, caller, limit))
    while True:
        context.check_serving()
        if activity.version != version:
            changed = requests_json(context, caller, limit, after=version)
            version = activity.version
            if changed:
                yield _frame("requests", changed)
        await asyncio.sleep(LOOK_S)


def _frame(event: str, requests: list[Json]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event.encode(), dump({"requests": requests}))
