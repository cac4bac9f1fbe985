# SPDX-License-Identifier: Apache-2.0
"""TransferEnds: loads and copies that have ended, reported by other threads to the engine's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class TransferEnds:
    """Numbers of transfers whose futures are done; any thread may add one.

    It may outlive the engine until the last future is done, so it holds nothing of the engine but `wake`.

    Args:
        clock: seconds.
        wake: called on any thread when a transfer has ended; may be replaced.
    """

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self.wake = wake
        self._clock = clock
        self._last_number = 0
        self._numbers: deque[tuple[int, float]] = deque()
        self._some = threading.Event()

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def expect(self, future: Future[Any]) -> int:
        """Return a number for a transfer, which `take` returns once the future is done."""
        self._last_number = number = self._last_number + 1
        wake = self.wake

        def ended(_: Future[Any]) -> None:
            self._numbers.append((number, self._clock()))
            self._some.set()
            wake()

        future.add_done_callback(ended)
        return number

    def take(self) -> list[tuple[int, float]]:
        """Return the ended transfers, each with the time of its end."""
        self._some.clear()
        return [self._numbers.popleft() for _ in range(len(self._numbers))]

    def wait(self, timeout: float | None) -> None:
        """Wait until a transfer has ended."""
        if not self._numbers:
            self._some.wait(timeout)
