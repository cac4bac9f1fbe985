"""Removals: what is remembered of blocks that were evicted or reset: their ages, their ghosts, how often."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.cache.block_identity import IDENTITY_BYTES
from radixkv.cache.eviction.policy import overridden
from radixkv.cache.insight.ages import EvictedAges
from radixkv.cache.insight.ghost import GhostIndex
from radixkv.cache.invalidated_tree import InvalidatedTree
from radixkv.cache.node import Node
from radixkv.cache.radix_tree import RadixTree


class Removals:
    """The removals of one cache.

    Args:
        tree: what is removed from; its policy is told of every eviction.
        clock: seconds.

    Attributes:
        ages: of what was evicted.
        resets: how often all was forgotten.
    """

    __slots__ = ("_clock", "_ghosts", "_on_evict", "_tree", "ages", "resets")

    def __init__(self, tree: RadixTree, ghosts: GhostIndex, clock: Callable[[], float]) -> None:
        self.ages = EvictedAges()
        self.resets = 0
        self._ghosts = ghosts
        self._tree = tree
        self._clock = clock
        self._on_evict = overridden(tree.policy, "on_evict")

    def evicted(self, node: Node, num_blocks: int, by: str) -> None:
        """The last blocks of a node are about to be evicted. O(blocks).

        Args:
            by: what removes them.
        """
        if self._on_evict is not None:
            self._on_evict(node, num_blocks)
        tree = self._tree
        self.ages.add(tree.use_times.age_s(node.last_access), num_blocks)
        if self._ghosts.capacity:
            keep, partial = len(node.blocks) - num_blocks, None
            tail = len(node.key) % tree.block_bytes
            if tail:
                partial = tree.identity_before(node, len(node.blocks) - 1), bytes(node.key[-tail:])
            reason = "expired" if node.lapsed else "evicted"
            self._ghosts.remember(node.ids[keep * IDENTITY_BYTES :], partial, reason, self._clock(), by)

    def reset(self, retired: InvalidatedTree) -> None:
        """All was forgotten. O(1)."""
        self._ghosts.remember_all(retired, retired.num_blocks, self._clock(), "reset()")
        self.resets += 1
