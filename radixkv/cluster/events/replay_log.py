# SPDX-License-Identifier: Apache-2.0
"""ReplayLog: the latest batches, for followers that missed some."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

MAX_BATCHES = 10_000
MAX_BYTES = 32 * 1024**2


class ReplayLog:
    """Batches by their sequence numbers, without a gap, up to a number and a size."""

    def __init__(self, max_batches: int = MAX_BATCHES) -> None:
        self._batches: deque[bytes] = deque()
        self._max_batches = max_batches
        self._num_bytes = 0
        self.next_sequence = 0

    @property
    def first_sequence(self) -> int:
        """Of the oldest batch that is left."""
        return self.next_sequence - len(self._batches)

    def append(self, payload: bytes) -> int:
        """Add a batch; returns its sequence number. Amortised O(1)."""
        self._batches.append(payload)
        self._num_bytes += len(payload)
        while len(self._batches) > self._max_batches or self._num_bytes > MAX_BYTES:
            self._num_bytes -= len(self._batches.popleft())
        self.next_sequence += 1
        return self.next_sequence - 1

    def since(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        """The batches from a number on, as far as they are left. O(batches)."""
        first = max(sequence, self.first_sequence)
        return zip(
            range(first, self.next_sequence),
            islice(self._batches, first - self.first_sequence, None),
            strict=True,
        )
