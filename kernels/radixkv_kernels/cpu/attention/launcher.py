"""Launch the numba kernel: argument block, partial buffers, and the CPU's way of cutting work."""

from __future__ import annotations

import numpy as np
import torch

from radixkv_kernels.cpu.attention import attention_kernel as na
from radixkv_kernels.cpu.openmp import run_parallel
from radixkv_kernels.interface import AttentionPlan, BackendConfig, Scoring
from radixkv_kernels.kv_cache import PagedKV
from radixkv_kernels.work_plan import WorkPlan, WorkSettings, build_work

_KINDS = {
    torch.float32: na.FLOAT32,
    torch.bfloat16: na.BFLOAT16,
    torch.float16: na.FLOAT16,
    torch.int8: na.INT8,
    torch.float8_e4m3fn: na.FP8_E4M3,
    torch.float8_e5m2: na.FP8_E5M2,
}

#: Rows (token x head of a KV group) per tile: scores of a tile and a block of keys stay in the L1 cache.
_TILE_ROWS = 48


def work_settings(config: BackendConfig) -> WorkSettings:
    """How the CPU cuts work: tiles of about 48 rows, four items a thread."""
    tile = max(1, _TILE_ROWS // config.group_size)
    return WorkSettings(
        segment=na.SEGMENT,
        block_size=config.spec.block_size,
        num_kv_heads=config.spec.num_kv_heads,
        short_tile=tile,
        long_tile=tile,
        group_tile=tile,
        parallel=4 * torch.get_num_threads(),
        share=config.share_prefixes,
        # In keys' worth of reading: a partial is written and read once, about four keys of traffic per head.
        load_cost=float(na.SEGMENT),
        partial_cost=4.0 * config.group_size,
    )


class NumbaPlan(AttentionPlan):
    """Work items per window, made on first use (models may mix windowed and full layers)."""

    def __init__(self, config: BackendConfig, *args: object) -> None:
        super().__init__(config, *args)  # type: ignore[arg-type]
        self._settings = work_settings(config)
        self.token_positions = self.positions()
        self._work: dict[int | None, tuple[WorkPlan, np.ndarray]] = {}
        self.work(None)

    def work(self, window: int | None) -> tuple[WorkPlan, np.ndarray]:
        """The plan for one window, and its items as one contiguous array."""
        found = self._work.get(window)
        if found is None:
            plan = build_work(
                self._settings,
                self.query_starts,
                self.context_lengths,
                self.tables,
                self.table_starts,
                window,
            )
            items = np.ascontiguousarray(np.concatenate([plan.long_items, plan.short_items]))
            found = self._work[window] = (plan, items)
        return found


def _float_rows(values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else values.to(torch.float32).contiguous()


class NumbaLauncher:
    """Runs plans on a cache. One per backend; holds the argument block and the partials' memory."""

    def __init__(self, config: BackendConfig) -> None:
        self.config = config
        spec = config.spec
        self._attend, self._merge = na.attention_kernels(
            spec.head_size, _KINDS[spec.storage_dtype], spec.block_size
        )
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
        rows = max(1, _TILE_ROWS // config.group_size) * config.group_size
        a[na.MAX_ROWS] = rows
        self._prepared: tuple[NumbaPlan, int | None] | None = None
        self._kv: PagedKV | None = None
        self._layers: list[tuple[int, ...]] = []  # of that cache: addresses of each layer's tensors

    def attend(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        plan: NumbaPlan,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """Attend `query [T, Hq, D]` float32 (last dimension contiguous) into `out [T, Hq, D]` float32
        contiguous."""
        a, window = self._arguments, scoring.window
        if self._prepared is None or self._prepared[0] is not plan or self._prepared[1] != window:
            self._prepare(plan, window)
        self._counters.fill(0)
        self._scalars[0] = scoring.scale
        self._scalars[1] = 0.0 if scoring.softcap is None else scoring.softcap
        sinks, slopes = _float_rows(scoring.sinks), _float_rows(scoring.alibi_slopes)
        stride = query.stride()
        a[na.QUERY], a[na.OUTPUT] = query.data_ptr(), out.data_ptr()
        a[na.QUERY_TOKEN_STRIDE], a[na.QUERY_HEAD_STRIDE] = stride[0], stride[1]
        if self._kv is not kv:
            self._kv = kv
            self._layers = list(
                zip(*([t.data_ptr() for t in tensor] for tensor in kv.tensors()), strict=True)
            )
        addresses = self._layers[layer]
        a[na.KEY], a[na.VALUE] = addresses[:2]
        if len(addresses) > 2:
            a[na.KEY_SCALE], a[na.VALUE_SCALE] = addresses[2:]
        a[na.SINKS] = 0 if sinks is None else sinks.data_ptr()
        a[na.SLOPES] = 0 if slopes is None else slopes.data_ptr()
        run_parallel(self._attend, self._address)
        if a[na.NUM_MERGE]:
            run_parallel(self._merge, self._address)

    def _prepare(self, plan: NumbaPlan, window: int | None) -> None:
        """Fill in what is the same for every layer of a plan and window."""
        work, items = plan.work(window)
        heads = self.config.num_query_heads
        slots = work.num_partials * heads
        if len(self._partial_max) < slots:
            self._partial_max = np.empty(slots, dtype=np.float32)
            self._partial_sum = np.empty(slots, dtype=np.float32)
            self._partial_out = np.empty(slots * self.config.spec.head_size, dtype=np.float32)
        a = self._arguments
        a[na.NUM_ITEMS], a[na.ITEMS] = len(items), items.ctypes.data
        a[na.TOKENS] = work.tokens.ctypes.data
        a[na.POSITIONS] = plan.token_positions.ctypes.data
        a[na.TABLES] = plan.tables.ctypes.data
        a[na.PARTIAL_BASE] = work.partial_base.ctypes.data
        a[na.MERGE_TOKENS], a[na.NUM_MERGE] = work.merge_tokens.ctypes.data, len(work.merge_tokens)
        a[na.PARTIAL_OUT] = self._partial_out.ctypes.data
        a[na.PARTIAL_MAX] = self._partial_max.ctypes.data
        a[na.PARTIAL_SUM] = self._partial_sum.ctypes.data
        a[na.WINDOW] = 0 if window is None else window
        self._prepared = (plan, window)
