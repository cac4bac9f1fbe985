# SPDX-License-Identifier: Apache-2.0
"""POST /v1/cache/explain: why a prompt would miss in the present cache, or where two prompts differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from radixkv.cache.keys import TOKEN_BYTES, encode_tokens, shared_bytes
from radixkv.cache.reporting.divergence import BreakPoint
from radixkv.cache.reporting.explain import MissReport
from radixkv.observe.explanation import SHOWN_TOKENS, MissPlace, Predecessor, explain, sides_of
from radixkv.observe.recoverable import recoverable_tokens
from radixkv_server.apis.cache_api.advice import point_at
from radixkv_server.apis.cache_api.cached_under import cached_under
from radixkv_server.apis.cache_api.caller import Caller
from radixkv_server.apis.cache_api.evidence import MissedPrompt, comparable, explanation_of, miss_place
from radixkv_server.apis.cache_api.prompt_ids import Prompt
from radixkv_server.apis.cache_api.tools_first import tools_first_tokens
from radixkv_server.apis.common.explanation_json import around_json, breaker_json, explanation_json
from radixkv_server.concurrency import off_loop
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json

COMPARED_TOKENS = 4096

_CACHED_TOO = ("diverged", "evicted", "expired", "reset", "namespace", "first_seen", "load_too_slow")


async def prompt_explanation(context: ServerContext, caller: Caller, prompt: Prompt) -> Json:
    """Explain a prompt's match in the present cache, without running the model."""
    cache, ids = context.engine.cache, prompt.ids
    report = await cache.explain(ids, caller.owner, admin=caller.is_admin)
    cached: list[int] = []
    if report.reason in _CACHED_TOO:
        cached = await cache.continuation(ids, caller.owner, limit=COMPARED_TOKENS)
    group = None
    if report.reason == "diverged":
        group = await point_at(context, caller.owner, ids, report.num_hit_tokens)
    path = await cache.path(ids, caller.owner)
    place = await off_loop(lambda: _place_of(context, report, prompt, cached, group))
    missed = MissedPrompt(caller.owner, ids, report, prompt.parts, prompt.hint(report))
    explanation = await explanation_of(context, missed, place)
    tools = await tools_first_tokens(context, explanation.breaker, prompt.parts)
    explanation = replace(explanation, tools_first_tokens=tools)
    shown = None
    if place is not None:
        shown = {**around_json(place), **_ids_around(ids, place.position, cached, "cached")}
    return {
        "object": "cache.explanation",
        **explanation_json(report, explanation, shown, prompt.client_rule),
        "detail": _detail(report),
        "cached_under": await cached_under(context, caller, ids, report),
        "tools_first_tokens": tools,
        "nodes": [context.names.of(node) for node in path],
    }


def _place_of(
    context: ServerContext, report: MissReport, prompt: Prompt, cached: list[int], group: BreakPoint | None
) -> MissPlace | None:
    """Return the place where the match of a prompt ends, with the tokens cached there; None: a hit."""
    if report.reason == "hit":
        return None
    position = report.num_hit_tokens
    before, new = (prompt.ids[side] for side in sides_of(position))
    part = prompt.place_name(before, new)
    place = miss_place(context, report, part, before, new, cached[:SHOWN_TOKENS], group)
    if place is None or report.reason != "diverged":
        return place
    equal = recoverable_tokens(prompt.ids[position:], cached)
    return replace(place, recoverable=max(place.recoverable, equal))


def _ids_around(ids: list[int], position: int, other: Sequence[int], name: str) -> Json:
    """Return the tokens of a prompt from a place on, and those of the other one, which has this name."""
    new = ids[position : position + SHOWN_TOKENS]
    return {"prompt_token_ids": new, f"{name}_token_ids": list(other[:SHOWN_TOKENS])}


def _detail(report: MissReport) -> str:
    """Return the report as a sentence; for a divergence without token ids, whose text is shown beside it."""
    if report.reason != "diverged":
        return report.detail
    return (
        f"{report.num_hit_tokens} of {report.num_prompt_tokens} tokens are cached; at token "
        f"{report.num_hit_tokens} the prompt parts from what is."
    )


async def prompt_comparison(context: ServerContext, prompt: Prompt, other: Prompt) -> Json:
    """Describe the place where two prompts differ, and its cost for the first one."""
    return await off_loop(lambda: _comparison(context, prompt, other))


def _comparison(context: ServerContext, prompt: Prompt, earlier: Prompt) -> Json:
    ids, other = prompt.ids, earlier.ids
    shared = shared_bytes(encode_tokens(ids), encode_tokens(other)) // TOKEN_BYTES
    missed = len(ids) - min(shared, len(ids) - 1)  # the last token is always computed
    before, new = (ids[side] for side in sides_of(shared))
    place = MissPlace(
        shared,
        missed,
        recoverable_tokens(ids[shared:], other[shared:]),
        prompt.place_name(before, new),
        before=context.text_of(before),
        new=context.text_of(new),
        old=context.text_of(other[shared : shared + SHOWN_TOKENS]),
        other="the other one",
    )
    is_same, breaker = shared == len(ids) == len(other), None
    advice: str | None = "The prompts are the same."
    if shared < min(len(ids), len(other)):
        old_parts, parts = comparable(context, (earlier.parts, other), (prompt.parts, ids))
        explanation = explain(None, parts, Predecessor(old_parts, shared), place)
        breaker, advice = explanation.breaker, explanation.advice
    elif not is_same:
        advice = "One prompt begins with all of the other: nothing is lost."
    shown = around_json(place)
    shown["with"] = shown.pop("cached")
    return {
        "object": "cache.comparison",
        "prompt_tokens": len(ids),
        "with_tokens": len(other),
        "shared_tokens": shared,
        "position": None if is_same else shared,
        "place": None if is_same else place.part,
        "missed_tokens": missed,
        "recoverable_tokens": place.recoverable,
        "around": None if is_same else {**shown, **_ids_around(ids, shared, other[shared:], "with")},
        "breaker": breaker_json(breaker),
        "advice": advice,
    }
