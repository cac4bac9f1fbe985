"""The CPU backend: paged attention by the numba kernel, or by torch's dense operators where numba is absent.

With numba (the `cpu` extra), blocks are read in place and every result is canonical: see `attention_kernel`.
Without it, a request's blocks are gathered into a preallocated buffer and attended by `dense_attention`, or,
in deterministic mode, by `canonical_attention`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from radixkv_kernels.cpu.attention.dense_attention import canonical_attention, dense_attention
from radixkv_kernels.interface import AttentionBackend, AttentionPlan, BackendConfig, BlockTables, Scoring
from radixkv_kernels.kv_cache import PagedKV, _bytes, quantize

if TYPE_CHECKING:
    from radixkv_kernels.cpu.attention.kv_write import FloatWriter
    from radixkv_kernels.cpu.attention.launcher import NumbaLauncher


def numba_available() -> bool:
    """Whether the compiled CPU kernel can be used."""
    return importlib.util.find_spec("numba") is not None


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
        self.blocks = torch.from_numpy(self.tables.astype(np.int64))
        self.block_starts = self.table_starts.tolist()


class TorchBackend(AttentionBackend):
    """See the module and `AttentionBackend`.

    Args:
        use_numba: None: when installed.
    """

    def __init__(self, config: BackendConfig, use_numba: bool | None = None) -> None:
        super().__init__(config)
        spec = config.spec
        if spec.device.type != "cpu":
            raise ValueError(f"the torch backend serves CPU caches, not {spec.device}")
        self._launcher: NumbaLauncher | None = None
        self._writer: FloatWriter | None = None
        if numba_available() if use_numba is None else use_numba:
            from radixkv_kernels.cpu.attention.launcher import NumbaLauncher

            self._launcher = NumbaLauncher(config)
            return
        blocks = -(-config.max_model_len // spec.block_size)
        size = spec.num_kv_heads * blocks * spec.block_size * spec.head_size
        self._gathered = [torch.empty(size, dtype=spec.storage_dtype) for _ in range(2)]

    def plan(
        self, query_starts: np.ndarray, context_lengths: np.ndarray, block_tables: BlockTables
    ) -> AttentionPlan:
        if self._launcher is not None:
            from radixkv_kernels.cpu.attention.launcher import NumbaPlan

            return NumbaPlan(self.config, query_starts, context_lengths, block_tables)
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
        if self._launcher is not None and self._write_in_place(kv, layer, key, value, slots, rows):
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

    def _write_in_place(
        self,
        kv: PagedKV,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> bool:
        """By the numba kernel, where all is float32; False: it is not."""
        from radixkv_kernels.cpu.attention.kv_write import FloatWriter

        if not FloatWriter.accepts(kv, key, value):
            return False
        if self._writer is None or self._writer.kv is not kv:
            self._writer = FloatWriter(kv)
        self._writer.write(layer, key, value, slots, rows)
        return True

    def _attend(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        plan: AttentionPlan,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        if self._launcher is not None:
            self._attend_in_place(kv, layer, query, plan, scoring, out)
            return
        assert isinstance(plan, TorchPlan)
        starts = plan.query_starts.tolist()
        for r, length in enumerate(plan.context_lengths.tolist()):
            start, end = starts[r], starts[r + 1]
            if start == end:
                continue
            position = length - (end - start)
            first = 0 if scoring.window is None else max(0, position - scoring.window + 1)
            key, value = self._gather(kv, layer, plan, r, first, length)
            rows = query[start:end].transpose(0, 1)
            attention = canonical_attention if self.config.deterministic else dense_attention
            result = attention(rows, key, value, position, first, scoring)
            out[start:end] = result.transpose(0, 1)

    def _attend_in_place(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        plan: AttentionPlan,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """By the numba kernel, which computes in float32 whatever the dtypes around it."""
        assert self._launcher is not None
        tokens = plan.num_tokens
        wide = query if query.dtype == torch.float32 else query[:tokens].to(torch.float32)
        if wide.stride(2) != 1:
            wide = wide.contiguous()
        direct = out.dtype == torch.float32 and out.is_contiguous()
        target = out if direct else torch.empty(tokens, *out.shape[1:], dtype=torch.float32)
        self._launcher.attend(kv, layer, wide, plan, scoring, target)  # type: ignore[arg-type]
        if not direct:
            out[:tokens] = target

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
