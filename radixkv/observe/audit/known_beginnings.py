# SPDX-License-Identifier: Apache-2.0
"""KnownBeginnings: results computed from the blocks of earlier prompts, for prompts that begin with them.

Turn n of a stored conversation has the blocks of turn n - 1 in front (the same objects). Values computed
block by block, such as hashes and texts, continue from there instead of from the first block. Lists that
grow so share their beginnings, too (`radixkv.observe.audit.grown`):

    earlier prompt   [b0 b1 ... b7]            value after b7
    next prompt      [b0 b1 ... b7][b8 b9]     found by b7; only b8 and b9 are new
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from radixkv.observe.audit.grown import Grown
from radixkv.observe.audit.record import Block

Value = TypeVar("Value")
Blocks = Sequence[Block]

_ENTRY_BYTES = 400  # of an entry without its value; pointers to blocks are counted apart
_POINTER_BYTES = 8


class _Entry(NamedTuple, Generic[Value]):
    place: tuple[Hashable, int]
    blocks: Blocks
    value: Value
    num_bytes: int


class KnownBeginnings(Generic[Value]):
    """Values of the latest prompts by their blocks, the least recently used evicted first.

    Args:
        max_bytes: for all values together, about; 0: nothing is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[tuple[Hashable, int], _Entry[Value]] = OrderedDict()

    def longest(self, context: Hashable, blocks: Blocks) -> tuple[int, Value] | None:
        """Return the number of blocks of the longest known beginning, and its value. O(blocks) at worst.

        Only beginnings whose last block is the same object are found; they are compared by value.

        Args:
            context: what else the value depends on.
        """
        for end in range(len(blocks), 0, -1):
            entry = self._entries.get((context, id(blocks[end - 1])))
            if entry is not None and len(entry.blocks) == end and _begins_with(blocks, entry.blocks):
                self._entries.move_to_end(entry.place, last=end == len(blocks))  # a longer one replaces it
                return end, entry.value
        return None

    def keep(self, context: Hashable, blocks: Blocks, value: Value, num_bytes: int) -> None:
        """Keep the value of a prompt. O(1) amortised.

        Args:
            num_bytes: of the value.
        """
        if not blocks:
            return
        size = num_bytes + _ENTRY_BYTES + _POINTER_BYTES * len(blocks)
        if size > self._max_bytes:
            return
        place = (context, id(blocks[-1]))  # unique while the entry holds the block
        old = self._entries.pop(place, None)
        self._entries[place] = _Entry(place, blocks, value, size)
        self._bytes += size - (old.num_bytes if old is not None else 0)
        while self._bytes > self._max_bytes:
            self._bytes -= self._entries.popitem(last=False)[1].num_bytes


def _begins_with(blocks: Blocks, others: Blocks) -> bool:
    """Tell whether blocks begin with others. O(1) where they grew from them."""
    if isinstance(blocks, Grown):
        return blocks.begins_with(others)
    return tuple(blocks[: len(others)]) == tuple(others)
