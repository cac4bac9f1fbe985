"""EvictedAges: how old what was evicted had become, counted."""

from __future__ import annotations

from bisect import bisect_left

#: Upper bounds of the counted ages, seconds; what is older is counted after the last.
AGE_BOUNDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)


class EvictedAges:
    """Counts evicted blocks by the seconds since they were last used.

    Attributes:
        counts: blocks by bucket: up to each of AGE_BOUNDS, then older.
        total_s: sum of their ages, seconds x blocks.
    """

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(AGE_BOUNDS) + 1)
        self.total_s = 0.0

    def add(self, age_s: float, num_blocks: int) -> None:
        """Blocks of one age were evicted. O(1)."""
        self.counts[bisect_left(AGE_BOUNDS, age_s)] += num_blocks
        self.total_s += age_s * num_blocks
