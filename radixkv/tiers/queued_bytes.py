# SPDX-License-Identifier: Apache-2.0
"""QueuedBytes: bounded count of saved bytes that wait to be written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

#: Bytes that may wait: the memory that they take, and the loss when the process is killed.
MAX_QUEUED_BYTES = 256 << 20


class QueuedBytes:
    """Bytes waiting to be written, counted by the engine's thread and the writers.

    Attributes:
        dropped_blocks: blocks that found no room in the queue.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        self._changed = threading.Condition()
        self.dropped_blocks = 0

    def add(self, num_bytes: int) -> None:
        """Add waiting bytes, or remove them, and wake the code that waits for the end."""
        with self._changed:
            self._num_bytes += num_bytes
            self._changed.notify_all()

    def wait(self, timeout: float, or_until: Callable[[], bool]) -> None:
        """Sleep until none are left, or a condition holds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_bytes or or_until(), timeout)

    def wanted(self, missing: Sequence[int], block_bytes: int) -> range:
        """Return the missing blocks of a run, by index, that there is room for, without gaps.

        Args:
            block_bytes: of each.
        """
        if not missing:
            return range(0)
        room = max(0, (MAX_QUEUED_BYTES - self._num_bytes) // block_bytes)
        wanted = range(missing[0], min(missing[-1] + 1, missing[0] + room))
        self.dropped_blocks += sum(index >= wanted.stop for index in missing)
        return wanted
