# SPDX-License-Identifier: Apache-2.0
"""Folding the partials of segments, in registers or, by the merge kernel, from memory: the same arithmetic.

The fold uses explicit fused multiply-adds, so that it rounds alike wherever it is compiled into.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
#: Partials whose loads are all issued before the first of them is folded.
AT_ONCE = 16
#: Elements of a row for each thread; with more, the assembler puts off loads to spare registers.
_PER_THREAD = 2


def merge_constants(heads: int, padded: int, *, is_interpreted: bool = False) -> dict[str, int]:
    """Launch options of the merge of rows of `padded` elements. An interpreter, where operations take time
    and waiting does not, has many heads in a program and loads nothing ahead."""
    at_once, block = (1, heads & -heads) if is_interpreted else (AT_ONCE, 1)
    warps = max(1, padded // (32 * _PER_THREAD))
    return {"HQ": heads, "VP": padded, "BH": block, "AT_ONCE": at_once, "num_warps": warps}


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
    HQ: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BH: tl.constexpr, AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (token bucket, HQ / BH): fold the partials of BH heads of one token, in order.

    A decode alone has dozens, and each is some hundred nanoseconds away. So the places of AT_ONCE of them are
    loaded before the first partial, and these before the first fold. Partials that a last round lacks change
    no bit. EARLY: see `dependent_launch`; the plan is read meanwhile.
    """
    index = tl.program_id(0)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    count = tl.load(blob_ptr + 2)
    tokens = blob_ptr + tl.load(blob_ptr + 5)
    ends = blob_ptr + tl.load(blob_ptr + 8) + index
    slots = blob_ptr + tl.load(blob_ptr + 9)
    if index >= count:
        return
    begin, end = tl.load(ends), tl.load(ends + 1)
    token = tl.load(tokens + index).to(tl.int64)
    w = tl.arange(0, VP)
    zeros = tl.zeros((BH,), tl.int32)
    inside = (zeros == 0)[:, None] & (w < V)[None, :]
    total_out = tl.zeros((BH, VP), tl.float32)
    total_max = tl.full((BH,), float("-inf"), tl.float32)
    total_sum = tl.zeros((BH,), tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for first in range(begin, end, AT_ONCE):
        places = ()
        for j in tl.static_range(AT_ONCE):
            slot = tl.load(slots + first + j, mask=end > first + j, other=0)
            places += (slot.to(tl.int64) * HQ + head,)
        outs, tops, sums = (), (), ()
        for j in tl.static_range(AT_ONCE):
            exists = zeros + first + j < end
            stat_at = partial_stat_ptr + places[j] * 2
            tops += (tl.load(stat_at, mask=exists, other=float("-inf")),)
            sums += (tl.load(stat_at + 1, mask=exists, other=0.0),)
            at = partial_out_ptr + places[j][:, None] * V + w[None, :]
            # 0 times -0, added to a total, leaves its sign.
            outs += (tl.load(at, mask=inside & exists[:, None], other=-0.0),)
        for j in tl.static_range(AT_ONCE):
            total_out, total_max, total_sum = fold(
                total_out, total_max, total_sum, outs[j], tops[j], sums[j]
            )  # fmt: skip
    sink = tl.zeros((BH,), tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head)
    result = finish(total_out, total_max, total_sum, sink, SINKS)
    at = out_ptr + (token * HQ + head)[:, None] * V + w[None, :]
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=inside)
