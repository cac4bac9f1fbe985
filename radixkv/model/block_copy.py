# SPDX-License-Identifier: Apache-2.0
"""BlockCopy: a copy of blocks out of the pool, made by a thread and by code that waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from radixkv_kernels import Bytes


class BlockCopy(Future["npt.NDArray[np.uint8]"]):
    """The future of the contents, uint8 [blocks, bytes of a block]; of the leading blocks if it was stopped.

    Args:
        rows: memory for the contents, or with them.
        copy: copies the block of a row; None: all of them have been copied.
        reads_pool: the blocks must not be written until the copy is done.
    """

    def __init__(
        self,
        rows: npt.NDArray[np.uint8],
        copy: Callable[[int], None] | None = None,
        *,
        reads_pool: bool = True,
    ) -> None:
        super().__init__()
        self.reads_pool = reads_pool
        self._rows = rows
        self._copy = copy
        self._changed = threading.Condition()  # around what follows
        self._num_begun = len(rows) if copy is None else 0
        self._copying: set[int] = set()
        self._end = len(rows)
        self._error: BaseException | None = None
        self._is_over = False
        self._end_if_over()

    def run(self, until: float = float("inf")) -> None:
        """Copy block after block, on any thread, to the last one or until a time of `time.monotonic`."""
        while time.monotonic() < until and self._copy_next():
            pass

    def row(self, index: int) -> npt.NDArray[np.uint8]:
        """Return the contents of one block as soon as they are there; until then this thread copies.

        Raises:
            IndexError: the copy was stopped before. Errors of copying are raised, too.
        """
        while True:
            with self._changed:
                if index < self._num_begun:
                    self._changed.wait_for(lambda: index not in self._copying)
                    if self._error is None:
                        return self._rows[index]
                if self._error is not None:
                    raise self._error
                if index >= self._end:
                    raise IndexError(f"block {index} is not copied: the copy was stopped at {self._end}")
            self._copy_next()

    def _copy_next(self) -> bool:
        """Copy the next block; False: none is left."""
        with self._changed:
            if self._num_begun >= self._end:
                return False
            row = self._num_begun
            self._num_begun += 1
            self._copying.add(row)
        error: BaseException | None = None
        try:
            assert self._copy is not None
            self._copy(row)
        except BaseException as failure:
            error = failure
        with self._changed:
            self._copying.remove(row)
            if error is not None:
                self._error, self._end = error, self._num_begun
            self._changed.notify_all()
        self._end_if_over()
        return True

    def stop(self, help_s: float = 0.0) -> None:
        """Help for at most `help_s` seconds, then stop the copy and return once it reads no more blocks.

        The copying thread finishes its current block; the blocks copied so far are the result.
        """
        self.run(time.monotonic() + help_s)
        with self._changed:
            self._end = self._num_begun
        self._end_if_over()
        wait([self])

    def _end_if_over(self) -> None:
        with self._changed:
            if self._is_over or self._copying or self._num_begun < self._end:
                return
            self._is_over = True
        if self._error is not None:
            self.set_exception(self._error)
        else:
            self.set_result(self._rows[: self._end])


class BlockMemory(Protocol):
    """Memory that blocks are copied from and to; see `radixkv.engine.runner.Runner`."""

    def save(self, blocks: Sequence[int]) -> BlockCopy: ...

    def load(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None: ...
