# SPDX-License-Identifier: Apache-2.0
"""The GPU backend: plans are staged into device buffers, one per window, and launched from there.

Also runs on CPU tensors under Triton's interpreter (TRITON_INTERPRET=1 before triton is imported): the
tests do.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

import numpy as np
import torch

from radixkv_kernels.interface import AttentionBackend, AttentionPlan, BackendConfig, BlockTables, Scoring
from radixkv_kernels.kv_cache import PagedKV
from radixkv_kernels.norm_rotary import Rotation
from radixkv_kernels.triton.copy import copy_blocks
from radixkv_kernels.triton.launch import KernelLauncher
from radixkv_kernels.triton.plan import TritonPlan, work_settings
from radixkv_kernels.triton.plan_buffers import Partials, PlanBuffers
from radixkv_kernels.triton.rotate_write import rotate_and_write_rows
from radixkv_kernels.triton.tiles import Tiling
from radixkv_kernels.triton.write import write_rows


class TritonBackend(AttentionBackend):
    """Backend of a GPU; see the module and `AttentionBackend`.

    Args:
        tiling: tiles to use in place of the shipped ones.

    Raises:
        ValueError: the block size does not divide the tiling's segment, or values of more than 512 elements.
    """

    def __init__(self, config: BackendConfig, tiling: Tiling | None = None) -> None:
        super().__init__(config)
        tiling = tiling or Tiling(config)
        if tiling.segment % config.spec.block_size:
            raise ValueError(
                f"block_size {config.spec.block_size} does not divide the segment of {tiling.segment}"
            )
        self.settings = work_settings(config, tiling)
        self._unit = tiling.unit
        self._partials = Partials(config, self.settings)
        self._launcher = KernelLauncher(config, tiling, self._partials)
        self._buffers: dict[int | None, PlanBuffers] = {}

    def plan(
        self, query_starts: np.ndarray, context_lengths: np.ndarray, block_tables: BlockTables
    ) -> TritonPlan:
        return TritonPlan(
            *(self.config, self.settings, query_starts, context_lengths, block_tables),
            unit=self._unit,
            max_partials=self._partials.slots,
        )

    def write(
        self,
        kv: PagedKV,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        write_rows(kv, layer, key, value, slots, rows)

    def pad(
        self, plan: AttentionPlan, windows: Collection[int | None], rows: int, *, every_kernel: bool
    ) -> None:
        assert isinstance(plan, TritonPlan)
        plan.pad(windows, rows, every_kernel=every_kernel)

    def rotate_and_write(
        self,
        kv: PagedKV,
        layer: int,
        merged: torch.Tensor,
        rotation: Rotation,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads = self.config.num_query_heads
        return rotate_and_write_rows(kv, layer, merged, heads, rotation, slots, rows)

    def stage(self, plan: AttentionPlan, windows: Collection[int | None]) -> None:
        assert isinstance(plan, TritonPlan)
        for window in windows:
            self._staged(plan, window)

    def launch_key(self, plan: AttentionPlan, windows: Collection[int | None]) -> Hashable:
        assert isinstance(plan, TritonPlan)
        order = sorted(windows, key=lambda w: -1 if w is None else w)
        return tuple((w, plan.grids(w)) for w in order)

    def _staged(self, plan: TritonPlan, window: int | None) -> PlanBuffers:
        """The device memory of a window's plans, with this one in it."""
        buffers = self._buffers.get(window)
        if buffers is None:
            buffers = self._buffers[window] = PlanBuffers(self.config, self.settings)
        buffers.load(plan, plan.packed(window)[1])
        return buffers

    def _attend(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        plan: AttentionPlan,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        assert isinstance(plan, TritonPlan)
        buffers = self._staged(plan, scoring.window)
        self._launcher.attend(kv, layer, query, plan.grids(scoring.window), buffers, scoring, out)

    def copy_blocks(self, kv: PagedKV, copies: Sequence[tuple[int, int, int]]) -> None:
        copy_blocks(kv, copies)
