"""Segmented LRU: what was hit goes after what never was."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from radixkv.cache.eviction.policy import CachedRun, EvictionPolicy


class SLRU(EvictionPolicy):
    """Segmented LRU (Karedla et al., 1994): blocks that were hit go after those that never were.

    At most `protected_share` of the pool is protected; what is pushed out of it starts anew as recently used.
    """

    name = "slru"
    tracks_path = True
    protected_share = 0.3

    def __init__(self) -> None:
        super().__init__()
        self._protected: OrderedDict[CachedRun, int] = OrderedDict()  # node -> its blocks, least recent first
        self._protected_blocks = 0

    def priority(self, node: CachedRun) -> Any:
        if node in self._protected:
            return 1, node.last_access
        return 0, max(node.last_access, node.data or 0)

    def on_hit(self, node: CachedRun) -> None:
        count = len(node.blocks)
        self._protected_blocks += count - self._protected.pop(node, 0)
        self._protected[node] = count
        while self._protected_blocks > self.protected_share * self.num_blocks:
            demoted, blocks = self._protected.popitem(last=False)
            self._protected_blocks -= blocks
            demoted.data = self.tick
            if demoted.entry is not None:
                demoted.space.group.index.reprioritize(demoted)

    def on_split(self, upper: CachedRun, lower: CachedRun) -> None:
        upper.data = lower.data
        if lower in self._protected:
            self._protected[lower] = len(lower.blocks)
            self._protected[upper] = len(upper.blocks)

    def on_evict(self, node: CachedRun, num_blocks: int) -> None:
        if node in self._protected:
            keep = min(self._protected[node], len(node.blocks) - num_blocks)
            self._protected_blocks -= self._protected[node] - keep
            self._protected[node] = keep

    def on_remove(self, node: CachedRun) -> None:
        self._protected_blocks -= self._protected.pop(node, 0)

    def on_reset(self) -> None:
        self._protected = OrderedDict()
        self._protected_blocks = 0
