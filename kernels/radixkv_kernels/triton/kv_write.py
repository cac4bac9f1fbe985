"""Triton kernels that write new keys and values into the cache, and that copy blocks."""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _write_rows(
    source_ptr, data_ptr, scale_ptr, token, slot, token_stride, head_stride, num_slots, limit,
    HKV: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HP)
    d = tl.arange(0, DP)
    inside = (head < HKV)[:, None] & (d < D)[None, :]
    source_at = token * token_stride + head[:, None] * head_stride + d[None, :]
    x = tl.load(source_ptr + source_at, mask=inside, other=0.0)
    row = head.to(tl.int64) * num_slots + slot
    if KIND > 0:
        wide = x.to(tl.float32)
        scale = tl.max(tl.abs(wide), 1) * (1.0 / limit)
        # A row of zeros keeps scale 1, since 0 / 0 would store NaN.
        scale = tl.where(scale > 0, scale, 1.0)
        wide = tl.minimum(tl.maximum(tl.div_rn(wide, scale[:, None]), -limit), limit)
        tl.store(scale_ptr + row, scale, mask=head < HKV)
        if KIND == 1:
            # Adding and subtracting 1.5 * 2^23 rounds a small float32 to the nearest integer, halves to even.
            wide = (wide + 12582912.0) - 12582912.0
        x = wide.to(data_ptr.dtype.element_ty)
    tl.store(data_ptr + row[:, None] * D + d[None, :], x, mask=inside)


@triton.jit
def write_kernel(
    key_ptr, value_ptr, key_data_ptr, value_data_ptr, key_scale_ptr, value_scale_ptr, slots_ptr, rows_ptr,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride, num_slots, limit,
    HKV: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (entries,): one entry's key and value, all heads. KIND: 0 as is, 1 int8, 2 fp8. Slot -1:
    skipped."""
    entry = tl.program_id(0)
    slot = tl.load(slots_ptr + entry)
    if slot < 0:
        return
    token = entry.to(tl.int64)
    if HAS_ROWS:
        token = tl.load(rows_ptr + entry)
    _write_rows(
        key_ptr, key_data_ptr, key_scale_ptr, token, slot, key_token_stride, key_head_stride,
        num_slots, limit, HKV, HP, D, DP, KIND,
    )  # fmt: skip
    _write_rows(
        value_ptr, value_data_ptr, value_scale_ptr, token, slot, value_token_stride, value_head_stride,
        num_slots, limit, HKV, HP, D, DP, KIND,
    )  # fmt: skip


@triton.jit
def copy_kernel(
    data_ptr, copies_ptr, plane_size,
    SLOT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (copies, planes, chunks): copy the first slots of one block in one (layer, head) plane.

    `data` holds planes of `plane_size` elements, a plane holds blocks of BLOCK slots of SLOT elements.
    """
    copy = copies_ptr + tl.program_id(0) * 3
    source = tl.load(copy).to(tl.int64)
    target = tl.load(copy + 1).to(tl.int64)
    count = tl.load(copy + 2) * SLOT
    plane = data_ptr + tl.program_id(1).to(tl.int64) * plane_size
    at = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = at < count
    x = tl.load(plane + source * (BLOCK * SLOT) + at, mask=inside)
    tl.store(plane + target * (BLOCK * SLOT) + at, x, mask=inside)
