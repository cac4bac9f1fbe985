# SPDX-License-Identifier: Apache-2.0
"""TokenBudget: the most tokens of a step, which an engine that finds no memory lowers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBudget:
    """The most tokens of a step, shared by those rules of a scheduler that depend on it.

    Attributes:
        num_tokens: the most tokens of a step now.
    """

    num_tokens: int
