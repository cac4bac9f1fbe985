"""GreedyDual-Size-Frequency: what is cheap to recompute and seldom used goes first."""

from __future__ import annotations

from typing import Any

from radixkv.cache.eviction.policy import CachedRun, EvictionPolicy


class GDSF(EvictionPolicy):
    """GreedyDual-Size-Frequency (Cherkasova, 1998): cheap to recompute and seldom used goes first.

    A block's cost is what it would take to compute it again: the dense layers alike for each token, and
    attention that grows with the position. `level` rises to the priority of what was evicted, so that what is
    not used ages.
    """

    name = "gdsf"
    tracks_path = True
    attention_scale = 4096  # tokens of context at which attention costs as much as the dense layers

    def __init__(self) -> None:
        super().__init__()
        self.level = 0.0

    def on_insert(self, node: CachedRun, num_blocks: int) -> None:
        if node.data is None:
            node.data = self.level

    def on_hit(self, node: CachedRun) -> None:
        node.data = self.level

    def priority(self, node: CachedRun) -> Any:
        cost = 1.0 + (node.start + len(node.blocks) * self.block_size) / self.attention_scale
        return node.data + (node.hits + 1) * cost, node.last_access

    def on_evict(self, node: CachedRun, num_blocks: int) -> None:
        self.level = max(self.level, node.entry[0][0])
