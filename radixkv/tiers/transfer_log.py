# SPDX-License-Identifier: Apache-2.0
"""TransferLog: counts of an engine's loads and saves, and log lines about failures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from radixkv.engine.counts import TransferCounts
from radixkv.tiers.measured_tier import MeasuredTier

logger = logging.getLogger("radixkv")

# Seconds between two warnings about a tier that fails.
WARNING_PAUSE_S = 60.0


class TransferLog:
    """Counts and warnings of transfers.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.counts = TransferCounts()
        self._clock = clock
        self._num_failures = 0
        self._next_warning = -float("inf")

    def failed(self, what: str, error: BaseException, tier: MeasuredTier | None = None) -> None:
        """Warn about a failed tier, or copy (None), at a limited rate."""
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
    """Return the result of a finished future, or the reason why there is none."""
    if future.cancelled():
        return None, CancelledError("it was cancelled")
    error = future.exception()
    return (None, error) if error is not None else (future.result(), None)
