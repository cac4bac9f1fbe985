# SPDX-License-Identifier: Apache-2.0
"""Ages: approximate time of a node's last use, and the ages of evicted nodes.

Nodes carry the cache's use counter, not a time: it orders them exactly, and nothing reads the clock at a use.
The clock is read once in each quarter of a second in which something is used.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

#: Upper bounds of the counted ages, seconds; older ones are counted after the last.
AGE_BOUNDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)

_RESOLUTION_S = 0.25
_MAX_READINGS = 4096


class UseTimes:
    """Maps the cache's use counter to the clock."""

    __slots__ = ("_clock", "_latest", "_ticks", "_times")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock  # seconds
        self._ticks = [0]
        self._times = [clock()]
        self._latest = self._times[0]

    def note(self, tick: int) -> None:
        """Note that the counter has come to `tick` now. Amortised O(1)."""
        now = self._clock()
        if now - self._latest < _RESOLUTION_S:
            return
        self._latest = now
        self._ticks.append(tick)
        self._times.append(now)
        if len(self._ticks) > _MAX_READINGS:  # the older half at half the resolution
            half = _MAX_READINGS // 2
            del self._ticks[1:half:2], self._times[1:half:2]

    def readings(self) -> list[tuple[int, float]]:
        """Return pairs of counter and clock seconds, oldest first. O(readings)."""
        return list(zip(self._ticks, self._times, strict=True))

    def age_s(self, tick: int) -> float:
        """Return the seconds since `tick` was counted: to 0.25 s, more coarsely long ago. O(log readings)."""
        return max(0.0, self._clock() - self._times[bisect_right(self._ticks, tick) - 1])


def time_of(tick: int, readings: list[tuple[int, float]]) -> float:
    """Return when the counter had this value, to 0.25 s, more coarsely long ago. O(log readings)."""
    return readings[bisect_right(readings, (tick, float("inf"))) - 1][1]


class EvictedAges:
    """Counts evicted blocks by the seconds since they were last used."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(AGE_BOUNDS) + 1)  # blocks by bucket: up to each of AGE_BOUNDS, then older
        self.total_s = 0.0  # sum of their ages, seconds x blocks

    def add(self, age_s: float, num_blocks: int) -> None:
        """Count evicted blocks of one age. O(1)."""
        self.counts[bisect_left(AGE_BOUNDS, age_s)] += num_blocks
        self.total_s += age_s * num_blocks
