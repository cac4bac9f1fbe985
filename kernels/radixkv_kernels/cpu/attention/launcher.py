# SPDX-License-Identifier: Apache-2.0
"""Launch the numba kernels: their argument block, and the memory of partials."""

from __future__ import annotations

import numpy as np
import torch

from radixkv_kernels.cpu.attention import attention_kernel as na
from radixkv_kernels.cpu.attention import stored_rows
from radixkv_kernels.cpu.attention.chunk_products import score_product, square_of, value_product
from radixkv_kernels.cpu.attention.plan import CpuPlan, tile_tokens
from radixkv_kernels.cpu.openmp import run_parallel
from radixkv_kernels.interface import BackendConfig, Scoring
from radixkv_kernels.kv_cache import PagedKV

_KINDS = {
    torch.float32: stored_rows.FLOAT32,
    torch.bfloat16: stored_rows.BFLOAT16,
    torch.float16: stored_rows.FLOAT16,
    torch.int8: stored_rows.INT8,
    torch.float8_e4m3fn: stored_rows.FP8_E4M3,
    torch.float8_e5m2: stored_rows.FP8_E5M2,
}


class AttentionLauncher:
    """Runs plans on a cache. One per backend; holds the argument block and the partials' memory."""

    def __init__(self, config: BackendConfig) -> None:
        self.config = config
        spec = config.spec
        self._attend, self._merge = na.attention_kernels()
        kind = _KINDS[spec.storage_dtype]
        square = square_of(spec.head_size, spec.block_size)
        value_row = spec.head_size if spec.value_in_key else spec.value_size
        value_bytes = value_row * spec.storage_dtype.itemsize
        self._arguments = np.zeros(na.NUM_ARGUMENTS, dtype=np.int64)
        # Each counter on its own cache line would not matter here: there is one take per item.
        self._counters = np.zeros(2, dtype=np.int64)
        self._scalars = np.zeros(2, dtype=np.float32)
        self._partial_out = np.zeros(0, dtype=np.float32)
        self._partial_max = np.zeros(0, dtype=np.float32)
        self._partial_sum = np.zeros(0, dtype=np.float32)
        a = self._arguments
        self._address = a.ctypes.data
        a[na.COUNTER] = self._counters.ctypes.data
        a[na.SCALARS] = self._scalars.ctypes.data
        a[na.NUM_KV_HEADS] = spec.num_kv_heads
        a[na.GROUP_SIZE] = config.group_size
        a[na.NUM_BLOCKS] = spec.num_blocks
        a[na.BLOCK_SIZE] = spec.block_size
        a[na.BLOCK_SHIFT] = spec.block_size.bit_length() - 1
        a[na.MAX_ROWS] = tile_tokens(config) * config.group_size
        a[na.HEAD_SIZE], a[na.VALUE_SIZE] = spec.head_size, spec.value_size
        a[na.VALUE_ROW], a[na.SQUARE] = value_row, square
        a[na.SCORE] = score_product(spec.head_size, kind, square, value_bytes)
        a[na.WEIGH] = value_product(spec.value_size, value_row, kind)
        self._prepared: tuple[CpuPlan, int | None] | None = None
        self._last_seen = np.zeros(0, dtype=np.int32)
        self._kv: PagedKV | None = None
        self._layers: list[tuple[int, ...]] = []  # of that cache: addresses of each layer's tensors

    def attend(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        plan: CpuPlan,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """Attend `query [T, Hq, D]` float32 (last dimension contiguous) into `out [T, Hq, V]` float32
        contiguous."""
        a, window = self._arguments, scoring.window
        if self._prepared is None or self._prepared[0] is not plan or self._prepared[1] != window:
            self._prepare(plan, window)
        self._counters.fill(0)
        self._scalars[0] = scoring.scale
        self._scalars[1] = 0.0 if scoring.softcap is None else scoring.softcap
        sinks = None if scoring.sinks is None else scoring.sinks.to(torch.float32).contiguous()
        stride = query.stride()
        a[na.QUERY], a[na.OUTPUT] = query.data_ptr(), out.data_ptr()
        a[na.QUERY_TOKEN_STRIDE], a[na.QUERY_HEAD_STRIDE] = stride[0], stride[1]
        if self._kv is not kv:
            self._kv = kv
            parts = [t for t in (kv.key, kv.value, kv.key_scale, kv.value_scale) if t is not None]
            self._layers = list(zip(*([t.data_ptr() for t in tensor] for tensor in parts), strict=True))
        addresses = self._layers[layer]
        a[na.KEY], a[na.VALUE] = addresses[:2]
        if len(addresses) > 2:
            a[na.KEY_SCALE], a[na.VALUE_SCALE] = addresses[2:]
        a[na.SINKS] = 0 if sinks is None else sinks.data_ptr()
        run_parallel(self._attend, self._address)
        if a[na.NUM_MERGE]:
            run_parallel(self._merge, self._address)

    def _prepare(self, plan: CpuPlan, window: int | None) -> None:
        """Fill in the arguments that all layers of a plan and window share."""
        work, items = plan.work(window)
        heads = self.config.num_query_heads
        slots = work.num_partials * heads
        if len(self._partial_max) < slots:
            self._partial_max = np.empty(slots, dtype=np.float32)
            self._partial_sum = np.empty(slots, dtype=np.float32)
            self._partial_out = np.empty(slots * self.config.spec.value_size, dtype=np.float32)
        a = self._arguments
        a[na.NUM_ITEMS], a[na.ITEMS] = len(items), items.ctypes.data
        a[na.TOKENS] = work.tokens.ctypes.data
        self._last_seen = plan.last_seen(window)  # kept for as long as its address is
        a[na.POSITIONS], a[na.LAST_SEEN] = plan.token_positions.ctypes.data, self._last_seen.ctypes.data
        a[na.TABLES] = plan.tables.ctypes.data
        a[na.PARTIAL_BASE] = work.partial_base.ctypes.data
        a[na.MERGE_TOKENS], a[na.NUM_MERGE] = work.merge_tokens.ctypes.data, len(work.merge_tokens)
        a[na.PARTIAL_OUT] = self._partial_out.ctypes.data
        a[na.PARTIAL_MAX] = self._partial_max.ctypes.data
        a[na.PARTIAL_SUM] = self._partial_sum.ctypes.data
        a[na.WINDOW] = 0 if window is None else window
        self._prepared = (plan, window)
