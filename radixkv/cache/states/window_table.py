# SPDX-License-Identifier: Apache-2.0
"""WindowTable: the blocks of windows that one request holds.

    0 ........ first ............. base ......... end of the last step
    |  freed   | the window before | tokens since |

Each request writes to blocks of its own, so no step waits for another, and nothing is copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.cache.states.window_checkpoints import WindowCheckpoints


class WindowTable:
    """See above.

    Args:
        end: tokens that the request goes on after, a multiple of the grid.
        blocks: that hold the window before `end`.

    Attributes:
        ids: block ids by block of the text; those before `first` are freed, and their ids mean nothing.
        first: index of the first block that is held.
    """

    def __init__(self, keeper: WindowCheckpoints, end: int = 0, blocks: Sequence[int] = ()) -> None:
        self._keeper, self._block_size = keeper, keeper.block_size
        self.first = end // self._block_size - len(blocks)
        self.ids = array("i", bytes(4 * self.first)) + array("i", blocks)
        for block in blocks:
            keeper.pool.blocks.share(block)

    def reach(self, end: int) -> bool:
        """Have blocks for the tokens up to `end`, guesses included; False: requests hold all. O(blocks)."""
        count = -(-end // self._block_size)
        while len(self.ids) > count:  # of guesses that were wrong
            self._keeper.pool.blocks.drop(self.ids.pop())
        while len(self.ids) < count:
            block = self._keeper.take_block()
            if block is None:
                return False
            self.ids.append(block)
        return True

    def before(self, position: int) -> Sequence[int]:
        """Return the blocks of the window before a grid point, all of which are held. O(blocks)."""
        first = self._first_block(position)
        assert self.first <= first, f"the window before {position} begins before block {self.first}"
        return self.ids[first : position // self._block_size]

    def free_before(self, position: int) -> None:
        """Free what is not seen from a position on. O(blocks)."""
        self._free(self._first_block(position))

    def fork(self, position: int) -> WindowTable:
        """Return the table of a fork that goes on after a grid point. O(blocks)."""
        first = max(self.first, self._first_block(position))
        return WindowTable(self._keeper, position, self.ids[first : position // self._block_size])

    def close(self) -> None:
        """Free all blocks. O(blocks)."""
        self._free(len(self.ids))

    def held(self) -> Sequence[int]:
        """Return the blocks that are held, for `check`."""
        return self.ids[self.first :]

    def _first_block(self, position: int) -> int:
        """Return the index of the first block that is seen from a position on."""
        return self._keeper.spec.window_before(position, self._block_size).start

    def _free(self, index: int) -> None:
        for block in self.ids[self.first : index]:
            self._keeper.pool.blocks.drop(block)
        self.first = max(self.first, index)
