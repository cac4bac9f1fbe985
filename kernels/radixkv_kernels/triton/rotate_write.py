# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel between the product of queries, keys and values and attention.

One launch norms and rotates queries, and norms, rotates and quantises keys on their way into the cache,
values beside them. It rounds where torch's operators do (see `Rotation`).
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from radixkv_kernels.kv_cache import KVSpec, PagedKV
from radixkv_kernels.norm_rotary import Norm, QueryGrowth, RotaryTurn, Rotation
from radixkv_kernels.triton.residual_norm import CENTERED, WEIGHTED, norm_kind, rms_factor, weighted
from radixkv_kernels.triton.write import cache_pointers, cache_shape, quantized, row_scale, store_rows

#: Query heads of a program.
QUERY_HEADS = 8


@triton.jit
def _load(pointer, at, column, inside, valid):
    """float32 [heads, columns] from `at[head] + column`."""
    mask = valid[:, None] & inside[None, :]
    return tl.load(pointer + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, at, column, inside, valid, x):
    tl.store(pointer + at[:, None] + column[None, :], x, mask=valid[:, None] & inside[None, :])


@triton.jit
def turned_pair(x, y, cosine, sine, ROUNDED: tl.constexpr, DTYPE: tl.constexpr):
    """float32 pairs, turned, rounded to DTYPE; ROUNDED: products are rounded before they are added."""
    if ROUNDED:
        first = (x * cosine).to(DTYPE).to(tl.float32) - (y * sine).to(DTYPE).to(tl.float32)
        second = (y * cosine).to(DTYPE).to(tl.float32) + (x * sine).to(DTYPE).to(tl.float32)
    else:
        first = x * cosine - y * sine
        second = y * cosine + x * sine
    return first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)


@triton.jit
def _weighted_part(x, factor, weight_ptr, weight_at, column, inside, KIND: tl.constexpr, DTYPE: tl.constexpr):
    weight = 0.0
    if WEIGHTED & KIND:
        weight = tl.load(
            weight_ptr + weight_at[:, None] + column[None, :],
            mask=(weight_at >= 0)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
    return weighted(x, factor, weight, KIND, DTYPE).to(tl.float32)


@triton.jit
def _row_factor(row_ptr, eps, WIDTH: tl.constexpr):
    """The factor of a norm over WIDTH elements in a row."""
    column = tl.arange(0, 512)
    sums = tl.zeros((512,), tl.float32)
    for start in range(0, WIDTH, 512):
        x = tl.load(row_ptr + start + column, mask=start + column < WIDTH, other=0.0).to(tl.float32)
        sums += x * x
    return rms_factor(tl.sum(sums, 0), eps, WIDTH)


@triton.jit
def _normed(
    x, y, z, column, second, rest, turns, rests, valid, row_factor, weight_ptr, weight_at, eps,
    D: tl.constexpr, KIND: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The three parts of heads (see `_turned`), normed. WHOLE: `row_factor` is the norm's."""
    if CENTERED & KIND:
        mean = ((tl.sum(x, 1) + tl.sum(y, 1) + tl.sum(z, 1)) / D)[:, None]
        x = tl.where(turns[None, :], x - mean, 0.0)
        y = tl.where(turns[None, :], y - mean, 0.0)
        z = tl.where(rests[None, :], z - mean, 0.0)
    if WHOLE:
        factor = row_factor
    else:
        factor = rms_factor(tl.sum(x * x, 1) + tl.sum(y * y, 1) + tl.sum(z * z, 1), eps, D)[:, None]
    weight_at = tl.where(valid, weight_at, -1)
    x = _weighted_part(x, factor, weight_ptr, weight_at, column, turns, KIND, DTYPE)
    y = _weighted_part(y, factor, weight_ptr, weight_at, second, turns, KIND, DTYPE)
    z = _weighted_part(z, factor, weight_ptr, weight_at, rest, rests, KIND, DTYPE)
    return x, y, z


@triton.jit
def _turned(
    merged_ptr, at, valid, row_factor, token, cosines_ptr, sines_ptr, rotation_stride, weight_ptr, weight_at,
    eps, multiplier, D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr,
    STEP: tl.constexpr, PAIRS: tl.constexpr, ROUNDED: tl.constexpr, KIND: tl.constexpr,
    WHOLE: tl.constexpr, LAST: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Heads at `at` [heads], normed and rotated, as float32: first and second elements of the R / 2 pairs,
    and elements [R, D). WHOLE: `row_factor` is the norm's. LAST: they turn before they are normed. SCALED:
    times `multiplier`, before both."""
    HALF: tl.constexpr = R // 2
    pair = tl.arange(0, RP)
    turns = pair < HALF
    column = pair * 2 if PAIRS > 0 else pair
    second = column + 1 if PAIRS > 0 else column + HALF
    rest = R + tl.arange(0, SP)
    rests = rest < D
    x = _load(merged_ptr, at, column, turns, valid)
    y = _load(merged_ptr, at, second, turns, valid)
    z = _load(merged_ptr, at, rest, rests, valid)
    if SCALED:
        x = (x * multiplier).to(DTYPE).to(tl.float32)
        y = (y * multiplier).to(DTYPE).to(tl.float32)
        z = (z * multiplier).to(DTYPE).to(tl.float32)
    if KIND and not LAST:
        x, y, z = _normed(
            x, y, z, column, second, rest, turns, rests, valid, row_factor, weight_ptr, weight_at, eps, D,
            KIND, WHOLE, DTYPE,
        )  # fmt: skip
    angle = token * rotation_stride + pair * STEP
    cosine = tl.load(cosines_ptr + angle, mask=turns, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines_ptr + angle, mask=turns, other=0.0).to(tl.float32)[None, :]
    x, y = turned_pair(x, y, cosine, sine, ROUNDED, DTYPE)
    if KIND and LAST:
        x, y, z = _normed(
            x, y, z, column, second, rest, turns, rests, valid, row_factor, weight_ptr, weight_at, eps, D,
            KIND, WHOLE, DTYPE,
        )  # fmt: skip
    return x, y, z


@triton.jit
def growth_factor(
    positions_ptr, token, scale, length, first, ROUNDED: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """The float32 factor of a token's queries, see `QueryGrowth`."""
    position = tl.load(positions_ptr + token).to(tl.float32)
    factor = 1.0 + tl.log(1.0 + tl.floor(tl.div_rn(position + first, length))) * scale
    if ROUNDED:
        factor = factor.to(DTYPE).to(tl.float32)
    return factor


@triton.jit
def _store_head(
    pointer, at, valid, x, y, z, D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Store the result of `_turned` at `at` [heads], in the type stored there."""
    dtype: tl.constexpr = pointer.dtype.element_ty
    pair = tl.arange(0, RP)
    turns = pair < R // 2
    column = pair * 2 if PAIRS == 1 else pair
    _store(pointer, at, column, turns, valid, x.to(dtype))
    _store(pointer, at, column + 1 if PAIRS == 1 else column + R // 2, turns, valid, y.to(dtype))
    if R < D:
        rest = R + tl.arange(0, SP)
        _store(pointer, at, rest, rest < D, valid, z.to(dtype))


@triton.jit
def _store_key(
    data_ptr, scale_ptr, row, valid, x, y, z, limit, D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    SP: tl.constexpr, PAIRS: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Store the result of `_turned` in rows of the cache, quantised where the cache is."""
    if STORED > 0:
        dtype: tl.constexpr = data_ptr.dtype.element_ty
        largest = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
        scale = row_scale(tl.maximum(largest, tl.max(tl.abs(z), 1)), limit)
        tl.store(scale_ptr + row, scale, mask=valid)
        _store_head(
            data_ptr, row * D, valid, quantized(x, scale, limit, STORED, dtype),
            quantized(y, scale, limit, STORED, dtype), quantized(z, scale, limit, STORED, dtype), D, R, RP,
            SP, PAIRS,
        )  # fmt: skip
    else:
        _store_head(data_ptr, row * D, valid, x, y, z, D, R, RP, SP, PAIRS)


@triton.jit(do_not_specialize=["num_tokens", "num_entries"])
def rotate_write_kernel(
    merged_ptr, query_ptr, cosines_ptr, sines_ptr, query_weight_ptr, key_weight_ptr, value_weight_ptr,
    key_data_ptr, value_data_ptr, key_scale_ptr, value_scale_ptr, slots_ptr, rows_ptr, num_tokens,
    num_entries, merged_stride, rotation_stride, query_eps, key_eps, value_eps, query_weight_stride,
    key_weight_stride, num_slots, limit, key_multiplier, positions_ptr, growth_scale, growth_length,
    growth_first,
    HQ: tl.constexpr, BQ: tl.constexpr, QD: tl.constexpr, HKV: tl.constexpr, HP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr,
    STEP: tl.constexpr, PAIRS: tl.constexpr, ROUNDED: tl.constexpr, QUERY_NORM: tl.constexpr,
    KEY_NORM: tl.constexpr, VALUE_NORM: tl.constexpr, WHOLE: tl.constexpr, SHARED: tl.constexpr,
    KIND: tl.constexpr, HAS_ROWS: tl.constexpr, TURNS_FIRST: tl.constexpr, KEY_SCALED: tl.constexpr,
    GROWTH: tl.constexpr,
):  # fmt: skip
    """Grid (max(tokens, entries), ceil(HQ / BQ) + 1): BQ query heads of a token each; last, an entry's keys
    and values. QD: elements from a query to the next. RP and SP: R / 2 and D - R, padded. STEP: elements from
    an angle to the next. PAIRS: a `Pairs`. QUERY_NORM and so on: kinds of norms, WHOLE: those of queries and
    keys are over all heads. SHARED: values lie where keys do. TURNS_FIRST, KEY_SCALED: see `Rotation`.
    GROWTH: queries grow, 2: by rounded factors. KIND and the rest: as in `write_kernel`."""
    dtype: tl.constexpr = merged_ptr.dtype.element_ty
    index = tl.program_id(0)
    part = tl.program_id(1)
    # Each branch has names of its own: shared ones would need one type in both.
    if part < (HQ + BQ - 1) // BQ:
        if index < num_tokens:
            token = index.to(tl.int64)
            head = part * BQ + tl.arange(0, BQ)
            row_factor = 1.0
            if WHOLE:
                row_factor = _row_factor(merged_ptr + token * merged_stride, query_eps, HQ * D)
            x, y, z = _turned(
                merged_ptr, token * merged_stride + head * QD, head < HQ, row_factor, token, cosines_ptr,
                sines_ptr, rotation_stride, query_weight_ptr, head * query_weight_stride, query_eps, 1.0, D,
                R, RP, SP, STEP, PAIRS, ROUNDED, QUERY_NORM, WHOLE, TURNS_FIRST, False, dtype,
            )  # fmt: skip
            if GROWTH:
                grown = growth_factor(
                    positions_ptr, token, growth_scale, growth_length, growth_first, GROWTH == 2, dtype
                )
                x, y, z = x * grown, y * grown, z * grown
            _store_head(query_ptr, (token * HQ + head) * D, head < HQ, x, y, z, D, R, RP, SP, PAIRS)
    elif index < num_entries:
        slot = tl.load(slots_ptr + index)
        if slot >= 0:
            source = index.to(tl.int64)
            if HAS_ROWS:
                source = tl.load(rows_ptr + index)
            stored_head = tl.arange(0, HP)
            keys_ptr = merged_ptr + HQ * QD
            key_factor = 1.0
            if WHOLE:
                key_factor = _row_factor(keys_ptr + source * merged_stride, key_eps, HKV * D)
            first, second, third = _turned(
                keys_ptr, source * merged_stride + stored_head * D, stored_head < HKV, key_factor, source,
                cosines_ptr, sines_ptr, rotation_stride, key_weight_ptr, stored_head * key_weight_stride,
                key_eps, key_multiplier, D, R, RP, SP, STEP, PAIRS, ROUNDED, KEY_NORM, WHOLE, TURNS_FIRST,
                KEY_SCALED, dtype,
            )  # fmt: skip
            _store_key(
                key_data_ptr, key_scale_ptr, stored_head.to(tl.int64) * num_slots + slot, stored_head < HKV,
                first, second, third, limit, D, R, RP, SP, PAIRS, KIND,
            )  # fmt: skip
            values_ptr = keys_ptr if SHARED else keys_ptr + HKV * D
            if VALUE_NORM:
                column = tl.arange(0, DP)
                wide = _load(
                    values_ptr, source * merged_stride + stored_head * D, column, column < D,
                    stored_head < HKV,
                )  # fmt: skip
                factor = rms_factor(tl.sum(wide * wide, 1), value_eps, D)[:, None]
                wide = _weighted_part(
                    wide, factor, value_weight_ptr, stored_head * 0, column, column < D, VALUE_NORM, dtype
                )  # fmt: skip
                value_row = stored_head.to(tl.int64) * num_slots + slot
                stored: tl.constexpr = value_data_ptr.dtype.element_ty
                if KIND > 0:
                    scale = row_scale(tl.max(tl.abs(wide), 1), limit)
                    tl.store(value_scale_ptr + value_row, scale, mask=stored_head < HKV)
                    wide = quantized(wide, scale, limit, KIND, stored)
                _store(
                    value_data_ptr, value_row * D, column, column < D, stored_head < HKV, wide.to(stored)
                )  # fmt: skip
            else:
                store_rows(
                    values_ptr, value_data_ptr, value_scale_ptr, source, slot, merged_stride, D, num_slots,
                    limit, HKV, HP, D, DP, KIND,
                )  # fmt: skip


def rotation_warps(num_kv_heads: int, turned: int) -> int:
    """Warps of a program: few, so that a thread has 16 bytes of a row to load, and no more than registers
    hold. `turned`: elements of a head that turn, or that don't, if those are more."""
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
    tokens, spec, turn, growth = len(merged), kv.spec, rotation.turn, rotation.growth
    norms = (rotation.query_norm, rotation.key_norm, rotation.value_norm)
    check_rows(merged, turn)
    check_norms(rotation, num_query_heads, spec)
    whole = is_over_all(rotation.query_norm, spec.head_size)
    heads = min(QUERY_HEADS, triton.next_power_of_2(num_query_heads))
    entries = slots.numel()
    query = merged.new_empty(tokens, num_query_heads, spec.head_size)
    if tokens:
        rotate_write_kernel[(max(tokens, entries), -(-num_query_heads // heads) + 1)](
            merged,
            query,
            turn.cosines,
            turn.sines,
            *(merged if norm is None or norm.weight is None else norm.weight for norm in norms),
            *cache_pointers(kv, layer),
            slots,
            slots if rows is None else rows,
            tokens,
            entries,
            merged.stride(0),
            turn.cosines.stride(0),
            *(0.0 if norm is None else norm.eps for norm in norms),
            *(_weight_stride(norm, spec.head_size) for norm in norms[:2]),
            **cache_shape(spec),
            key_multiplier=rotation.key_factor,
            **growth_arguments(growth, slots),
            HQ=num_query_heads,
            BQ=heads,
            QD=spec.head_size * (1 + rotation.gated),
            R=turn.size,
            RP=triton.next_power_of_2(max(1, turn.size // 2)),
            SP=triton.next_power_of_2(max(1, spec.head_size - turn.size)),
            STEP=turn.cosines.stride(1),
            PAIRS=turn.pairs.value,
            ROUNDED=not turn.wide,
            QUERY_NORM=norm_kind(norms[0]),
            KEY_NORM=norm_kind(norms[1]),
            VALUE_NORM=norm_kind(norms[2]),
            WHOLE=whole,
            SHARED=rotation.shared,
            HAS_ROWS=rows is not None,
            TURNS_FIRST=rotation.turns_first,
            KEY_SCALED=rotation.key_factor != 1.0,
            num_warps=rotation_warps(spec.num_kv_heads, max(turn.size, spec.head_size - turn.size)),
            enable_fp_fusion=False,
        )
    return query


def growth_arguments(growth: QueryGrowth | None, integers: torch.Tensor) -> dict[str, Any]:
    """Arguments of the kernels that let queries grow; `integers`: stand for positions that none reads."""
    if growth is None:
        numbers: tuple[Any, ...] = (integers, 0.0, 1.0, 0.0)
    else:
        numbers = (growth.positions, growth.scale, growth.length, growth.first)
    names = ("positions_ptr", "growth_scale", "growth_length", "growth_first")
    return dict(zip(names, numbers, strict=True)) | {"GROWTH": 0 if growth is None else 1 + growth.rounded}


def is_over_all(norm: Norm | None, size: int) -> bool:
    """Return True for a norm over all heads of this size."""
    return norm is not None and norm.weight is not None and norm.weight.dim() == 1 and len(norm.weight) > size


def check_rows(merged: torch.Tensor, turn: RotaryTurn) -> None:
    """Raise ValueError for rows or angles in a layout that the kernels don't read."""
    if merged.stride(1) != 1 or turn.cosines.stride() != turn.sines.stride():
        raise ValueError("rows of queries, keys and values must be contiguous, cosines and sines laid alike")


def check_norms(rotation: Rotation, num_query_heads: int, spec: KVSpec) -> None:
    """Raise ValueError for norms that the kernel does not compute."""
    query, key, value = rotation.query_norm, rotation.key_norm, rotation.value_norm
    over_all = is_over_all(query, spec.head_size)
    if any(norm is not None and norm.bias is not None for norm in (query, key, value)):
        raise ValueError("norms of heads have no biases")
    has_others = rotation.gated or rotation.turns_first or (query is not None and query.centered)
    if over_all and (has_others or key is None):
        raise ValueError(
            "norms over all heads are of queries and keys, before they turn, without gates and means"
        )
    if over_all and not is_over_all(key, spec.head_size) and spec.num_kv_heads > 1:
        raise ValueError("the norms of queries and keys must both be over all heads, or both over each")
    if value is not None and value.centered:
        raise ValueError("norms of values have no means")


def _weight_stride(norm: Norm | None, size: int) -> int:
    """Elements of a norm's weight from one head's to the next one's."""
    if norm is None or norm.weight is None or norm.weight.numel() == size:
        return 0
    return size
