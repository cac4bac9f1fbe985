"""The CPU backend: paged attention through torch's dense operators.

A request's blocks are gathered into a preallocated buffer, then attended by `dense_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from radixkv_kernels.backend import AttentionBackend, AttentionPlan, BackendConfig, BlockTables
from radixkv_kernels.dense_attention import apply_sinks, dense_attention
from radixkv_kernels.kv_cache import PagedKV, _bytes, quantize


class TorchPlan(AttentionPlan):
    """Adds the gather index of every request."""

    def __init__(
        self,
        config: BackendConfig,
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        tables: BlockTables,
    ) -> None:
        super().__init__(config, query_starts, context_lengths, tables)
        flat = np.concatenate([*self.block_tables, np.zeros(0, np.int32)]).astype(np.int64)
        self.blocks = torch.from_numpy(flat)
        self.block_starts = np.concatenate([[0], np.cumsum([len(t) for t in self.block_tables])]).tolist()


class TorchBackend(AttentionBackend):
    """See the module and `AttentionBackend`."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        spec = config.spec
        if spec.device.type != "cpu":
            raise ValueError(f"the torch backend serves CPU caches, not {spec.device}")
        blocks = -(-config.max_model_len // spec.block_size)
        size = spec.num_kv_heads * blocks * spec.block_size * spec.head_size
        self._gathered = [torch.empty(size, dtype=spec.storage_dtype) for _ in range(2)]

    def plan(
        self, query_starts: np.ndarray, context_lengths: np.ndarray, block_tables: BlockTables
    ) -> TorchPlan:
        return TorchPlan(self.config, query_starts, context_lengths, block_tables)

    def write(
        self,
        kv: PagedKV,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        if slots.numel() == 0:
            return
        if int(slots.min()) < 0:
            valid = (slots >= 0).nonzero().squeeze(1)
            slots = slots.index_select(0, valid)
            rows = valid if rows is None else rows.index_select(0, valid)
        if rows is not None:
            key, value = key.index_select(0, rows), value.index_select(0, rows)
        quantization = kv.spec.quantization
        for data, scales, new in (
            (kv.key[layer], kv.key_scale, key),
            (kv.value[layer], kv.value_scale, value),
        ):
            stored = new
            if quantization is not None and scales is not None:
                stored, scale = quantize(new, quantization)
                scales[layer].flatten(1).index_copy_(1, slots, scale.transpose(0, 1))
            _bytes(data).flatten(1, 2).index_copy_(1, slots, _bytes(stored).transpose(0, 1))

    def attend(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(plan, TorchPlan)
        if out is None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
            out[plan.num_tokens :] = 0
        starts = plan.query_starts.tolist()
        for r, length in enumerate(plan.context_lengths.tolist()):
            start, end = starts[r], starts[r + 1]
            if start == end:
                continue
            position = length - (end - start)
            first = 0 if window is None else max(0, position - window + 1)
            key, value = self._gather(kv, layer, plan, r, first, length)
            result, lse = dense_attention(
                query[start:end].transpose(0, 1),
                key,
                value,
                position,
                first,
                scale=scale,
                window=window,
                softcap=softcap,
                alibi_slopes=alibi_slopes,
            )
            if sinks is not None:
                result = apply_sinks(result, lse, sinks)
            out[start:end] = result.transpose(0, 1)
        return out

    def copy_blocks(self, kv: PagedKV, copies: Sequence[tuple[int, int, int]]) -> None:
        read = [
            (t, target, t[:, :, source, :count].clone())
            for source, target, count in copies
            for t in map(_bytes, kv.tensors())
        ]
        for t, target, data in read:
            t[:, :, target, : data.shape[2]] = data

    def _gather(
        self, kv: PagedKV, layer: int, plan: TorchPlan, request: int, first: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions `first` to `end` of a request: two `[Hkv, end - first, D]`, compute dtype.

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
            flat = _bytes(buffer[: shape[0] * shape[1] * shape[2]])
            torch.index_select(
                _bytes(data[layer]).flatten(2), 1, blocks, out=flat.view(shape[0], high - low, -1)
            )
            rows = flat.view(buffer.dtype).view(shape)[:, offset : offset + end - first]
            if scales is not None:
                factor = scales[layer].index_select(1, blocks).flatten(1)[:, offset : offset + end - first]
                rows = (rows.to(torch.float32) * factor.unsqueeze(-1)).to(self.config.compute_dtype)
            result.append(rows)
        return result[0], result[1]
