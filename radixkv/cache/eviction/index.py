# SPDX-License-Identifier: Apache-2.0
"""The candidates of eviction in their order: updated leaf by leaf, never rebuilt."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from sortedcontainers import SortedList


class CachedRun(Protocol):
    """A policy's view of a node: a run of cached blocks."""

    data: Any  # the policy's own, None at first; the only one that it may write
    entry: Any  # (priority, serial, run) while it is a candidate, else None
    start: int  # tokens before it: its depth
    key: bytearray  # its tokens, four bytes each
    blocks: array[int]  # its block ids
    ids: bytearray  # the identities of its whole blocks, 16 bytes each
    last_access: int  # the cache's use counter when it was used last; exact for leaves
    hits: int  # leases that found it; kept if the policy's `tracks_path` is true
    owner: Any  # its namespace: `key`, and `account.index`, where it is a candidate
    parent: Any  # the run before it


class EvictionIndex:
    """The candidates of one account in order of eviction. All operations O(log n)."""

    __slots__ = ("_done", "_entries", "_priority", "_serial", "on_change")

    def __init__(self, priority: Callable[[CachedRun], Any]) -> None:
        self._priority = priority  # the policy's
        self._entries: Any = SortedList()
        self._serial = 0
        self._done: dict[int, CachedRun] = {}  # by id: whose sessions are over, in that order
        self.on_change: Callable[[], None] | None = None  # called after a candidate came, went or moved

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, node: CachedRun) -> None:
        """Make a leaf a candidate; on equal priority the one added earlier is evicted first."""
        self._serial = serial = self._serial + 1
        node.entry = entry = (self._priority(node), serial, node)
        self._entries.add(entry)
        if self.on_change is not None:
            self.on_change()

    def remove(self, node: CachedRun) -> None:
        """Take a leaf out of the candidates."""
        self._entries.remove(node.entry)
        node.entry = None
        if self._done:
            self._done.pop(id(node), None)
        if self.on_change is not None:
            self.on_change()

    def clear(self) -> None:
        """Forget all candidates, without touching them. O(1) but for memory."""
        self._entries = SortedList()
        self._done.clear()
        if self.on_change is not None:
            self.on_change()

    def reprioritize(self, node: CachedRun) -> None:
        """Ask the policy for the candidate's priority again and move it there."""
        self.remove(node)
        self.add(node)

    def put_first(self, node: CachedRun) -> None:
        """Evict a candidate before all others, unless it is used again first. O(1)."""
        assert node.entry is not None, "it is no candidate"
        self._done[id(node)] = node

    def done(self) -> CachedRun | None:
        """Return the candidate that was put first the longest ago; None: there is none. O(1)."""
        return next(iter(self._done.values()), None)

    def all_done(self) -> Iterator[CachedRun]:
        """Return the candidates that were put first."""
        return iter(self._done.values())

    def first(self) -> CachedRun:
        """Return the candidate with the lowest priority."""
        return self._entries[0][2]

    def first_priority(self) -> Any:
        """Return the lowest priority."""
        return self._entries[0][0]

    def first_from(self, priority: Any) -> CachedRun | None:
        """Return the first candidate with at least this priority; None: there is none."""
        i = self._entries.bisect_left((priority,))
        return self._entries[i][2] if i < len(self._entries) else None

    def __iter__(self) -> Iterator[CachedRun]:
        return (entry[2] for entry in self._entries)
