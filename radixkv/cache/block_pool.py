"""BlockPool: which physical KV blocks are free, and who else holds a block that is not in the tree.

A block is in exactly one of three places: on the free list, in a node of the tree, or private to the leases
that have it in their block table. Tree blocks are protected through their node, so that locking a prefix
costs nothing per block; only private blocks that several leases share (after a fork) are counted here.
"""

from __future__ import annotations

from array import array


class BlockPool:
    """A stack of free block ids and the extra holders of private blocks.

    Args:
        num_blocks: blocks in the pool, numbered from 0.
    """

    __slots__ = ("_stack", "extra_holders", "num_blocks", "num_free")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._stack = array("i", range(num_blocks - 1, -1, -1))
        self.extra_holders: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"BlockPool({self.num_free} of {self.num_blocks} blocks free)"

    def allocate(self, count: int) -> array[int]:
        """Take `count` free blocks; the caller has made sure that there are as many. O(count)."""
        top = self.num_free
        assert 0 <= count <= top, f"{count} blocks asked for, {top} are free"
        taken = self._stack[top - count : top]
        taken.reverse()
        self.num_free = top - count
        return taken

    def free(self, blocks: array[int]) -> int:
        """Give blocks back that nobody holds any more; returns how many. O(count)."""
        bottom = self.num_free
        count = len(blocks)
        top = bottom + count
        assert top <= self.num_blocks, "more blocks freed than the pool has: one was freed twice"
        self._stack[bottom:top] = blocks[::-1]
        self.num_free = top
        return count

    def share(self, blocks: array[int]) -> None:
        """Count one more holder of each of these private blocks. O(count)."""
        for block in blocks:
            self.extra_holders[block] = self.extra_holders.get(block, 0) + 1

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
        """The free ids, for `check`."""
        return self._stack[: self.num_free].tolist()
