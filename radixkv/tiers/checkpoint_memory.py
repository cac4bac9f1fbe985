# SPDX-License-Identifier: Apache-2.0
"""CheckpointMemory: the contents of a checkpoint, as tiers keep them: one record of a fixed size.

a state     one slot of the states' memory
a window    its blocks, one after the other; zeros after the fewer ones near the beginning of a text
both        the state, then the window
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from radixkv.cache.states.checkpoints import Checkpoints
from radixkv.cache.states.window_checkpoints import StateWindowCheckpoints, WindowCheckpoints
from radixkv.cache.states.window_pool import WindowSpec
from radixkv.engine.runner import Runner, StateSlots, WindowBlocks
from radixkv.model.block_copy import BlockCopy
from radixkv.tiers.tier import Bytes


class CheckpointMemory(ABC):
    """Copies the contents of checkpoints, by their slots. Used by the engine's thread only.

    Attributes:
        num_bytes: of a record.
    """

    num_bytes: int

    @abstractmethod
    def save(self, slot: int) -> BlockCopy:
        """Start to copy a checkpoint's contents; its slot may be given to others at once."""

    def record(self, contents: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the record [1, bytes of a record] of contents that were copied."""
        return contents

    @abstractmethod
    def restore(self, end: int, data: Bytes) -> int | None:
        """Return a new slot with saved contents after `end` tokens; None: there is no room.

        Raises:
            ValueError: the data are not as long as they should be; nothing was taken.
        """


class StateMemory(CheckpointMemory):
    """Checkpoints of states."""

    def __init__(self, keeper: Checkpoints, memory: StateSlots) -> None:
        self._keeper, self._memory = keeper, memory
        self.num_bytes = memory.bytes_per_slot

    def save(self, slot: int) -> BlockCopy:
        return self._memory.save([slot])

    def restore(self, end: int, data: Bytes) -> int | None:
        slot = self._keeper.take_slot()
        if slot is not None:
            try:
                self._memory.load([slot], [data])
            except BaseException:
                self._keeper.pool.drop(slot)
                raise
        return slot


class WindowMemory(CheckpointMemory):
    """Checkpoints of models that free their windows."""

    def __init__(self, keeper: WindowCheckpoints, memory: WindowBlocks) -> None:
        self._keeper, self._memory = keeper, memory
        self.num_bytes = bytes_per_window(keeper.spec, keeper.block_size)

    def save(self, slot: int) -> BlockCopy:
        return self._memory.save(self._keeper.pool.kept(slot))

    def record(self, contents: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        record = np.zeros((1, self.num_bytes), np.uint8)
        record[0, : contents.size] = contents.reshape(-1)
        return record

    def restore(self, end: int, data: Bytes) -> int | None:
        record = np.frombuffer(data, np.uint8)
        if len(record) != self.num_bytes:
            raise ValueError(f"a window has {self.num_bytes} bytes, not {len(record)}")
        slot = self._keeper.take_window(end)
        if slot is not None:
            try:
                self._fill(slot, record)
            except BaseException:
                self._keeper.pool.drop(slot)
                raise
        return slot

    def _fill(self, slot: int, record: npt.NDArray[np.uint8]) -> None:
        blocks, size = self._keeper.pool.kept(slot), self._keeper.spec.block_bytes
        self._memory.load(blocks, list(record[: len(blocks) * size].reshape(len(blocks), size)))


class StateWindowMemory(WindowMemory):
    """Checkpoints of models that have states and free their windows."""

    _keeper: StateWindowCheckpoints

    def __init__(self, keeper: StateWindowCheckpoints, states: StateSlots, windows: WindowBlocks) -> None:
        super().__init__(keeper, windows)
        self._states = states
        self.num_bytes += states.bytes_per_slot

    def save(self, slot: int) -> BlockCopy:
        state = self._states.save([self._keeper.pool.state(slot)])
        window = super().save(slot)
        record = np.zeros((1, self.num_bytes), np.uint8)

        def join(row: int) -> None:
            first, second = state.result().reshape(-1), window.result().reshape(-1)
            record[0, : first.size] = first
            record[0, first.size : first.size + second.size] = second

        both = BlockCopy(record, join, reads_pool=False)
        state.add_done_callback(lambda _: window.add_done_callback(lambda _: both.run()))
        return both

    def record(self, contents: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return contents

    def _fill(self, slot: int, record: npt.NDArray[np.uint8]) -> None:
        size = self._states.bytes_per_slot
        self._states.load([self._keeper.pool.state(slot)], [record[:size]])
        super()._fill(slot, record[size:])


def open_checkpoint_memory(keeper: Checkpoints, runner: Runner) -> CheckpointMemory:
    """Make the memory of a cache's checkpoints."""
    if isinstance(keeper, StateWindowCheckpoints):
        assert runner.windows is not None
        assert runner.states is not None
        return StateWindowMemory(keeper, runner.states, runner.windows)
    if isinstance(keeper, WindowCheckpoints):
        assert runner.windows is not None
        return WindowMemory(keeper, runner.windows)
    assert runner.states is not None
    return StateMemory(keeper, runner.states)


def bytes_per_checkpoint(runner: Runner) -> int:
    """Return the size of a record; 0: requests of this model need no checkpoints."""
    size = 0 if runner.states is None else runner.states.bytes_per_slot
    if runner.windows is not None:
        size += bytes_per_window(runner.windows.spec, runner.block_size)
    return size


def bytes_per_window(spec: WindowSpec, block_size: int) -> int:
    """Return the size of a whole kept window."""
    return spec.blocks_per_window(block_size) * spec.block_bytes
