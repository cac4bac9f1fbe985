# SPDX-License-Identifier: Apache-2.0
"""Folding the partials of segments, in registers or, by the merge kernel, from memory: the same arithmetic.

The fold uses explicit fused multiply-adds, so that it rounds alike wherever it is compiled into.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def fold(total_out, total_max, total_sum, out, top, sums):
    """Fold a segment's partial into running totals; rows are the first dimension."""
    new = tl.maximum(total_max, top)
    # A row that has seen nothing yet stays at -inf, 0, 0.
    safe = tl.where(new == float("-inf"), 0.0, new)
    keep = tl.exp2(total_max - safe)
    add = tl.exp2(top - safe)
    total_sum = tl.fma(sums, add, total_sum * keep)
    add_rows = tl.broadcast_to(add[:, None], out.shape)
    total_out = tl.fma(out, add_rows, total_out * keep[:, None])
    return total_out, new, total_sum


@triton.jit
def finish(total_out, total_max, total_sum, sink, SINKS: tl.constexpr):
    """Output rows, with the sink's logit in the denominator."""
    if SINKS:
        logit = sink * LOG2E
        new = tl.maximum(total_max, logit)
        keep = tl.exp2(total_max - new)
        total_sum = tl.fma(total_sum, keep, tl.exp2(logit - new))
        total_out = total_out * keep[:, None]
    # Padding rows of a tile saw nothing: their 0 / 0 would not be stored, but trips checks for NaN.
    total_sum = tl.where(total_sum == 0.0, 1.0, total_sum)
    return total_out / total_sum[:, None]


@triton.jit
def merge_kernel(
    out_ptr, partial_out_ptr, partial_stat_ptr, blob_ptr, sinks_ptr,
    HQ: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BH: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (token bucket, ceil(HQ / BH)): fold the partials of BH heads of one token."""
    index = tl.program_id(0)
    if index >= tl.load(blob_ptr + 2):
        return
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    valid = head < HQ
    w = tl.arange(0, VP)
    inside = valid[:, None] & (w < V)[None, :]
    token = tl.load(blob_ptr + tl.load(blob_ptr + 5) + index)
    ends = blob_ptr + tl.load(blob_ptr + 8) + index
    slots = blob_ptr + tl.load(blob_ptr + 9)
    total_out = tl.zeros((BH, VP), tl.float32)
    total_max = tl.full((BH,), float("-inf"), tl.float32)
    total_sum = tl.zeros((BH,), tl.float32)
    for i in range(tl.load(ends), tl.load(ends + 1)):
        slot = tl.load(slots + i).to(tl.int64) * HQ + head
        out = tl.load(partial_out_ptr + slot[:, None] * V + w[None, :], mask=inside, other=0.0)
        top = tl.load(partial_stat_ptr + slot * 2, mask=valid, other=0.0)
        sums = tl.load(partial_stat_ptr + slot * 2 + 1, mask=valid, other=1.0)
        total_out, total_max, total_sum = fold(total_out, total_max, total_sum, out, top, sums)
    sink = tl.zeros((BH,), tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=valid, other=0.0)
    result = finish(total_out, total_max, total_sum, sink, SINKS)
    out_at = (token.to(tl.int64) * HQ + head) * V
    tl.store(out_ptr + out_at[:, None] + w[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)
