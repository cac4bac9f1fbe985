# SPDX-License-Identifier: Apache-2.0
"""MissReport: the reason why a prompt missed, and the search for it.

The reasons, in the order in which they are tried for the first token that was not found:

    hit            nothing was missing but the one token that is always computed (of a model with states: but
                   the tokens after the last grid point)
    skipped        the caller, or the cache's settings, asked not to look
    partial_block  the tokens are cached, but sharing a part of a block was not possible
    no_state       of a model with states or freed windows: the K/V is here, and no checkpoint near its end
    evicted        the block was here and was evicted to make room
    expired        the same, after a pin on it had run out
    reset          the same, by `reset`
    namespace      cached, but under another one of the latest namespaces (shown to administrators only)
    diverged       another continuation of the same prefix is cached
    first_seen     nothing that begins like this has been here, as far as the ghost index remembers

Of a request, where a tier below the cache has the next blocks or should have, instead of these:

    load_too_slow  they were computed, since loading them would have taken longer, or did not end in time
    checksum       the tier's copy of them was damaged
    length         they are cached for sequences of another length, with other rotary frequencies
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from radixkv.cache.keys import CONTEXT_TOKENS, TOKEN_BYTES, decode_tokens
from radixkv.cache.node import Namespace
from radixkv.cache.radix_tree import RadixTree, Walk
from radixkv.cache.reporting.ghost import GhostIndex, GhostRecord
from radixkv.cache.reporting.reasons import Reason
from radixkv.cache.states.checkpoint import GRID

CACHE_IS_OFF = "prefix caching is off"
SAID_TOKENS = 8  # of each side, in a sentence
_SHOWN = (
    *("reason", "num_prompt_tokens", "num_hit_tokens", "diverged_at", "cached_tokens_after"),
    *("new_tokens_after", "age_s", "evicted_by", "skipped", "tier", "num_tier_tokens", "num_kv_tokens"),
    "detail",
)


@dataclass(frozen=True, slots=True, repr=False)
class MissReport:
    """Found part of a prompt, and the reason for missing the rest. Small: text is composed on demand.

    Attributes:
        cached_key, new_key: continuations in the cache and in the prompt, four bytes a token.
    """

    reason: Reason
    num_prompt_tokens: int  # length of the prompt
    num_hit_tokens: int  # leading tokens found; for a lease at most the prompt's length - 1
    # Index of the first token that differs from the cached one; None unless `diverged`.
    diverged_at: int | None = None
    cached_key: bytes | bytearray = b""
    new_key: bytes = b""
    # Seconds since the first missing block was removed, for `evicted`, `expired` and `reset`.
    age_s: float | None = None
    # What removed it, e.g. `capacity`, `quota`, `evict()`, `reset()`; None otherwise.
    evicted_by: str | None = None
    skipped: str | None = None  # why no lookup was made, for `skipped`
    # The cached text after `diverged_at` was declared public: it is not shown to others.
    cached_is_public: bool = False
    # The tier below the cache that has the next blocks, or that is spoken of; None: none is.
    tier: str | None = None
    num_tier_tokens: int = 0  # of the missing tokens, those that it has, as far as it was asked
    # Leading tokens whose K/V is here, for `no_state`: those after `num_hit_tokens` are computed again.
    num_kv_tokens: int | None = None

    @property
    def cached_tokens_after(self) -> list[int]:
        """Cached tokens from `diverged_at` on (at most `CONTEXT_TOKENS`); empty unless `diverged`."""
        return decode_tokens(self.cached_key)

    @property
    def new_tokens_after(self) -> list[int]:
        """Prompt tokens from `diverged_at` on (at most `CONTEXT_TOKENS`); empty unless `diverged`."""
        return decode_tokens(self.new_key)

    @property
    def num_missed_tokens(self) -> int:
        """Prompt tokens that must be computed."""
        return self.num_prompt_tokens - self.num_hit_tokens

    @property
    def detail(self) -> str:
        """The report as one sentence."""
        found = f"{self.num_hit_tokens} of {self.num_prompt_tokens} tokens were cached"
        if self.reason == "hit":
            return f"{found}; nothing else was missing."
        if self.reason == "skipped":
            return f"The cache was not consulted: {self.skipped}."
        if self.reason == "partial_block":
            return f"{found}; the next ones are, too, but their part of a block could not be shared."
        if self.reason == "load_too_slow":
            return f"{found}; the next ones are in the tier {self.tier}: load too slow, they were computed."
        if self.reason == "checksum":
            return f"{found}; the next ones were damaged in the tier {self.tier} (checksum)."
        there = f" The tier {self.tier} has {self.num_tier_tokens} of them." if self.tier else ""
        if self.reason == "no_state":
            return (
                f"{found}: the K/V of {self.num_kv_tokens} tokens is here, the nearest checkpoint is at "
                f"{self.num_hit_tokens}; the tokens between were computed again.{there}"
            )
        if self.reason in ("evicted", "expired", "reset"):
            what = {
                "evicted": "were evicted",
                "expired": "were evicted after their pin had expired",
                "reset": "were forgotten",
            }[self.reason]
            if self.tier and self.reason != "reset":
                what = what.replace("were evicted", f"were evicted to {self.tier}")
            return f"{found}; the next ones {what} {self.age_s:.1f} s ago ({self.evicted_by}).{there}"
        if self.reason == "length":
            return f"{found}; the next ones are for other lengths, with other rotary frequencies.{there}"
        if self.reason == "namespace":
            return f"{found}; the next ones are cached under another namespace.{there}"
        if self.reason == "diverged":
            return (
                f"{found}; at token {self.diverged_at} the prompt goes on with "
                f"{self.new_tokens_after[:SAID_TOKENS]}, the cached one with "
                f"{self.cached_tokens_after[:SAID_TOKENS]}.{there}"
            )
        return f"{found}; the rest has not been seen before.{there}"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {name: getattr(self, name) for name in _SHOWN}

    def __repr__(self) -> str:
        return f"MissReport({self.reason}: {self.num_hit_tokens} of {self.num_prompt_tokens} tokens hit)"


@dataclass(frozen=True, slots=True)
class TierHit:
    """Tokens that a tier below the KV cache gave to a request's prompt.

    Attributes:
        tier: its name, such as `disk`.
        num_tokens: of the cached tokens, those loaded from it for this request.
        seconds: time that the request waited for them, or in vain.
    """

    tier: str
    num_tokens: int
    seconds: float


class DueReport(NamedTuple):
    """Data of a report, taken at the moment of its lookup; the report is composed when it is read."""

    walk: Walk | None  # where that ended; None: nothing was cached in the namespace
    num_tokens: int  # of the prompt
    record: GhostRecord | None  # what removed the first block missed
    at: float  # clock seconds
    skip: str | None  # why no lookup was made


#: Quicker than DueReport(...).
new_due = cast(Callable[[tuple[Any, ...]], DueReport], partial(tuple.__new__, DueReport))


def due_report(
    ghosts: GhostIndex, tree: RadixTree, data: bytes, owner: Namespace, walk: Walk | None
) -> DueReport:
    """Take the data of the report of a prompt that is looked up just now. O(1) without resets."""
    num_tokens = len(data) // TOKEN_BYTES
    if walk is None or walk[1] + walk[2] < num_tokens - 1:
        record = ghosts.removal(tree, data, owner, walk)
        if record is not None:
            return new_due((walk, num_tokens, record, ghosts.clock(), None))
    return new_due((walk, num_tokens, None, 0.0, None))


def report_of(
    due: DueReport,
    data: bytes | bytearray,
    cached: int,
    elsewhere: int | None = None,
    *,
    states_at: int | None = None,
) -> MissReport:
    """Return a report with the first reason that applies, in the order of `Reason`.

    Args:
        data: tokens that begin with the prompt.
        cached: tokens that the prompt gets from the cache, a part of the found ones.
        elsewhere: leading tokens that are cached in another namespace; None: not to be shown.
        states_at: of a model with states: the tokens before the deepest state within the cached ones.
    """
    walk, num_tokens, record = due.walk, due.num_tokens, due.record
    if due.skip is not None:
        return MissReport(Reason.SKIPPED, num_tokens, 0, skipped=due.skip)
    found = 0 if walk is None else walk.depth + walk.partial
    kv_tokens, is_whole = cached, cached >= num_tokens - 1
    if states_at is not None:
        cached, is_whole = states_at, states_at >= (num_tokens - 1) // GRID * GRID
    if is_whole:
        return MissReport(Reason.HIT, num_tokens, cached)
    if kv_tokens - cached >= GRID:
        return MissReport(Reason.NO_STATE, num_tokens, cached, num_kv_tokens=kv_tokens)
    if found > kv_tokens and states_at is None:
        return MissReport(Reason.PARTIAL_BLOCK, num_tokens, cached)
    if record is not None:
        age = due.at - record.at
        return MissReport(Reason(record.reason), num_tokens, cached, age_s=age, evicted_by=record.by)
    if elsewhere is not None and elsewhere > found:
        return MissReport(Reason.NAMESPACE, num_tokens, cached)
    if walk is not None and found and walk.onward:
        shown = walk.onward[: CONTEXT_TOKENS * TOKEN_BYTES]
        new = bytes(data[found * TOKEN_BYTES : min(found + CONTEXT_TOKENS, num_tokens) * TOKEN_BYTES])
        is_public = walk.neighbour is not None and walk.neighbour.owner.is_public
        return MissReport(Reason.DIVERGED, num_tokens, cached, found, shown, new, cached_is_public=is_public)
    return MissReport(Reason.FIRST_SEEN, num_tokens, cached)
