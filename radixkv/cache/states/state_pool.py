# SPDX-License-Identifier: Apache-2.0
"""StatePool: the slots for states, with a count of holders for each.

A slot is held by the tree (a checkpoint), by running requests (their base) and by the step that writes it. It
is written once, by that step, and free once its last holder has released it.
"""

from __future__ import annotations

from collections.abc import Iterable


class StatePool:
    """Counts the holders of `num_slots` slots."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._holders = [0] * num_slots

    def __repr__(self) -> str:
        return f"StatePool({self.num_slots} slots, {self.num_free} free)"

    @property
    def num_slots(self) -> int:
        return len(self._holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """Return a free slot with one holder; None: there is none. O(1)."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._holders[slot] = 1
        return slot

    def share(self, slot: int) -> None:
        """Add a holder of a held slot. O(1)."""
        assert self._holders[slot] > 0, f"slot {slot} is free and can't be shared"
        self._holders[slot] += 1

    def drop(self, slot: int) -> None:
        """Drop a holder; the slot is free after the last one. O(1)."""
        assert self._holders[slot] > 0, f"slot {slot} was dropped more often than held"
        self._holders[slot] -= 1
        if not self._holders[slot]:
            self._free.append(slot)

    def holders(self, slot: int) -> int:
        """Return how many hold a slot. O(1)."""
        return self._holders[slot]

    def check(self, kept: Iterable[int], held: Iterable[int]) -> None:
        """Assert that slots have these holders, in the tree and by leases, and that the others are free."""
        holders = [0] * self.num_slots
        for slot in (*kept, *held):
            holders[slot] += 1
        assert holders == self._holders, f"slots have holders {holders}, counted are {self._holders}"
        free = [slot for slot, count in enumerate(holders) if not count]
        assert sorted(self._free) == free, "slots are lost"
