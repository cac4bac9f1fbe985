# SPDX-License-Identifier: Apache-2.0
"""A step's work on the CPU: how it is cut, and its items per window."""

from __future__ import annotations

import numpy as np
import torch

from radixkv_kernels.cpu.attention.attention_kernel import SEGMENT
from radixkv_kernels.interface import Ahead, AttentionPlan, BackendConfig, BlockTables
from radixkv_kernels.work_plan import WorkPlan, WorkSettings, build_work

#: Rows (token x head of a KV group) per tile: scores of a tile and a block of keys stay in the L1 cache.
_TILE_ROWS = 48


def tile_tokens(config: BackendConfig) -> int:
    """Query tokens per tile."""
    return max(1, _TILE_ROWS // config.group_size)


def work_settings(config: BackendConfig) -> WorkSettings:
    """Cutting of work on the CPU: tiles of about 48 rows, four items a thread."""
    tile = tile_tokens(config)
    return WorkSettings(
        segment=SEGMENT,
        block_size=config.spec.block_size,
        num_kv_heads=config.spec.num_kv_heads,
        short_tile=tile,
        long_tile=tile,
        group_tile=tile,
        parallel=4 * torch.get_num_threads(),
        share=config.share_prefixes,
        # In keys' worth of reading: a partial is written and read once, about four keys of traffic per head.
        load_cost=float(SEGMENT),
        partial_cost=4.0 * config.group_size,
    )


class CpuPlan(AttentionPlan):
    """Work items per window, made on first use (models may mix windowed and full layers)."""

    def __init__(
        self,
        config: BackendConfig,
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        tables: BlockTables,
        ahead: Ahead | None = None,
    ) -> None:
        super().__init__(config, query_starts, context_lengths, tables, ahead)
        self._settings = work_settings(config)
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
                self.last_seen(window),
            )
            items = np.ascontiguousarray(np.concatenate([plan.long_items, plan.short_items]))
            found = self._work[window] = (plan, items)
        return found
