# SPDX-License-Identifier: Apache-2.0
"""TensorParallelRunner: the runner of rank 0, which makes every other rank repeat its calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from radixkv.cache.pending_copies import Copy
from radixkv.engine.config import EngineConfig
from radixkv.errors import EngineStoppedError
from radixkv.model.block_copy import BlockCopy
from radixkv.model.loading.loader import LoadedModel
from radixkv.model.make_runner import make_runner
from radixkv.model.parallel.commands import Command, Words, encode_batch, message
from radixkv.model.parallel.communicator import Communicator
from radixkv.model.parallel.joined_saves import JoinedSaves
from radixkv.model.parallel.shard_model import check_split, shard_model
from radixkv.model.parallel.worker_group import WorkerGroup
from radixkv.model.runner import ModelRunner
from radixkv.model.without_windows import WithoutWindows
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
        sizes = communicator.gather(runner.bytes_per_block)
    return TensorParallelRunner(runner, group, communicator, sizes), max_model_len


class TensorParallelRunner(WithoutWindows):
    """See `radixkv.engine.runner.Runner`. Not thread-safe.

    Args:
        own: of rank 0.
        sizes: bytes of a block on each rank.
    """

    def __init__(
        self, own: ModelRunner, group: WorkerGroup, communicator: Communicator, sizes: Sequence[int]
    ) -> None:
        self._own = own
        self._group = group
        self._communicator = communicator
        self._starts = [0, *np.cumsum(sizes).tolist()]  # where each rank's bytes of a block begin
        self._num_saves = 0
        self._saves = JoinedSaves(group, self._spans())
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
        total: int = self._starts[-1]
        return total

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
        shares = ", ".join(str(end - start) for start, end in self._spans())
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

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks after the first, in their order."""
        return [worker.process.pid for worker in self._group.workers]

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
        rows = [np.frombuffer(each, np.uint8) for each in data]
        if len(blocks) != len(rows) or any(len(row) != self.bytes_per_block for row in rows):
            raise ValueError(f"{len(blocks)} blocks need {self.bytes_per_block} bytes each")
        words = message(Command.LOAD, blocks)
        own, *others = self._spans()
        for worker, (start, end) in zip(self._group.workers, others, strict=True):
            payload = np.concatenate([row[start:end] for row in rows]) if rows else np.empty(0, np.uint8)
            with self._group.waiting():
                worker.commands.send_bytes(words.data)
                worker.commands.send_bytes(payload.data)
        with self._group.together():
            self._own.load(blocks, [row[own[0] : own[1]] for row in rows])

    def save(self, blocks: Sequence[int]) -> BlockCopy:
        self._num_saves += 1
        self._tell(message(Command.SAVE, [self._num_saves], blocks))
        with self._group.together():
            own = self._own.save(blocks)
        return self._saves.start(self._num_saves, own, len(blocks))

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

    def _spans(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._starts[1:], strict=False))
