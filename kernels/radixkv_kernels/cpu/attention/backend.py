# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: paged attention by the numba kernel, which reads blocks in place; see `attention_kernel`.

Every result is canonical: a row's bits do not depend on the batch, deterministic mode or not.
"""

from __future__ import annotations

import numpy as np
import torch

from radixkv_kernels.cpu.attention.kv_write import FloatWriter
from radixkv_kernels.cpu.attention.launcher import AttentionLauncher
from radixkv_kernels.cpu.attention.plan import CpuPlan
from radixkv_kernels.cpu.torch_backend import TorchBackend
from radixkv_kernels.interface import Ahead, AttentionPlan, BackendConfig, BlockTables, Scoring
from radixkv_kernels.kv_cache import PagedKV


class CpuBackend(TorchBackend):
    """Backend of a CPU with numba; see `AttentionBackend`. Other operations run in torch."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._launcher = AttentionLauncher(config)
        self._writer: FloatWriter | None = None

    def plan(
        self,
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        block_tables: BlockTables,
        ahead: Ahead | None = None,
    ) -> CpuPlan:
        return CpuPlan(self.config, query_starts, context_lengths, block_tables, ahead)

    def write(
        self,
        kv: PagedKV,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        if slots.numel() == 0 or not FloatWriter.accepts(kv, key, value):
            super().write(kv, layer, key, value, slots, rows)
            return
        if self._writer is None or self._writer.kv is not kv:
            self._writer = FloatWriter(kv)
        self._writer.write(layer, key, value, slots, rows)

    def _attend(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        plan: AttentionPlan,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        assert isinstance(plan, CpuPlan)
        # The kernel computes in float32 whatever the dtypes around it.
        tokens = plan.num_tokens
        wide = query if query.dtype == torch.float32 else query[:tokens].to(torch.float32)
        if wide.stride(2) != 1:
            wide = wide.contiguous()
        direct = out.dtype == torch.float32 and out.is_contiguous()
        target = out if direct else torch.empty(tokens, *out.shape[1:], dtype=torch.float32)
        self._launcher.attend(kv, layer, wide, plan, scoring, target)
        if not direct:
            out[:tokens] = target
