"""BlockCopy: blocks whose contents are being copied out of the pool, perhaps by another thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Protocol

from radixkv.tiers.tier import Bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class BlockCopy(Future["npt.NDArray[np.uint8]"]):
    """The future of the blocks' contents, uint8 [blocks, bytes of a block].

    Attributes:
        is_stopped: who copies leaves off after the block at hand; the result is the blocks before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_stopped = False

    def run(self, copy: Callable[[], npt.NDArray[np.uint8]]) -> None:
        """Copy, on any thread, and end with what that gives or raises."""
        try:
            copied = copy()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(copied)

    def stop(self) -> None:
        """Return when nobody reads the blocks any more, at most about one block's copy later.

        It is done then, with the leading blocks that had been copied.
        """
        self.is_stopped = True
        wait([self])


class BlockMemory(Protocol):
    """Where blocks are copied from and to; see `radixkv.engine.runner.Runner`."""

    def save(self, blocks: Sequence[int]) -> BlockCopy: ...

    def load(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None: ...
