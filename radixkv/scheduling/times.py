# SPDX-License-Identifier: Apache-2.0
"""Times of a request: readings of the engine's clock, and durations since its arrival."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SequenceTimes:
    """Readings of the engine's clock, in seconds; None: has not happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds from a request's arrival at its engine until something happened; None: it has not.

    Attributes:
        first_scheduled: its first step was computed.
        first_token: its first token came.
        finished: it ended.
    """

    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @classmethod
    def of(cls, times: SequenceTimes) -> RequestTimes:
        """Express readings of the engine's clock as durations, for readers with another clock."""
        marks = (times.first_scheduled, times.first_token, times.finished)
        return cls(*(None if mark is None else max(0.0, mark - times.arrival) for mark in marks))
