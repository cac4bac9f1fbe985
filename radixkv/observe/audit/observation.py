# SPDX-License-Identifier: Apache-2.0
"""Observation: what a cache with certain rules makes of one request of a log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from radixkv.observe.breaker import Breaker

Reason = Literal[
    "hit",  # all that an earlier prompt left is found
    "first",  # nothing that begins like this was seen before
    "broken",  # the prompt parts from the one that it should go on after
    "expired",  # what was written had run out
    "evicted",  # it had to make room
    "too_short",  # for these rules to cache it
    "no_breakpoint",  # nothing says that it is to be cached, or too far from what was
    "concurrent",  # what it shares was being computed for another request
    "skipped",  # it asks for logprobs of its prompt, so that all of it was computed
]
Fault = Literal["none", "prompt", "time", "room", "client", "provider", "unknown"]


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known of one request; all counts are of tokens.

    Attributes:
        conversation: as the client named it, or a number.
        prompt_tokens: of the prompt: by the tokenizer, else as reported, else estimated.
        is_estimate: counts are made of characters, in proportion to what was reported.
        shared_tokens: that it begins with and the earlier prompt had, too.
        cached_tokens: that these rules find.
        best_tokens: that they would find, had what differs come after all that is the same.
        reported_tokens: that were found, as the answer told; None: it did not.
        reported_prompt: tokens of the prompt by the same answer, in which other tokens may be counted.
        reason: why these rules find no more.
        fault: what is to be done something about, by what is known.
        breaker: what breaks the prompt; None: nothing.
        before: the text in front of where they part; old, new: how the earlier prompt and this one go on.
        lost_tokens: that would have been found without.
        age_s: how long ago what was found or missed was used last; None: not known.
        earlier: where the earlier prompt stands in the log; empty: there is none.
        written: tokens that these rules write for each time to live, where that is told apart.
    """

    conversation: str
    prompt_tokens: int
    is_estimate: bool
    shared_tokens: int
    cached_tokens: int
    best_tokens: int
    reported_tokens: int | None
    reason: Reason
    fault: Fault
    breaker: Breaker | None = None
    before: str = ""
    old: str = ""
    new: str = ""
    lost_tokens: int = 0
    age_s: float | None = None
    earlier: str = ""
    written: tuple[tuple[int, float], ...] = ()
    reported_prompt: int | None = None
