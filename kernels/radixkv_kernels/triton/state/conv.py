# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of short causal convolutions: a program for each row, and for each state that is kept.

    out[t] = activation(bias + weight[0] x[t - K + 1] + ... + weight[K - 1] x[t])

The state before a row is its last K - 1 inputs: of this step, of the ring, or of the base.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.states import GRID, LayerStates
from radixkv_kernels.triton.state.tables import StepTables

BLOCK, WARPS = 256, 2
_GRID = tl.constexpr(GRID)


@triton.jit
def _tap(x_ptr, slot_ptr, ring_ptr, stride, first, at, own, column, inside, C: tl.constexpr,
         TAPS: tl.constexpr):  # fmt: skip
    """The input of row `own` of a request, which may lie up to TAPS - 1 tokens before its first row."""
    place = at + own
    if own >= 0:
        x = tl.load(x_ptr + (first + own) * stride + column, mask=inside, other=0.0).to(tl.float32)
    elif place >= 0:
        x = tl.load(ring_ptr + place * C + column, mask=inside, other=0.0)
    else:
        x = tl.load(slot_ptr + (TAPS - 1 + place) * C + column, mask=inside, other=0.0)
    return x


@triton.jit(do_not_specialize=["num_rows"])
def conv_kernel(
    header_ptr, requests_ptr, saves_ptr, owners_ptr, x_ptr, weight_ptr, bias_ptr, out_ptr, slots_ptr,
    rings_ptr, stride,
    num_rows, C: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows + kept states, blocks of BLOCK channels), or more. Rows past the plan's become zero."""
    index = tl.program_id(0)
    save = saves_ptr + (index - num_rows) * 4
    if index < num_rows:
        if index >= tl.load(header_ptr + 3):
            padding = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            tl.store(
                out_ptr + index.to(tl.int64) * C + padding, tl.zeros([BLOCK], tl.float32), mask=padding < C
            )
            return
        owner = tl.load(owners_ptr + index)
    else:
        if index - num_rows >= tl.load(header_ptr + 2):
            return
        owner = tl.load(save + 2)
    request = requests_ptr + owner * 8
    first = tl.load(request).to(tl.int64)
    ring_ptr = rings_ptr + tl.load(request + 2).to(tl.int64) * (_GRID * C)
    at = tl.load(request + 3)
    slot_ptr = slots_ptr + tl.load(request + 4).to(tl.int64) * ((TAPS - 1) * C)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < C
    if index < num_rows:
        own = index - first.to(tl.int32)
        total = tl.zeros([BLOCK], tl.float32)
        if BIAS:
            total = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        for k in tl.static_range(TAPS):
            x = _tap(
                x_ptr, slot_ptr, ring_ptr, stride, first, at, own + k - TAPS + 1, column, inside, C, TAPS
            )
            total += x * tl.load(weight_ptr + k * C + column, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            e = tl.exp(-tl.abs(total))  # can't overflow
            total = tl.where(total >= 0, total, total * e) / (1.0 + e)
        tl.store(out_ptr + index.to(tl.int64) * C + column, total, mask=inside)
    else:
        own, slot = tl.load(save), tl.load(save + 1).to(tl.int64)
        target_ptr = slots_ptr + slot * ((TAPS - 1) * C) + column
        for k in tl.static_range(TAPS - 1):
            x = _tap(
                x_ptr, slot_ptr, ring_ptr, stride, first, at, own + k - TAPS + 1, column, inside, C, TAPS
            )
            tl.store(target_ptr + k * C, x, mask=inside)


def conv_rows(
    memory: LayerStates,
    tables: StepTables,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
) -> None:
    """Compute rows x [T, C] into `out`, float32 [T, C], and keep states; the rings are left as they are."""
    channels, taps = memory.shape.sizes
    rows = len(out)
    conv_kernel[(rows + tables.grids["saves"], triton.cdiv(channels, BLOCK))](
        tables.header,
        tables.walks,
        tables.saves,
        tables.owners,
        x,
        weight,
        weight if bias is None else bias,
        out,
        memory.slots,
        memory.rings[0],
        x.stride(0),
        rows,
        C=channels,
        TAPS=taps,
        BIAS=bias is not None,
        SILU=activation == "silu",
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
