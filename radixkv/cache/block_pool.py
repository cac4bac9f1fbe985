# SPDX-License-Identifier: Apache-2.0
"""BlockPool: which physical KV blocks are free, and who else holds a block that is not in the tree.

A block is in exactly one of three places: on the free list, in a node of the tree, or private to the leases
that have it in their block table. Tree blocks are protected through their node, so that locking a prefix
costs nothing per block; only private blocks that several leases share (after a fork) are counted here.
"""

from __future__ import annotations

from array import array
from collections import deque

from radixkv.cache.invalidated_tree import InvalidatedTree


class BlockPool:
    """A stack of free block ids and the extra holders of private blocks.

    Attributes:
        num_free: free blocks, those in reserves included.
    """

    __slots__ = ("_reserves", "_stack", "_top", "extra_holders", "num_blocks", "num_free")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks  # blocks in the pool, numbered from 0
        self.num_free = self._top = num_blocks
        self._stack = array("i", range(num_blocks - 1, -1, -1))
        self._reserves: deque[InvalidatedTree] = deque()
        self.extra_holders: dict[int, int] = {}  # private block -> how many leases hold it besides the first

    def __repr__(self) -> str:
        return f"BlockPool({self.num_free} of {self.num_blocks} blocks free)"

    def allocate(self, count: int) -> array[int]:
        """Take `count` free blocks; the caller has made sure that there are as many. O(count)."""
        top = self._top
        assert 0 <= count <= self.num_free, f"{count} blocks asked for, {self.num_free} are free"
        if self._reserves:
            self._draw(count)
            top = self._top
        taken = self._stack[top - count : top]
        taken.reverse()
        self._top = top - count
        self.num_free -= count
        return taken

    def free(self, blocks: array[int]) -> int:
        """Return unheld blocks to the free list; return their number. O(count)."""
        count = len(blocks)
        self._push(blocks)
        self.num_free += count
        return count

    def _push(self, blocks: array[int]) -> None:
        bottom = self._top
        self._top = top = bottom + len(blocks)
        assert top <= self.num_blocks, "more blocks freed than the pool has: one was freed twice"
        self._stack[bottom:top] = blocks[::-1]

    def free_later(self, reserve: InvalidatedTree) -> None:
        """Count the blocks of `reserve` as free; it names them when they are needed. O(1)."""
        if reserve.num_blocks:
            self._reserves.append(reserve)
            self.num_free += reserve.num_blocks

    def _draw(self, count: int) -> None:
        """Take a piece out of the reserves, and more until `count` blocks are on the stack.

        O(count + blocks of a piece).
        """
        while True:
            reserve = self._reserves[0]
            self._push(reserve.take())
            if not reserve.num_blocks:
                self._reserves.popleft()
            if self._top >= count:
                return

    def share(self, blocks: array[int]) -> None:
        """Count one more holder of each of these private blocks. O(count)."""
        for block in blocks:
            self.extra_holders[block] = self.extra_holders.get(block, 0) + 1

    def forget_sharing(self, blocks: array[int]) -> None:
        """Stop counting the holders of blocks that enter the tree: a node protects them now. O(count)."""
        for block in blocks:
            self.extra_holders.pop(block, None)

    def set_holders(self, holders: dict[int, int]) -> None:
        """Count the leases that hold blocks which have left the tree. O(count)."""
        for block, count in holders.items():
            if count > 1:
                self.extra_holders[block] = count - 1

    def drop_holder(self, block: int) -> bool:
        """Drop one holder of a private block; True when it was the last one. O(1)."""
        extra = self.extra_holders.get(block)
        if extra is None:
            return True
        if extra == 1:
            del self.extra_holders[block]
        else:
            self.extra_holders[block] = extra - 1
        return False

    def drop_private(self, blocks: array[int]) -> int:
        """Drop one holder of each private block, free those without another; returns how many. O(count)."""
        if not self.extra_holders:
            return self.free(blocks)
        return self.free(array("i", [block for block in blocks if self.drop_holder(block)]))

    def free_ids(self) -> list[int]:
        """Return the free ids, for `check`."""
        waiting = [block for reserve in self._reserves for block in reserve.waiting_blocks()]
        return self._stack[: self._top].tolist() + waiting
