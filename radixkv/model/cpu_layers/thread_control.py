# SPDX-License-Identifier: Apache-2.0
"""Number of threads that the model computes with, on a CPU that it may have to share.

A small model's step has hundreds of parallel regions, each as slow as its slowest thread. When another
program takes a core, the thread on that core waits for a turn of milliseconds in region after region while
the others spin at the barrier: a step of two threads on two cores was measured to become twenty times
slower. A step of one thread stays as fast as it is, as long as one core is free. So `ThreadControl` watches
how long this process's threads wait for a core, and computes with fewer threads while that is a sizeable
share of the time. Packed, fused and int8 layers and the attention compute the same bits with any number of
threads; products left to a library (experts' products, say) may differ in the last ones.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

# Seconds between two looks at the counters: short bursts of others are not worth a change.
_WINDOW = 0.3
# Share of the time, summed over threads, that they wait for a core: above it, cores are short.
_CONTENDED = 0.25
# Seconds until more threads are tried again: the first time, and at most. It doubles with each failed trial,
# and starts again once a trial has gone well for as long.
_FIRST_TRIAL = 0.5
_LAST_TRIAL = 8.0
_GONE_WELL = 1.5


def seconds_waited() -> float:
    """Return how long this process's threads have been ready to run without a core (Linux schedstats).

    Raises:
        OSError, ValueError: this system has no such counters.
    """
    tasks, waited = Path("/proc/self/task"), 0
    for task in os.listdir(tasks):
        try:
            waited += int((tasks / task / "schedstat").read_text().split()[1])
        except FileNotFoundError:  # the thread has ended
            if not tasks.parent.joinpath("schedstat").exists():
                raise
    return waited / 1e9


class ThreadControl:
    """Chooses the number of threads between two steps. For one process that computes on a CPU.

    Args:
        most: threads when nothing else runs.
        waited: seconds that threads have waited for a core, summed, ever growing.
        clock: seconds, monotonic.
        apply: called with each new number of threads.
    """

    def __init__(
        self,
        most: int,
        *,
        waited: Callable[[], float] = seconds_waited,
        clock: Callable[[], float] = time.monotonic,
        apply: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self.most = most
        self.threads = most
        self._waited, self._clock, self._apply = waited, clock, apply
        self._pause = _FIRST_TRIAL
        self._try_at = self._tried_at = 0.0
        self._looked_at = clock()
        self._waited_then: float | None = None
        if most > 1:
            with contextlib.suppress(OSError, ValueError, IndexError):
                self._waited_then = waited()

    def before_step(self) -> None:
        """Read the counters once a window, and change the number of threads if cores are short or free."""
        if self._waited_then is None:
            return
        now = self._clock()
        elapsed = now - self._looked_at
        if elapsed < _WINDOW:
            return
        try:
            waited = self._waited()
        except (OSError, ValueError, IndexError):
            self._waited_then = None
            return
        self._choose((waited - self._waited_then) / elapsed, now)
        self._looked_at, self._waited_then = now, waited

    def _choose(self, waiting: float, now: float) -> None:
        """Choose the number of threads by the number that waited for a core, on average."""
        if waiting > _CONTENDED and self.threads > 1:
            # A thread that shares its core with one other program waits half the time.
            self._set(max(1, self.threads - max(1, round(2 * waiting))))
            self._try_at = now + self._pause
            self._pause = min(2 * self._pause, _LAST_TRIAL)
        elif self.threads < self.most and now >= self._try_at:
            self._set(self.most)
            self._tried_at = now
        elif self.threads == self.most and now >= self._tried_at + _GONE_WELL:
            self._pause = _FIRST_TRIAL

    def _set(self, threads: int) -> None:
        self.threads = threads
        self._apply(threads)
