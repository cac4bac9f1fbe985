# SPDX-License-Identifier: Apache-2.0
"""Observation: the result of one request of a log in a cache with certain rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from radixkv.cache.reporting.reasons import Reason
from radixkv.observe.causes import Breaker

Fault = Literal["none", "prompt", "time", "room", "client", "provider", "unknown"]


@dataclass(frozen=True, slots=True)
class Observation:
    """Result of one request; all counts are of tokens.

    Attributes:
        conversation: the client's name for the conversation, or a number.
        prompt_tokens: size of the prompt: by the tokenizer, else as reported, else estimated.
        is_estimate: True if counts are estimated from characters, in proportion to reported counts.
        shared_tokens: common prefix with the earlier prompt.
        cached_tokens: tokens found under these rules.
        best_tokens: tokens that would be found if all differing parts came after all equal parts.
        reported_tokens: hits that the answer reports; None: not reported.
        reported_prompt: size of the prompt by the same answer, which may include other tokens.
        reason: reason for the end of the match: `hit` if all is found that an earlier prompt left,
            `first_seen` if nothing that begins like this was seen before, `diverged` if the prompt leaves
            the one that it should continue, at a cost.
        fault: cause to act upon, as far as the evidence shows.
        breaker: cause of the prompt's break; None: it does not break.
        before: text before the difference; old, new: text after it in the earlier prompt and in this one.
        lost_tokens: tokens that would have been found without the break.
        age_s: seconds since the last use of the prefix, found or missed; None: not known.
        earlier: place of the earlier prompt in the log; empty: there is none.
        written: tokens written under these rules for each time to live, where rules distinguish them.
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
