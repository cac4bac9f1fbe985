"""EventCounts: counts of published block events, free of the publisher's dependencies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EventCounts:
    """Counts of published events.

    Attributes:
        batches: heartbeats included.
        blocks: stored and removed.
        dropped_blocks: that were not published one by one, because too many waited.
        waiting_blocks: to be published.
        replays: answered.
    """

    batches: int = 0
    blocks: int = 0
    dropped_blocks: int = 0
    waiting_blocks: int = 0
    replays: int = 0
