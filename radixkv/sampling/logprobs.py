# SPDX-License-Identifier: Apache-2.0
"""Logprobs of tokens, as users get them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """The natural-log probability of one token, its rank (1 = likeliest) and its own text."""

    token_id: int
    logprob: float
    rank: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs at one position: the chosen token, then the k likeliest, likeliest first."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()
