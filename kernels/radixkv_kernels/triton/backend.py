# SPDX-License-Identifier: Apache-2.0
"""The GPU backend: plans are staged into device buffers, one per window, and launched from there.

Also runs on CPU tensors under Triton's interpreter (TRITON_INTERPRET=1 before triton is imported): the
tests do.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

import numpy as np
import torch

from radixkv_kernels.contiguous import (
    MIN_ROWS,
    CausalAttention,
    ContiguousChunk,
    ContiguousChunks,
    attend_chunk,
    causal_attention,
    is_plain,
    long_requests,
    scratch_bytes,
    takes_long_chunks,
)
from radixkv_kernels.interface import (
    Ahead,
    AttentionBackend,
    AttentionPlan,
    BackendConfig,
    BlockTables,
    Scoring,
)
from radixkv_kernels.kv_cache import PagedKV
from radixkv_kernels.norm_rotary import LatentRotation, Rotation
from radixkv_kernels.triton.copy import copy_blocks
from radixkv_kernels.triton.latent_write import can_write_latents, write_latent_rows
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
        long_rows: fewest rows of a chunk that `long_attention` computes (`contiguous`).
        long_attention: tried here; where its result is not right, the kernel computes all chunks.

    Raises:
        ValueError: the block size does not divide the tiling's segment, or values of more than 512 elements.
    """

    def __init__(
        self,
        config: BackendConfig,
        tiling: Tiling | None = None,
        *,
        long_rows: int = MIN_ROWS,
        long_attention: CausalAttention = causal_attention,
    ) -> None:
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
        self._long_attention = long_attention
        self._long_rows = long_rows if takes_long_chunks(config, long_rows, long_attention) else None

    @property
    def scratch_bytes(self) -> int:
        return 0 if self._long_rows is None else scratch_bytes(self.config)

    def plan(
        self,
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        block_tables: BlockTables,
        ahead: Ahead | None = None,
    ) -> TritonPlan:
        plan = TritonPlan(
            *(self.config, self.settings, query_starts, context_lengths, block_tables),
            unit=self._unit,
            max_partials=self._partials.slots,
            ahead=ahead,
        )
        if self._long_rows is not None:
            long = long_requests(self.config, query_starts, context_lengths, self._long_rows)
            if plan.ahead is not None and plan.sees_ahead(None):  # flash attention's mask is causal
                sees = np.add.reduceat(np.append(plan.ahead.counts, 0), plan.query_starts[:-1]) > 0
                long = long[~sees[long]]
            if len(long):
                plan.long_chunks = self._divide(long, plan, block_tables)
        return plan

    def _divide(
        self,
        long: np.ndarray,
        plan: TritonPlan,
        block_tables: BlockTables,
    ) -> ContiguousChunks:
        """Set the chunks of some requests apart from the rows of all others."""
        query_starts, context_lengths = plan.query_starts, plan.context_lengths
        size = self.config.spec.block_size
        chunks = []
        for r in long.tolist():
            context = int(context_lengths[r])
            blocks = np.asarray(block_tables[r][: -(-context // size)], np.int64)
            span = slice(int(query_starts[r]), int(query_starts[r + 1]))
            chunks.append(ContiguousChunk(span, context, self._sent(blocks)))
        others = np.setdiff1d(np.arange(len(context_lengths)), long)
        counts = np.diff(query_starts)[others]
        rows = np.concatenate(
            [np.arange(query_starts[r], query_starts[r + 1]) for r in others] or [np.zeros(0, np.int64)]
        )
        if not len(rows):
            return ContiguousChunks(chunks, slice(0), None)
        ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        ahead = None if plan.ahead is None else plan.ahead.of(rows)
        rest = self.plan(ends, context_lengths[others], [block_tables[r] for r in others], ahead)
        is_run = rows[-1] - rows[0] + 1 == len(rows)
        own = slice(int(rows[0]), int(rows[-1]) + 1) if is_run else self._sent(rows.astype(np.int64))
        return ContiguousChunks(chunks, own, rest)

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        """The array on the device; nothing is waited for."""
        tensor, device = torch.from_numpy(array), self.config.spec.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

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

    def write_latents(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        folded: torch.Tensor,
        latents: torch.Tensor,
        rotation: LatentRotation,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        if can_write_latents(kv.spec, rotation):
            write_latent_rows(kv, layer, query, folded, latents, rotation, slots, rows)
        else:
            super().write_latents(kv, layer, query, folded, latents, rotation, slots, rows)

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
        long = plan.long_chunks
        if long is not None and is_plain(scoring):
            for chunk in long.chunks:
                asked = query[chunk.rows]
                out[chunk.rows] = attend_chunk(self._long_attention, kv, layer, asked, chunk, scoring.scale)
            if long.plan is not None:
                part = out[long.others]
                self._attend(kv, layer, query[long.others].contiguous(), long.plan, scoring, part)
                if not isinstance(long.others, slice):
                    out[long.others] = part
            return
        buffers = self._staged(plan, scoring.window)
        self._launcher.attend(
            kv,
            layer,
            query,
            plan.grids(scoring.window),
            buffers,
            scoring,
            out,
            sees_ahead=plan.sees_ahead(scoring.window),
        )

    def copy_blocks(self, kv: PagedKV, copies: Sequence[tuple[int, int, int]]) -> None:
        copy_blocks(kv, copies)
