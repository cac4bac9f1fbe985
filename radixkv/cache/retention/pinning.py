"""Pinning: prefixes that eviction spares, within a budget and for a time.

A pin is a reference like a lease's, without a block table. What several pins have in common counts once.
Expired pins are taken off when the cache is next used: `expire` costs one comparison while none is due.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isinf

from radixkv.cache.keys import NamespaceKey, decode_tokens
from radixkv.cache.node import Node, Space
from radixkv.cache.radix_tree import RadixTree, Walk
from radixkv.cache.retention.retention import Pin, Pins


@dataclass(frozen=True, slots=True)
class PinInfo:
    """A pin as it can be seen.

    Attributes:
        token_ids: what was to be pinned.
        num_tokens: leading tokens of it that are.
        expires_in_s: seconds until it ends, if no hit renews it; None: it stays until `unpin`.
    """

    namespace: NamespaceKey
    token_ids: tuple[int, ...]
    num_tokens: int
    expires_in_s: float | None


class PinBoard:
    """The pins of one cache.

    Args:
        budget_blocks: most blocks that pins may protect together.
        clock: seconds.

    Attributes:
        pinned_blocks: blocks that pins protect now.
        any_lapsed: whether some node may carry the mark of an expired pin.
    """

    def __init__(self, tree: RadixTree, budget_blocks: int, clock: Callable[[], float]) -> None:
        self.budget_blocks = budget_blocks
        self.pinned_blocks = 0
        self.any_lapsed = False
        self.pins = Pins()
        self._tree = tree
        self._clock = clock

    def __len__(self) -> int:
        return len(self.pins.by_key)

    def listing(self) -> list[PinInfo]:
        """What is pinned, oldest first. O(pins and their tokens)."""
        self.expire()
        now = self._clock()
        return [
            PinInfo(
                pin.namespace,
                tuple(decode_tokens(pin.key)),
                pin.num_tokens,
                None if isinf(pin.expires) else pin.expires - now,
            )
            for pin in self.pins.by_key.values()
        ]

    def __repr__(self) -> str:
        return f"PinBoard({len(self)} pins, {self.pinned_blocks} of {self.budget_blocks} blocks)"

    def get(self, data: bytes, space: Space) -> Pin | None:
        """The pin that was set with these tokens, or None."""
        return self.pins.by_key.get((space.key, data))

    def add(self, data: bytes, space: Space, walk: Walk, ttl: float | None) -> int:
        """Pin what a lookup found, as far as the budget goes; returns the tokens pinned. O(path)."""
        node, num_tokens = self._target(walk)
        if node is None:
            return 0
        self.pinned_blocks += self._tree.pin(node)
        life = float("inf") if ttl is None else float(ttl)
        self.pins.add(Pin(data, space.key, node, num_tokens, life, self._clock() + life))
        return num_tokens

    def _target(self, walk: Walk) -> tuple[Node | None, int]:
        """The node that ends with the match, or earlier where the budget ends; splits as needed."""
        size = self._tree.block_size
        budget = self.budget_blocks - self.pinned_blocks
        last = walk.source if walk.source is not None else walk.node
        for node in self._tree.path(last):
            if node.pins:
                continue
            found = min(node.end, walk.depth + walk.partial)
            wanted = -(-(found - node.start) // size)
            count = min(wanted, budget)
            budget -= count
            if count < wanted:
                if not count:
                    return (node.parent, node.start) if node.start else (None, 0)
                upper = self._tree.split(node, count)
                return upper, upper.end
        if last.parent is None:
            return None, 0
        found = walk.depth + walk.partial
        count = -(-(found - last.start) // size)
        return (last if count == len(last.blocks) else self._tree.split(last, count)), found

    def drop(self, pin: Pin, lapsed: bool = False) -> None:
        """End a pin; `lapsed`: its blocks are marked, so that their eviction is explained as an expiry."""
        self.pins.remove(pin)
        node: Node | None = pin.node
        assert node is not None
        self.pinned_blocks -= self._tree.unpin(node)
        while lapsed and node is not None and not node.pins:
            node.lapsed = self.any_lapsed = True
            node = node.parent

    def expire(self) -> None:
        """End the pins whose time has run out. O(1) when there are none."""
        now = self._clock()
        while (pin := self.pins.pop_expired(now)) is not None:
            self.drop(pin, lapsed=True)

    def refresh(self, node: Node) -> None:
        """A request hit the path to `node`: pins on it live on for their TTL."""
        now = self._clock()
        current: Node | None = node
        while current is not None:
            current.lapsed = False
            if current.pins_here:
                for pin in self.pins.by_node[current]:
                    pin.expires = now + pin.ttl
            current = current.parent
