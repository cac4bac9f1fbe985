"""Leases: the live leases of one cache, by number."""

from __future__ import annotations

from collections.abc import Iterator

from radixkv.cache.holding import Holding


class Leases:
    """The live leases of one cache."""

    __slots__ = ("_by_id", "_last_id")

    def __init__(self) -> None:
        self._by_id: dict[int, Holding] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Holding]:
        return iter(self._by_id.values())

    def add(self, lease: Holding) -> int:
        """Register a new lease; returns its number. O(1)."""
        self._last_id = number = self._last_id + 1
        self._by_id[number] = lease
        return number

    def remove(self, number: int) -> None:
        """A lease has ended. O(1)."""
        del self._by_id[number]
