# SPDX-License-Identifier: Apache-2.0
"""Causes of breaks: from comparing a prompt with the most similar earlier one, or from the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from radixkv.cache.keys import TOKEN_BYTES, Owner, encode_tokens, shared_bytes
from radixkv.cache.reporting.explain import MissReport
from radixkv.observe.advisor import same_later
from radixkv.observe.causes import Breaker, make_breaker
from radixkv.observe.message_difference import changing
from radixkv.observe.message_places import message_name
from radixkv.observe.prompt_difference import find_breaker
from radixkv.observe.prompt_parts import PromptParts
from radixkv.text.chat_formats.client_rules import (
    CLIENT_DROPS_REASONING,
    RESERIALISED,
    TEMPLATE_DROPS_REASONING,
)
from radixkv_server.activity.activity import SeenRequest
from radixkv_server.chats.chat import MakeParts
from radixkv_server.concurrency import off_loop
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json

COMPARED_REQUESTS = 200  # the latest of a tenant
_OF_HINTS = {
    TEMPLATE_DROPS_REASONING: "thinking_stripped",
    CLIENT_DROPS_REASONING: "thinking_stripped",
    RESERIALISED: "arguments_reserialised",
}
_REMOVED = frozenset({"evicted", "expired", "reset"})
#: Reasons for which the prompt is as it was.
_UNBROKEN = frozenset(
    {"hit", "skipped", "partial_block", "no_state", "length", "namespace", "load_too_slow", "checksum"}
)


@dataclass(frozen=True, slots=True)
class Broken:
    """Prompt that missed.

    Args:
        owner: its owner.
        ids: tokens of the prompt.
        parts: makes the parts to compare; None: only the text is known.
        cause: further knowledge of the miss.
        request: request with the prompt; None: it was not sent.
        cached: text around the place, and the cache's text after it, where no earlier prompt is known.
    """

    owner: Owner
    ids: Sequence[int]
    report: MissReport
    parts: MakeParts | None = None
    place: str | None = None
    cause: str | None = None
    request: SeenRequest | None = None
    cached: tuple[str, str, str] = ("", "", "")


def breaker_json(found: Breaker | None) -> Json | None:
    """Return a breaker as JSON; None: nothing breaks the prompt."""
    if found is None:
        return None
    return {
        "kind": found.kind,
        "what": found.what,
        "place": found.place or None,
        "message": found.message,
        "tool": found.tool,
        "earlier": found.old or None,
        "now": found.new or None,
        "remedy": found.remedy,
        "detail": found.detail,
    }


async def recoverable_of_request(context: ServerContext, one: SeenRequest) -> int:
    """Count missed tokens of a request that are the same further on in the earlier prompt most like it."""
    report = one.report
    if report is None or report.reason != "diverged" or not one.prompt:
        return 0
    broken = Broken(one.owner, one.prompt, report, request=one)
    seen = context.activity.latest(one.owner.tenant, COMPARED_REQUESTS)
    earlier = [other for other in seen if _is_earlier(other, broken)]

    def count() -> int:
        found, shared = _most_alike(broken, earlier)
        return 0 if found is None else same_later(one.prompt[shared:], found.prompt[shared:])

    return await off_loop(count)


async def breaker_of(context: ServerContext, broken: Broken) -> Breaker | None:
    """Find the cause of a prompt's break; None: no known kind of cause."""
    reason = broken.report.reason
    if reason in _UNBROKEN:
        return None
    seen = context.activity.latest(broken.owner.tenant, COMPARED_REQUESTS)
    earlier = [one for one in seen if _is_earlier(one, broken)]
    if reason in _REMOVED:
        return await off_loop(lambda: _removed(context, broken, earlier))
    return await off_loop(lambda: _compared(context, broken, earlier))


async def breaker_of_request(context: ServerContext, one: SeenRequest) -> Breaker | None:
    """Find the cause of a request's break while its prompt is remembered."""
    report = one.report
    if report is None or not one.prompt:
        return None
    around = (context.text_of(one.before), context.text_of(one.after), "")
    if not report.cached_is_public:
        around = (*around[:2], context.text_of(report.cached_tokens_after))
    return await breaker_of(
        context, Broken(one.owner, one.prompt, report, one.parts, one.place, one.cause, one, around)
    )


def _is_earlier(one: SeenRequest, broken: Broken) -> bool:
    request = broken.request
    return (
        one is not request
        and one.owner == broken.owner
        and len(one.prompt) > 0
        and (request is None or one.started_at <= request.started_at)
    )


def _most_alike(broken: Broken, earlier: Sequence[SeenRequest]) -> tuple[SeenRequest | None, int]:
    """Return the request with the longest common prefix.

    Among equals, one that goes on as the cached text that is shown, then the most similar further on.
    """
    ids, cached = broken.ids, broken.report.cached_tokens_after
    tokens = encode_tokens(ids)
    shared = [shared_bytes(tokens, encode_tokens(one.prompt)) // TOKEN_BYTES for one in earlier]
    if not shared:
        return None, 0
    most = max(shared)
    best = [one for one, count in zip(earlier, shared, strict=True) if count == most]
    as_cached = [one for one in best if one.prompt[most : most + len(cached)].tolist() == cached]
    found = max((as_cached or best)[:8], key=lambda one: same_later(ids[most:], one.prompt[most:]))
    return found, most


def _parts_of(
    context: ServerContext, *prompts: tuple[MakeParts | None, Sequence[int]]
) -> tuple[PromptParts, ...]:
    """Return prompts in comparable form: as chats if all of them are chats, else as texts."""
    if all(parts is not None for parts, _ in prompts):
        return tuple(parts() for parts, _ in prompts if parts is not None)
    return tuple(PromptParts.of_text(context.text_of(list(ids))) for _, ids in prompts)


def breaker_between(
    context: ServerContext,
    old: tuple[MakeParts | None, Sequence[int]],
    new: tuple[MakeParts | None, Sequence[int]],
    place: str | None,
) -> Breaker | None:
    """Find the cause of the break between an earlier prompt and a new one.

    Args:
        old, new: parts of the prompt, if it is a chat, and its tokens.
        place: part of the prompt in which they differ, if known.
    """
    in_tools = None if place is None else place == "the tools"
    one, other = _parts_of(context, old, new)
    return find_breaker(one, other, in_tools=in_tools)


def _compared(context: ServerContext, broken: Broken, earlier: Sequence[SeenRequest]) -> Breaker | None:
    found, shared = _most_alike(broken, earlier)
    position, size = broken.report.num_hit_tokens, context.engine.config.block_size
    if found is not None and shared == len(found.prompt) and broken.cause is not None:
        return _in_answer(found, broken)
    if found is None or shared < position:
        before, new, cached = broken.cached
        return changing(before + cached, before + new) if cached else None
    if shared > position + size and shared > 1:
        return _not_found(broken, found)
    return breaker_between(context, (found.parts, found.prompt), (broken.parts, broken.ids), broken.place)


def _in_answer(earlier: SeenRequest, broken: Broken) -> Breaker:
    """Describe a prompt that continues an earlier one but departs from the model's answer to it."""
    assert broken.cause is not None
    kind = _OF_HINTS.get(broken.cause, "unknown")
    found = make_breaker(kind, broken.cause if kind == "unknown" else "")
    if earlier.parts is None or broken.parts is None:
        return found
    answer, messages = len(earlier.parts().messages), broken.parts().messages
    return (
        replace(found, message=answer, place=message_name([message.role for message in messages], answer))
        if answer < len(messages)
        else found
    )


def _not_found(broken: Broken, earlier: SeenRequest) -> Breaker:
    """Describe a miss of tokens that an earlier request had and that were not removed."""
    request = broken.request
    first = earlier.progress.first_token_at
    if first is None or (request is not None and first > request.started):
        return make_breaker("concurrent")
    return make_breaker("unknown", "what an earlier request had computed, and the cache does not find")


def _removed(context: ServerContext, broken: Broken, earlier: Sequence[SeenRequest]) -> Breaker:
    """Describe a prefix that was evicted, and the requests that took its room."""
    reason = broken.report.reason
    found, shared = _most_alike(broken, earlier)
    if reason != "evicted" or found is None or shared < broken.report.num_hit_tokens:
        return make_breaker(reason)
    until = float("inf") if broken.request is None else broken.request.started_at
    written = {True: 0, False: 0}
    for one in context.activity.latest(None, limit=10_000):
        if found.started_at < one.started_at < until and one.progress.outcome is not None:
            written[one.tenant == broken.owner.tenant] += one.progress.outcome.num_cache_write_tokens
    return make_breaker("evicted_by_others" if written[False] > written[True] else reason)
