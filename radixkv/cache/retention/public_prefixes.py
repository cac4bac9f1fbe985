"""PublicPrefixes: prompts' beginnings that all namespaces share whose K/V is computed alike.

The tokens of a public prefix hang below a root of their own; what namespaces cached after it hangs there as
each one's `namespace_children` children, so that it stays private.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from radixkv.cache.keys import shared_bytes


class _PrefixOrder:
    """Strings in order, each with the longest other one that it begins with, its parent.

    Of what lies before some data in the order, the last string begins with every string that begins the data:
    so the longest of those is that string or one of its ancestors. *Jumps* lead to an ancestor further up, so
    that an ancestor of a given length is found in O(log) steps (Myers 1983).
    """

    __slots__ = ("_jumps", "_parents", "_strings")

    def __init__(self, strings: Iterable[bytes]) -> None:
        self._strings = [b"", *sorted(strings)]
        self._parents = [0]
        self._jumps = [0]
        depths = [0]
        for i in range(1, len(self._strings)):
            parent = i - 1
            while not self._strings[i].startswith(self._strings[parent]):
                parent = self._parents[parent]
            near = self._jumps[parent]
            far = self._jumps[near]
            is_even = depths[parent] - depths[near] == depths[near] - depths[far]
            self._parents.append(parent)
            self._jumps.append(far if is_even else parent)
            depths.append(depths[parent] + 1)

    def longest_in(self, data: bytes) -> int:
        """Length of the longest string that `data` begins with. O(length + log strings)."""
        strings = self._strings
        i = bisect_right(strings, data, 1) - 1
        if data.startswith(strings[i]):
            return len(strings[i])
        shared = shared_bytes(strings[i], data)
        while len(strings[i]) > shared:
            jump = self._jumps[i]
            i = jump if len(strings[jump]) > shared else self._parents[i]
        return len(strings[i])


class PublicPrefixes:
    """The declared prefixes, as bytes of whole blocks.

    Args:
        block_bytes: bytes of a block's token ids.

    Attributes:
        prefixes: the declared ones, as the keys.
        version: changes with each declaration.
    """

    __slots__ = ("_order", "_size", "prefixes", "version")

    def __init__(self, block_bytes: int) -> None:
        self.prefixes: dict[bytes, None] = {}
        self._order: _PrefixOrder | None = None  # None: to be made when it is needed
        self.version = 0
        self._size = block_bytes

    def __len__(self) -> int:
        return len(self.prefixes)

    def _whole_blocks(self, data: bytes) -> bytes:
        return data[: len(data) - len(data) % self._size]

    def add(self, data: bytes) -> int:
        """Declare the whole blocks of `data` public; returns their length in bytes."""
        data = self._whole_blocks(data)
        if data and data not in self.prefixes:
            self.prefixes[data] = self._order = None
            self.version += 1
        return len(data)

    def discard(self, data: bytes) -> bool:
        """Take a declaration back; False: there was none."""
        data = self._whole_blocks(data)
        if data not in self.prefixes:
            return False
        del self.prefixes[data]
        self._order = None
        self.version += 1
        return True

    def length_in(self, data: bytes) -> int:
        """Length in bytes of the longest public prefix of `data`.

        O(length + log prefixes); the first time after a declaration O(prefixes).
        """
        if not self.prefixes:
            return 0
        if self._order is None:
            self._order = _PrefixOrder(self.prefixes)
        return self._order.longest_in(data)
