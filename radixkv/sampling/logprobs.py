# SPDX-License-Identifier: Apache-2.0
"""Logprobs of tokens, as users get them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """The natural-log probability of one token, its rank (1 = likeliest) and its own text."""

    token_id: int
    logprob: float
    rank: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs at one position.

    Attributes:
        chosen: of the chosen token.
        top: of the k likeliest, likeliest first.
        named: natural-log probability of each token of `SamplingParams.logprob_token_ids`, by its id.
    """

    chosen: Logprob
    top: tuple[Logprob, ...] = ()
    named: Mapping[int, float] = field(default_factory=dict)
