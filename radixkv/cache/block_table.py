# SPDX-License-Identifier: Apache-2.0
"""BlockTable: the blocks of one lease in order, with spare entries so that appending need not move them.

It is read as an array of numpy where that is installed, else as a memoryview: both are int32, can be indexed
and sliced, have `tolist()`, and are handed on without a copy.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_SPARE_ENTRIES = array("i", [0] * 4)  # room in a new block table, so that the first appends need not move it


@functools.cache
def _make_view() -> Callable[[array[int]], Any]:
    """Makes an int32 view of an array, without a copy."""
    try:
        import numpy as np
    except ImportError:
        return memoryview
    return functools.partial(np.frombuffer, dtype=np.int32)


class BlockTable:
    """A growing array of block ids, int32. Its fields are written here only, the first time by `fill`."""

    __slots__ = ("_table", "_view", "num_blocks")

    _table: array[int]  # the entries in use, then spare ones
    _view: npt.NDArray[np.int32] | None  # the same, as it is read
    num_blocks: int  # entries in use

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """Block ids, int32: of all tokens, and reserved ones. A view, to be fetched after each call. O(1).

        A memoryview where numpy is not installed.
        """
        view = self._view
        if view is None:
            view = self._view = _make_view()(self._table)
        return view[: self.num_blocks]

    def blocks(self, start: int, stop: int) -> array[int]:
        """A copy of the entries [start, stop), as far as they are in use. O(stop - start)."""
        return self._table[start : min(stop, self.num_blocks)]

    def fill(self, blocks: array[int]) -> None:
        """The first entries; the table keeps `blocks` and appends to it. O(1)."""
        self.num_blocks = len(blocks)
        blocks += _SPARE_ENTRIES
        self._table = blocks
        self._view = None

    def add_blocks(self, blocks: array[int]) -> None:
        """More entries at the end. Amortised O(new ones)."""
        old = self.num_blocks
        new = old + len(blocks)
        if new > len(self._table):  # a view of it may be in use: it can't be resized
            self._table = self._table + array("i", bytes(4 * max(new - old, old)))
            self._view = None
        self._table[old:new] = blocks
        self.num_blocks = new

    def keep_blocks(self, count: int) -> None:
        """Keep the first entries only. O(1)."""
        self.num_blocks = count

    def replace_blocks(self, first: int, blocks: array[int]) -> None:
        """Other blocks for the entries from `first` on. O(those)."""
        self._table[first : first + len(blocks)] = blocks
