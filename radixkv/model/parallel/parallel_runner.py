# SPDX-License-Identifier: Apache-2.0
"""TensorParallelRunner: the runner of rank 0, which makes every other rank repeat its calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import numpy as np
import torch

from radixkv.cache.pending_copies import Copy
from radixkv.engine.config import EngineConfig
from radixkv.errors import EngineStoppedError
from radixkv.model.block_copy import BlockCopy, BlockMemory
from radixkv.model.loading.loader import LoadedModel
from radixkv.model.make_runner import make_runner
from radixkv.model.parallel.commands import Command, Words, encode_batch, message
from radixkv.model.parallel.communicator import Communicator
from radixkv.model.parallel.joined_saves import JoinedSaves
from radixkv.model.parallel.shard_model import check_split, shard_model
from radixkv.model.parallel.shared_images import broadcast, share_images
from radixkv.model.parallel.worker_group import WorkerGroup
from radixkv.model.runner import ModelRunner
from radixkv.model.runner_states import RunnerStates
from radixkv.model.runner_windows import RunnerWindows
from radixkv.scheduling.batch import Batch
from radixkv_kernels import Bytes


def make_parallel_runner(
    config: EngineConfig, loaded: LoadedModel, group: WorkerGroup
) -> tuple[TensorParallelRunner, int]:
    """The runner of a model on several ranks, and the longest context in tokens.

    Args:
        loaded: the whole model; this rank's share is left of it.

    Raises:
        ConfigError: the model can't be split so, or the KV cache does not fit.
        EngineStoppedError: a rank has failed.
    """
    check_split(loaded, group.size)
    communicator = group.meet(loaded.fingerprint, loaded.device, in_order=config.deterministic)
    with group.together():
        runner, max_model_len = make_runner(config, shard_model(loaded, communicator), communicator)
        sizes = block_sizes(runner, communicator)
    return TensorParallelRunner(runner, group, communicator, *sizes), max_model_len


def block_sizes(runner: ModelRunner, communicator: Communicator) -> tuple[list[int], list[int]]:
    """Bytes of a block on each rank, and of a block of windows; all ranks call it at once."""
    windows = runner.windows
    return (
        communicator.gather(runner.bytes_per_block),
        communicator.gather(0 if windows is None else windows.spec.block_bytes),
    )


class TensorParallelRunner:
    """See `radixkv.engine.runner.Runner`. Not thread-safe.

    Args:
        own: of rank 0.
        sizes, window_sizes: bytes of a block on each rank, and of a block of windows.
    """

    def __init__(
        self,
        own: ModelRunner,
        group: WorkerGroup,
        communicator: Communicator,
        sizes: Sequence[int],
        window_sizes: Sequence[int],
    ) -> None:
        self._own = own
        self._group = group
        self._communicator = communicator
        shared = group, JoinedSaves(group), count(1)
        self._blocks = _SplitBlocks(*shared, own, sizes, Command.SAVE, Command.LOAD)
        self.states = None if own.states is None else _SharedStates(own.states, group)
        self.windows: _SplitWindows | None = None
        if own.windows is not None:
            self.windows = _SplitWindows(
                own.windows, *shared, own.windows, window_sizes, Command.SAVE_WINDOWS, Command.LOAD_WINDOWS
            )
        self.images = own.images
        self._end = weakref.finalize(self, group.close)

    # ------------------------------------------------------------------ facts

    @property
    def num_blocks(self) -> int:
        return self._own.num_blocks

    @property
    def block_size(self) -> int:
        return self._own.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block on all ranks together."""
        return self._blocks.num_bytes

    @property
    def kv_format(self) -> str:
        """Type, shape and order of a saved block: one rank's bytes after the other's."""
        shares = ", ".join(str(end - start) for start, end in self._blocks.spans)
        return f"{self._own.kv_format} on {self._group.size} ranks of {shares} bytes"

    @property
    def backend_name(self) -> str:
        return self._own.backend_name

    @property
    def dtype_name(self) -> str:
        return self._own.dtype_name

    @property
    def device_name(self) -> str:
        return self._own.device_name

    @property
    def failure(self) -> EngineStoppedError | None:
        return self._group.failure

    def on_failure(self, call: Callable[[], None]) -> None:
        """Call a function, on any thread, when a rank is lost."""
        self._group.on_failure(call)

    def close(self) -> None:
        """End the other ranks."""
        self._end()

    # ------------------------------------------------------------------ what every rank does

    def warm_up(self, *, thorough: bool = True) -> None:
        _tell(self._group, message(Command.WARM_UP, [thorough]))
        with self._group.together():
            self._own.warm_up(thorough=thorough)
            self._communicator.gather(0)  # all have come to the end
        self._group.serves()

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        _tell(self._group, message(Command.COPY, np.asarray(copies, np.int64).reshape(-1)))
        with self._group.together():
            self._own.copy_blocks(copies)

    def execute(self, batch: Batch) -> torch.Tensor:
        # An image that can't be encoded is no rank's failure.
        with torch.inference_mode():
            shown = None if self.images is None else self.images.of(batch)
            images, encoding = share_images(shown, self._own.dtype)
        _tell(self._group, np.concatenate([encode_batch(batch), images]))
        with self._group.together(), torch.inference_mode():
            if batch.fed_tokens is not None:
                self._communicator.take_first(batch.fed_tokens)
            if encoding is not None:
                broadcast(encoding, self._communicator)
            logits = self._own.execute(batch, shown)
            self._communicator.note_launched()
            return logits

    def save(self, blocks: Sequence[int]) -> BlockCopy:
        return self._blocks.save(blocks)

    def load(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        self._blocks.load(blocks, data)


class _SplitBlocks:
    """Blocks that are split over the ranks; each rank saves and loads its part.

    Args:
        saves: all saves of the group, of any blocks.
        numbers: gives each save a number of its own.
        own: rank 0's part.
        sizes: bytes of a block on each rank.
        save, load: the commands for other ranks.
    """

    def __init__(
        self,
        group: WorkerGroup,
        saves: JoinedSaves,
        numbers: Iterator[int],
        own: BlockMemory,
        sizes: Sequence[int],
        save: Command,
        load: Command,
    ) -> None:
        self._group, self._saves, self._numbers = group, saves, numbers
        self._own = own
        self.spans = _spans(sizes)
        self._save, self._load = save, load

    @property
    def num_bytes(self) -> int:
        """Of a block, on all ranks together."""
        return self.spans[-1][1]

    def save(self, blocks: Sequence[int]) -> BlockCopy:
        number = next(self._numbers)
        _tell(self._group, message(self._save, [number], blocks))
        with self._group.together():
            own = self._own.save(blocks)
        return self._saves.start(number, own, len(blocks), self.spans)

    def load(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        rows = [np.frombuffer(each, np.uint8) for each in data]
        if len(blocks) != len(rows) or any(len(row) != self.num_bytes for row in rows):
            raise ValueError(f"{len(blocks)} blocks need {self.num_bytes} bytes each")
        words = message(self._load, blocks)
        own, *others = self.spans
        for worker, (start, end) in zip(self._group.workers, others, strict=True):
            payload = np.concatenate([row[start:end] for row in rows]) if rows else np.empty(0, np.uint8)
            with self._group.waiting():
                worker.commands.send(words.data)
                worker.commands.send(payload.data)
        with self._group.together():
            self._own.load(blocks, [row[own[0] : own[1]] for row in rows])


class _SplitWindows(_SplitBlocks):
    """Blocks of windows; see `radixkv.engine.runner.WindowBlocks`."""

    def __init__(self, own: RunnerWindows, *args: Any) -> None:
        super().__init__(*args)
        self.spec = replace(own.spec, block_bytes=self.num_bytes)


class _SharedStates:
    """States that every rank keeps whole; see `radixkv.engine.runner.StateSlots`."""

    def __init__(self, own: RunnerStates, group: WorkerGroup) -> None:
        self._own, self._group = own, group
        self.num_slots = own.num_slots
        self.bytes_per_slot = own.bytes_per_slot
        self.num_bytes = group.size * own.num_bytes

    def save(self, slots: Sequence[int]) -> BlockCopy:
        """Copy slots out of rank 0: all ranks have the same."""
        with self._group.together():
            return self._own.save(slots)

    def load(self, slots: Sequence[int], data: Sequence[Bytes]) -> None:
        rows = [np.frombuffer(each, np.uint8) for each in data]
        if len(slots) != len(rows) or any(len(row) != self.bytes_per_slot for row in rows):
            raise ValueError(f"{len(slots)} states need {self.bytes_per_slot} bytes each")
        words, payload = message(Command.STATES, slots), np.concatenate(rows)
        for worker in self._group.workers:
            with self._group.waiting():
                worker.commands.send(words.data)
                worker.commands.send(payload.data)
        with self._group.together():
            self._own.load(slots, rows)


def _tell(group: WorkerGroup, words: Words) -> None:
    for worker in group.workers:
        with group.waiting():
            worker.commands.send(words.data)


def _spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the span of each rank's bytes in a block, in the order of ranks."""
    return list(pairwise([0, *np.cumsum(sizes).tolist()]))
