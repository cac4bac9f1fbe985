# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of elementwise recurrences: selective scans (Mamba) and the linear recurrent unit.

    scan   s[c, n] = 2^(dt[c] A[c, n]) s[c, n] + dt[c] x[c] b[n]        out[c] = sum over n of c[n] s[c, n]
    lru    s[c] = a[c] s[c] + x[c]                                       out[c] = s[c]

A program carries a block of channels of one request from its base through its ring to its last row. The
states at the ends of rings, which the CPU's kernels keep, are left alone. A comes times log2(e).
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.states import GRID, LayerStates
from radixkv_kernels.triton.state.tables import StepTables

SCAN_BLOCK, LRU_BLOCK = 32, 128
#: Tokens whose inputs are being loaded at a time.
_STAGES = tl.constexpr(3)
_GRID = tl.constexpr(GRID)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _advance(s, rate, x, dt, b):
    """The states [BLOCK, N] after one more token."""
    return s * tl.exp2(dt[:, None] * rate) + (dt * x)[:, None] * b


@triton.jit
def scan_kernel(
    header_ptr, requests_ptr, folds_ptr, x_ptr, dt_ptr, b_ptr, c_ptr, rate_ptr, out_ptr, slots_ptr,
    ring_x_ptr,
    ring_dt_ptr, ring_b_ptr, x_stride, dt_stride, b_stride, c_stride, C: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK channels, requests)."""
    if tl.program_id(1) >= tl.load(header_ptr):
        return
    request = requests_ptr + tl.program_id(1) * 8
    first, ring = tl.load(request).to(tl.int64), tl.load(request + 2).to(tl.int64)
    at, base = tl.load(request + 3), tl.load(request + 4).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, NP)
    is_channel = channel < C
    inside = is_channel[:, None] & (n < N)[None, :]
    own = channel[:, None] * N + n[None, :]
    shared = (channel // (C // G))[:, None] * N + n[None, :]
    rate = tl.load(rate_ptr + own, mask=inside, other=0.0).to(tl.float32) * _LOG2E
    s = tl.load(slots_ptr + base * (C * N) + own, mask=inside, other=0.0)
    for i in tl.range(at, num_stages=_STAGES):
        place = ring * _GRID + i
        x = tl.load(ring_x_ptr + place * C + channel, mask=is_channel, other=0.0)
        dt = tl.load(ring_dt_ptr + place * C + channel, mask=is_channel, other=0.0)
        b = tl.load(ring_b_ptr + place * (G * N) + shared, mask=inside, other=0.0)
        s = _advance(s, rate, x, dt, b)
    for fold in range(tl.load(request + 5), tl.load(request + 6)):
        end, slot = tl.load(folds_ptr + fold * 4), tl.load(folds_ptr + fold * 4 + 1).to(tl.int64)
        # Triton 3.6 takes a bound that an outer loop carries for the bound's first value.
        begin = tl.load(folds_ptr + fold * 4 + 3)
        for i in tl.range(begin, end, num_stages=_STAGES):
            row = first + i
            x = tl.load(x_ptr + row * x_stride + channel, mask=is_channel, other=0.0).to(tl.float32)
            dt = tl.load(dt_ptr + row * dt_stride + channel, mask=is_channel, other=0.0).to(tl.float32)
            b = tl.load(b_ptr + row * b_stride + shared, mask=inside, other=0.0).to(tl.float32)
            c = tl.load(c_ptr + row * c_stride + shared, mask=inside, other=0.0).to(tl.float32)
            s = _advance(s, rate, x, dt, b)
            tl.store(out_ptr + row * C + channel, tl.sum(s * c, 1), mask=is_channel)
        if slot >= 0:
            tl.store(slots_ptr + slot * (C * N) + own, s, mask=inside)


@triton.jit
def lru_kernel(
    header_ptr, requests_ptr, folds_ptr, a_ptr, x_ptr, out_ptr, slots_ptr, ring_a_ptr, ring_x_ptr,
    a_stride, x_stride,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK channels, requests)."""
    if tl.program_id(1) >= tl.load(header_ptr):
        return
    request = requests_ptr + tl.program_id(1) * 8
    first, ring = tl.load(request).to(tl.int64), tl.load(request + 2).to(tl.int64)
    at, base = tl.load(request + 3), tl.load(request + 4).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    s = tl.load(slots_ptr + base * C + channel, mask=inside, other=0.0)
    for i in tl.range(at, num_stages=_STAGES):
        place = (ring * _GRID + i) * C + channel
        a = tl.load(ring_a_ptr + place, mask=inside, other=0.0)
        s = a * s + tl.load(ring_x_ptr + place, mask=inside, other=0.0)
    for fold in range(tl.load(request + 5), tl.load(request + 6)):
        end, slot = tl.load(folds_ptr + fold * 4), tl.load(folds_ptr + fold * 4 + 1).to(tl.int64)
        # Triton 3.6 takes a bound that an outer loop carries for the bound's first value.
        begin = tl.load(folds_ptr + fold * 4 + 3)
        for i in tl.range(begin, end, num_stages=_STAGES):
            row = first + i
            a = tl.load(a_ptr + row * a_stride + channel, mask=inside, other=0.0).to(tl.float32)
            s = a * s + tl.load(x_ptr + row * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_ptr + row * C + channel, s, mask=inside)
        if slot >= 0:
            tl.store(slots_ptr + slot * C + channel, s, mask=inside)


def scan_rows(
    memory: LayerStates,
    tables: StepTables,
    inputs: tuple[torch.Tensor, ...],
    rate: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute rows of `scan` into `out`, float32 [T, C], and keep states; the rings are left as they are."""
    channels, groups, size = memory.shape.sizes
    out.zero_()
    scan_kernel[(triton.cdiv(channels, SCAN_BLOCK), tables.grids["walks"])](
        tables.header,
        tables.walks,
        tables.folds,
        *inputs,
        rate,
        out,
        memory.slots,
        *memory.rings[:3],
        *(each.stride(0) for each in inputs),
        C=channels,
        G=groups,
        N=size,
        NP=triton.next_power_of_2(size),
        BLOCK=SCAN_BLOCK,
        num_warps=1,
        enable_fp_fusion=False,
    )


def lru_rows(
    memory: LayerStates, tables: StepTables, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> None:
    """Compute rows of `lru` into `out`, float32 [T, C], and keep states; the rings are left as they are."""
    (channels,) = memory.shape.sizes
    out.zero_()
    lru_kernel[(triton.cdiv(channels, LRU_BLOCK), tables.grids["walks"])](
        tables.header,
        tables.walks,
        tables.folds,
        *inputs,
        out,
        memory.slots,
        *memory.rings[:2],
        *(each.stride(0) for each in inputs),
        C=channels,
        BLOCK=LRU_BLOCK,
        num_warps=1,
        enable_fp_fusion=False,
    )
