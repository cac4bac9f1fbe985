# SPDX-License-Identifier: Apache-2.0
"""Divergences: places where prompts part from cached text, and the observer that collects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from radixkv.cache.keys import NamespaceKey
from radixkv.cache.node import Namespace
from radixkv.cache.radix_tree import Walk


@dataclass(frozen=True, slots=True)
class BreakPoint:
    """A place where prompts of one group part from cached text.

    Attributes:
        example_cached, example_new: tokens of one such place.
    """

    position: int  # the first token that differed, at the earliest
    count: int  # lookups that parted there, in the window
    recoverable_tokens: int  # estimate of the tokens, over all of them, that would have hit had it come later
    group_tokens: tuple[int, ...]  # the tokens that the group's prompts begin with
    example_cached: tuple[int, ...]
    example_new: tuple[int, ...]
    namespace: NamespaceKey = ()  # whose lookups: groups of different namespaces are apart
    group_count: int = 0  # lookups of the group that parted anywhere
    example_before: tuple[int, ...] = ()  # the tokens in front of that place

    @property
    def advice(self) -> str:
        """The finding as one sentence."""
        return (
            f"{self.count} prompts that begin with {list(self.group_tokens)} part at token {self.position}; "
            f"about {self.recoverable_tokens} tokens would have been found had that come later."
        )


class DivergenceObserver(Protocol):
    """Observer of prompts that part from cached text, such as `radixkv.observe.advisor.Advisor`."""

    def observe(self, data: bytes, walk: Walk, owner: Namespace) -> None:
        """Note an acquire of `data` in `owner` that found some tokens, then left `walk.neighbour`.

        In the middle of the acquire: it must be quick, raise nothing and call nothing of the cache.
        """

    def advice(self, limit: int = 10, namespace: NamespaceKey | None = None) -> list[BreakPoint]:
        """Return the places with the most to win, best first; of one namespace, or of all."""
        ...
