# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel between the products of queries and latents and absorbed attention (MLA).

One launch rotates the parts of queries that turn, beside the folded ones, and norms, rotates and quantises
latents on their way into the cache. It rounds where torch's operators do (see `LatentRotation`).
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.kv_cache import KVSpec, PagedKV
from radixkv_kernels.norm_rotary import LatentRotation
from radixkv_kernels.triton.residual_norm import norm_kind, normed_row
from radixkv_kernels.triton.rotate_write import growth_arguments, growth_factor, turned_pair
from radixkv_kernels.triton.write import cache_pointers, cache_shape, row_scale

#: Query heads of a program.
QUERY_HEADS = 16
#: Columns of folded queries that a program multiplies at a time, where queries grow.
FOLDED_COLUMNS = tl.constexpr(64)
#: Padding of a stored key takes fewer elements than this.
_PADDING = 8


@triton.jit
def _stored(wide, scale, limit, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """float32 numbers in the cache's type; see `write.quantized`, which has a scale for each row."""
    if KIND > 0:
        wide = tl.minimum(tl.maximum(tl.div_rn(wide, scale), -limit), limit)
    if KIND == 1:
        wide = (wide + 12582912.0) - 12582912.0
    return wide.to(DTYPE)


@triton.jit(do_not_specialize=["num_tokens", "num_entries"])
def latent_write_kernel(
    query_ptr, folded_ptr, latents_ptr, cosines_ptr, sines_ptr, weight_ptr, key_data_ptr, key_scale_ptr,
    slots_ptr, rows_ptr, num_tokens, num_entries, query_stride, latents_stride, rotation_stride, eps, limit,
    positions_ptr, growth_scale, growth_length, growth_first,
    H: tl.constexpr, BQ: tl.constexpr, QD: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr,
    RP: tl.constexpr, D: tl.constexpr, TURNS: tl.constexpr, STEP: tl.constexpr, PAIRS: tl.constexpr,
    ROUNDED: tl.constexpr, NORM: tl.constexpr, KIND: tl.constexpr, HAS_ROWS: tl.constexpr,
    GROWTH: tl.constexpr,
):  # fmt: skip
    """Grid (max(tokens, entries), ceil(H / BQ) + 1): BQ query heads of a token each; last, an entry's key.
    QD: elements of a query head, R of them turn, the last ones. L: of a latent, D: of a stored key and a
    folded query. LP and RP: L and R / 2, padded. TURNS: there is a rotary embedding. STEP: elements from an
    angle to the next. PAIRS: a `Pairs`. NORM: the kind of the latent's norm. GROWTH: as in
    `rotate_write_kernel`, of folded queries, too. KIND and HAS_ROWS: as in `write_kernel`."""
    dtype: tl.constexpr = latents_ptr.dtype.element_ty
    HALF: tl.constexpr = R // 2
    index = tl.program_id(0)
    part = tl.program_id(1)
    pair = tl.arange(0, RP)
    turns = pair < HALF
    source = pair * 2 if PAIRS > 0 else pair
    second_source = source + 1 if PAIRS > 0 else source + HALF
    target = pair * 2 if PAIRS == 1 else pair
    second_target = target + 1 if PAIRS == 1 else target + HALF
    pad = R + tl.arange(0, 8)
    pads = pad < D - L
    # Each branch has names of its own: shared ones would need one type in both.
    if part < (H + BQ - 1) // BQ:
        if index < num_tokens:
            token = index.to(tl.int64)
            head = part * BQ + tl.arange(0, BQ)
            inside = (head < H)[:, None] & turns[None, :]
            at = query_ptr + token * query_stride + (head * QD + QD - R)[:, None]
            x = tl.load(at + source[None, :], mask=inside, other=0.0).to(tl.float32)
            y = tl.load(at + second_source[None, :], mask=inside, other=0.0).to(tl.float32)
            if TURNS:
                angle = token * rotation_stride + pair * STEP
                cosine = tl.load(cosines_ptr + angle, mask=turns, other=0.0).to(tl.float32)[None, :]
                sine = tl.load(sines_ptr + angle, mask=turns, other=0.0).to(tl.float32)[None, :]
                x, y = turned_pair(x, y, cosine, sine, ROUNDED, dtype)
            if GROWTH:
                grown = growth_factor(
                    positions_ptr, token, growth_scale, growth_length, growth_first, GROWTH == 2, dtype
                )
                x, y = x * grown, y * grown
                for start in range(0, L, FOLDED_COLUMNS):
                    folded_column = start + tl.arange(0, FOLDED_COLUMNS)
                    there = (head < H)[:, None] & (folded_column < L)[None, :]
                    own = folded_ptr + ((token * H + head) * D)[:, None] + folded_column[None, :]
                    folded = tl.load(own, mask=there, other=0.0).to(tl.float32) * grown
                    tl.store(own, folded.to(dtype), mask=there)
            to = folded_ptr + ((token * H + head) * D + L)[:, None]
            tl.store(to + target[None, :], x.to(dtype), mask=inside)
            tl.store(to + second_target[None, :], y.to(dtype), mask=inside)
            if D > L + R:
                tl.store(to + pad[None, :], 0.0, mask=(head < H)[:, None] & pads[None, :])
    elif index < num_entries:
        slot = tl.load(slots_ptr + index)
        if slot >= 0:
            stored: tl.constexpr = key_data_ptr.dtype.element_ty
            row = index.to(tl.int64)
            if HAS_ROWS:
                row = tl.load(rows_ptr + index)
            column = tl.arange(0, LP)
            within = column < L
            row_ptr = latents_ptr + row * latents_stride
            latent = tl.load(row_ptr + column, mask=within, other=0.0).to(tl.float32)
            latent = normed_row(latent, within, column, weight_ptr, weight_ptr, eps, L, NORM, dtype).to(
                tl.float32
            )
            first = tl.load(row_ptr + L + source, mask=turns, other=0.0).to(tl.float32)
            second = tl.load(row_ptr + L + second_source, mask=turns, other=0.0).to(tl.float32)
            if TURNS:
                own_angle = row * rotation_stride + pair * STEP
                own_cosine = tl.load(cosines_ptr + own_angle, mask=turns, other=0.0).to(tl.float32)
                own_sine = tl.load(sines_ptr + own_angle, mask=turns, other=0.0).to(tl.float32)
                first, second = turned_pair(first, second, own_cosine, own_sine, ROUNDED, dtype)
            scale = 1.0
            if KIND > 0:
                largest = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
                latent = tl.where(within, latent, 0.0)
                scale = row_scale(tl.maximum(largest, tl.max(tl.abs(latent), 0)), limit)
                tl.store(key_scale_ptr + slot, scale)
            key_ptr = key_data_ptr + slot.to(tl.int64) * D
            tl.store(key_ptr + column, _stored(latent, scale, limit, KIND, stored), mask=within)
            key_ptr += L
            tl.store(key_ptr + target, _stored(first, scale, limit, KIND, stored), mask=turns)
            tl.store(key_ptr + second_target, _stored(second, scale, limit, KIND, stored), mask=turns)
            if D > L + R:
                tl.store(key_ptr + pad, _stored(pad * 0.0, scale, limit, KIND, stored), mask=pads)


def can_write_latents(spec: KVSpec, rotation: LatentRotation) -> bool:
    """Return True for a cache and latents that the kernel writes."""
    padding = spec.head_size - rotation.latent - rotation.rest
    norm = rotation.norm
    return (
        spec.value_in_key
        and spec.num_kv_heads == 1
        and rotation.rest % 2 == 0
        and rotation.turn.size in (0, rotation.rest)
        and 0 <= padding <= _PADDING
        and norm.bias is None
        and (norm.weight is None or norm.weight.dim() == 1)
    )


def write_latent_rows(
    kv: PagedKV,
    layer: int,
    query: torch.Tensor,
    folded: torch.Tensor,
    latents: torch.Tensor,
    rotation: LatentRotation,
    slots: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:
    """See `AttentionBackend.write_latents`; for what `can_write_latents` holds."""
    (tokens, heads, size), turn, norm = query.shape, rotation.turn, rotation.norm
    if query.stride(1) != size or query.stride(2) != 1 or not folded.is_contiguous():
        raise ValueError("heads of a query lie one after the other, and folded queries are contiguous")
    if latents.stride(1) != 1:
        raise ValueError("elements of a latent lie one after the other")
    if not tokens:
        return
    entries, shape = slots.numel(), cache_shape(kv.spec)
    key, _, scales, _ = cache_pointers(kv, layer)
    at_once = min(QUERY_HEADS, triton.next_power_of_2(heads))
    latent_write_kernel[(max(tokens, entries), -(-heads // at_once) + 1)](
        query,
        folded,
        latents,
        turn.cosines,
        turn.sines,
        latents if norm.weight is None else norm.weight,
        key,
        scales,
        slots,
        slots if rows is None else rows,
        tokens,
        entries,
        query.stride(0),
        latents.stride(0),
        turn.cosines.stride(0),
        norm.eps,
        shape["limit"],
        **growth_arguments(rotation.growth, slots),
        H=heads,
        BQ=at_once,
        QD=size,
        L=rotation.latent,
        LP=triton.next_power_of_2(rotation.latent),
        R=rotation.rest,
        RP=triton.next_power_of_2(max(1, rotation.rest // 2)),
        D=shape["D"],
        TURNS=turn.size > 0,
        STEP=turn.cosines.stride(1),
        PAIRS=turn.pairs.value if turn.size else 0,
        ROUNDED=not turn.wide,
        NORM=norm_kind(norm),
        KIND=shape["KIND"],
        HAS_ROWS=rows is not None,
        num_warps=4,
        enable_fp_fusion=False,
    )
