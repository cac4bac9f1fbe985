# SPDX-License-Identifier: Apache-2.0
"""TensorParallelRunner: the runner of rank 0, which makes every other rank repeat its calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from radixkv.cache.pending_copies import Copy
from radixkv.cache.states.window_pool import WindowSpec
from radixkv.engine.config import EngineConfig
from radixkv.errors import EngineStoppedError
from radixkv.model.block_copy import BlockCopy
from radixkv.model.loading.loader import LoadedModel
from radixkv.model.make_runner import make_runner
from radixkv.model.parallel.commands import Command, Words, encode_batch, message
from radixkv.model.parallel.communicator import Communicator
from radixkv.model.parallel.joined_saves import JoinedSaves, Spans
from radixkv.model.parallel.shard_model import check_split, shard_model
from radixkv.model.parallel.worker_group import WorkerGroup
from radixkv.model.runner import ModelRunner
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
        communicator.gather(0 if windows is None else windows.block_bytes),
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
        self._spans, self._window_spans = _spans(sizes), _spans(window_sizes)
        self._num_saves = 0
        self._saves = JoinedSaves(group)
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
        """Of all ranks together."""
        return self._spans[-1][1]

    @property
    def num_state_slots(self) -> int:
        return self._own.num_state_slots

    @property
    def bytes_per_state(self) -> int:
        """Of one rank: all of them keep the same."""
        return self._own.bytes_per_state

    @property
    def state_bytes(self) -> int:
        """Of all ranks together."""
        return self._group.size * self._own.state_bytes

    @property
    def kv_format(self) -> str:
        """Type, shape and order of a saved block: one rank's bytes after the other's."""
        shares = ", ".join(str(end - start) for start, end in self._spans)
        return f"{self._own.kv_format} on {self._group.size} ranks of {shares} bytes"

    @property
    def windows(self) -> WindowSpec | None:
        """Blocks of windows, with the bytes of all ranks together."""
        own = self._own.windows
        return None if own is None else replace(own, block_bytes=self._window_spans[-1][1])

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
        self._tell(message(Command.WARM_UP, [thorough]))
        with self._group.together():
            self._own.warm_up(thorough=thorough)
            self._communicator.gather(0)  # all have come to the end
        self._group.serves()

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        self._tell(message(Command.COPY, np.asarray(copies, np.int64).reshape(-1)))
        with self._group.together():
            self._own.copy_blocks(copies)

    def execute(self, batch: Batch) -> torch.Tensor:
        self._tell(encode_batch(batch))
        with self._group.together(), torch.inference_mode():
            if batch.fed_tokens is not None:
                self._communicator.take_first(batch.fed_tokens)
            logits = self._own.execute(batch)
            self._communicator.note_launched()
            return logits

    def load(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        self._load(Command.LOAD, self._own.load, blocks, data, self._spans)

    def load_windows(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        """See `radixkv.engine.runner.Runner`."""
        self._load(Command.LOAD_WINDOWS, self._own.load_windows, blocks, data, self._window_spans)

    def _load(
        self,
        command: Command,
        load_own: Callable[[Sequence[int], Sequence[Bytes]], None],
        blocks: Sequence[int],
        data: Sequence[Bytes],
        spans: Spans,
    ) -> None:
        """Give each rank its bytes of some blocks, by a command."""
        size = spans[-1][1]
        rows = [np.frombuffer(each, np.uint8) for each in data]
        if len(blocks) != len(rows) or any(len(row) != size for row in rows):
            raise ValueError(f"{len(blocks)} blocks need {size} bytes each")
        words = message(command, blocks)
        own, *others = spans
        for worker, (start, end) in zip(self._group.workers, others, strict=True):
            payload = np.concatenate([row[start:end] for row in rows]) if rows else np.empty(0, np.uint8)
            with self._group.waiting():
                worker.commands.send_bytes(words.data)
                worker.commands.send_bytes(payload.data)
        with self._group.together():
            load_own(blocks, [row[own[0] : own[1]] for row in rows])

    def save(self, blocks: Sequence[int]) -> BlockCopy:
        return self._save(Command.SAVE, self._own.save, blocks, self._spans)

    def save_windows(self, blocks: Sequence[int]) -> BlockCopy:
        """See `radixkv.engine.runner.Runner`."""
        return self._save(Command.SAVE_WINDOWS, self._own.save_windows, blocks, self._window_spans)

    def _save(
        self,
        command: Command,
        save_own: Callable[[Sequence[int]], BlockCopy],
        blocks: Sequence[int],
        spans: Spans,
    ) -> BlockCopy:
        """Have each rank copy its bytes of some blocks, by a command."""
        self._num_saves += 1
        self._tell(message(command, [self._num_saves], blocks))
        with self._group.together():
            own = save_own(blocks)
        return self._saves.start(self._num_saves, own, len(blocks), spans)

    def save_states(self, slots: Sequence[int]) -> BlockCopy:
        """See `radixkv.engine.runner.Runner`: rank 0's are everybody's."""
        with self._group.together():
            return self._own.save_states(slots)

    def load_states(self, slots: Sequence[int], data: Sequence[Bytes]) -> None:
        """See `radixkv.engine.runner.Runner`."""
        rows = [np.frombuffer(each, np.uint8) for each in data]
        if len(slots) != len(rows) or any(len(row) != self.bytes_per_state for row in rows):
            raise ValueError(f"{len(slots)} states need {self.bytes_per_state} bytes each")
        words, payload = message(Command.STATES, slots), np.concatenate(rows)
        for worker in self._group.workers:
            with self._group.waiting():
                worker.commands.send_bytes(words.data)
                worker.commands.send_bytes(payload.data)
        with self._group.together():
            self._own.load_states(slots, rows)

    def _tell(self, words: Words) -> None:
        for worker in self._group.workers:
            with self._group.waiting():
                worker.commands.send_bytes(words.data)


def _spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each rank's bytes of a block lie, one rank's after the other's."""
    return list(pairwise([0, *np.cumsum(sizes).tolist()]))
