# SPDX-License-Identifier: Apache-2.0
"""JoinedSaves: blocks that are copied out on all ranks, put together on rank 0 as they arrive.

Each rank sends the blocks of its saves in order, a message for each block. A thread of
rank 0's receives them, and so does any thread that finishes a copy. Later messages of a stopped save are
thrown away. No step waits for any of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.model.block_copy import BlockCopy
from radixkv.model.parallel.worker_group import WorkerGroup
from radixkv.text.thread_priority import yield_to_steps

#: Before the bytes of a block: the number of the save, then the place of the block in it.
HEADER = np.dtype([("save", "<i8"), ("row", "<i8")])


#: Begin and end of each rank's bytes in a block.
Spans: TypeAlias = "Sequence[tuple[int, int]]"


class _Arriving(NamedTuple):
    """Blocks of one save as they arrive.

    Attributes:
        counts: blocks that each rank after the first has sent.
    """

    rows: npt.NDArray[np.uint8]
    spans: Spans
    counts: list[int]


class JoinedSaves:
    """The saves of one group of ranks; its methods are for the engine's thread."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._lock = threading.Lock()  # around the connections, and what follows
        self._arriving: dict[int, _Arriving] = {}  # of saves that ranks still send blocks of
        self._receiver = ThreadPoolExecutor(1, "radixkv-saver", initializer=yield_to_steps, initargs=(10,))

    def start(self, number: int, own: BlockCopy, num_blocks: int, spans: Spans) -> BlockCopy:
        """Return the joint copy of all ranks, after each rank has begun its own.

        Args:
            number: number of the save on all ranks.
            own: rank 0's part.
            spans: begin and end of each rank's bytes in a block.
        """
        first, last = spans[0], spans[-1]
        rows = np.empty((num_blocks, last[1]), np.uint8)
        arriving = _Arriving(rows, spans, [0] * len(self._group.workers))

        def fill(row: int) -> None:
            rows[row, first[0] : first[1]] = own.row(row)
            self._receive(arriving, row)

        copy = BlockCopy(rows, fill, reads_pool=own.reads_pool)
        with self._lock:
            self._arriving[number] = arriving
        self._receiver.submit(self._take_in, number, arriving, copy)
        return copy

    def _take_in(self, number: int, arriving: _Arriving, copy: BlockCopy) -> None:
        copy.run()
        try:
            self._receive(arriving, len(arriving.rows) - 1)  # of a stopped save: its later messages
        finally:
            with self._lock:  # the engine's thread may still be looking at its last block
                del self._arriving[number]

    def _receive(self, arriving: _Arriving, row: int) -> None:
        """Wait until all ranks have sent a block of a save, and with it those before.

        Raises:
            EngineStoppedError: the group is broken.
        """
        for index, worker in enumerate(self._group.workers):
            while True:
                with self._lock:
                    if arriving.counts[index] > row:
                        break
                    with self._group.waiting():
                        header = np.frombuffer(worker.data.receive(), HEADER)[0]
                        data = worker.data.receive()
                    sent, place = self._arriving[int(header["save"])], int(header["row"])
                    start, end = sent.spans[index + 1]
                    sent.rows[place, start:end] = np.frombuffer(data, np.uint8)
                    sent.counts[index] = place + 1
