# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel between two products of a layer: add to the residual, then normalise for the next one.

The unfused operators read and write each row about eight times; this kernel does so once. Where they round to
the model's dtype, so does it, and it is compiled without contraction to fused multiply-adds: results differ
from theirs by the order of the sum of squares alone.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Literal, overload

import torch
import triton
import triton.language as tl

from radixkv_kernels.norm_rotary import Norm
from radixkv_kernels.triton.fp8_rows import Fp8Rows, store_rounded


@triton.jit
def rms_factor(sum_of_squares, eps, N: tl.constexpr):
    """Return the factor that makes a row's mean square 1."""
    return tl.rsqrt(sum_of_squares / N + eps)


#: Bits of a norm's kind, as kernels are compiled for it; 0: there is none.
NORM, OFFSET, WIDE, CENTERED, WEIGHTED, BIASED = (tl.constexpr(1 << i) for i in range(6))


def norm_kind(norm: Norm | None) -> int:
    """The bits of a norm's kind."""
    if norm is None:
        return 0
    bits = (True, norm.offset, norm.wide, norm.centered, norm.weight is not None, norm.bias is not None)
    return sum(bit << i for i, bit in enumerate(bits))


@triton.jit
def weighted(x, factor, weight, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """float32 x * factor * weight, rounded to DTYPE; see `Norm`."""
    x = x * factor
    weight = weight.to(tl.float32)
    if OFFSET & KIND:
        weight = weight + 1.0
    if not (WIDE & KIND):
        x = x.to(DTYPE).to(tl.float32)
    if WEIGHTED & KIND:
        x = x * weight
    return x.to(DTYPE)


@triton.jit
def normed_row(
    x, inside, column, weight_ptr, bias_ptr, eps, N: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """A float32 row of N numbers, normed as KIND says, rounded to DTYPE."""
    if CENTERED & KIND:
        x = tl.where(inside, x - tl.sum(x, 0) / N, 0.0)
    factor = rms_factor(tl.sum(x * x, 0), eps, N)
    weight = 0.0
    if WEIGHTED & KIND:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if BIASED & KIND:  # a layer norm with a bias rounds once, after it
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        return (weighted(x, factor, weight, KIND, tl.float32) + bias).to(DTYPE)
    return weighted(x, factor, weight, KIND, DTYPE)


@triton.jit
def residual_norm_kernel(
    states_ptr, added_ptr, other_ptr, out_ptr, scales_ptr, after_ptr, after_bias_ptr, next_ptr, next_bias_ptr,
    states_stride, added_stride, other_stride, scale_stride, multiplier, other_multiplier, factor_ptr,
    after_eps, next_eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, OTHER: tl.constexpr, SCALED: tl.constexpr,
    FACTOR: tl.constexpr, AFTER: tl.constexpr, NEXT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). ADD: states += added, AFTER normalised, SCALED; OTHER: states += other, too, SCALED by
    its own number; FACTOR: times a number in memory. NEXT: out = norm(states), rounded to 8 bits with a scale
    for each GROUP, if that is any. AFTER and NEXT: kinds of norms."""
    dtype: tl.constexpr = states_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    states_at = states_ptr + row * states_stride + column
    states = tl.load(states_at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(added_ptr + row * added_stride + column, mask=inside, other=0.0).to(tl.float32)
        if AFTER:
            added = normed_row(
                added, inside, column, after_ptr, after_bias_ptr, after_eps, N, AFTER, dtype
            ).to(tl.float32)  # fmt: skip
        if SCALED:
            added = (added * multiplier).to(dtype).to(tl.float32)
        result = (states + added).to(dtype)
        if OTHER:
            other = tl.load(other_ptr + row * other_stride + column, mask=inside, other=0.0).to(tl.float32)
            if SCALED:
                other = (other * other_multiplier).to(dtype).to(tl.float32)
            result = (result.to(tl.float32) + other).to(dtype)
        if FACTOR:
            result = (result.to(tl.float32) * tl.load(factor_ptr).to(tl.float32)).to(dtype)
        tl.store(states_at, result, mask=inside)
        states = result.to(tl.float32)
    if NEXT:
        normed = normed_row(states, inside, column, next_ptr, next_bias_ptr, next_eps, N, NEXT, dtype)
        if GROUP:
            normed = tl.where(inside, normed.to(tl.float32), 0.0)
            store_rounded(normed, row, 0, out_ptr, scales_ptr, scale_stride, N, BLOCK, GROUP)
        else:
            tl.store(out_ptr + row * N + column, normed, mask=inside)


def warps_for(block: int) -> int:
    """Warps of a program that holds a row of `block` numbers."""
    return min(16, max(4, block // 512))


@overload
def norm_rows(states: torch.Tensor, norm: Norm, *, group: Literal[0] = 0) -> torch.Tensor: ...
@overload
def norm_rows(states: torch.Tensor, norm: Norm, *, group: int) -> torch.Tensor | Fp8Rows: ...
def norm_rows(states: torch.Tensor, norm: Norm, *, group: int = 0) -> torch.Tensor | Fp8Rows:
    """Norm of rows [T, N] with a contiguous last dimension -> [T, N], contiguous.

    Args:
        group: numbers that share a scale in rows of 8 bits; 0: the result is not rounded to these.
    """
    return _launch(states, None, norm, group=group)


def add_rows(
    states: torch.Tensor,
    added: torch.Tensor,
    *,
    multiplier: float = 1.0,
    after: Norm | None = None,
    other: torch.Tensor | None = None,
    other_multiplier: float | None = None,
    factor: torch.Tensor | None = None,
) -> None:
    """`states = (states + multiplier * added) * factor` in place; [T, N] each.

    Args:
        after: norm of what is added.
        other: added after `added`, without the norm; times `other_multiplier`, or None: `multiplier`.
        factor: one number in memory; None: 1.
    """
    _launch(states, added, None, multiplier, after, other, other_multiplier, factor)


@overload
def add_and_norm_rows(
    states: torch.Tensor,
    added: torch.Tensor,
    norm: Norm,
    *,
    multiplier: float = 1.0,
    after: Norm | None = None,
    other: torch.Tensor | None = None,
    other_multiplier: float | None = None,
    group: Literal[0] = 0,
) -> torch.Tensor: ...
@overload
def add_and_norm_rows(
    states: torch.Tensor,
    added: torch.Tensor,
    norm: Norm,
    *,
    multiplier: float = 1.0,
    after: Norm | None = None,
    other: torch.Tensor | None = None,
    other_multiplier: float | None = None,
    group: int,
) -> torch.Tensor | Fp8Rows: ...
def add_and_norm_rows(
    states: torch.Tensor,
    added: torch.Tensor,
    norm: Norm,
    *,
    multiplier: float = 1.0,
    after: Norm | None = None,
    other: torch.Tensor | None = None,
    other_multiplier: float | None = None,
    group: int = 0,
) -> torch.Tensor | Fp8Rows:
    """`add_rows`, and the norm of the sum, see `norm_rows`."""
    return _launch(states, added, norm, multiplier, after, other, other_multiplier, group=group)


def _launch(
    states: torch.Tensor,
    added: torch.Tensor | None,
    following: Norm | None,
    multiplier: float = 1.0,
    after: Norm | None = None,
    other: torch.Tensor | None = None,
    other_multiplier: float | None = None,
    factor: torch.Tensor | None = None,
    *,
    group: int = 0,
) -> torch.Tensor | Fp8Rows:
    rows, width = states.shape
    out: torch.Tensor | Fp8Rows = states if following is None else states.new_empty(0)
    codes, scales = states, states
    if following is not None and group:
        out = Fp8Rows.empty(rows, width, group, states)
        codes, scales = out.codes, out.scales
    elif following is not None:
        out = codes = scales = states.new_empty(rows, width)
    if rows == 0:
        return out
    block = triton.next_power_of_2(width)
    of_other = multiplier if other_multiplier is None else other_multiplier
    weights = (
        states if each is None else each
        for norm in (after, following)
        for each in ((None, None) if norm is None else (norm.weight, norm.bias))
    )
    residual_norm_kernel[(rows,)](
        states,
        states if added is None else added,
        states if other is None else other,
        codes,
        scales,
        *weights,
        states.stride(0),
        0 if added is None else added.stride(0),
        0 if other is None else other.stride(0),
        scales.stride(1),
        multiplier,
        of_other,
        states if factor is None else factor,
        0.0 if after is None else after.eps,
        0.0 if following is None else following.eps,
        N=width,
        BLOCK=block,
        ADD=added is not None,
        OTHER=other is not None,
        SCALED=multiplier != 1.0 or of_other != 1.0,
        FACTOR=factor is not None,
        AFTER=norm_kind(after),
        NEXT=norm_kind(following),
        GROUP=group,
        num_warps=warps_for(block),
        enable_fp_fusion=False,
    )
    return out
