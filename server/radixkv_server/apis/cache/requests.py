"""The latest requests as JSON, and as a stream of those that change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from radixkv_server.activity import SeenRequest
from radixkv_server.apis.cache.caller import Caller
from radixkv_server.apis.cache.explain import report_json
from radixkv_server.apis.cache.texts import TokenTexts
from radixkv_server.apis.cache.wording import miss_advice, what_is_at
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json, dump
from radixkv_server.errors import ApiError

LOOK_S = 0.5  # how often a stream looks for what has changed


def requests_json(context: ServerContext, caller: Caller, limit: int, after: int = 0) -> list[Json]:
    """The latest requests, newest first."""
    texts = TokenTexts(context.engine.tokenizer)
    return [_summary(one, caller, texts) for one in context.activity.latest(caller.scope, limit, after)]


def _summary(one: SeenRequest, caller: Caller, texts: TokenTexts) -> Json:
    may_read = caller.may_read(one.tenant, one.salt)
    rate = None
    if one.ttft_s is not None:
        spent = (one.duration_s or one.age_s) - one.ttft_s
        decoded = one.completion_tokens - one.num_samples
        rate = round(decoded / spent, 1) if spent > 0 and decoded > 0 else None
    shown: Json = {
        "id": one.id,
        "operation": one.operation,
        "state": one.state,
        "error_code": one.error_code,
        "started_at": round(one.started_at, 3),
        "prompt_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens if one.is_admitted else None,
        "completion_tokens": one.completion_tokens,
        "reason": None if one.report is None else one.report.reason,
        "ttft_s": None if one.ttft_s is None else round(one.ttft_s, 4),
        "duration_s": round(one.duration_s if one.duration_s is not None else one.age_s, 4),
        "tokens_per_s": rate,
        "text": texts.text(one.beginning) if may_read else None,
    }
    if caller.is_admin:
        shown["tenant"], shown["cache_salt"] = one.tenant, one.salt or None
    return shown


def request_json(context: ServerContext, caller: Caller, name: str) -> Json:
    """One request with the explanation of its miss.

    Raises:
        ApiError: 404; it is not among the caller's latest.
    """
    one = context.activity.find(caller.scope, name)
    if one is None:
        raise ApiError(
            404, "No such request is among the latest ones of yours.", code="request_not_found", param="id"
        )
    texts = TokenTexts(context.engine.tokenizer)
    shown: Json = {"object": "cache.request", **_summary(one, caller, texts), "explanation": None}
    if one.report is not None:
        around, kind = None, None
        if caller.may_read(one.tenant, one.salt) and one.report.reason != "hit":
            before, prompt = texts.text(one.before), texts.text(one.after)
            cached = None if one.report.cached_is_public else texts.text(one.report.cached_tokens_after)
            position = one.report.num_hit_tokens
            around = {"position": position, "before": before, "prompt": prompt, "cached": cached or None}
            kind = what_is_at(before, prompt) or what_is_at(before, cached or "")
        shown["explanation"] = {
            **report_json(one.report),
            "around": around,
            "advice": miss_advice(one.report, kind, 0),
        }
    return shown


async def request_frames(context: ServerContext, caller: Caller, limit: int) -> AsyncGenerator[bytes, None]:
    """Server-sent events: the latest requests, then those that changed, newest first.

    They have no ids: a client that was cut off gets the few latest again.
    """
    activity = context.activity
    version = activity.version
    yield _frame("snapshot", requests_json(context, caller, limit))
    while True:
        if activity.version != version:
            changed = requests_json(context, caller, limit, after=version)
            version = activity.version
            if changed:
                yield _frame("requests", changed)
        await asyncio.sleep(LOOK_S)


def _frame(event: str, requests: list[Json]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event.encode(), dump({"requests": requests}))
