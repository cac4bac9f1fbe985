"""TransferLog: what came of an engine's loads and saves, and what is said when they fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from radixkv.tiers.measured_tier import MeasuredTier

logger = logging.getLogger("radixkv")

# Seconds between two warnings about a tier that fails.
WARNING_PAUSE_S = 60.0


@dataclass(slots=True)
class TransferCounts:
    """What came of loads and saves, since the start.

    Attributes:
        loads: started; `loaded_blocks` of them were committed.
        failed_loads: those that gave fewer blocks than asked for, or none.
        late_loads: of these, those given up at the deadline.
        saved_blocks: given to a tier, counted once for each.
        failed_saves: copies, or calls of the tier, that failed.
        stopped_saves: copies that were stopped for requests that needed their blocks.
    """

    loads: int = 0
    loaded_blocks: int = 0
    failed_loads: int = 0
    late_loads: int = 0
    saved_blocks: int = 0
    failed_saves: int = 0
    stopped_saves: int = 0


class TransferLog:
    """Counts, and warns.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.counts = TransferCounts()
        self._clock = clock
        self._num_failures = 0
        self._next_warning = -float("inf")

    def failed(self, what: str, error: BaseException, tier: MeasuredTier | None = None) -> None:
        """A tier, or the copy (None), has failed: say so, not too often."""
        self._num_failures += 1
        if tier is not None:
            tier.failed(what)
        now = self._clock()
        if now >= self._next_warning:
            self._next_warning = now + WARNING_PAUSE_S
            logger.warning(
                "the K/V tier %s failed to %s (%d failures so far): %s: %s; prompts are computed instead",
                "(copying)" if tier is None else tier.name,
                what,
                self._num_failures,
                type(error).__name__,
                error,
            )


def result_of(future: Future[Any]) -> tuple[Any, BaseException | None]:
    """What a future that is done gave, or why it gave nothing."""
    if future.cancelled():
        return None, CancelledError("it was cancelled")
    error = future.exception()
    return (None, error) if error is not None else (future.result(), None)
