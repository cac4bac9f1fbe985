# SPDX-License-Identifier: Apache-2.0
"""The advisor's findings for people: the places where prompts of a group break, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from radixkv.cache.keys import Owner
from radixkv.cache.reporting.divergence import BreakPoint
from radixkv.observe.explanation import Explanation, MissPlace
from radixkv_server.activity.activity import SeenRequest
from radixkv_server.apis.cache_api.caller import Caller
from radixkv_server.apis.cache_api.evidence import explanation_of_request
from radixkv_server.apis.cache_api.tools_first import tools_first_tokens
from radixkv_server.apis.common.explanation_json import breaker_json
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json

MAX_POINTS = 1000  # of the advisor's, among which one is looked for


def owner_of(point: BreakPoint) -> Owner:
    """Return the owner of the prompts that break there."""
    return Owner(*(*point.namespace, "", "", "")[:3])


async def point_at(
    context: ServerContext, owner: Owner, beginning: Sequence[int], position: int
) -> BreakPoint | None:
    """Return the advisor's record of the place where a prompt leaves the cached text, or None.

    Args:
        beginning: first tokens of the prompt, at least one.
    """
    points = await context.engine.cache.advice(MAX_POINTS, tenant=owner.tenant, salt=owner.salt)
    size = context.engine.config.block_size
    return next((point for point in points if _is_at(point, owner, beginning, position, size)), None)


def _is_at(point: BreakPoint, owner: Owner, beginning: Sequence[int], position: int, block_size: int) -> bool:
    prompt_group = point.group_tokens
    return (
        owner_of(point) == owner
        and tuple(beginning[: len(prompt_group)]) == prompt_group
        and position // block_size == point.position // block_size
    )


def _parts_at(one: SeenRequest, point: BreakPoint, block_size: int) -> bool:
    report = one.report
    return (
        report is not None
        and report.reason == "diverged"
        and _is_at(point, one.owner, one.beginning, report.num_hit_tokens, block_size)
    )


def _is_example(one: SeenRequest, point: BreakPoint) -> bool:
    shown, before = point.example_new, point.example_before
    return tuple(one.after[: len(shown)]) == shown and tuple(one.before[-len(before) :]) == before


async def advice_json(context: ServerContext, point: BreakPoint, caller: Caller) -> Json:
    """Describe a place where prompts break; with text if the prompts are the caller's own."""
    tenant, salt, _ = owner_of(point)
    size = context.engine.config.block_size
    latest = [one for one in context.activity.latest(tenant) if _parts_at(one, point, size)]
    part = next((one.place for one in latest if one.place), None)
    breaker = tools = None
    shown: Json = {
        "position": point.position,
        "place": part,
        "count": point.count,
        "share": round(point.count / max(1, point.group_count), 3),
        "recoverable_tokens": point.recoverable_tokens,
        "kind": None,
        "family": None,
        "example": None,
    }
    place = MissPlace(point.position, 0, point.recoverable_tokens, part, group=point)
    if caller.may_read(tenant, salt):
        tokens = (point.example_before, point.example_new, point.example_cached)
        before, new, cached = (context.text_of(some) for some in tokens)
        place = replace(place, before=before, new=new, old=cached)
        shown |= {
            "kind": place.kind or "text",
            "family": context.text_of(point.group_tokens),
            "example": {"before": before, "prompt": new, "cached": cached or None},
        }
        # The cause is that of the request that the example is from: another one may have another.
        sample = next((one for one in latest if _is_example(one, point)), None)
        if sample is not None and sample.report is not None:
            breaker = (await explanation_of_request(context, sample, sample.report, point)).breaker
            tools = await tools_first_tokens(context, breaker, sample.parts)
            tools = None if tools is None else tools * point.count
    shown |= {
        "breaker": breaker_json(breaker),
        "tools_first_tokens": tools,
        "advice": Explanation(None, place, breaker, tools_first_tokens=tools).advice,
    }
    if caller.is_admin:
        shown["tenant"], shown["cache_salt"] = tenant, salt
    return shown
