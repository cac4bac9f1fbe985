# SPDX-License-Identifier: Apache-2.0
"""Allocators: four ways to give KV slots to sequences, for the fragmentation simulation.

| scheme | reserves | wasted |
| --- | --- | --- |
| `slab` | the longest allowed sequence, contiguous | all that is never written |
| `buddy` | the final length rounded up to a power of two, contiguous | up to half, and holes between |
| `paged` | pages as tokens come | part of the last page |
| `paged+sharing` | the same, equal prompt pages once | part of the last page |
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from radixkv.cli.replay.trace import Int64Array


@dataclass(frozen=True, slots=True)
class ReplayedSequence:
    """An allocator's view of a sequence: its id, its tokens now, and its final length."""

    index: int
    tokens: int
    final: int


class Allocator(Protocol):
    """Gives and takes back slots. `grows`: slots are taken as tokens come, so a pool can run full."""

    grows: bool

    def ever_fits(self, final: int) -> bool:
        """Return True if a sequence of that final length fits into the empty memory."""

    def admit(self, sequence: ReplayedSequence, taken: int) -> bool:
        """Try to take slots for a new sequence; `taken`: slots that growing sequences
        hold after their next token."""

    def release(self, index: int) -> None: ...

    def reserved_slots(self) -> int:
        """Slots held by sequences (contiguous schemes), or saved by sharing as a negative number."""

    def external_slots(self, waiting: ReplayedSequence | None) -> int:
        """Free slots that can't serve `waiting` because of where they lie, not because they are too few."""


class SlabAllocator:
    """Equal contiguous slabs, each for the longest sequence; the remainder at the end is lost."""

    grows = False

    def __init__(self, total: int, max_length: int) -> None:
        self._max_length = max_length
        self._free = total // max_length
        self._lost = total % max_length
        self._fits = self._free > 0
        self._held: set[int] = set()

    def ever_fits(self, final: int) -> bool:
        return self._fits and final <= self._max_length

    def admit(self, sequence: ReplayedSequence, taken: int) -> bool:
        if not self._free:
            return False
        self._free -= 1
        self._held.add(sequence.index)
        return True

    def release(self, index: int) -> None:
        self._held.remove(index)
        self._free += 1

    def reserved_slots(self) -> int:
        return len(self._held) * self._max_length

    def external_slots(self, waiting: ReplayedSequence | None) -> int:
        return self._lost


class BuddyAllocator:
    """Knuth's buddy system: power-of-two extents at multiples of their size; free halves are merged.

    Memory that is no power of two is taken as several, largest first.
    """

    grows = False

    def __init__(self, total: int, min_order: int = 4) -> None:
        self._min_order = min_order
        self._free: dict[int, list[int]] = {}  # order -> heap of addresses
        self._is_free: set[tuple[int, int]] = set()
        self._roots: set[tuple[int, int]] = set()
        self._held: dict[int, tuple[int, int]] = {}
        self._free_slots = 0
        self._reserved = 0
        address = 0
        for order in range(total.bit_length() - 1, min_order - 1, -1):
            if total >> order & 1:
                self._roots.add((order, address))
                self._put(order, address)
                address += 1 << order
        self._lost = total - address
        self._largest = max((order for order, _ in self._roots), default=-1)

    def check(self) -> None:
        """Assert that extents don't overlap, and that none is lost. O(extents)."""
        held = list(self._held.values())
        spans = sorted((address, address + (1 << order)) for order, address in [*held, *self._is_free])
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), "extents overlap"
        assert self._free_slots == sum(1 << order for order, _ in self._is_free)
        assert self._reserved == sum(1 << order for order, _ in held)
        assert self._free_slots + self._reserved == sum(1 << order for order, _ in self._roots)

    def order_of(self, length: int) -> int:
        """The order of the smallest extent that holds `length` slots."""
        return max((length - 1).bit_length(), self._min_order)

    def ever_fits(self, final: int) -> bool:
        return self.order_of(final) <= self._largest

    def admit(self, sequence: ReplayedSequence, taken: int) -> bool:
        want = self.order_of(sequence.final)
        for order in range(want, self._largest + 1):
            heap = self._free.get(order)
            while heap and (order, heap[0]) not in self._is_free:
                heapq.heappop(heap)  # merged away since
            if heap:
                break
        else:
            return False
        address = heapq.heappop(self._free[order])
        self._is_free.remove((order, address))
        self._free_slots -= 1 << order
        while order > want:
            order -= 1
            self._put(order, address + (1 << order))
        self._held[sequence.index] = (want, address)
        self._reserved += 1 << want
        return True

    def release(self, index: int) -> None:
        order, address = self._held.pop(index)
        self._reserved -= 1 << order
        while (order, address) not in self._roots:
            buddy = address ^ (1 << order)
            if (order, buddy) not in self._is_free:
                break
            self._is_free.remove((order, buddy))
            self._free_slots -= 1 << order
            address = min(address, buddy)
            order += 1
        self._put(order, address)

    def _put(self, order: int, address: int) -> None:
        heapq.heappush(self._free.setdefault(order, []), address)
        self._is_free.add((order, address))
        self._free_slots += 1 << order

    def reserved_slots(self) -> int:
        return self._reserved

    def external_slots(self, waiting: ReplayedSequence | None) -> int:
        blocked = waiting is not None and self._free_slots >= 1 << self.order_of(waiting.final)
        return self._lost + (self._free_slots if blocked else 0)


class PagedAllocator:
    """Pages from one pool, taken as tokens come; with `paths`, equal prompt pages are held once.

    Args:
        total: slots.
        page_size: slots per page.
        paths: per sequence the ids of its prefix runs; None: nothing is shared.
        pages: int64, pages of each prefix run.
    """

    grows = True

    def __init__(
        self,
        total: int,
        page_size: int,
        paths: list[Int64Array] | None = None,
        pages: Int64Array | None = None,
    ) -> None:
        self.page_size = page_size
        self.num_pages = total // page_size
        self._paths = paths
        self._pages = pages if pages is not None else np.zeros(0, dtype=np.int64)
        self._holders = np.zeros(len(self._pages), dtype=np.int64)
        self._saved = 0  # pages that would be held again without sharing

    def ever_fits(self, final: int) -> bool:
        return -(-final // self.page_size) <= self.num_pages

    def admit(self, sequence: ReplayedSequence, taken: int) -> bool:
        need = -(-(sequence.tokens + 1) // self.page_size)  # so that it can take a step at once
        saved = 0
        path = None
        if self._paths is not None:
            path = self._paths[sequence.index]
            saved = int(self._pages[path[self._holders[path] > 0]].sum())
        free = self.num_pages - taken // self.page_size + self._saved
        if need - saved > free:
            return False
        if path is not None:
            self._holders[path] += 1
            self._saved += saved
        return True

    def release(self, index: int) -> None:
        if self._paths is not None:
            path = self._paths[index]
            self._holders[path] -= 1
            self._saved -= int(self._pages[path[self._holders[path] > 0]].sum())

    def reserved_slots(self) -> int:
        return -self._saved * self.page_size

    def external_slots(self, waiting: ReplayedSequence | None) -> int:
        return 0
