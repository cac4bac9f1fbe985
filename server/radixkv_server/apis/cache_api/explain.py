# SPDX-License-Identifier: Apache-2.0
"""Explanations of a prompt's match: its length, the place of the break, and the text around it."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.cache.keys import TOKEN_BYTES, encode_tokens, shared_bytes
from radixkv.cache.reporting.divergence import BreakPoint
from radixkv.cache.reporting.explain import MissReport
from radixkv.observe.advisor import same_later
from radixkv.observe.explanation import Divergence, Explanation
from radixkv.text.chat_formats.client_rules import ClientRule
from radixkv_server.apis.cache_api.advice import point_at, prompt_group_json, recoverable_each
from radixkv_server.apis.cache_api.breaker import (
    Broken,
    breaker_between,
    breaker_json,
    breaker_of,
)
from radixkv_server.apis.cache_api.cached_under import cached_under
from radixkv_server.apis.cache_api.caller import Caller
from radixkv_server.apis.cache_api.prompt_ids import Prompt
from radixkv_server.apis.cache_api.tools_first import tools_first_tokens
from radixkv_server.chats.render import rule_in_words
from radixkv_server.concurrency import off_loop
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json

SHOWN_TOKENS = 48  # on each side of a break
COMPARED_TOKENS = 4096

_CACHED_TOO = ("diverged", "evicted", "expired", "reset", "namespace", "first_seen", "load_too_slow")


async def explain(context: ServerContext, caller: Caller, prompt: Prompt) -> Json:
    """Explain a prompt's match in the present cache, without running the model."""
    cache, ids = context.engine.cache, prompt.ids
    report = await cache.explain(ids, caller.owner, admin=caller.is_admin)
    cached: list[int] = []
    if report.reason in _CACHED_TOO:
        cached = await cache.continuation(ids, caller.owner, limit=COMPARED_TOKENS)
    point = None
    if report.reason == "diverged":
        point = await point_at(context, caller.owner, ids, report.num_hit_tokens)
    path = await cache.path(ids, caller.owner)
    place, around, diverged = await off_loop(lambda: _break(context, report, prompt, cached, point))
    shown, hint = around or {}, prompt.hint(report)
    broken = Broken(
        caller.owner,
        ids,
        report,
        prompt.parts,
        place,
        hint,
        cached=(shown.get("before") or "", shown.get("prompt") or "", shown.get("cached") or ""),
    )
    breaker = await breaker_of(context, broken)
    tools = await tools_first_tokens(context, breaker, prompt.parts)
    explanation = Explanation(report, diverged, breaker, hint, tools)
    return {
        "object": "cache.explanation",
        **explanation_json(report, explanation, place, around, prompt.client_rule),
        "detail": _detail(report),
        "cached_under": await cached_under(context, caller, ids, report),
        "tools_first_tokens": tools,
        "nodes": [context.names.of(node) for node in path],
    }


def explanation_json(
    report: MissReport,
    explanation: Explanation,
    place: str | None,
    around: Json | None,
    rule: ClientRule | None,
) -> Json:
    """Return an explanation as the views of a request and of a prompt have it.

    Args:
        place: part of the prompt in which the match ended.
        around: texts there; None: not to be shown.
        rule: the rule by which the prompt's client was held constant.
    """
    diverged = explanation.divergence
    return {
        **report_json(report),
        "place": place,
        "normalized": normalized_json(rule),
        "recoverable_tokens": explanation.recoverable_tokens,
        "family": prompt_group_json(None if diverged is None else diverged.group),
        "around": around,
        "breaker": breaker_json(explanation.breaker),
        "advice": explanation.advice,
    }


def report_json(report: MissReport) -> Json:
    """Return the facts of a report, without any tokens."""
    return {
        "prompt_tokens": report.num_prompt_tokens,
        "cached_tokens": report.num_hit_tokens,
        "missed_tokens": report.num_missed_tokens,
        "reason": report.reason,
        "position": None if report.reason == "hit" else report.num_hit_tokens,
        "age_s": None if report.age_s is None else round(report.age_s, 3),
        "evicted_by": report.evicted_by,
        "skipped": report.skipped,
        "tier": report.tier,
        "tier_tokens": report.num_tier_tokens,
    }


def normalized_json(rule: ClientRule | None) -> Json | None:
    """Describe the client's text about itself that was held constant in a prompt, or None."""
    return None if rule is None else {"client": rule.client, "what": rule.what, "detail": rule_in_words(rule)}


def _break(
    context: ServerContext, report: MissReport, prompt: Prompt, cached: list[int], point: BreakPoint | None
) -> tuple[str | None, Json | None, Divergence | None]:
    """Return the part in which the match ended, the texts there, and the divergence; None: there is none."""
    ids, position = prompt.ids, report.num_hit_tokens
    if report.reason == "hit":
        return None, None, None
    place, around = _place(prompt, position), _around(context, ids, position, cached)
    if report.reason != "diverged":
        return place, around, None
    # Of what is cached there not all may be left: the group knows more.
    known = 0 if point is None else min(recoverable_each(point), report.num_missed_tokens)
    recoverable = max(known, same_later(ids[position:], cached))
    found = Divergence(
        position, None, report.num_missed_tokens, recoverable, place=place, group=point
    ).with_text(around["before"], around["prompt"], around["cached"])
    return place, around, found


def _place(prompt: Prompt, position: int) -> str | None:
    """Name the part that contains a place of a prompt."""
    ids = prompt.ids
    return prompt.place_name(
        ids[max(0, position - SHOWN_TOKENS) : position], ids[position : position + SHOWN_TOKENS]
    )


def _detail(report: MissReport) -> str:
    """Return the report as a sentence; for a divergence without token ids, whose text is shown beside it."""
    if report.reason != "diverged":
        return report.detail
    return (
        f"{report.num_hit_tokens} of {report.num_prompt_tokens} tokens are cached; at token "
        f"{report.num_hit_tokens} the prompt parts from what is."
    )


def _around(context: ServerContext, ids: Sequence[int], position: int, cached: Sequence[int]) -> Json:
    """Return the text before a break, and its continuations in the prompt and the nearest cached one."""
    new, old = list(ids[position : position + SHOWN_TOKENS]), list(cached[:SHOWN_TOKENS])
    return {
        "position": position,
        "before": context.text_of(ids[max(0, position - SHOWN_TOKENS) : position]),
        "prompt": context.text_of(new),
        "cached": context.text_of(old) if old else None,
        "prompt_token_ids": new,
        "cached_token_ids": old,
    }


async def compare(context: ServerContext, prompt: Prompt, other: Prompt) -> Json:
    """Describe the place where two prompts differ, and its cost for the second one."""
    return await off_loop(lambda: _comparison(context, prompt, other))


def _comparison(context: ServerContext, prompt: Prompt, earlier: Prompt) -> Json:
    ids, other = prompt.ids, earlier.ids
    shared = shared_bytes(encode_tokens(ids), encode_tokens(other)) // TOKEN_BYTES
    is_same = shared == len(ids) == len(other)
    breaker = None
    missed = len(ids) - min(shared, len(ids) - 1)  # the last token is always computed
    recoverable = same_later(ids[shared:], other[shared:])
    around, place = None, None
    advice: str | None = "The prompts are the same."
    if not is_same:
        around = _around(context, ids, shared, other[shared:])
        around["with"] = around.pop("cached")
        around["with_token_ids"] = around.pop("cached_token_ids")
        place = _place(prompt, shared)
        advice = "One prompt begins with all of the other: nothing is lost."
        if shared < min(len(ids), len(other)):
            found = Divergence(shared, None, missed, recoverable, place=place, other="the other one")
            found = found.with_text(around["before"], around["prompt"], around["with"])
            breaker = breaker_between(context, (earlier.parts, other), (prompt.parts, ids), place)
            advice = Explanation(None, found, breaker).advice
    return {
        "object": "cache.comparison",
        "prompt_tokens": len(ids),
        "with_tokens": len(other),
        "shared_tokens": shared,
        "position": None if is_same else shared,
        "place": place,
        "missed_tokens": missed,
        "recoverable_tokens": recoverable,
        "around": around,
        "breaker": breaker_json(breaker),
        "advice": advice,
    }
