"""The GPU backend: plans packed into one device buffer, and checked launches of the Triton kernels.

Also runs on CPU tensors under Triton's interpreter (TRITON_INTERPRET=1 before triton is imported): the
tests do.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import numpy as np
import torch
import triton

from radixkv_kernels.interface import AttentionBackend, AttentionPlan, BackendConfig, BlockTables, Scoring
from radixkv_kernels.kv_cache import QUANTIZED_MAX, PagedKV, _bytes
from radixkv_kernels.triton import unified_attention as ua
from radixkv_kernels.triton.kv_write import copy_kernel, write_kernel
from radixkv_kernels.triton.tiles import CDNA, SEGMENT, Tile, bucket, choose_tile, launch_tile
from radixkv_kernels.work_plan import ITEM_WIDTH, WorkPlan, WorkSettings, build_work

_COPY_CHUNK = 1024


@functools.cache
def _programs(device: torch.device) -> int:
    """Items that fill the machine about twice: later ones even out earlier ones."""
    if device.type != "cuda":
        return 16
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _capability(device: torch.device) -> int:
    """Compute capability x 10; Hopper's for the interpreter, `CDNA` for AMD."""
    if device.type != "cuda":
        return 90
    if torch.version.hip is not None:
        return CDNA
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def work_settings(config: BackendConfig, short: Tile, long: Tile, growth: int) -> WorkSettings:
    """How the GPU cuts work.

    The cost model counts bytes per KV head. Attending a segment for m requests together saves m - 1
    readings of its keys and values; each token pays one partial written and read back (float32 rows and two
    numbers). What is saved in total must outweigh the extra launch and the waiting it adds (about 5 us of
    memory traffic).
    """
    spec = config.spec
    group = config.group_size
    element = spec.storage_dtype.itemsize
    return WorkSettings(
        segment=SEGMENT,
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        short_tile=short.rows // group,
        long_tile=long.rows // group,
        group_tile=long.rows // group,
        parallel=_programs(spec.device),
        share=config.share_prefixes,
        load_cost=2.0 * SEGMENT * spec.head_size * element,
        partial_cost=2.0 * group * (spec.head_size + 2) * 4,
        min_saving=0.0 if spec.device.type != "cuda" else 16e6 / spec.num_kv_heads,
        growth=growth,
    )


class TritonPlan(AttentionPlan):
    """One step's work. Packed per window, on first use, into the backend's device buffer for that window."""

    def __init__(
        self,
        config: BackendConfig,
        settings: WorkSettings,
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        tables: BlockTables,
    ) -> None:
        super().__init__(config, query_starts, context_lengths, tables)
        self._settings = settings
        if settings.growth:
            self._make_room(settings.growth * settings.segment // settings.block_size)
        self.token_positions = self.positions()
        segments = -(-self.context_lengths // settings.segment) + settings.growth
        #: Per request, the longest context the plan can be advanced to.
        self.longest = segments * settings.segment if settings.growth else self.context_lengths
        self._packed: dict[int | None, tuple[WorkPlan, np.ndarray]] = {}
        self.work(None)

    def work(self, window: int | None) -> WorkPlan:
        """The work items for one window."""
        return self.packed(window)[0]

    def packed(self, window: int | None) -> tuple[WorkPlan, np.ndarray]:
        """The work items for one window, and the blob that holds them: header, lists, positions, tables."""
        found = self._packed.get(window)
        if found is None:
            work = build_work(
                self._settings,
                self.query_starts,
                self.context_lengths,
                self.tables,
                self.table_starts,
                window,
            )
            found = self._packed[window] = (work, self._pack(work))
        return found

    def grids(self, window: int | None) -> tuple[int, int, int]:
        """Programs (per KV head or head tile) of the short items, the long items and the merge."""
        work = self.packed(window)[0]
        return bucket(len(work.short_items)), bucket(len(work.long_items)), bucket(len(work.merge_tokens))

    def _make_room(self, spare: int) -> None:
        """Lay the tables out again with room for `spare` more blocks per request."""
        tables = self.block_tables
        width = max(map(len, tables), default=0) + spare
        padded = np.zeros((len(tables), width), dtype=np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        self.tables, self.table_starts = padded.reshape(-1), np.arange(len(tables)) * width

    def advance(self, context_lengths: np.ndarray, block_tables: BlockTables | None) -> None:
        """Move the host's copy of the plan on by one position; see `TritonBackend.advance`."""
        self.context_lengths = context_lengths
        self.token_positions = self.token_positions + 1
        if block_tables is not None:
            ends = np.append(self.table_starts[1:], len(self.tables))
            for start, end, table in zip(self.table_starts, ends, block_tables, strict=True):
                n = min(len(table), end - start)
                self.tables[start : start + n] = table[:n]
        for _, packed in self._packed.values():
            packed[packed[ua.AT_POSITIONS] : packed[ua.AT_BASE]] += 1
            packed[packed[ua.AT_TABLES] :] = self.tables

    def _pack(self, work: WorkPlan) -> np.ndarray:
        parts = {
            ua.AT_SHORT: work.short_items,
            ua.AT_LONG: work.long_items,
            ua.AT_MERGE: work.merge_tokens,
            ua.AT_TOKENS: work.tokens,
            ua.AT_POSITIONS: self.token_positions,
            ua.AT_BASE: work.partial_base,
            ua.AT_TABLES: self.tables,
        }
        header = np.zeros(ua.HEADER, dtype=np.int32)
        header[ua.NUM_SHORT], header[ua.NUM_LONG] = len(work.short_items), len(work.long_items)
        header[ua.NUM_MERGE] = len(work.merge_tokens)
        at = ua.HEADER
        for place, part in parts.items():
            header[place] = at
            at += part.size
        return np.concatenate([header, *(part.reshape(-1) for part in parts.values())])


class _Buffers:
    """Device memory for the plans of one window: fixed addresses, so that CUDA graphs may hold them."""

    def __init__(self, config: BackendConfig, settings: WorkSettings) -> None:
        spec = config.spec
        segments = -(-config.max_model_len // settings.segment) + settings.growth
        blocks = segments * settings.segment // settings.block_size
        pairs = config.max_num_seqs * segments
        tiles = config.max_num_tokens // settings.long_tile + config.max_num_seqs
        size = (
            ua.HEADER
            + ITEM_WIDTH * (2 * pairs + tiles * segments)
            + config.max_num_tokens * 4
            + pairs * settings.short_tile
            + config.max_num_seqs * blocks
        )
        pinned = spec.device.type == "cuda"
        self.blob = torch.zeros(size, dtype=torch.int32, device=spec.device)
        self.staging = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self.host = self.staging.numpy()
        self.copied = torch.cuda.Event() if pinned else None
        self.plan: TritonPlan | None = None
        #: Times that `reserve` moved the partials: launches recorded before must not be replayed.
        self.generation = 0
        self.partial_out = torch.empty(0, dtype=torch.float32, device=spec.device)
        self.partial_stat = torch.empty(0, dtype=torch.float32, device=spec.device)

    def load(self, plan: TritonPlan, packed: np.ndarray) -> None:
        """Copy a plan to the device, unless it is there."""
        if self.plan is plan:
            return
        if len(packed) > len(self.host):
            raise ValueError(f"the plan needs {len(packed)} words, more than the {len(self.host)} allotted")
        if self.copied is not None:
            # The last copy may still be reading the staging memory.
            self.copied.synchronize()
        self.host[: len(packed)] = packed
        self.blob[: len(packed)].copy_(self.staging[: len(packed)], non_blocking=True)
        if self.copied is not None:
            self.copied.record()
        self.plan = plan

    def reserve(self, slots: int, num_heads: int, head_size: int) -> None:
        """Room for partials; grows by doubling. A captured graph must have seen the largest."""
        rows = slots * num_heads
        if self.partial_stat.numel() < rows * 2:
            rows = max(rows, self.partial_stat.numel())
            self.generation += 1
            device = self.blob.device
            self.partial_out = torch.empty(rows * head_size, dtype=torch.float32, device=device)
            self.partial_stat = torch.empty(rows * 2, dtype=torch.float32, device=device)


class TritonBackend(AttentionBackend):
    """See the module and `AttentionBackend`.

    Args:
        growth: segments by which decodes may outgrow a plan before it must be made anew (`advance`).
    """

    def __init__(self, config: BackendConfig, growth: int = 0) -> None:
        super().__init__(config)
        spec = config.spec
        element = config.compute_dtype.itemsize
        self._capability = _capability(spec.device)
        self.long_tile = choose_tile(spec.head_size, config.group_size, "long", element, self._capability)
        self.short_tile = self.long_tile
        if not config.deterministic:
            self.short_tile = choose_tile(
                spec.head_size, config.group_size, "short", element, self._capability
            )
        if SEGMENT % spec.block_size:
            raise ValueError(f"block_size {spec.block_size} does not divide the segment of {SEGMENT}")
        self.settings = work_settings(config, self.short_tile, self.long_tile, growth)
        self._buffers: dict[int | None, _Buffers] = {}
        self._none = torch.zeros(1, dtype=torch.float32, device=spec.device)

    def plan(
        self, query_starts: np.ndarray, context_lengths: np.ndarray, block_tables: BlockTables
    ) -> TritonPlan:
        return TritonPlan(self.config, self.settings, query_starts, context_lengths, block_tables)

    def advance(self, plan: TritonPlan, block_tables: BlockTables | None = None) -> None:
        """Move every query of a plan of decodes one position on, on the device, without planning again.

        Args:
            plan: one query token per request, made by a backend with `growth`; contexts may not outgrow it.
            block_tables: the tables, where blocks were added since.

        Raises:
            ValueError: the plan cannot be advanced.
        """
        if (plan.query_lengths != 1).any():
            raise ValueError("only a plan of decodes can be advanced")
        lengths = plan.context_lengths + 1
        if (lengths > plan.longest).any():
            raise ValueError("the contexts outgrow this plan: make a new one")
        plan.advance(lengths, block_tables)
        for window, buffers in self._buffers.items():
            if buffers.plan is not plan:
                continue
            packed = plan.packed(window)[1]
            buffers.blob[packed[ua.AT_POSITIONS] : packed[ua.AT_BASE]] += 1
            if block_tables is not None:
                start = int(packed[ua.AT_TABLES])
                buffers.blob[start : len(packed)].copy_(torch.from_numpy(packed[start:]))

    def write(
        self,
        kv: PagedKV,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        entries = slots.numel()
        if entries == 0:
            return
        key = key if key.stride(2) == 1 else key.contiguous()
        value = value if value.stride(2) == 1 else value.contiguous()
        spec = self.config.spec
        key_scale = self._none if kv.key_scale is None else kv.key_scale[layer]
        value_scale = self._none if kv.value_scale is None else kv.value_scale[layer]
        quantization = spec.quantization
        write_kernel[(entries,)](
            key,
            value,
            kv.key[layer],
            kv.value[layer],
            key_scale,
            value_scale,
            slots,
            slots if rows is None else rows,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            spec.num_blocks * spec.block_size,
            1.0 if quantization is None else QUANTIZED_MAX[quantization],
            HKV=spec.num_kv_heads,
            HP=triton.next_power_of_2(spec.num_kv_heads),
            D=spec.head_size,
            DP=triton.next_power_of_2(spec.head_size),
            KIND=0 if quantization is None else 1 if quantization == "int8" else 2,
            HAS_ROWS=rows is not None,
        )

    def stage(self, plan: AttentionPlan, windows: Collection[int | None]) -> None:
        assert isinstance(plan, TritonPlan)
        for window in windows:
            self._staged(plan, window)

    def launch_key(self, plan: AttentionPlan, windows: Collection[int | None]) -> Hashable:
        assert isinstance(plan, TritonPlan)
        order = sorted(windows, key=lambda w: -1 if w is None else w)
        return tuple((w, plan.grids(w), self._staged(plan, w).generation) for w in order)

    def _staged(self, plan: TritonPlan, window: int | None) -> _Buffers:
        """The device memory of a window's plans, with this one in it."""
        work, packed = plan.packed(window)
        buffers = self._buffers.get(window)
        if buffers is None:
            buffers = self._buffers[window] = _Buffers(self.config, self.settings)
        buffers.load(plan, packed)
        buffers.reserve(work.num_partials, self.config.num_query_heads, self.config.spec.head_size)
        return buffers

    def _attend(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        plan: AttentionPlan,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        assert isinstance(plan, TritonPlan)
        if not out.is_contiguous():
            raise ValueError("out must be contiguous")
        query = query if query.stride(2) == 1 else query.contiguous()
        buffers = self._staged(plan, scoring.window)
        sinks = self._none if scoring.sinks is None else scoring.sinks.to(torch.float32)
        shape = {
            "HQ": self.config.num_query_heads,
            "D": kv.spec.head_size,
            "DP": max(16, triton.next_power_of_2(kv.spec.head_size)),
            "SEGMENT": SEGMENT,
            "WINDOW": scoring.window is not None,
            "SINKS": scoring.sinks is not None,
        }
        short, long, merge = plan.grids(scoring.window)
        for planned, grid, is_long in ((self.long_tile, long, True), (self.short_tile, short, False)):
            if grid:
                self._launch(kv, layer, query, buffers, scoring, sinks, out, planned, grid, is_long, shape)
        if merge:
            heads = min(4, triton.next_power_of_2(self.config.num_query_heads))
            ua.merge_kernel[(merge, -(-self.config.num_query_heads // heads))](
                out,
                buffers.partial_out,
                buffers.partial_stat,
                buffers.blob,
                sinks,
                scoring.window or 0,
                BH=heads,
                num_warps=4,
                **shape,
            )

    def _launch(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        buffers: _Buffers,
        scoring: Scoring,
        sinks: torch.Tensor,
        out: torch.Tensor,
        planned: Tile,
        grid: int,
        is_long: bool,
        shape: dict[str, Any],
    ) -> None:
        """Run the attention kernel over the short or the long items of a plan."""
        spec, group = self.config.spec, self.config.group_size
        softcap, slopes = scoring.softcap, scoring.alibi_slopes
        featured = scoring.window is not None or softcap is not None or slopes is not None
        tile = launch_tile(
            planned,
            spec.head_size,
            self.config.compute_dtype.itemsize,
            self._capability,
            block_size=spec.block_size,
            featured=featured or spec.quantization is not None,
        )
        split = -(-(planned.rows // group) // (tile.rows // group))
        ua.attention_kernel[(grid * split, spec.num_kv_heads)](
            query,
            kv.key[layer],
            kv.value[layer],
            self._none if kv.key_scale is None else kv.key_scale[layer],
            self._none if kv.value_scale is None else kv.value_scale[layer],
            out,
            buffers.partial_out,
            buffers.partial_stat,
            buffers.blob,
            sinks,
            self._none if slopes is None else slopes.to(torch.float32),
            scoring.scale,
            0.0 if softcap is None else softcap,
            scoring.window or 0,
            query.stride(0),
            query.stride(1),
            spec.num_blocks * spec.block_size,
            HKV=spec.num_kv_heads,
            BM=tile.rows,
            SPLIT=split,
            BN=tile.keys,
            BLOCK=spec.block_size,
            LONG=is_long,
            SOFTCAP=softcap is not None,
            ALIBI=slopes is not None,
            QUANTIZED=spec.quantization is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **shape,
        )

    def copy_blocks(self, kv: PagedKV, copies: Sequence[tuple[int, int, int]]) -> None:
        if not copies:
            return
        sources, targets = {c[0] for c in copies}, {c[1] for c in copies}
        if sources & targets:
            # Some source is also a target: read all before writing any.
            for t in map(_bytes, kv.tensors()):
                read = [t[:, :, source, :count].clone() for source, _, count in copies]
                for (_, target, count), data in zip(copies, read, strict=True):
                    t[:, :, target, :count] = data
            return
        listed = torch.tensor(copies, dtype=torch.int32).to(kv.spec.device, non_blocking=True)
        spec = kv.spec
        for t in kv.tensors():
            slot = t.shape[4] if t.dim() == 5 else 1
            planes = spec.num_layers * spec.num_kv_heads
            chunks = triton.cdiv(spec.block_size * slot, _COPY_CHUNK)
            copy_kernel[(len(copies), planes, chunks)](
                _bytes(t),
                listed,
                spec.num_blocks * spec.block_size * slot,
                SLOT=slot,
                BLOCK=spec.block_size,
                CHUNK=_COPY_CHUNK,
            )
