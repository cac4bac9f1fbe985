# SPDX-License-Identifier: Apache-2.0
"""Report of `radixkv serve` when it is ready: the engine's figures, its start in phases, memory at rest."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import psutil


@dataclass(slots=True)
class StartupPhases:
    """Names and seconds of the phases, in order."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.monotonic)

    @classmethod
    def since_process_start(cls, name: str) -> StartupPhases:
        """Return phases whose first, `name`, began with the process and ends now: Python and its imports."""
        phases = cls()
        phases.seconds[name] = max(0.0, time.time() - psutil.Process().create_time())
        return phases

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of a block as a phase."""
        started = time.monotonic()
        yield
        self._last = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + self._last - started

    def ends_now(self, name: str) -> None:
        """Record a phase that lasted from the end of the one before until now."""
        now = time.monotonic()
        self.seconds[name] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{self.total:.1f} s: {parts}"


@dataclass(frozen=True, slots=True)
class EngineSummary:
    """Figures of the start-up banner; `kv_tokens` is the capacity of all blocks together.

    `phases` has the seconds of each phase of the start; the server adds its own. `sampling` is that of
    requests that give none, and comes from `sampling_source`. `num_states` and `state_bytes` (running
    requests' part included) are 0 for a model without states, `num_window_blocks` and `window_bytes` where no
    windows are freed.
    """

    model: str
    backend: str
    dtype: str
    device: str
    block_size: int
    num_blocks: int
    kv_tokens: int
    kv_bytes: int
    max_model_len: int
    phases: StartupPhases
    sampling: Mapping[str, object]
    sampling_source: str
    num_states: int = 0
    state_bytes: int = 0
    num_window_blocks: int = 0
    window_bytes: int = 0


def resident_memory() -> int:
    """Return the bytes of RAM that the process occupies now, mapped files included."""
    return int(psutil.Process().memory_info().rss)


def return_freed_memory() -> None:
    """Return freed memory to the system, where the C library holds on to it (glibc)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
