# SPDX-License-Identifier: Apache-2.0
"""Copies of a CPU's memory beside the steps, by a thread; a GPU's are in `device_copies.py`.

A place is copied as it was when the copy was asked for: before it is written again, its copy is completed, by
the thread that writes if need be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from radixkv.model.block_copy import BlockCopy
from radixkv.text.thread_priority import yield_to_steps


class HostCopies:
    """Copies out of one memory's places: blocks, or slots. Used by the runner's thread."""

    def __init__(self) -> None:
        self._saver: ThreadPoolExecutor | None = None  # made when it is needed
        self._under_way: list[tuple[frozenset[int], BlockCopy]] = []

    def save(
        self, places: Sequence[int], size: int, read: Callable[[int, np.ndarray[Any, Any]], None]
    ) -> BlockCopy:
        """Start to copy places of `size` bytes; `read` copies one into uint8 [size], on any thread."""
        rows = np.empty((len(places), size), np.uint8)
        copy = BlockCopy(rows, lambda row: read(places[row], rows[row]))
        if self._saver is None:
            self._saver = ThreadPoolExecutor(1, "radixkv-saver", initializer=yield_to_steps, initargs=(10,))
        self._under_way = [each for each in self._under_way if not each[1].done()]
        self._under_way.append((frozenset(places), copy))
        self._saver.submit(copy.run)
        return copy

    def finish(self) -> None:
        """Wait for all copies under way."""
        wait([copy for _, copy in self._under_way])

    def before_writing(self, places: Iterable[int]) -> None:
        """Complete the copies of places that are about to be written. O(copies under way)."""
        self._under_way = [each for each in self._under_way if not each[1].done()]
        if self._under_way:
            written = frozenset(places)
            for copied, copy in self._under_way:
                if copied & written:
                    copy.run()
                    wait([copy])
