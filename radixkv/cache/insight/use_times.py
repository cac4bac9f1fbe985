"""UseTimes: about when the cache's use counter had a value, so that a node's latest use has an age.

Nodes carry the counter, not the time: a clock reading for each use would be paid by every request. A reading
for every few acquires is enough to say "seconds" or "hours".
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Protocol

MOST_READINGS = 4096


class UseCounter(Protocol):
    """Has the counter: an eviction policy."""

    tick: int


class UseTimes:
    """The latest readings.

    Args:
        counter: whose `tick` is read.
        at: clock seconds now, before any use.
    """

    __slots__ = ("_counter", "_readings")

    def __init__(self, counter: UseCounter, at: float) -> None:
        self._counter = counter
        self._readings: deque[tuple[int, float]] = deque([(0, at)], maxlen=MOST_READINGS)

    def note(self, at: float) -> None:
        """The counter stands where it stands at this clock reading. O(1)."""
        self._readings.append((self._counter.tick, at))

    def readings(self) -> list[tuple[int, float]]:
        """(counter, clock seconds), oldest first. O(readings)."""
        return list(self._readings)


def time_of(tick: int, readings: list[tuple[int, float]]) -> float | None:
    """When the counter had this value, at the latest; None: before the first reading. O(log readings)."""
    place = bisect_left(readings, (tick, float("-inf")))
    if place == len(readings):
        return readings[-1][1] if readings else None
    if place == 0 and tick < readings[0][0]:
        return None
    return readings[place][1]
