# SPDX-License-Identifier: Apache-2.0
"""Evidence of why prompts missed: the requests that the server remembers, gathered for `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from radixkv.cache.keys import TOKEN_BYTES, Owner, encode_tokens, shared_bytes
from radixkv.cache.reporting.divergence import BreakPoint
from radixkv.cache.reporting.explain import MissReport
from radixkv.observe.causes import CAUSES, Detector
from radixkv.observe.explanation import Explanation, MissPlace, Predecessor, explain
from radixkv.observe.prompt_parts import MakeParts, PromptParts
from radixkv.observe.recoverable import recoverable_tokens
from radixkv_server.activity.activity import SeenRequest
from radixkv_server.concurrency import off_loop
from radixkv_server.context import ServerContext

COMPARED_REQUESTS = 200  # the latest of a tenant
_MAX_TIED = 8  # requests that share equally much with a prompt, and are compared further on
_COUNTED_REQUESTS = 10_000  # of all tenants, whose writes may have taken a prompt's room


@dataclass(frozen=True, slots=True)
class MissedPrompt:
    """Prompt whose miss is to be explained.

    Args:
        owner: its owner.
        ids: its tokens.
        parts: makes the parts to compare; None: only the text is known.
        hint: a likely cause that the chat format knows.
        request: request with the prompt; None: it was not sent.
    """

    owner: Owner
    ids: Sequence[int]
    report: MissReport
    parts: MakeParts | None
    hint: str | None
    request: SeenRequest | None = None


def miss_place(
    context: ServerContext,
    report: MissReport,
    part: str | None,
    before: Sequence[int],
    new: Sequence[int],
    old: Sequence[int],
    group: BreakPoint | None,
) -> MissPlace | None:
    """Return the place where the found part of a prompt ends; None: nothing was missed.

    Args:
        part: part of the prompt that contains it, if known.
        before, new: tokens of the prompt on both sides of it; old: those that are cached there instead.
        group: record of prompts that leave the cached text there.
    """
    if report.reason == "hit":
        return None
    missed = report.num_missed_tokens
    # Some of the cached tokens there may be evicted by now: the group knows more.
    known = 0 if group is None else min(group.recoverable_tokens // max(1, group.count), missed)
    return MissPlace(
        report.num_hit_tokens,
        missed,
        known,
        part,
        before=context.text_of(before),
        new=context.text_of(new),
        old=context.text_of(old),
        group=group,
    )


async def explanation_of(
    context: ServerContext, prompt: MissedPrompt, place: MissPlace | None
) -> Explanation:
    """Explain a prompt by what the server remembers of its tenant's requests."""
    report, request = prompt.report, prompt.request
    if CAUSES[report.reason].detector in (Detector.NOTHING, Detector.REASON):
        return explain(report, lambda: PromptParts(()), None, place, hint=prompt.hint)
    earlier = [
        one
        for one in context.activity.latest(prompt.owner.tenant, COMPARED_REQUESTS)
        if one is not request
        and one.owner == prompt.owner
        and len(one.prompt) > 0
        and (request is None or one.started_at <= request.started_at)
    ]
    return await off_loop(lambda: _explained(context, prompt, place, earlier))


async def explanation_of_request(
    context: ServerContext, one: SeenRequest, report: MissReport, group: BreakPoint | None
) -> Explanation:
    """Explain the miss of a request; without its cause once its prompt is forgotten.

    Args:
        group: record of prompts that leave the cached text where it does.
    """
    old = [] if report.cached_is_public else report.cached_tokens_after
    place = miss_place(context, report, one.place, one.before, one.after, old, group)
    if not one.prompt:
        return Explanation(report, place, None, one.cause)
    missed = MissedPrompt(one.owner, one.prompt, report, one.parts, one.cause, one)
    return await explanation_of(context, missed, place)


def _explained(
    context: ServerContext, prompt: MissedPrompt, place: MissPlace | None, earlier: Sequence[SeenRequest]
) -> Explanation:
    report, size = prompt.report, context.engine.config.block_size
    found, shared = _most_alike(prompt, earlier)
    if found is None:
        _, parts = comparable(context, (None, ()), (prompt.parts, prompt.ids))
        return explain(report, parts, None, place, hint=prompt.hint, block_size=size)
    if report.reason == "diverged" and place is not None:
        equal = recoverable_tokens(prompt.ids[shared:], found.prompt[shared:])
        place = replace(place, recoverable=min(max(place.recoverable, equal), place.missed))
    old, new = comparable(context, (found.parts, found.prompt), (prompt.parts, prompt.ids))
    first_token, request = found.progress.first_token_at, prompt.request
    predecessor = Predecessor(
        old,
        shared,
        is_whole=shared == len(found.prompt),
        was_computed=first_token is not None and (request is None or first_token <= request.started),
        lost_to_others=_is_lost_to_others(context, prompt, found, shared),
    )
    return explain(report, new, predecessor, place, hint=prompt.hint, block_size=size)


def _most_alike(prompt: MissedPrompt, earlier: Sequence[SeenRequest]) -> tuple[SeenRequest | None, int]:
    """Return the request with the longest common prefix, and its length in tokens.

    Among equals, one that goes on as the cached text that is shown, then the most similar further on.
    """
    ids, cached = prompt.ids, prompt.report.cached_tokens_after
    tokens = encode_tokens(ids)
    shared = [shared_bytes(tokens, encode_tokens(one.prompt)) // TOKEN_BYTES for one in earlier]
    if not shared:
        return None, 0
    most = max(shared)
    best = [one for one, count in zip(earlier, shared, strict=True) if count == most]
    as_cached = [one for one in best if one.prompt[most : most + len(cached)].tolist() == cached]
    tied = (as_cached or best)[:_MAX_TIED]
    return max(tied, key=lambda one: recoverable_tokens(ids[most:], one.prompt[most:])), most


def comparable(
    context: ServerContext,
    old: tuple[MakeParts | None, Sequence[int]],
    new: tuple[MakeParts | None, Sequence[int]],
) -> tuple[MakeParts, MakeParts]:
    """Return makers of the parts of two prompts in one form: as chats if both are chats, else as texts.

    Args:
        old, new: maker of the parts, if the prompt is a chat, and its tokens.
    """
    if old[0] is not None and new[0] is not None:
        return old[0], new[0]

    def as_text(ids: Sequence[int]) -> MakeParts:
        return lambda: PromptParts.of_text(context.text_of(list(ids)))

    return as_text(old[1]), as_text(new[1])


def _is_lost_to_others(context: ServerContext, prompt: MissedPrompt, found: SeenRequest, shared: int) -> bool:
    """Tell whether an evicted prompt made room for other tenants: they wrote more since than its own did."""
    if prompt.report.reason != "evicted" or shared < prompt.report.num_hit_tokens:
        return False
    until = float("inf") if prompt.request is None else prompt.request.started_at
    written = {True: 0, False: 0}  # tokens, by whether they are of its own tenant
    for one in context.activity.latest(None, limit=_COUNTED_REQUESTS):
        if found.started_at < one.started_at < until and one.progress.outcome is not None:
            written[one.tenant == prompt.owner.tenant] += one.progress.outcome.num_cache_write_tokens
    return written[False] > written[True]
