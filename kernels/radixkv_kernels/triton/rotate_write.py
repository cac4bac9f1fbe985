# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel between the product of queries, keys and values and attention.

One launch norms and rotates queries, and norms, rotates and quantises keys on their way into the cache,
values beside them. It rounds where torch's operators do (see `Rotation`).
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.kv_cache import PagedKV
from radixkv_kernels.norm_rotary import Rotation
from radixkv_kernels.triton.residual_norm import rms_factor, weighted
from radixkv_kernels.triton.write import cache_pointers, cache_shape, quantized, row_scale, store_rows

#: Query heads of a program.
QUERY_HEADS = 8


@triton.jit
def _load(pointer, at, column, valid, END: tl.constexpr):
    """float32 [heads, columns] from `at[head] + column`, for columns below END."""
    mask = valid[:, None] & (column < END)[None, :]
    return tl.load(pointer + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, at, column, valid, x, END: tl.constexpr):
    tl.store(pointer + at[:, None] + column[None, :], x, mask=valid[:, None] & (column < END)[None, :])


@triton.jit
def _weighted_part(x, factor, weight_ptr, column, END: tl.constexpr, OFFSET: tl.constexpr,
                   WIDE: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    weight = tl.load(weight_ptr + column, mask=column < END, other=0.0)[None, :]
    return weighted(x, factor, weight, OFFSET, WIDE, DTYPE).to(tl.float32)


@triton.jit
def _turned(
    merged_ptr, at, valid, token, cosines_ptr, sines_ptr, rotation_stride, weight_ptr, eps,
    D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Heads at `at` [heads], normed and rotated, as float32: elements [0, R / 2), [R / 2, R) and [R, D)."""
    HALF: tl.constexpr = R // 2
    column = tl.arange(0, RP)
    rest = R + tl.arange(0, SP)
    x = _load(merged_ptr, at, column, valid, HALF)
    y = _load(merged_ptr, at + HALF, column, valid, HALF)
    z = _load(merged_ptr, at, rest, valid, D)
    if NORM:
        factor = rms_factor(tl.sum(x * x, 1) + tl.sum(y * y, 1) + tl.sum(z * z, 1), eps, D)[:, None]
        x = _weighted_part(x, factor, weight_ptr, column, HALF, OFFSET, WIDE, DTYPE)
        y = _weighted_part(y, factor, weight_ptr + HALF, column, HALF, OFFSET, WIDE, DTYPE)
        z = _weighted_part(z, factor, weight_ptr, rest, D, OFFSET, WIDE, DTYPE)
    angle = token * rotation_stride + column
    cosine = tl.load(cosines_ptr + angle, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines_ptr + angle, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    # Products are rounded before they are added, as operators round them.
    first = (x * cosine).to(DTYPE).to(tl.float32) - (y * sine).to(DTYPE).to(tl.float32)
    second = (y * cosine).to(DTYPE).to(tl.float32) + (x * sine).to(DTYPE).to(tl.float32)
    return first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32), z


@triton.jit
def _store_head(
    pointer, at, valid, x, y, z, D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr
):  # fmt: skip
    """Store the result of `_turned` at `at` [heads], in the type stored there."""
    dtype: tl.constexpr = pointer.dtype.element_ty
    column = tl.arange(0, RP)
    _store(pointer, at, column, valid, x.to(dtype), R // 2)
    _store(pointer, at + R // 2, column, valid, y.to(dtype), R // 2)
    if R < D:
        _store(pointer, at, R + tl.arange(0, SP), valid, z.to(dtype), D)


@triton.jit
def _store_key(
    data_ptr, scale_ptr, row, valid, x, y, z, limit,
    D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Store the result of `_turned` in rows of the cache, quantised where the cache is."""
    if KIND > 0:
        dtype: tl.constexpr = data_ptr.dtype.element_ty
        largest = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
        scale = row_scale(tl.maximum(largest, tl.max(tl.abs(z), 1)), limit)
        tl.store(scale_ptr + row, scale, mask=valid)
        _store_head(
            data_ptr, row * D, valid, quantized(x, scale, limit, KIND, dtype),
            quantized(y, scale, limit, KIND, dtype), quantized(z, scale, limit, KIND, dtype), D, R, RP, SP,
        )  # fmt: skip
    else:
        _store_head(data_ptr, row * D, valid, x, y, z, D, R, RP, SP)


@triton.jit(do_not_specialize=["num_tokens", "num_entries"])
def rotate_write_kernel(
    merged_ptr, query_ptr, cosines_ptr, sines_ptr, query_weight_ptr, key_weight_ptr, key_data_ptr,
    value_data_ptr, key_scale_ptr, value_scale_ptr, slots_ptr, rows_ptr, num_tokens, num_entries,
    merged_stride, rotation_stride, query_eps, key_eps, num_slots, limit,
    HQ: tl.constexpr, BQ: tl.constexpr, HKV: tl.constexpr, HP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr, QUERY_NORM: tl.constexpr,
    KEY_NORM: tl.constexpr, OFFSET: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (max(tokens, entries), ceil(HQ / BQ) + 1): BQ query heads of a token each; last, an entry's keys
    and values. RP and SP: R / 2 and D - R, padded. KIND and the rest: as in `write_kernel`."""
    dtype: tl.constexpr = merged_ptr.dtype.element_ty
    index = tl.program_id(0)
    part = tl.program_id(1)
    # Each branch has names of its own: shared ones would need one type in both.
    if part < (HQ + BQ - 1) // BQ:
        if index < num_tokens:
            token = index.to(tl.int64)
            head = part * BQ + tl.arange(0, BQ)
            x, y, z = _turned(
                merged_ptr, token * merged_stride + head * D, head < HQ, token, cosines_ptr, sines_ptr,
                rotation_stride, query_weight_ptr, query_eps, D, R, RP, SP, QUERY_NORM, OFFSET, WIDE, dtype,
            )  # fmt: skip
            _store_head(query_ptr, (token * HQ + head) * D, head < HQ, x, y, z, D, R, RP, SP)
    elif index < num_entries:
        slot = tl.load(slots_ptr + index)
        if slot >= 0:
            source = index.to(tl.int64)
            if HAS_ROWS:
                source = tl.load(rows_ptr + index)
            stored_head = tl.arange(0, HP)
            first, second, third = _turned(
                merged_ptr, source * merged_stride + (HQ + stored_head) * D, stored_head < HKV, source,
                cosines_ptr, sines_ptr, rotation_stride, key_weight_ptr, key_eps, D, R, RP, SP, KEY_NORM,
                OFFSET, WIDE, dtype,
            )  # fmt: skip
            _store_key(
                key_data_ptr, key_scale_ptr, stored_head.to(tl.int64) * num_slots + slot, stored_head < HKV,
                first, second, third, limit, D, R, RP, SP, KIND,
            )  # fmt: skip
            store_rows(
                merged_ptr + (HQ + HKV) * D, value_data_ptr, value_scale_ptr, source, slot, merged_stride, D,
                num_slots, limit, HKV, HP, D, DP, KIND,
            )  # fmt: skip


def rotation_warps(num_kv_heads: int, turned: int) -> int:
    """Warps of a program: few, so that a thread has 16 bytes of a row to load, and no more than registers
    hold."""
    return 2 if triton.next_power_of_2(num_kv_heads) * triton.next_power_of_2(turned) <= 1024 else 4


def rotate_and_write_rows(
    kv: PagedKV,
    layer: int,
    merged: torch.Tensor,
    num_query_heads: int,
    rotation: Rotation,
    slots: torch.Tensor,
    rows: torch.Tensor | None,
) -> torch.Tensor:
    """See `AttentionBackend.rotate_and_write`.

    Raises:
        ValueError: a layout that the kernel does not read.
    """
    tokens, spec = len(merged), kv.spec
    if merged.stride(1) != 1 or rotation.cosines.stride() != rotation.sines.stride():
        raise ValueError("rows of queries, keys, values, cosines and sines must be contiguous and laid alike")
    norms = (rotation.query_norm, rotation.key_norm)
    kinds = {(norm.offset, norm.wide) for norm in norms if norm is not None}
    if len(kinds) > 1:
        raise ValueError("the norms of queries and keys must be of one kind")
    offset, wide = next(iter(kinds), (False, False))
    turned = rotation.cosines.shape[1]
    heads = min(QUERY_HEADS, triton.next_power_of_2(num_query_heads))
    entries = slots.numel()
    query = merged.new_empty(tokens, num_query_heads, spec.head_size)
    if tokens:
        rotate_write_kernel[(max(tokens, entries), -(-num_query_heads // heads) + 1)](
            merged,
            query,
            rotation.cosines,
            rotation.sines,
            *(merged if norm is None else norm.weight for norm in norms),
            *cache_pointers(kv, layer),
            slots,
            slots if rows is None else rows,
            tokens,
            entries,
            merged.stride(0),
            rotation.cosines.stride(0),
            *(0.0 if norm is None else norm.eps for norm in norms),
            **cache_shape(spec),
            HQ=num_query_heads,
            BQ=heads,
            R=turned,
            RP=triton.next_power_of_2(turned // 2),
            SP=triton.next_power_of_2(max(1, spec.head_size - turned)),
            QUERY_NORM=norms[0] is not None,
            KEY_NORM=norms[1] is not None,
            OFFSET=offset,
            WIDE=wide,
            HAS_ROWS=rows is not None,
            num_warps=rotation_warps(spec.num_kv_heads, turned),
            enable_fp_fusion=False,
        )
    return query
