"""The Triton kernel that writes new keys and values into the cache, and its launcher."""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.kv_cache import QUANTIZED_MAX, PagedKV


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


def write_rows(
    kv: PagedKV,
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:
    """See `AttentionBackend.write`."""
    entries = slots.numel()
    if entries == 0:
        return
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    spec = kv.spec
    key_scale = slots if kv.key_scale is None else kv.key_scale[layer]
    value_scale = slots if kv.value_scale is None else kv.value_scale[layer]
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
