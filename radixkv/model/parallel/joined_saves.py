"""JoinedSaves: blocks that are copied out on all ranks, put together on rank 0 as they arrive.

Each rank sends the blocks of its saves in order, a message for each block. A thread of
rank 0's receives them, and so does any thread that finishes a copy. Later messages of a stopped save are
thrown away. No step waits for any of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from radixkv.model.parallel.worker_group import WorkerGroup
from radixkv.text.thread_priority import yield_to_steps
from radixkv.tiers.block_copy import BlockCopy

#: Before the bytes of a block: the number of the save, then the place of the block in it.
HEADER = np.dtype([("save", "<i8"), ("row", "<i8")])


class JoinedSaves:
    """The saves of one group of ranks; its methods are for the engine's thread.

    Args:
        spans: from where to where each rank's bytes of a block go.
    """

    def __init__(self, group: WorkerGroup, spans: Sequence[tuple[int, int]]) -> None:
        self._group = group
        self._spans = spans
        self._lock = threading.Lock()  # around the connections, and what follows
        self._rows: dict[int, npt.NDArray[np.uint8]] = {}  # of saves under way
        self._arrived: dict[int, list[int]] = {}  # blocks of a save that each rank after the first has sent
        self._receiver = ThreadPoolExecutor(1, "radixkv-saver", initializer=yield_to_steps, initargs=(10,))

    def start(self, number: int, own: BlockCopy, num_blocks: int) -> BlockCopy:
        """The joint copy of all ranks, after each rank has begun its own.

        Args:
            number: of the save; the ranks know it by that.
            own: rank 0's part.
        """
        first, last = self._spans[0], self._spans[-1]
        rows = np.empty((num_blocks, last[1]), np.uint8)

        def fill(row: int) -> None:
            rows[row, first[0] : first[1]] = own.row(row)
            self._receive(number, row)

        copy = BlockCopy(rows, fill)
        with self._lock:
            self._rows[number], self._arrived[number] = rows, [0] * len(self._group.workers)
        self._receiver.submit(self._take_in, number, copy)
        return copy

    def _take_in(self, number: int, copy: BlockCopy) -> None:
        copy.run()
        try:
            self._receive(number, len(self._rows[number]) - 1)  # of a stopped save: what still comes
        finally:
            with self._lock:
                del self._rows[number], self._arrived[number]

    def _receive(self, number: int, row: int) -> None:
        """Wait until all ranks have sent a block of a save, and with it those before.

        Raises:
            EngineStoppedError: the group is broken.
        """
        for index, worker in enumerate(self._group.workers):
            start, end = self._spans[index + 1]
            while True:
                with self._lock:
                    if self._arrived[number][index] > row:
                        break
                    with self._group.waiting():
                        header = np.frombuffer(worker.data.recv_bytes(), HEADER)[0]
                        data = worker.data.recv_bytes()
                    save, place = int(header["save"]), int(header["row"])
                    self._rows[save][place, start:end] = np.frombuffer(data, np.uint8)
                    self._arrived[save][index] = place + 1
