# SPDX-License-Identifier: Apache-2.0
"""Backend for layers of several shapes, which passes each layer to the backend of its group.

Every group has a plan of its own, since tiles depend on heads and sizes, and tables on the pool. A layer
that reads another layer's keys and values writes none.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import numpy as np
import torch

from radixkv_kernels.interface import Ahead, AttentionBackend, AttentionPlan, BlockTables
from radixkv_kernels.kv_groups import KVLayout
from radixkv_kernels.norm_rotary import LatentRotation, Rotation


class GroupedPlan(AttentionPlan):
    """A step, and the plans of all groups for it; `tables` are each group's."""

    def __init__(
        self,
        backends: Sequence[AttentionBackend],
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        tables: Sequence[BlockTables],
        ahead: Ahead | None = None,
    ) -> None:
        super().__init__(backends[0].config, query_starts, context_lengths, tables[0], ahead)
        self.plans = [
            backend.plan(query_starts, context_lengths, own, ahead)
            for backend, own in zip(backends, tables, strict=True)
        ]


class GroupedBackend(AttentionBackend):
    """Backend of layers of several shapes; `kv` is a `GroupedKV` of the same layout.

    Args:
        backends: one per group of the layout.
    """

    def __init__(self, layout: KVLayout, backends: Sequence[AttentionBackend]) -> None:
        super().__init__(backends[0].config)
        self.backends = backends
        self._places, self._aliases = layout.places, frozenset(layout.aliases)
        self._has_window = [group.window is not None for group in layout.groups]
        # Windows that the layers of a group have asked for: buffers are staged for these alone, and for all
        # before the first step.
        self._windows: list[set[int | None]] = [set() for _ in backends]

    @property
    def scratch_bytes(self) -> int:
        return max(backend.scratch_bytes for backend in self.backends)

    def plan(
        self,
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        block_tables: BlockTables,
        ahead: Ahead | None = None,
    ) -> GroupedPlan:
        return self.plan_with_windows(query_starts, context_lengths, block_tables, block_tables, ahead)

    def plan_with_windows(
        self,
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        block_tables: BlockTables,
        window_tables: BlockTables,
        ahead: Ahead | None = None,
    ) -> GroupedPlan:
        """`plan`, with tables for groups with a window. Entries before a window are any of its blocks."""
        tables = [window_tables if each else block_tables for each in self._has_window]
        return GroupedPlan(self.backends, query_starts, context_lengths, tables, ahead)

    def write(
        self,
        kv: Any,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        if layer in self._aliases:
            return
        group, index = self._places[layer]
        self.backends[group].write(kv.groups[group], index, key, value, slots, rows)

    def rotate_and_write(
        self,
        kv: Any,
        layer: int,
        merged: torch.Tensor,
        rotation: Rotation,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        group, index = self._places[layer]
        return self.backends[group].rotate_and_write(kv.groups[group], index, merged, rotation, slots, rows)

    def write_latents(
        self,
        kv: Any,
        layer: int,
        query: torch.Tensor,
        folded: torch.Tensor,
        latents: torch.Tensor,
        rotation: LatentRotation,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        group, index = self._places[layer]
        own, memory = self.backends[group], kv.groups[group]
        own.write_latents(memory, index, query, folded, latents, rotation, slots, rows)

    def attend(
        self,
        kv: Any,
        layer: int,
        query: torch.Tensor,
        plan: AttentionPlan,
        *,
        window: int | None = None,
        **options: Any,
    ) -> torch.Tensor:
        assert isinstance(plan, GroupedPlan)
        group, index = self._places[layer]
        self._windows[group].add(window)
        return self.backends[group].attend(
            kv.groups[group], index, query, plan.plans[group], window=window, **options
        )

    def pad(
        self, plan: AttentionPlan, windows: Collection[int | None], rows: int, *, every_kernel: bool
    ) -> None:
        for backend, each, own in self._parts(plan, windows):
            backend.pad(each, own, rows, every_kernel=every_kernel)

    def stage(self, plan: AttentionPlan, windows: Collection[int | None]) -> None:
        for backend, each, own in self._parts(plan, windows):
            backend.stage(each, own)

    def launch_key(self, plan: AttentionPlan, windows: Collection[int | None]) -> Hashable:
        return tuple(backend.launch_key(each, own) for backend, each, own in self._parts(plan, windows))

    def _parts(
        self, plan: AttentionPlan, windows: Collection[int | None]
    ) -> list[tuple[AttentionBackend, AttentionPlan, Collection[int | None]]]:
        """Each group's backend, plan and windows."""
        assert isinstance(plan, GroupedPlan)
        return [
            (backend, each, own & set(windows) if own else windows)
            for backend, each, own in zip(self.backends, plan.plans, self._windows, strict=True)
        ]

    def copy_blocks(self, kv: Any, copies: Sequence[tuple[int, int, int]]) -> None:
        for backend, group, has_window in zip(self.backends, kv.groups, self._has_window, strict=True):
            if not has_window:
                backend.copy_blocks(group, copies)
