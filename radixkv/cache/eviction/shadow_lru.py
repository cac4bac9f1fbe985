# SPDX-License-Identifier: Apache-2.0
"""ShadowLRU: the contents of an LRU cache of the same size, without building one.

LRU keeps the most recently used blocks, so all it takes is when each block was used last. A request uses a
path from the root, so of the blocks that one request was the last to use, LRU drops the deepest first.

    requests, oldest first      17     18     19     20   ...
    blocks last used by it      40     12      0     25   ...
                                └ in part ┘└── in LRU ──┘     the suffix that sums up to the capacity

Exact for as long as the owner remembers when the blocks in question were used (evicted ones included).
"""

from __future__ import annotations


class ShadowLRU:
    """Counts of blocks by the request that used them last."""

    __slots__ = ("_counts", "_ends", "_excess", "_oldest", "_total", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # blocks
        self._counts: dict[int, int] = {}
        self._ends: dict[int, int] = {}  # request -> depth in blocks at which its path ends
        self._oldest = 0  # the oldest request of which LRU still holds something
        self._total = 0  # blocks last used by `_oldest` or later
        self._excess = 0  # those of them that do not fit: the deepest of the oldest request

    def begin(self, request: int) -> None:
        """Begin a request. O(1) amortised."""
        counts = self._counts
        while self._oldest < request and self._total - counts.get(self._oldest, 0) >= self.capacity:
            self._total -= counts.pop(self._oldest, 0)
            self._ends.pop(self._oldest, None)
            self._oldest += 1
        self._excess = max(0, self._total - self.capacity)
        counts[request] = 0
        self._ends[request] = 0

    def holds(self, request: int, depth: int, count: int) -> int:
        """Count the blocks held by LRU of `count` from `depth` on, last used by `request`, at the last one.

        O(1).
        """
        if request > self._oldest:
            return count
        if request < self._oldest:
            return 0
        return min(max(self._ends[request] - self._excess - depth, 0), count)

    def use(self, request: int, depth: int, count: int) -> None:
        """Count blocks that `request`, the latest one, uses; they are not counted at present. O(1)."""
        self._counts[request] += count
        self._total += count
        self._ends[request] = max(self._ends[request], depth + count)

    def forget(self, request: int, count: int) -> None:
        """Stop counting blocks that were last used by `request`. O(1)."""
        if request >= self._oldest:
            self._counts[request] -= count
            self._total -= count
