"""Removals: what is remembered of blocks that were evicted or reset: their ages, their ghosts, how often."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.cache.eviction.policy import EvictionPolicy, hook
from radixkv.cache.insight.evicted_ages import EvictedAges
from radixkv.cache.insight.ghost import GhostIndex
from radixkv.cache.insight.use_times import UseTimes
from radixkv.cache.node import Node
from radixkv.cache.retired import RetiredTree


class Removals:
    """The removals of one cache.

    Args:
        policy: told of every eviction; says what its ghosts carry.
        use_times: says when a node was used last.
        clock: seconds.

    Attributes:
        ages: of what was evicted.
        resets: how often all was forgotten.
    """

    __slots__ = ("_clock", "_ghost_data", "_ghosts", "_on_evict", "_use_times", "ages", "resets")

    def __init__(
        self, policy: EvictionPolicy, ghosts: GhostIndex, use_times: UseTimes, clock: Callable[[], float]
    ) -> None:
        self.ages = EvictedAges()
        self.resets = 0
        self._ghosts = ghosts
        self._use_times = use_times
        self._clock = clock
        self._on_evict = hook(policy, "on_evict")
        self._ghost_data = hook(policy, "ghost_data")

    def evicted(self, node: Node, num_blocks: int, by: str) -> None:
        """The last blocks of a node are about to be evicted. Amortised O(1).

        Args:
            by: what removes them.
        """
        if self._on_evict is not None:
            self._on_evict(node, num_blocks)
        self.ages.add(self._use_times.age_s(node.last_access), num_blocks)
        if self._ghosts.capacity:
            data = None if self._ghost_data is None else self._ghost_data(node)
            reason = "expired" if node.lapsed else "evicted"
            self._ghosts.remember(node, num_blocks, reason, self._clock(), by, data)

    def reset(self, retired: RetiredTree) -> None:
        """All was forgotten. O(1)."""
        self._ghosts.remember_all(retired, retired.num_blocks, "reset", self._clock(), "reset()")
        self.resets += 1
