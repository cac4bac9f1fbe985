"""Explanations: how much of a prompt would be found, where it breaks, and the text around the break."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from radixkv.cache.insight.explain import MissReport
from radixkv_server.apis.cache.caller import Caller
from radixkv_server.apis.cache.texts import TokenTexts
from radixkv_server.apis.cache.wording import break_advice, miss_advice, what_differs
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json
from radixkv_server.usage import Hint

SHOWN_TOKENS = 48  # on each side of a break
COMPARED_TOKENS = 4096

_CACHED_TOO = ("diverged", "evicted", "expired", "reset", "namespace", "first_seen")


async def explain(context: ServerContext, caller: Caller, ids: list[int], hint: Hint | None = None) -> Json:
    """What the cache would say to a prompt now; nothing is sent to the model.

    Args:
        hint: says of a report what is known of its cause.
    """
    cache = context.engine.cache
    report = await cache.explain(ids, tenant=caller.tenant, salt=caller.salt, admin=caller.is_admin)
    cached: list[int] = []
    if report.reason in _CACHED_TOO:
        cached = await cache.continuation(ids, tenant=caller.tenant, salt=caller.salt, limit=COMPARED_TOKENS)
    cause = None if hint is None else hint(report)
    path = await cache.path(ids, tenant=caller.tenant, salt=caller.salt)
    texts = TokenTexts(context.engine.tokenizer)
    explanation = await asyncio.to_thread(_explanation, texts, report, ids, cached, cause)
    return {**explanation, "nodes": [context.names.of(node) for node in path]}


def report_json(report: MissReport) -> Json:
    """The facts of a report, without any tokens."""
    return {
        "prompt_tokens": report.num_prompt_tokens,
        "cached_tokens": report.num_hit_tokens,
        "missed_tokens": report.num_missed_tokens,
        "reason": report.reason,
        "position": None if report.reason == "hit" else report.num_hit_tokens,
        "age_s": None if report.age_s is None else round(report.age_s, 3),
        "evicted_by": report.evicted_by,
        "skipped": report.skipped,
    }


def _explanation(
    texts: TokenTexts, report: MissReport, ids: list[int], cached: list[int], cause: str | None
) -> Json:
    position = report.num_hit_tokens
    around, kind = None, None
    if report.reason != "hit":
        around = _around(texts, ids, position, cached)
        kind = what_differs(around["before"], around["prompt"], around["cached"] or "")
    recoverable = _same_later(ids[position:], cached)
    return {
        "object": "cache.explanation",
        **report_json(report),
        "detail": _detail(report),
        "recoverable_tokens": recoverable if report.reason == "diverged" else 0,
        "around": around,
        "advice": miss_advice(report, kind, recoverable) if cause is None else f"It seems that {cause}.",
    }


def _detail(report: MissReport) -> str:
    """The report as a sentence; of a divergence without the token ids, whose text stands beside it."""
    if report.reason != "diverged":
        return report.detail
    return (
        f"{report.num_hit_tokens} of {report.num_prompt_tokens} tokens are cached; at token "
        f"{report.num_hit_tokens} the prompt parts from what is."
    )


def _around(texts: TokenTexts, ids: Sequence[int], position: int, cached: Sequence[int]) -> Json:
    """The text before a break, and how the prompt and the nearest cached one go on."""
    new, old = list(ids[position : position + SHOWN_TOKENS]), list(cached[:SHOWN_TOKENS])
    return {
        "position": position,
        "before": texts.text(ids[max(0, position - SHOWN_TOKENS) : position]),
        "prompt": texts.text(new),
        "cached": texts.text(old) if old else None,
        "prompt_token_ids": new,
        "cached_token_ids": old,
    }


def _same_later(new: Sequence[int], cached: Sequence[int]) -> int:
    """Tokens at equal places, or a common end, whichever is more: found, had the rest come later."""
    count = min(len(new), len(cached))
    if not count:
        return 0
    one, other = np.array(new), np.array(cached)
    in_place = int(np.count_nonzero(one[:count] == other[:count]))
    return max(in_place, _common(one[::-1], other[::-1]))


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many leading tokens two prompts share."""
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    return int(differs.argmax()) if differs.any() else count


async def compare(context: ServerContext, ids: list[int], other: list[int]) -> Json:
    """Where two prompts part, and what that costs the one that comes second."""
    return await asyncio.to_thread(_comparison, TokenTexts(context.engine.tokenizer), ids, other)


def _comparison(texts: TokenTexts, ids: list[int], other: list[int]) -> Json:
    one, two = np.array(ids), np.array(other)
    shared = _common(one, two)
    is_same = shared == len(ids) == len(other)
    missed = len(ids) - min(shared, len(ids) - 1)  # the last token is always computed
    recoverable = min(_common(one[shared:][::-1], two[shared:][::-1]), len(ids) - shared)
    around, advice = None, "The prompts are the same."
    if not is_same:
        around = _around(texts, ids, shared, other[shared:])
        around["with"] = around.pop("cached")
        around["with_token_ids"] = around.pop("cached_token_ids")
        if shared == len(ids) or shared == len(other):
            advice = "One prompt begins with all of the other: nothing is lost."
        else:
            kind = what_differs(around["before"], around["prompt"], around["with"] or "")
            advice = break_advice(kind, shared, missed, recoverable)
    return {
        "object": "cache.comparison",
        "prompt_tokens": len(ids),
        "with_tokens": len(other),
        "shared_tokens": shared,
        "position": None if is_same else shared,
        "missed_tokens": missed,
        "recoverable_tokens": recoverable,
        "around": around,
        "advice": advice,
    }
