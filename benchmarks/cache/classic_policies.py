# SPDX-License-Identifier: Apache-2.0
"""The classic orders of eviction, to compare with those of the product: one small class each.

Each is selected by its place, wherever a policy is named: `radixkv replay TRACE --policy
lru,benchmarks.classic_policies:LFU`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from radixkv.cache.eviction.policy import CachedRun, EvictionPolicy


class LFU(EvictionPolicy):
    """Fewest hits while cached first; among equals the least recently used."""

    name = "lfu"
    tracks_path = True

    def priority(self, node: CachedRun) -> Any:
        return node.hits, node.last_access


class FIFO(EvictionPolicy):
    """The leaf whose blocks were cached first, whatever was used since."""

    name = "fifo"

    def on_insert(self, node: CachedRun, num_blocks: int) -> None:
        if node.data is None:
            node.data = self.tick

    def priority(self, node: CachedRun) -> Any:
        return node.data


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


class SLRU(EvictionPolicy):
    """Segmented LRU (Karedla et al., 1994): blocks that were hit go after those that never were.

    At most `protected_share` of the pool is protected; blocks pushed out of it count as recently used.
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
                demoted.owner.account.index.reprioritize(demoted)

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


#: Their names, as options and `PrefixCache(policy=...)` take them.
NAMES = (
    *(f"benchmarks.classic_policies:{policy.__name__}" for policy in (LFU, SLRU, GDSF, FIFO)),
    "benchmarks.s3fifo:S3FIFO",
)
