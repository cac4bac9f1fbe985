# SPDX-License-Identifier: Apache-2.0
"""PublicPrefixes: declared prefixes, shared by all namespaces whose K/V the same model and adapter compute.

Public text has a root of its own. A namespace's continuation of it is a child in `namespace_children` of the
public node, and stays private.
"""

from __future__ import annotations

from bisect import bisect_right

from radixkv.cache.keys import shared_bytes


class PublicPrefixes:
    """The declared prefixes, as bytes of whole blocks."""

    __slots__ = ("_order", "_size", "prefixes", "version")

    def __init__(self, block_bytes: int) -> None:
        self.prefixes: dict[bytes, None] = {}  # the declared ones, as the keys
        self._order: list[bytes] | None = None  # None: to be made when it is needed
        self.version = 0  # changes with each declaration
        self._size = block_bytes  # bytes of a block's token ids

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
        """Return the length in bytes of the longest public prefix of `data`.

        O(length + log prefixes) for each prefix that begins like `data` and parts from it ever earlier; the
        first time after a declaration O(prefixes log prefixes).
        """
        if not self.prefixes:
            return 0
        if self._order is None:
            self._order = sorted(self.prefixes)
        order, end = self._order, len(data)
        while end:
            i = bisect_right(order, data[:end]) - 1
            if i < 0:
                return 0
            if data.startswith(order[i]):
                return len(order[i])
            end = shared_bytes(order[i], data[:end])
        return 0
