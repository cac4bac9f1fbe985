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


@triton.jit
def weighted(x, factor, weight, OFFSET: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr):
    """float32 x * factor * weight, rounded to DTYPE; see `Norm`."""
    x = x * factor
    weight = weight.to(tl.float32)
    if OFFSET:
        weight = weight + 1.0
    if not WIDE:
        x = x.to(DTYPE).to(tl.float32)
    return (x * weight).to(DTYPE)


@triton.jit
def residual_norm_kernel(
    states_ptr, added_ptr, out_ptr, scales_ptr, after_ptr, next_ptr, states_stride, added_stride,
    scale_stride, multiplier, after_eps, next_eps, N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    SCALED: tl.constexpr, AFTER: tl.constexpr, NEXT: tl.constexpr, OFFSET: tl.constexpr, WIDE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). ADD: states += added, AFTER normalised, SCALED. NEXT: out = norm(states), rounded to 8
    bits with a scale for each GROUP, if that is any."""
    dtype: tl.constexpr = states_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    states_at = states_ptr + row * states_stride + column
    states = tl.load(states_at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(added_ptr + row * added_stride + column, mask=inside, other=0.0).to(tl.float32)
        if AFTER:
            factor = rms_factor(tl.sum(added * added, 0), after_eps, N)
            weight = tl.load(after_ptr + column, mask=inside, other=0.0)
            added = weighted(added, factor, weight, OFFSET, WIDE, dtype).to(tl.float32)
        if SCALED:
            added = (added * multiplier).to(dtype).to(tl.float32)
        result = (states + added).to(dtype)
        tl.store(states_at, result, mask=inside)
        states = result.to(tl.float32)
    if NEXT:
        factor = rms_factor(tl.sum(states * states, 0), next_eps, N)
        weight = tl.load(next_ptr + column, mask=inside, other=0.0)
        normed = weighted(states, factor, weight, OFFSET, WIDE, dtype)
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
    """RMSNorm of rows [T, N] with a contiguous last dimension -> [T, N], contiguous.

    Args:
        group: numbers that share a scale in rows of 8 bits; 0: the result is not rounded to these.
    """
    return _launch(states, None, 1.0, None, norm, group)


def add_rows(
    states: torch.Tensor, added: torch.Tensor, *, multiplier: float = 1.0, after: Norm | None = None
) -> None:
    """`states += multiplier * added` in place; [T, N] each.

    Args:
        after: normalise the sum.
    """
    _launch(states, added, multiplier, after, None, 0)


@overload
def add_and_norm_rows(
    states: torch.Tensor,
    added: torch.Tensor,
    norm: Norm,
    *,
    multiplier: float = 1.0,
    after: Norm | None = None,
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
    group: int,
) -> torch.Tensor | Fp8Rows: ...
def add_and_norm_rows(
    states: torch.Tensor,
    added: torch.Tensor,
    norm: Norm,
    *,
    multiplier: float = 1.0,
    after: Norm | None = None,
    group: int = 0,
) -> torch.Tensor | Fp8Rows:
    """`add_rows`, and the RMSNorm of the sum, see `norm_rows`."""
    return _launch(states, added, multiplier, after, norm, group)


def _launch(
    states: torch.Tensor,
    added: torch.Tensor | None,
    multiplier: float,
    after: Norm | None,
    following: Norm | None,
    group: int,
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
    norm = following or after
    block = triton.next_power_of_2(width)
    residual_norm_kernel[(rows,)](
        states,
        states if added is None else added,
        codes,
        scales,
        states if after is None else after.weight,
        states if following is None else following.weight,
        states.stride(0),
        0 if added is None else added.stride(0),
        scales.stride(1),
        multiplier,
        0.0 if after is None else after.eps,
        0.0 if following is None else following.eps,
        N=width,
        BLOCK=block,
        ADD=added is not None,
        SCALED=multiplier != 1.0,
        AFTER=after is not None,
        NEXT=following is not None,
        OFFSET=norm is not None and norm.offset,
        WIDE=norm is not None and norm.wide,
        GROUP=group,
        num_warps=warps_for(block),
        enable_fp_fusion=False,
    )
    return out
