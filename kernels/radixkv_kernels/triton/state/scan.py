# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of elementwise recurrences: selective scans (Mamba) and the linear recurrent unit.

    scan   s[c, n] = 2^(dt[c] A[c, n]) s[c, n] + dt[c] x[c] b[n]        out[c] = sum over n of c[n] s[c, n]
    lru    s[c] = a[c] s[c] + x[c]                                       out[c] = s[c]

Rows come in chunks of the grid, or, a few rows of a request outside deterministic mode, after its ring. All
chunks at once are walked twice, token after token, with a pass from chunk to chunk between them::

    totals   of a full chunk: the product of its factors, and its state from zero
    states   s' = product s + state from zero, chunk after chunk; states that are kept
    rows     from the state before a chunk, or a base, through the ring to each row

A state at a grid point is always made by the first two, in decode by a full ring; a row's sums begin at the
grid point before it. So pieces, hits and decodes have the bits of the whole. The states at the ends of rings,
which the CPU's kernels keep, are left alone. A comes times log2(e).
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from radixkv_kernels.states import GRID, LayerStates
from radixkv_kernels.triton.state.tables import StepTables

SCAN_BLOCK, LRU_BLOCK = 32, 128
#: Numbers of a state that a program carries from chunk to chunk.
STATE_BLOCK = 128
#: Tokens, or chunks, whose inputs are being loaded at a time.
_STAGES = tl.constexpr(3)
_GRID = tl.constexpr(GRID)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _token(x_ptr, dt_ptr, b_ptr, rate, channel, shared, is_channel, inside, LRU: tl.constexpr):
    """What a token multiplies the states [BLOCK, N] by, and what it adds; pointers are to its row.

    LRU: `x_ptr` has the factors, `dt_ptr` what is added.
    """
    x = tl.load(x_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    if LRU:
        factor, added = x[:, None], dt[:, None]
    else:
        b = tl.load(b_ptr + shared, mask=inside, other=0.0).to(tl.float32)
        factor, added = tl.exp2(dt[:, None] * rate), (dt * x)[:, None] * b
    return factor, added


@triton.jit
def totals_kernel(
    header_ptr, chunks_ptr, x_ptr, dt_ptr, b_ptr, rate_ptr, ring_x_ptr, ring_dt_ptr, ring_b_ptr, factors_ptr,
    sums_ptr, x_stride, dt_stride, b_stride, C: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    NP: tl.constexpr, BLOCK: tl.constexpr, LRU: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK channels, chunks); nothing of chunks that are not full."""
    chunk = tl.program_id(1)
    if chunk >= tl.load(header_ptr + 5):
        return
    table = chunks_ptr + chunk * 8
    first, begin, end = tl.load(table).to(tl.int64), tl.load(table + 1), tl.load(table + 2)
    if end < _GRID:
        return
    ring = tl.load(table + 3).to(tl.int64) * _GRID
    channel, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, NP)
    is_channel = channel < C
    inside = is_channel[:, None] & (n < N)[None, :]
    own = channel[:, None] * N + n[None, :]
    shared = (channel // (C // G))[:, None] * N + n[None, :]
    rate = tl.load(rate_ptr + own, mask=inside, other=0.0).to(tl.float32) * _LOG2E
    product, s = tl.full([BLOCK, NP], 1.0, tl.float32), tl.zeros([BLOCK, NP], tl.float32)
    for i in tl.range(begin, num_stages=_STAGES):
        factor, added = _token(
            ring_x_ptr + (ring + i) * C, ring_dt_ptr + (ring + i) * C, ring_b_ptr + (ring + i) * (G * N),
            rate, channel, shared, is_channel, inside, LRU,
        )  # fmt: skip
        product, s = product * factor, s * factor + added
    for i in tl.range(begin, end, num_stages=_STAGES):
        row = first + i - begin
        factor, added = _token(
            x_ptr + row * x_stride, dt_ptr + row * dt_stride, b_ptr + row * b_stride, rate, channel, shared,
            is_channel, inside, LRU,
        )  # fmt: skip
        product, s = product * factor, s * factor + added
    place = chunk.to(tl.int64) * (C * N) + own
    tl.store(factors_ptr + place, product, mask=inside)
    tl.store(sums_ptr + place, s, mask=inside)


@triton.jit
def states_kernel(
    header_ptr, requests_ptr, chunks_ptr, copies_ptr, factors_ptr, sums_ptr, slots_ptr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK of a state's SIZE numbers, requests). The state before a chunk takes the place of
    the product of its factors."""
    if tl.program_id(1) >= tl.load(header_ptr + 4):
        return
    request = requests_ptr + tl.program_id(1) * 8
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = own < SIZE
    s = tl.load(slots_ptr + tl.load(request + 2).to(tl.int64) * SIZE + own, mask=inside, other=0.0)
    for chunk in range(tl.load(request), tl.load(request + 1)):
        place = tl.cast(chunk, tl.int64) * SIZE + own
        end, slot = tl.load(chunks_ptr + chunk * 8 + 2), tl.load(chunks_ptr + chunk * 8 + 4)
        is_full = own < tl.where(end == _GRID, SIZE, 0)
        factor = tl.load(factors_ptr + place, mask=is_full, other=1.0)
        added = tl.load(sums_ptr + place, mask=is_full, other=0.0)
        tl.store(factors_ptr + place, s, mask=inside)
        s = s * factor + added
        target = slots_ptr + tl.maximum(slot, 0).to(tl.int64) * SIZE + own
        tl.store(target, s, mask=own < tl.where(slot >= 0, SIZE, 0))
    tl.debug_barrier()
    for copy in range(tl.load(request + 4), tl.load(request + 5)):
        source, slot = tl.load(copies_ptr + copy * 2), tl.load(copies_ptr + copy * 2 + 1)
        s = tl.load(slots_ptr + source.to(tl.int64) * SIZE + own, mask=inside)
        tl.store(slots_ptr + slot.to(tl.int64) * SIZE + own, s, mask=inside)


@triton.jit
def rows_kernel(
    header_ptr, chunks_ptr, shorts_ptr, x_ptr, dt_ptr, b_ptr, c_ptr, rate_ptr, before_ptr, slots_ptr,
    ring_x_ptr, ring_dt_ptr, ring_b_ptr, out_ptr, x_stride, dt_stride, b_stride, c_stride, num_chunks,
    C: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BLOCK: tl.constexpr,
    LRU: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK channels, num_chunks and requests with a few rows), or more of both."""
    channel, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, NP)
    is_channel = channel < C
    inside = is_channel[:, None] & (n < N)[None, :]
    own = channel[:, None] * N + n[None, :]
    shared = (channel // (C // G))[:, None] * N + n[None, :]
    index = tl.program_id(1)
    if index < num_chunks:
        if index >= tl.load(header_ptr + 5):
            return
        table = chunks_ptr + index * 8
        begin, end = tl.load(table + 1), tl.load(table + 2)
        ring = tl.load(table + 3).to(tl.int64) * _GRID
        s_ptr = before_ptr + index.to(tl.int64) * (C * N)
    else:
        if index - num_chunks >= tl.load(header_ptr + 7):
            return
        table = shorts_ptr + (index - num_chunks) * 8
        begin, end = tl.load(table + 3), tl.load(table + 5)
        ring = tl.load(table + 2).to(tl.int64) * _GRID
        s_ptr = slots_ptr + tl.load(table + 4).to(tl.int64) * (C * N)
    if begin >= end:
        return
    first = tl.load(table).to(tl.int64)
    rate = tl.load(rate_ptr + own, mask=inside, other=0.0).to(tl.float32) * _LOG2E
    s = tl.load(s_ptr + own, mask=inside, other=0.0)
    for i in tl.range(begin, num_stages=_STAGES):
        factor, added = _token(
            ring_x_ptr + (ring + i) * C, ring_dt_ptr + (ring + i) * C, ring_b_ptr + (ring + i) * (G * N),
            rate, channel, shared, is_channel, inside, LRU,
        )  # fmt: skip
        s = s * factor + added
    for i in tl.range(begin, end, num_stages=_STAGES):
        row = first + i - begin
        factor, added = _token(
            x_ptr + row * x_stride, dt_ptr + row * dt_stride, b_ptr + row * b_stride, rate, channel, shared,
            is_channel, inside, LRU,
        )  # fmt: skip
        s = s * factor + added
        out = s
        if not LRU:
            out *= tl.load(c_ptr + row * c_stride + shared, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * C + channel, tl.sum(out, 1), mask=is_channel)


def scan_rows(
    memory: LayerStates,
    tables: StepTables,
    inputs: tuple[torch.Tensor, ...],
    rate: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Compute rows into `out`, float32 [T, C], and keep states; the rings are left as they are.

    Args:
        inputs, rate: of `scan`; of `lru`, where there is no rate.
    """
    sizes = scan_sizes(memory.shape.sizes)
    channels, states = sizes["C"], sizes["N"]
    is_lru = rate is None
    x, dt = inputs[:2]
    b, c = (x, x) if is_lru else inputs[2:]
    rings = memory.rings[0], memory.rings[1], memory.rings[0 if is_lru else 2]
    rates = memory.slots if rate is None else rate  # the unit's is not used
    blocks, num_chunks, num_shorts = (
        triton.cdiv(channels, sizes["BLOCK"]),
        tables.grids["chunks"],
        tables.grids["shorts"],
    )
    settings: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
    factors = torch.empty(2, num_chunks, channels * states, dtype=torch.float32, device=out.device)
    out.zero_()
    if num_chunks:
        totals_kernel[(blocks, num_chunks)](
            tables.header, tables.chunks, x, dt, b, rates, *rings, factors[0], factors[1], x.stride(0),
            dt.stride(0), b.stride(0), **sizes, **settings,
        )  # fmt: skip
        states_kernel[(triton.cdiv(channels * states, STATE_BLOCK), tables.grids["requests"])](
            tables.header, tables.requests, tables.chunks, tables.copies, factors[0], factors[1],
            memory.slots, SIZE=channels * states, BLOCK=STATE_BLOCK, **settings,
        )  # fmt: skip
    rows_kernel[(blocks, num_chunks + num_shorts)](
        tables.header, tables.chunks, tables.shorts, x, dt, b, c, rates, factors, memory.slots, *rings, out,
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), num_chunks, **sizes, **settings,
    )  # fmt: skip


def scan_sizes(sizes: tuple[int, ...]) -> dict[str, int]:
    """Constants of the kernels, of a shape of `radixkv_kernels.states`: a scan's, or a recurrent unit's."""
    is_lru = len(sizes) == 1
    channels, groups, states = (sizes[0], 1, 1) if is_lru else sizes
    padded, block = triton.next_power_of_2(states), LRU_BLOCK if is_lru else SCAN_BLOCK
    return {"C": channels, "G": groups, "N": states, "NP": padded, "BLOCK": block, "LRU": is_lru}
