# SPDX-License-Identifier: Apache-2.0
"""Measured time of loading, and of computing instead, the latest counting most."""

from __future__ import annotations

# Weight of an older measurement beside the next one.
_DECAY = 0.7


class Speed:
    """Seconds for a unit of something: a sum of seconds over a sum of units, both fading.

    Attributes:
        seconds_per_unit: None: nothing was measured yet.
    """

    __slots__ = ("_seconds", "_units", "seconds_per_unit")

    def __init__(self) -> None:
        self._seconds = self._units = 0.0
        self.seconds_per_unit: float | None = None

    def __repr__(self) -> str:
        return f"Speed({self.seconds_per_unit} s)"

    def measured(self, units: float, seconds: float) -> None:
        """Add a measurement. A duration of zero says nothing."""
        if seconds > 0 and units > 0:
            self._seconds = _DECAY * self._seconds + seconds
            self._units = _DECAY * self._units + units
            self.seconds_per_unit = self._seconds / self._units

    def seconds(self, units: float) -> float:
        """Predict a duration; 0.0 without measurements."""
        return (self.seconds_per_unit or 0.0) * units
