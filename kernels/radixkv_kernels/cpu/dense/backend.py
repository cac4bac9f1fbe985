"""The CPU backend where numba is not installed: blocks are gathered, then attended by torch's operators.

A request's blocks are gathered into a preallocated buffer and attended by `dense_attention`, or, in
deterministic mode, by `canonical_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from radixkv_kernels.cpu.dense.attention import canonical_attention, dense_attention
from radixkv_kernels.cpu.paged_copies import copy_blocks, write_rows
from radixkv_kernels.interface import AttentionBackend, AttentionPlan, BackendConfig, BlockTables, Scoring
from radixkv_kernels.kv_cache import PagedKV, indexable


class DensePlan(AttentionPlan):
    """Adds the gather index of every request."""

    def __init__(
        self,
        config: BackendConfig,
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        tables: BlockTables,
    ) -> None:
        super().__init__(config, query_starts, context_lengths, tables)
        self.blocks = torch.from_numpy(self.tables.astype(np.int64))
        self.block_starts = self.table_starts.tolist()


class DenseBackend(AttentionBackend):
    """See the module and `AttentionBackend`.

    Raises:
        ValueError: the cache is not on the CPU.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        spec = config.spec
        if spec.device.type != "cpu":
            raise ValueError(f"the cpu backend serves CPU caches, not {spec.device}")
        blocks = -(-config.max_model_len // spec.block_size)
        size = spec.num_kv_heads * blocks * spec.block_size * spec.head_size
        self._gathered = [torch.empty(size, dtype=spec.storage_dtype) for _ in range(2)]

    def plan(
        self, query_starts: np.ndarray, context_lengths: np.ndarray, block_tables: BlockTables
    ) -> DensePlan:
        return DensePlan(self.config, query_starts, context_lengths, block_tables)

    def write(
        self,
        kv: PagedKV,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        if slots.numel():
            write_rows(kv, layer, key, value, slots, rows)

    def _attend(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        plan: AttentionPlan,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        assert isinstance(plan, DensePlan)
        attention = canonical_attention if self.config.deterministic else dense_attention
        starts = plan.query_starts.tolist()
        for r, length in enumerate(plan.context_lengths.tolist()):
            start, end = starts[r], starts[r + 1]
            if start == end:
                continue
            position = length - (end - start)
            first = 0 if scoring.window is None else max(0, position - scoring.window + 1)
            key, value = self._gather(kv, layer, plan, r, first, length)
            rows = query[start:end].transpose(0, 1)
            result = attention(rows, key, value, position, first, scoring)
            out[start:end] = result.transpose(0, 1)

    def copy_blocks(self, kv: PagedKV, copies: Sequence[tuple[int, int, int]]) -> None:
        copy_blocks(kv, copies)

    def _gather(
        self, kv: PagedKV, layer: int, plan: DensePlan, request: int, first: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions `first` to `end` of a request: two `[Hkv, end - first, D]`, compute
        dtype.

        Views of the scratch buffers where the cache holds the compute dtype.
        """
        spec = self.config.spec
        size = spec.block_size
        low, high = first // size, -(-end // size)
        base = plan.block_starts[request]
        blocks = plan.blocks[base + low : base + high]
        shape = (spec.num_kv_heads, (high - low) * size, spec.head_size)
        offset = first - low * size
        result = []
        for buffer, data, scales in zip(
            self._gathered, (kv.key, kv.value), (kv.key_scale, kv.value_scale), strict=True
        ):
            flat = indexable(buffer[: shape[0] * shape[1] * shape[2]])
            torch.index_select(
                indexable(data[layer]).flatten(2), 1, blocks, out=flat.view(shape[0], high - low, -1)
            )
            rows = flat.view(buffer.dtype).view(shape)[:, offset : offset + end - first]
            if scales is not None:
                factor = scales[layer].index_select(1, blocks).flatten(1)[:, offset : offset + end - first]
                rows = (rows.to(torch.float32) * factor.unsqueeze(-1)).to(self.config.compute_dtype)
            result.append(rows)
        return result[0], result[1]
