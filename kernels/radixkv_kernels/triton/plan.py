# SPDX-License-Identifier: Apache-2.0
"""A step's work on the GPU: cut, and packed into one int32 array, the *blob*, that kernels read.

blob = header | short items | long items | tokens to merge | tokens | positions | merge starts | slots
       | tables | last positions seen, where rows see beyond their own
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch

from radixkv_kernels.contiguous import ContiguousChunks
from radixkv_kernels.interface import Ahead, AttentionPlan, BackendConfig, BlockTables
from radixkv_kernels.triton.partial_slots import PlacedWork, place_partials
from radixkv_kernels.triton.tiles import Tiling, bucket
from radixkv_kernels.work_plan import SEGMENT_END, SEGMENT_START, WorkSettings, build_work

#: Places in the blob's header; the kernels spell them as literals.
NUM_SHORT, NUM_LONG, NUM_MERGE = 0, 1, 2
AT_SHORT, AT_LONG, AT_MERGE, AT_TOKENS, AT_POSITIONS, AT_STARTS, AT_SLOTS, AT_TABLES, AT_LAST = range(3, 12)
HEADER = 16
_NONE = np.zeros(0, dtype=np.int32)


@functools.cache
def _programs(device: torch.device) -> int:
    """Items that fill the machine about twice: later ones even out earlier ones."""
    if device.type != "cuda":
        return 16
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def work_settings(config: BackendConfig, tiling: Tiling) -> WorkSettings:
    """Cutting of work on the GPU.

    The cost model counts bytes per KV head. Attending a segment for m requests together saves m - 1
    readings of its keys and values; each token pays one partial written and read back (float32 rows and two
    numbers). The total saved must outweigh the extra launch and the waiting it adds (about 5 us of
    memory traffic).
    """
    spec = config.spec
    group = tiling.group
    stored = spec.head_size if spec.value_in_key else spec.head_size + spec.value_size
    return WorkSettings(
        segment=tiling.segment,
        block_size=spec.block_size,
        num_kv_heads=config.num_query_heads // group,
        short_tile=tiling.short.rows // group,
        long_tile=tiling.long.rows // group,
        group_tile=tiling.long.rows // group,
        parallel=_programs(spec.device),
        share=config.share_prefixes,
        load_cost=1.0 * tiling.segment * stored * spec.storage_dtype.itemsize,
        partial_cost=2.0 * group * (spec.value_size + 2) * 4,
        min_saving=0.0 if spec.device.type != "cuda" else 16e6 * group / config.num_query_heads,
    )


def split_items(settings: WorkSettings) -> int:
    """Return about how many items splitting makes at most: twice the number that keeps the machine busy."""
    return 2 * -(-settings.parallel // settings.num_kv_heads)


def partial_slots(config: BackendConfig, settings: WorkSettings) -> int:
    """Slots for partials. Splitting makes about as many items as keep the machine busy twice, of whole tiles;
    the rest is for requests that share a few prefixes of each other."""
    return split_items(settings) * (settings.long_tile + settings.short_tile) + 8 * config.max_num_seqs


def in_units(items: np.ndarray, units: int) -> np.ndarray:
    """Items with their segments counted in units."""
    if units == 1:
        return items
    items = items.copy()
    items[:, [SEGMENT_START, SEGMENT_END]] *= units
    return items


class TritonPlan(AttentionPlan):
    """A step's work. Packed per window, on first use, into the backend's device buffer for that window.

    Attributes:
        long_chunks: chunks that are attended otherwise in layers without window, softcap and sinks.
    """

    def __init__(
        self,
        config: BackendConfig,
        settings: WorkSettings,
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        tables: BlockTables,
        unit: int,
        max_partials: int,
        ahead: Ahead | None = None,
    ) -> None:
        super().__init__(config, query_starts, context_lengths, tables, ahead)
        self._settings, self._unit, self._max_partials = settings, unit, max_partials
        self._by_segment = config.deterministic
        self._packed: dict[int | None, tuple[PlacedWork, np.ndarray]] = {}
        self._min_grids = (0, 0, 0)
        self.long_chunks: ContiguousChunks | None = None
        self.work(None)

    def work(self, window: int | None) -> PlacedWork:
        """The work items for one window."""
        return self.packed(window)[0]

    def packed(self, window: int | None) -> tuple[PlacedWork, np.ndarray]:
        """The work items for one window, and the blob that holds them: header, lists, positions, tables."""
        found = self._packed.get(window)
        if found is None:
            found = self._packed[window] = self._place(window)
        return found

    def _place(self, window: int | None) -> tuple[PlacedWork, np.ndarray]:
        """The work with its slots: with less sharing, then less splitting, where these would be too many."""
        segment = self._segment(window)
        shorter = {} if segment == self._settings.segment else {"segment": segment, "share": False}
        for change in (shorter, {"share": False}, {"share": False, "parallel": 1}):
            settings = replace(self._settings, **change)
            work = build_work(
                *(settings, self.query_starts, self.context_lengths, self.tables, self.table_starts),
                window,
                self.last_seen(window),
            )
            num_tokens = int(self.query_starts[-1])
            placed = place_partials(work, settings, num_tokens, by_segment=self._by_segment)
            if len(placed.slots) <= self._max_partials:
                break
        last = self.last_seen(window) if self.sees_ahead(window) else _NONE
        return placed, self._pack(placed, settings.segment // self._unit, last)

    def _segment(self, window: int | None) -> int:
        """The longest segments, down to items' unit and a block, that give each multiprocessor two programs.

        Steps so small share nothing: it would save too little.
        """
        s, lengths = self._settings, self.query_lengths
        tiles = np.where(lengths > s.short_tile, -(-lengths // s.long_tile), lengths > 0)
        seen = self.context_lengths if window is None else np.minimum(self.context_lengths, lengths + window)
        segment = s.segment
        while segment > max(self._unit, s.block_size):
            if int((tiles * -(-seen // segment)).sum()) * s.num_kv_heads >= s.parallel // 2:
                break
            segment //= 2
        return segment

    def pad(self, windows: Collection[int | None], rows: int, *, every_kernel: bool) -> None:
        """See `AttentionBackend.pad`: grids that seldom depend on more than the number of rows.

        Splitting makes about as many items as keep the machine busy; besides, there is one for each request,
        or for each tile of its chunk. Programs without an item return at once.
        """
        split = split_items(self._settings)
        has_long = every_kernel or any(len(self.work(window).long_items) for window in windows)
        tiles = rows // self._settings.short_tile
        self._min_grids = (split + rows, split + tiles if has_long else 0, rows)

    def grids(self, window: int | None) -> tuple[int, int, int]:
        """Programs (per KV head or head tile) of the short items, the long items and the merge."""
        work = self.work(window)
        short, long, merge = (
            least if count <= least else bucket(count)
            for count, least in zip(
                (len(work.short_items), len(work.long_items), len(work.merge_tokens)),
                self._min_grids,
                strict=True,
            )
        )
        return short, long, merge

    def _pack(self, work: PlacedWork, units: int, last: np.ndarray) -> np.ndarray:
        """Return the blob; `units` is the length of a segment in the units of the kernels."""
        parts = {
            AT_SHORT: in_units(work.short_items, units),
            AT_LONG: in_units(work.long_items, units),
            AT_MERGE: work.merge_tokens,
            AT_TOKENS: work.tokens,
            AT_POSITIONS: self.token_positions,
            AT_STARTS: work.merge_starts,
            AT_SLOTS: work.slots,
            AT_TABLES: self.tables,
            AT_LAST: last,
        }
        header = np.zeros(HEADER, dtype=np.int32)
        header[NUM_SHORT], header[NUM_LONG] = len(work.short_items), len(work.long_items)
        header[NUM_MERGE] = len(work.merge_tokens)
        at = HEADER
        for place, part in parts.items():
            header[place] = at
            at += part.size
        return np.concatenate([header, *(part.reshape(-1) for part in parts.values())])
