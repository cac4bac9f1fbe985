# SPDX-License-Identifier: Apache-2.0
"""Pins: prefixes that eviction spares, as the cache knows them; `radixkv.tenancy.pins` keeps real ones."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from radixkv.cache.accounts import BlockAccount
from radixkv.cache.keys import NamespaceKey, decode_tokens
from radixkv.cache.node import Node


@dataclass(frozen=True, slots=True)
class PinInfo:
    """A pin as its users see it."""

    id: str  # names it within its namespace: the identity of the tokens it was set with
    namespace: NamespaceKey
    num_tokens: int  # what is pinned: as many leading tokens as were cached and fitted into the budget
    token_key: bytes  # these, or as many leading ones as were asked for: four bytes each
    expires_in_s: float | None  # seconds until it ends, if no hit renews it; None: it stays until `unpin`
    node: int = -1  # the first block of the node that it ends at, which names that node in a `TreeWalk`

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The pinned tokens, or the first of them. O(tokens)."""
        return tuple(decode_tokens(self.token_key))

    @property
    def tenant(self) -> str:
        """The first part of its namespace."""
        return self.namespace[0]

    @property
    def salt(self) -> str:
        """The second part of its namespace; empty where that has one part."""
        return self.namespace[1] if len(self.namespace) > 1 else ""


class PinnedPath(Protocol):
    """A pin as the tree's keepers need it: the node at its end, and its length."""

    node: Node
    num_tokens: int


class Pins:
    """The pins of one cache; this base has none."""

    by_key: Mapping[Any, PinnedPath] = MappingProxyType({})  # oldest first
    budget_blocks = 0  # most blocks that pins may protect together
    pinned_blocks = 0  # blocks that pins protect now
    any_lapsed = False  # whether some node may carry the mark of an expired pin
    given_way = 0  # pins that were ended early, for a request that could never run beside them

    def __len__(self) -> int:
        return len(self.by_key)

    def __iter__(self) -> Iterator[PinnedPath]:
        return iter(self.by_key.values())

    def expire(self) -> None:
        """End the pins whose time has run out. O(1) when there are none."""

    def refresh(self, node: Node) -> None:
        """Renew the pins on the path to `node`, which a request hit. O(path)."""

    def drop_in(self, nodes: Container[Node]) -> None:
        """End the pins that end at these nodes. O(pins)."""

    def give_way(self, is_enough: Callable[[], bool], group: BlockAccount | None = None) -> bool:
        """End pins, of an account or all, until there is room; False, and none ended, if there never is."""
        return False
