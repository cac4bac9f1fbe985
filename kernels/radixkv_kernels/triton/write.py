# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that writes new keys and values into the cache, and its launcher."""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from radixkv_kernels.kv_cache import QUANTIZED_MAX, KVSpec, PagedKV


@triton.jit
def row_scale(largest, limit):
    """The scale of rows whose largest magnitudes these are."""
    scale = largest * (1.0 / limit)
    # A row of zeros keeps scale 1, since 0 / 0 would store NaN.
    return tl.where(scale > 0, scale, 1.0)


@triton.jit
def quantized(wide, scale, limit, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """float32 rows in the cache's type. KIND: 1 int8, 2 fp8."""
    wide = tl.minimum(tl.maximum(tl.div_rn(wide, scale[:, None]), -limit), limit)
    if KIND == 1:
        # Adding and subtracting 1.5 * 2^23 rounds a small float32 to the nearest integer, halves to even.
        wide = (wide + 12582912.0) - 12582912.0
    return wide.to(DTYPE)


@triton.jit
def store_rows(
    source_ptr, data_ptr, scale_ptr, token, slot, token_stride, head_stride, num_slots, limit,
    HKV: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Store all heads' rows of one token in their slot."""
    head = tl.arange(0, HP)
    d = tl.arange(0, DP)
    inside = (head < HKV)[:, None] & (d < D)[None, :]
    source_at = token * token_stride + head[:, None] * head_stride + d[None, :]
    x = tl.load(source_ptr + source_at, mask=inside, other=0.0)
    row = head.to(tl.int64) * num_slots + slot
    if KIND > 0:
        wide = x.to(tl.float32)
        scale = row_scale(tl.max(tl.abs(wide), 1), limit)
        tl.store(scale_ptr + row, scale, mask=head < HKV)
        x = quantized(wide, scale, limit, KIND, data_ptr.dtype.element_ty)
    tl.store(data_ptr + row[:, None] * D + d[None, :], x, mask=inside)


@triton.jit
def write_kernel(
    key_ptr, value_ptr, key_data_ptr, value_data_ptr, key_scale_ptr, value_scale_ptr, slots_ptr, rows_ptr,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride, num_slots, limit,
    HKV: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr,
    V: tl.constexpr, VP: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (entries,): one entry's key and value, all heads. KIND: 0 as is, 1 int8, 2 fp8. V: 0 where values
    are part of the keys. Slot -1: skipped."""
    entry = tl.program_id(0)
    slot = tl.load(slots_ptr + entry)
    if slot < 0:
        return
    token = entry.to(tl.int64)
    if HAS_ROWS:
        token = tl.load(rows_ptr + entry)
    store_rows(
        key_ptr, key_data_ptr, key_scale_ptr, token, slot, key_token_stride, key_head_stride,
        num_slots, limit, HKV, HP, D, DP, KIND,
    )  # fmt: skip
    if V > 0:
        store_rows(
            value_ptr, value_data_ptr, value_scale_ptr, token, slot, value_token_stride, value_head_stride,
            num_slots, limit, HKV, HP, V, VP, KIND,
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
    if slots.numel() == 0:
        return
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    write_kernel[(slots.numel(),)](
        key,
        value,
        *cache_pointers(kv, layer),
        slots,
        slots if rows is None else rows,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        **cache_shape(kv.spec),
        V=0 if kv.spec.value_in_key else kv.spec.value_size,
        VP=triton.next_power_of_2(kv.spec.value_size),
        HAS_ROWS=rows is not None,
    )


def cache_pointers(kv: PagedKV, layer: int) -> tuple[torch.Tensor, ...]:
    """A layer's keys, values and their scales; where there are no scales, placeholders."""
    key, value = kv.key[layer], kv.value[layer]
    if kv.key_scale is None or kv.value_scale is None:
        return key, value, key, value
    return key, value, kv.key_scale[layer], kv.value_scale[layer]


def cache_shape(spec: KVSpec) -> dict[str, Any]:
    """Arguments of writing kernels that describe the cache."""
    quantization = spec.quantization
    return {
        "num_slots": spec.num_blocks * spec.block_size,
        "limit": 1.0 if quantization is None else QUANTIZED_MAX[quantization],
        "HKV": spec.num_kv_heads,
        "HP": triton.next_power_of_2(spec.num_kv_heads),
        "D": spec.head_size,
        "DP": triton.next_power_of_2(spec.head_size),
        "KIND": 0 if quantization is None else 1 if quantization == "int8" else 2,
    }
