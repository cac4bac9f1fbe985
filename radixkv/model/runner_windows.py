# SPDX-License-Identifier: Apache-2.0
"""RunnerWindows: a step's tables and slots for layers with blocks from the pool of windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from torch import Tensor

from radixkv.cache.states.window_pool import WindowSpec
from radixkv.model.attention.attention_hook import AttentionStep
from radixkv.model.block_copy import BlockCopy
from radixkv.model.device_copies import DeviceCopies
from radixkv.model.host_copies import HostCopies
from radixkv.sampling.device_arrays import to_device
from radixkv.scheduling.batch import Batch, BatchWindows
from radixkv_kernels import Ahead, AttentionBackend, Bytes, KVLayout
from radixkv_kernels.grouped_backend import GroupedBackend, GroupedPlan
from radixkv_kernels.kv_groups import GroupedKV


@dataclass(slots=True, kw_only=True)
class WindowedStep(AttentionStep):
    """A step whose layers in `window_layers` write to slots of their own, each row to one."""

    window_layers: frozenset[int]
    window_slots: Tensor

    def _target(self, layer: int) -> tuple[Tensor, Tensor | None]:
        if layer in self.window_layers:
            return self.window_slots, None
        return self.slots, self.rows


class RunnerWindows:
    """Steps of one runner.

    Args:
        layout: with groups that have a window.
        step_tokens: most tokens of a step.
        kv: the memory.
        copies: the attribute of this name.

    Attributes:
        copies: saves and loads of a GPU's memory, beside the steps; None: a thread reads the CPU's.
        host_copies: what that thread copies.
    """

    def __init__(
        self, layout: KVLayout, step_tokens: int, kv: GroupedKV, copies: DeviceCopies | None = None
    ) -> None:
        assert layout.window is not None
        self.spec = WindowSpec(
            layout.window, layout.num_window_blocks, step_tokens, layout.bytes_per_window_block
        )
        self._layers, self._block_size = layout.window_layers, layout.block_size
        self._kv = kv.windows
        self.copies, self.host_copies = copies, HostCopies()

    def plan(self, backend: AttentionBackend, batch: Batch, ahead: Ahead | None = None) -> GroupedPlan:
        """Plan the attention of a batch; `ahead` as in `AttentionBackend.plan`.

        A batch without requests gets any tables, and writes nothing.
        """
        assert isinstance(backend, GroupedBackend)
        if batch.windows is None:
            batch.windows = self._idle(batch)
        return backend.plan_with_windows(
            batch.query_starts,
            batch.context_lengths,
            batch.block_tables,
            batch.windows.block_tables,
            ahead,
        )

    def step(self, step: AttentionStep, batch: Batch, write_slots: Tensor | None = None) -> WindowedStep:
        """Return the step that the layers call for a planned batch; `step` is that of other layers.

        Args:
            write_slots: of each row in the pool of windows, on the device; None: the batch's are sent there.
        """
        if write_slots is None:
            assert batch.windows is not None
            blocks = batch.windows.write_slots // self._block_size
            self.host_copies.before_writing(blocks.tolist())
            write_slots = to_device(batch.windows.write_slots, step.slots.device)
        own = {each.name: getattr(step, each.name) for each in fields(AttentionStep)}
        return WindowedStep(**own, window_layers=self._layers, window_slots=write_slots)

    def save(self, blocks: Sequence[int]) -> BlockCopy:
        """Copy blocks out; see `radixkv.engine.runner.WindowBlocks`."""
        if self.copies is not None:
            return self.copies.save(self._kv.gather_blocks(blocks))
        return self.host_copies.save(blocks, self.spec.block_bytes, self._kv.block_reader())

    def load(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        """Fill blocks; see `radixkv.engine.runner.WindowBlocks`."""
        if self.copies is not None:
            self.copies.load(
                lambda rows: self._kv.scatter_blocks(blocks, rows),
                *(data, len(blocks), self.spec.block_bytes, f"the K/V of {len(blocks)} blocks is"),
            )
            return
        self.host_copies.before_writing(blocks)
        self._kv.load_blocks(blocks, data)

    def _idle(self, batch: Batch) -> BatchWindows:
        """Tables for a batch as run before the first request."""
        assert not batch.entries, f"{batch!r} says nothing of the windows of a model that frees them"
        tables = [table % self.spec.num_blocks for table in batch.block_tables]
        return BatchWindows(tables, np.full(batch.num_tokens, -1, np.int64))
