# SPDX-License-Identifier: Apache-2.0
"""Waits for what other threads and processes do, and a clock that waits for the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def until(condition: Callable[[], Found], seconds: float = 60.0) -> Found:
    """Return the first value of a condition that counts as true; it is looked at a hundred times a second."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
    return found


async def until_async(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for what other tasks and threads do, a thousand times a second."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.001)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
