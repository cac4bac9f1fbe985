# SPDX-License-Identifier: Apache-2.0
"""Checked launches of the attention and merge kernels over one window's plan on the device."""

from __future__ import annotations

from typing import Any

import torch

from radixkv_kernels.interface import BackendConfig, Scoring
from radixkv_kernels.kv_cache import PagedKV
from radixkv_kernels.triton import merge, unified_attention
from radixkv_kernels.triton.dependent_launch import launches_early
from radixkv_kernels.triton.head_shape import head_constants
from radixkv_kernels.triton.plan_buffers import Partials, PlanBuffers
from radixkv_kernels.triton.tiles import Tile, Tiling


class KernelLauncher:
    """Launches one backend's kernels."""

    def __init__(self, config: BackendConfig, tiling: Tiling, partials: Partials) -> None:
        self.config, self.tiling, self._partials = config, tiling, partials
        self._heads = head_constants(config.spec)
        self._early = launches_early(config.spec.device)
        # Stands for tensors that a layer does not have; the kernels don't read it.
        self._none = torch.zeros(1, dtype=torch.float32, device=config.spec.device)

    def attend(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        grids: tuple[int, int, int],
        buffers: PlanBuffers,
        scoring: Scoring,
        out: torch.Tensor,
        *,
        sees_ahead: bool,
    ) -> None:
        """Attend a staged plan into `out`, which must be contiguous; `grids` and `sees_ahead` are the plan's.

        Raises:
            ValueError: `out` is not contiguous.
        """
        if not out.is_contiguous():
            raise ValueError("out must be contiguous")
        query = query if query.stride(2) == 1 else query.contiguous()
        sinks = self._none if scoring.sinks is None else scoring.sinks.to(torch.float32)
        shape = {"SINKS": scoring.sinks is not None, "EARLY": self._early}
        short, long, merged = grids
        for planned, grid, is_long in ((self.tiling.long, long, True), (self.tiling.short, short, False)):
            if grid:
                self._attend(
                    *(kv, layer, query, buffers, scoring, sinks, out, planned, grid, is_long),
                    shape | {"AHEAD": sees_ahead},
                )
        if merged:
            heads, is_interpreted = self.config.num_query_heads, out.device.type == "cpu"
            constants = merge.merge_constants(heads, self._heads["VP"], is_interpreted=is_interpreted)
            merge.merge_kernel[(merged, heads // constants["BH"])](
                out,
                self._partials.out,
                self._partials.stat,
                buffers.blob,
                sinks,
                V=self._heads["V"],
                **shape,
                **constants,
                **({"launch_pdl": True} if self._early else {}),
            )

    def _attend(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        buffers: PlanBuffers,
        scoring: Scoring,
        sinks: torch.Tensor,
        out: torch.Tensor,
        planned: Tile,
        grid: int,
        is_long: bool,
        shape: dict[str, Any],
    ) -> None:
        """Run the attention kernel over the short or the long items of a plan."""
        spec, group, softcap = self.config.spec, self.tiling.group, scoring.softcap
        parts = self.config.group_size // group
        tile = self.tiling.launched(planned, featured=scoring.window is not None or softcap is not None)
        split = -(-(planned.rows // group) // (tile.rows // group))
        unified_attention.attention_kernel[(grid * split, spec.num_kv_heads * parts)](
            query,
            kv.key[layer],
            # The kernel reads quantised values in pairs.
            kv.value[layer] if spec.quantization is None else kv.value[layer].view(torch.int16),
            self._none if kv.key_scale is None else kv.key_scale[layer],
            self._none if kv.value_scale is None else kv.value_scale[layer],
            out,
            self._partials.out,
            self._partials.stat,
            buffers.blob,
            sinks,
            scoring.scale,
            0.0 if softcap is None else softcap,
            scoring.window or 0,
            query.stride(0),
            query.stride(1),
            spec.num_blocks * spec.block_size,
            HQ=self.config.num_query_heads,
            HKV=spec.num_kv_heads,
            PARTS=parts,
            BM=tile.rows,
            SPLIT=split,
            BN=tile.keys,
            BLOCK=spec.block_size,
            SEGMENT=self.tiling.unit,
            LONG=is_long,
            WINDOW=scoring.window is not None,
            SOFTCAP=softcap is not None,
            QUANTIZED=spec.quantization is not None,
            BY_SEGMENT=self.config.deterministic,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **shape,
            **self._heads,
        )
