# SPDX-License-Identifier: Apache-2.0
"""Reasons of misses: one vocabulary for explain, usage, metrics, advice, console, audit and proxy.

`Reason` names them, in the order in which a report tries them for the first token that was not found; its
last four are found only by rules that watch another server's cache. `MEANINGS` has a label, a meaning and
advice for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """A reason for which the rest of a prompt was not found."""

    HIT = "hit"
    SKIPPED = "skipped"
    PARTIAL_BLOCK = "partial_block"
    NO_STATE = "no_state"
    EVICTED = "evicted"
    EXPIRED = "expired"
    RESET = "reset"
    LENGTH = "length"
    NAMESPACE = "namespace"
    DIVERGED = "diverged"
    FIRST_SEEN = "first_seen"
    LOAD_TOO_SLOW = "load_too_slow"
    CHECKSUM = "checksum"
    UPSTREAM_MISSED = "upstream_missed"
    TOO_SHORT = "too_short"
    NO_BREAKPOINT = "no_breakpoint"
    CONCURRENT = "concurrent"


@dataclass(frozen=True, slots=True)
class Meaning:
    """Words for a reason.

    Attributes:
        label: its name for people.
        text: its meaning, one sentence.
        advice: a remedy; None: there is nothing to do.
    """

    label: str
    text: str
    advice: str | None = None


MEANINGS: dict[Reason, Meaning] = {
    Reason.HIT: Meaning("Hit", "Only the last token was computed, as always."),
    Reason.SKIPPED: Meaning(
        "Skipped", "The request asked not to look it up, or for logprobs of its prompt, which are computed."
    ),
    Reason.PARTIAL_BLOCK: Meaning(
        "Partial block",
        "Cached, but less than a whole block of it could be shared.",
        "The server shares whole blocks only.",
    ),
    Reason.NO_STATE: Meaning(
        "No state",
        "Its keys and values are cached, but no state of the model's state layers near their end.",
        "The tokens after the nearest state were computed again. Prompts that part here get a state at the "
        "second sight; mark the end of the steady part (cache_control), or give states more memory "
        "(--state-memory).",
    ),
    Reason.EVICTED: Meaning(
        "Evicted",
        "It was cached and made room for something else.",
        "The cache had too little room for it. Pin the part that must stay (POST /v1/cache/pins), ask for a "
        "quota with a floor, or give the server more blocks.",
    ),
    Reason.EXPIRED: Meaning(
        "Expired",
        "Its time to live was over.",
        "Its time to live ran out before its next use: use it in time, or keep it for longer (a pin's ttl).",
    ),
    Reason.RESET: Meaning(
        "Reset", "The cache was emptied.", "The cache was reset since; the next request brings it back."
    ),
    Reason.LENGTH: Meaning(
        "Other length",
        "It is cached for prompts of another length, with other rotary frequencies.",
        "The model rotates all keys otherwise beyond a length: prompts on either side compute it once.",
    ),
    Reason.NAMESPACE: Meaning(
        "Other tenant",
        "Another tenant has it.",
        "Another tenant or cache_salt has it. Publish it if all may share it (POST /v1/cache/public).",
    ),
    Reason.DIVERGED: Meaning(
        "Diverged", "A token differs from the cached one. Put the varying part at the end of the prompt."
    ),
    Reason.FIRST_SEEN: Meaning(
        "New text",
        "It goes on with text that has not been here. Normal for new prompts and a chat's next turn.",
        "No prompt with this beginning was cached here lately. If there should be one, check that the key "
        "and the cache_salt are the same, and that the prompt begins with the part that all of them share.",
    ),
    Reason.LOAD_TOO_SLOW: Meaning(
        "Load too slow",
        "A tier has it, but it was quicker to compute, or did not come in time.",
        "A tier has it, and computing it is quicker than loading it, or the tier did not answer in time: "
        "look at radixkv_tier_up and at the speed of the disk or the network.",
    ),
    Reason.CHECKSUM: Meaning(
        "Checksum",
        "The copy in a tier was damaged: it was dropped, and computed.",
        "The copy in a tier was damaged and has been dropped; it is computed and saved again. If it happens "
        "again, look at the disk: `radixkv cache verify PATH`.",
    ),
    Reason.UPSTREAM_MISSED: Meaning(
        "Upstream missed",
        "The prompt was steady and its time not over: the upstream did not find it all the same.",
        "The prompt begins as an earlier one whose time was not over: the upstream missed.",
    ),
    Reason.TOO_SHORT: Meaning(
        "Too short",
        "Its shared part is shorter than the upstream caches.",
        "Its shared part is shorter than the upstream caches.",
    ),
    Reason.NO_BREAKPOINT: Meaning(
        "No breakpoint",
        "No breakpoint asks to cache it. Set one at the end of the steady part.",
        "No breakpoint asks to cache it: set one where the steady part ends.",
    ),
    Reason.CONCURRENT: Meaning(
        "Concurrent",
        "Its shared part was being computed for another request.",
        "Its shared part was being computed for another request: let one begin before the others.",
    ),
}

#: Reasons that a report of our own cache can have.
REASONS: tuple[Reason, ...] = tuple(Reason)[: tuple(Reason).index(Reason.UPSTREAM_MISSED)]
