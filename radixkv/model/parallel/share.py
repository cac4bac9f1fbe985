# SPDX-License-Identifier: Apache-2.0
"""Share: a rank's part of something split over ranks."""

from __future__ import annotations

from dataclasses import dataclass

#: Columns of an MLP are given out in bundles of this size, if there are enough: widths that kernels like.
_BUNDLE = 16


@dataclass(frozen=True, slots=True)
class Share:
    """The part of rank `rank` of `size`. An uneven split makes the first ranks' parts larger.

    >>> [Share(rank, 2).heads(3) for rank in range(2)]
    [range(0, 2), range(2, 3)]
    >>> [Share(rank, 3).columns(100) for rank in range(3)]
    [range(0, 36), range(36, 68), range(68, 100)]
    """

    rank: int
    size: int

    def heads(self, count: int) -> range:
        """Its KV heads, of `count` of them."""
        least, more = divmod(count, self.size)
        start = self.rank * least + min(self.rank, more)
        return range(start, start + least + (self.rank < more))

    def all_heads(self, count: int) -> list[range]:
        """Each rank's KV heads."""
        return [Share(rank, self.size).heads(count) for rank in range(self.size)]

    def all_columns(self, count: int) -> list[range]:
        """Each rank's columns."""
        return [Share(rank, self.size).columns(count) for rank in range(self.size)]

    def columns(self, count: int) -> range:
        """Its columns of an MLP that is `count` wide."""
        bundle = _BUNDLE if count >= _BUNDLE * self.size else 1
        own = self.heads(count // bundle)
        # The incomplete bundle goes to the first rank.
        rest = count % bundle
        return range(own.start * bundle + (rest if self.rank else 0), own.stop * bundle + rest)
