# SPDX-License-Identifier: Apache-2.0
"""Rows rounded to floats of 8 bits (e4m3), for torch's scaled products: codes and their scales.

A scale belongs to a whole row or to 128 neighbours of it: the largest magnitude becomes 448. Kernels of norms
and gates round their results at once (`store_rounded`); `round_rows` does it for others.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: Numbers that share a scale, where blocks of weights do; else a whole row does.
GROUP = 128
#: torch's products of blocks want a multiple of rows.
ROW_MULTIPLE = 4
_LARGEST = tl.constexpr(448.0)
#: Of a row of zeros, too, the scale is none.
_SMALLEST = tl.constexpr(1e-30)


@dataclass(frozen=True)
class Fp8Rows:
    """Rows [T, N], each number a code times its scale.

    Attributes:
        codes: e4m3 [P, N], T rounded up to a multiple of 4; what the last rows hold is of no use.
        scales: float32 [P, groups], those of one group one after the other.
        count: T.
        dtype: of the rows before, and of what is made of them.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    count: int
    dtype: torch.dtype

    @classmethod
    def empty(cls, count: int, width: int, group: int, like: torch.Tensor) -> Fp8Rows:
        """Rows without values, on the device of `like` and with its dtype."""
        padded = -(-count // ROW_MULTIPLE) * ROW_MULTIPLE
        codes = like.new_empty(padded, width, dtype=torch.float8_e4m3fn)
        groups = -(-width // group)
        # Contiguous by rows if there is one group, as torch wants it; else by groups.
        scales = like.new_empty(groups, padded, dtype=torch.float32)
        scales = scales.view(padded, 1) if groups == 1 else scales.t()
        return cls(codes, scales, count, like.dtype)

    def numbers(self) -> torch.Tensor:
        """What the rows stand for, float32 [T, N]."""
        codes, width = self.codes[: self.count].to(torch.float32), self.codes.shape[1]
        group = -(-width // self.scales.shape[1])
        return codes * self.scales[: self.count].repeat_interleave(group, 1)[:, :width]


@triton.jit
def store_rounded(
    x, row, start, codes_ptr, scales_ptr, scale_stride, N: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Store numbers `start` to `start` + BLOCK of a row, float32, zeros beyond N, as codes and scales."""
    column = start + tl.arange(0, BLOCK)
    if GROUP >= N:
        scale = tl.maximum(tl.max(tl.abs(x), 0) / _LARGEST, _SMALLEST)
        x = tl.math.div_rn(x, scale)
        tl.store(scales_ptr + row, scale)
    else:
        groups: tl.constexpr = BLOCK // GROUP
        x = tl.reshape(x, (groups, GROUP))
        scale = tl.maximum(tl.max(tl.abs(x), 1) / _LARGEST, _SMALLEST)
        x = tl.reshape(tl.math.div_rn(x, tl.broadcast_to(scale[:, None], (groups, GROUP))), (BLOCK,))
        group = start // GROUP + tl.arange(0, groups)
        tl.store(scales_ptr + group * scale_stride + row, scale, mask=group * GROUP < N)
    tl.store(codes_ptr + row * N + column, x.to(tl.float8e4nv), mask=column < N)


@triton.jit
def round_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, stride, scale_stride, N: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (rows, ceil(N / BLOCK)): rows [T, N] as codes and scales."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + column, mask=column < N, other=0.0).to(tl.float32)
    store_rounded(x, row, start, codes_ptr, scales_ptr, scale_stride, N, BLOCK, GROUP)


def rounding_block(width: int, group: int) -> int:
    """Numbers of a program: a whole row where it has one scale."""
    whole = triton.next_power_of_2(width)
    return whole if group >= width else max(group, min(1024, whole))


def rounding_warps(block: int) -> int:
    """Warps of a program that holds `block` numbers."""
    return min(16, max(4, block // 512))


def round_rows(rows: torch.Tensor, group: int) -> Fp8Rows:
    """Round rows [T, N], whose last dimension is contiguous, with a scale for each `group` of numbers."""
    count, width = rows.shape
    out = Fp8Rows.empty(count, width, group, rows)
    if count:
        block = rounding_block(width, group)
        round_rows_kernel[(count, -(-width // block))](
            rows,
            out.codes,
            out.scales,
            rows.stride(0),
            out.scales.stride(1),
            N=width,
            BLOCK=block,
            GROUP=group,
            num_warps=rounding_warps(block),
            enable_fp_fusion=False,
        )
    return out
