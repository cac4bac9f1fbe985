# SPDX-License-Identifier: Apache-2.0
"""S3-FIFO: a small queue filters what is seen once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixkv.cache.eviction.index import EvictionIndex
from radixkv.cache.eviction.policy import CachedRun, EvictionPolicy


class TwoQueues(EvictionIndex):
    """An index whose priorities begin with 0 in a small queue, with the count of the blocks there."""

    __slots__ = ("_lengths", "small_blocks")

    def __init__(self, priority: Callable[[CachedRun], Any]) -> None:
        super().__init__(priority)
        self.small_blocks = 0  # blocks of the small queue's candidates
        self._lengths: dict[CachedRun, int] = {}  # as counted

    def add(self, node: CachedRun) -> None:
        super().add(node)
        if not node.entry[0][0]:
            self._lengths[node] = len(node.blocks)
            self.small_blocks += len(node.blocks)

    def clear(self) -> None:
        super().clear()
        self._lengths = {}
        self.small_blocks = 0

    def remove(self, node: CachedRun) -> None:
        super().remove(node)
        self.small_blocks -= self._lengths.pop(node, 0)

    def shrink(self, node: CachedRun, num_blocks: int) -> None:
        """A candidate is about to lose blocks."""
        if node in self._lengths:
            self._lengths[node] -= num_blocks
            self.small_blocks -= num_blocks


class S3FIFO(EvictionPolicy):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue filters what is seen once from the main queue.

    New blocks enter the small queue (a tenth of the pool) or, if the ghost index still knows them, the main
    queue. What was hit in the small queue moves on to the main one; what was hit there goes round again.
    """

    name = "s3fifo"
    tracks_path = True
    small_share = 0.1
    max_frequency = 3

    def __init__(self) -> None:
        super().__init__()
        self._stamp = 0

    def _place(self, node: CachedRun, queue: int, frequency: int) -> None:
        self._stamp += 1
        node.data = (queue, self._stamp, frequency)

    def priority(self, node: CachedRun) -> Any:
        return node.data[:2]

    def on_insert(self, node: CachedRun, num_blocks: int) -> None:
        if node.data is None:
            first = len(node.blocks) - num_blocks
            self._place(node, int(self.was_removed(node, first)), 0)

    def on_hit(self, node: CachedRun) -> None:
        queue, stamp, frequency = node.data
        node.data = (queue, stamp, min(frequency + 1, self.max_frequency))

    def new_index(self) -> EvictionIndex:
        return TwoQueues(self.priority)

    def on_evict(self, node: CachedRun, num_blocks: int) -> None:
        index = node.owner.account.index
        assert isinstance(index, TwoQueues)
        index.shrink(node, num_blocks)

    def victim(self, index: EvictionIndex) -> CachedRun:
        assert isinstance(index, TwoQueues)
        limit = max(1, int(self.small_share * self.num_blocks))
        while True:
            node = index.first()
            if node.data[0] == 0 and index.small_blocks < limit:
                node = index.first_from((1,)) or node
            frequency = node.data[2]
            if not frequency:
                return node
            self._place(node, 1, 0 if node.data[0] == 0 else frequency - 1)
            index.reprioritize(node)
