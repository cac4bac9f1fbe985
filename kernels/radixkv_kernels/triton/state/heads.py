# SPDX-License-Identifier: Apache-2.0
"""Launches for heads whose state is a matrix: rows in chunks, decodes over their rings, folds, rings.

    folds and prompts    gather, scores (KDA only) -> local -> states -> outputs    `channels.py`, `chunks.py`
    decodes, guesses     one kernel, after the folds before them                    `ring.py`

A ring holds keys, what each row wrote (u) and decays, and for delta rules values and betas: from these a
full ring is folded as if its rows had come in one chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from radixkv_kernels.states import GRID, LayerStates, rounded
from radixkv_kernels.triton.state.channels import PART, gather_kernel, scores_kernel
from radixkv_kernels.triton.state.chunks import local_kernel, output_kernel, state_kernel
from radixkv_kernels.triton.state.ring import ring_kernel
from radixkv_kernels.triton.state.tables import StepTables
from radixkv_kernels.triton.tiles import capability_of, shared_memory_of

#: Columns of a state that a program has, at most, and its warps.
STATE_COLUMNS, STATE_WARPS = 32, 8
OUTPUT_COLUMNS = 64
#: Bytes of shared memory that a program may have on consumer GPUs.
CONSUMER_SHARED = 99 << 10
SCORES_WARPS = 8
#: Shared memory of its programs besides the chunks that are being loaded.
_STATE_SHARED = 32 << 10
#: Numbers of a state that a program of decodes has, at most.
RING_NUMBERS = 4096
#: A product of matrices has 16 rows and columns at least.
_LEAST = 16


class HeadSizes(NamedTuple):
    """Sizes of a layer as the kernels take them; see there."""

    heads: int
    groups: int
    key: int
    value: int
    delta: bool
    channels: bool

    @classmethod
    def of(cls, kind: str, sizes: tuple[int, ...]) -> HeadSizes:
        """Of a shape of `radixkv_kernels.states`."""
        groups, heads, key, value = (sizes[0], *sizes) if kind == "kda" else sizes
        return cls(heads, groups, key, value, kind != "ssd", kind == "kda")

    @property
    def padded(self) -> tuple[int, int]:
        """Sizes of keys and values in a chunk's tiles."""
        key, value = (max(_LEAST, triton.next_power_of_2(rounded(size))) for size in self[2:4])
        return key, value

    def constants(self, *names: str, columns: int = 0) -> dict[str, int | bool]:
        """The kernels' constants of these names; `columns`: the most for BV."""
        key, value = self.padded
        known: dict[str, int | bool] = {
            "H": self.heads,
            "G": self.groups,
            "K": self.key,
            "KR": rounded(self.key),
            "KP": key,
            "V": self.value,
            "VR": rounded(self.value),
            "VP": value,
            "BV": min(columns, value),
            "DELTA": self.delta,
            "CHANNELS": self.channels,
        }
        return {name: known[name] for name in names}

    def local(self) -> dict[str, int | bool]:
        """Constants of `local_kernel`."""
        return self.constants("H", "G", "K", "KR", "KP", "V", "VR", "VP", "DELTA", "CHANNELS")

    def state(self, capability: int, shared: int) -> dict[str, int | bool]:
        """Constants of `state_kernel` but for KEEP, on a GPU of this capability (times 10) whose programs may
        have so many bytes of shared memory: consumer GPUs have 99 KiB, half of Hopper's."""
        names = ("H", "G", "KR", "KP", "V", "VR", "VP", "BV", "DELTA", "CHANNELS")
        found = self.constants(*names, columns=STATE_COLUMNS)
        key, columns = self.padded[0], int(found["BV"])
        # A chunk's keys, both parts of w, sums of decays, and u.
        chunk = GRID * key * (2 + 4 * self.delta + 4 * self.channels) + GRID * columns * 4
        # Hopper's products read the chunk that they compute from shared memory, too.
        buffers = 2 if capability >= 90 else 1
        return found | {"STAGES": 2 if buffers * chunk + _STATE_SHARED <= shared else 1}

    def output(self, capability: int, shared: int) -> dict[str, int | bool]:
        """Constants of `output_kernel`; see `state`. Products that are not Hopper's have their operands in
        registers, which do not hold those of more columns; consumer GPUs have such products, whatever their
        capability is."""
        names = ("H", "G", "K", "KP", "V", "VP", "BV", "DELTA", "CHANNELS")
        has_wide_products = capability >= 90 and shared > CONSUMER_SHARED
        return self.constants(*names, columns=OUTPUT_COLUMNS if has_wide_products else OUTPUT_COLUMNS // 2)

    def ring(self) -> dict[str, int | bool]:
        """Constants of `ring_kernel`."""
        names = ("H", "G", "K", "KR", "KP", "V", "VR", "BV", "DELTA", "CHANNELS")
        return self.constants(*names, columns=max(_LEAST, RING_NUMBERS // self.padded[0]))

    @property
    def chunk_warps(self) -> int:
        """Warps of `local_kernel` and `output_kernel`."""
        return 8 if self.channels else 4

    @property
    def ring_warps(self) -> int:
        """Warps of `ring_kernel`: the ring's keys lie in their registers."""
        return 8 if self.channels or self.padded[0] > 128 else 4


class ChunkScratch(NamedTuple):
    """Buffers that the kernels of chunks hand on to one another; see `chunks.py`."""

    keys: torch.Tensor
    lengths: torch.Tensor
    scores: torch.Tensor
    query_scores: torch.Tensor
    w: torch.Tensor
    low: torch.Tensor
    u: torch.Tensor
    cumulated: torch.Tensor
    before: torch.Tensor

    @classmethod
    def of(cls, sizes: HeadSizes, num_chunks: int, inputs: tuple[torch.Tensor, ...]) -> ChunkScratch:
        """Take memory for chunks of a layer with these inputs."""
        key, value = sizes.padded
        rows, heads = num_chunks * GRID, sizes.heads
        device = inputs[0].device

        def take(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        score = rows * heads * GRID if sizes.channels else 0
        w = rows * heads * key if sizes.delta else 0
        return cls(
            keys=take(rows * sizes.groups * key, inputs[1].dtype),
            lengths=take(rows * sizes.groups),
            scores=take(score),
            query_scores=take(score),
            w=take(w, torch.bfloat16),
            low=take(w, torch.bfloat16),
            u=take(rows * heads * value, torch.float32 if sizes.delta else inputs[2].dtype),
            cumulated=take(rows * heads * (key if sizes.channels else 1)),
            before=take(num_chunks * heads * key * value),
        )


def head_rows(
    memory: LayerStates,
    tables: StepTables,
    inputs: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    *,
    clears_padding: bool = True,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Compute rows into `out`, float32 [T, heads, value size], keep states, and put u into the rings.

    Args:
        clears_padding: padding rows become zero; otherwise they may hold anything.

    Returns:
        The inputs that rings keep, and the parts of rings that they go to; see `keep_rows`.
    """
    sizes = HeadSizes.of(memory.shape.kind, memory.shape.sizes)
    rings = memory.rings
    if sizes.delta:
        assert len(rings) == 5, "rings without values: the spec was made without keeps_values"
    if tables.grids["chunks"]:
        _chunks(memory, tables, sizes, inputs, out)
    if tables.grids["shorts"] or (clears_padding and len(out) > tables.plan.num_rows):
        _shorts(memory, tables, sizes, inputs, out)
    kept = [(inputs[1], rings[0]), (inputs[3], rings[2])]
    return [*kept, (inputs[2], rings[3]), (inputs[4], rings[4])] if sizes.delta else kept


def _chunks(
    memory: LayerStates,
    tables: StepTables,
    sizes: HeadSizes,
    inputs: tuple[torch.Tensor, ...],
    out: torch.Tensor,
) -> None:
    q, k, v, decay = inputs[:4]
    beta = inputs[4] if sizes.delta else decay
    ring_k, ring_u, ring_decay = memory.rings[:3]
    ring_v, ring_beta = memory.rings[3:] if sizes.delta else (ring_u, ring_decay)
    heads, num_chunks = sizes.heads, tables.grids["chunks"]
    scratch = ChunkScratch.of(sizes, num_chunks, inputs)
    settings: dict[str, Any] = {"enable_fp_fusion": False}
    if sizes.channels:
        gather_kernel[(num_chunks, heads)](
            tables.header, tables.chunks, k, decay, ring_k, ring_decay, scratch.keys, scratch.lengths,
            scratch.cumulated,
            k.stride(0), decay.stride(0), **sizes.constants("H", "K", "KR", "KP"), num_warps=4,
            **settings,
        )  # fmt: skip
        scores_kernel[(GRID // PART, num_chunks, heads)](
            tables.header, tables.chunks, q, scratch.keys, scratch.lengths, scratch.cumulated,
            scratch.scores, scratch.query_scores, q.stride(0), **sizes.constants("H", "K", "KP"),
            num_warps=SCORES_WARPS,
            **settings,
        )  # fmt: skip
    local_kernel[(num_chunks, heads)](
        tables.header, tables.chunks, k, v, decay, beta, ring_k, ring_v, ring_decay, ring_beta, scratch.keys,
        scratch.lengths, scratch.scores, scratch.w, scratch.low, scratch.u, scratch.cumulated, k.stride(0),
        v.stride(0), decay.stride(0), beta.stride(0), **sizes.local(), num_warps=sizes.chunk_warps,
        **settings,
    )  # fmt: skip
    device = capability_of(out.device), shared_memory_of(out.device)
    constants = sizes.state(*device)
    grid = triton.cdiv(rounded(sizes.value), constants["BV"]), heads, tables.grids["requests"]
    state_kernel[grid](
        tables.header, tables.requests, tables.chunks, tables.copies, scratch.keys, scratch.lengths,
        scratch.w, scratch.low,
        scratch.u, scratch.cumulated, scratch.before, memory.slots, ring_u, **constants,
        KEEP=not (sizes.delta and tables.deterministic), num_warps=STATE_WARPS, **settings,
    )  # fmt: skip
    constants = sizes.output(*device)
    output_kernel[(triton.cdiv(sizes.value, constants["BV"]), num_chunks, heads)](
        tables.header, tables.chunks, q, scratch.keys, scratch.lengths, scratch.query_scores, scratch.u,
        scratch.cumulated,
        scratch.before, out, q.stride(0), sizes.key**-0.5, **constants, num_warps=sizes.chunk_warps,
        **settings,
    )  # fmt: skip


def _shorts(
    memory: LayerStates,
    tables: StepTables,
    sizes: HeadSizes,
    inputs: tuple[torch.Tensor, ...],
    out: torch.Tensor,
) -> None:
    beta = inputs[4] if sizes.delta else inputs[3]
    constants = sizes.ring()
    blocks = triton.cdiv(sizes.value, constants["BV"])
    # Recorded launches have a program for each row: for its request, or to clear a row of padding.
    padding = 0 if tables.grids["shorts"] == len(out) else len(out) - tables.plan.num_rows
    ring_kernel[(sizes.heads * blocks, tables.grids["shorts"] + padding)](
        tables.header, tables.shorts, *inputs[:4], beta, *memory.rings[:3], memory.slots, out,
        *(each.stride(0) for each in (*inputs[:4], beta)), sizes.key**-0.5,
        len(out), **constants, num_warps=sizes.ring_warps, enable_fp_fusion=False,
    )  # fmt: skip
