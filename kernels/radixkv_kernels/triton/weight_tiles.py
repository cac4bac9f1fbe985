# SPDX-License-Identifier: Apache-2.0
"""Weights as Triton kernels read them: a tile of any stored form, times a tile of rows.

    form      a number                                    read as
    plain     itself                                      [..., out, in] in any order of the last two
    bytes     (code - zero) * scale of its block          int8, uint8 or 8-bit floats [..., out, in]
    nibbles   (code - zero) * scale of its block          uint8 [..., out, in / 2], even inputs in low halves
    mxfp4     e2m1 code * 2^(scale - 127)                 the same; uint8 scales [..., out, in / 32]

Codes less their zero points are exact in 16-bit floats, so products of codes are summed in float32 over what
shares a scale, and the scale multiplies the sum. An mxfp4 number is exact itself. Weights are the tall
operand: few rows still give Hopper's wide instructions.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

PLAIN, BYTES, NIBBLES, MXFP4 = range(4)
#: Inputs that share a scale of mxfp4.
_MXFP4_GROUP = 32
#: 2^126: an e2m1 code in float32's exponent and mantissa is that much too small.
_E2M1_SCALE = tl.constexpr(2.0**126)


@dataclass(frozen=True)
class TiledWeight:
    """Weights of one product, [out, in], or of experts, [experts, out, in].

    Make it by `plain`, `scaled` or `mxfp4`.

    Attributes:
        codes: numbers or codes; `scales`, `zeros`: of blocks, [..., out / height, in / width], rounded up.
        out_features, in_features: of one product.
        block: height and width of what shares a scale.
        bias: [..., out]; None: there is none.
    """

    form: int
    codes: torch.Tensor
    out_features: int
    in_features: int
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    block: tuple[int, int] = (1, 1)
    bias: torch.Tensor | None = None

    @classmethod
    def plain(
        cls, weight: torch.Tensor, bias: torch.Tensor | None = None, *, inputs_first: bool = False
    ) -> TiledWeight:
        """Floats [..., out, in], or with inputs first [..., in, out]; nothing is copied."""
        weight = weight.transpose(-1, -2) if inputs_first else weight
        return cls(PLAIN, weight, weight.shape[-2], weight.shape[-1], bias=bias)

    @classmethod
    def scaled(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        block: tuple[int, int],
        zeros: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        packed: bool = False,
    ) -> TiledWeight:
        """Codes of 8 bits, or of 4 (`packed`), with a scale for each block.

        Raises:
            ValueError: scales change within 16 inputs, or their grid does not fit.
        """
        height, width = block
        outputs, inputs = codes.shape[-2], codes.shape[-1] * (2 if packed else 1)
        grid = [-(-outputs // height), -(-inputs // width)]
        if list(scales.shape[-2:]) != grid or (width % 16 and width < inputs):
            raise ValueError(
                f"{outputs} x {inputs} codes in blocks of {list(block)} with {list(scales.shape)} scales: "
                f"expected {grid}, and blocks of a multiple of 16 inputs"
            )
        scales = scales.to(torch.float32).contiguous()
        zeros = None if zeros is None else zeros.to(torch.float32).contiguous()
        form = NIBBLES if packed else BYTES
        return cls(form, codes.contiguous(), outputs, inputs, scales, zeros, block, bias)

    @classmethod
    def mxfp4(
        cls, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
    ) -> TiledWeight:
        """Codes uint8 [..., out, in / 2] and exponents uint8 [..., out, in / 32], as gpt-oss stores them.

        Raises:
            ValueError: shapes that do not fit.
        """
        outputs, inputs = codes.shape[-2], 2 * codes.shape[-1]
        if inputs % _MXFP4_GROUP or list(scales.shape[-2:]) != [outputs, inputs // _MXFP4_GROUP]:
            raise ValueError(f"{outputs} x {inputs} codes of mxfp4 with {list(scales.shape)} scales")
        block = (1, _MXFP4_GROUP)
        return cls(
            MXFP4,
            codes.contiguous(),
            outputs,
            inputs,
            scales.view(torch.uint8).contiguous(),
            None,
            block,
            bias,
        )

    def step(self, most: int) -> int:
        """Inputs that a kernel takes at a time, a power of two up to `most`: no scale changes within them."""
        if self.form in (BYTES, NIBBLES) and self.block[1] < self.in_features:
            return math.gcd(most, self.block[1])
        return max(_MXFP4_GROUP, most) if self.form == MXFP4 else most

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Pointers that `add_product` and `load_bias` take: codes, scales, zeros and bias."""
        parts = (self.scales, self.zeros, self.bias)
        return (self.codes, *(self.codes if part is None else part for part in parts))

    def constants(self) -> dict[str, Any]:
        """Return the constants for which kernels are specialised."""
        height, width = self.block
        return {
            "FORM": self.form,
            "N_STRIDE": self.codes.stride(-2),
            "K_STRIDE": self.codes.stride(-1),
            "HEIGHT": height,
            "WIDTH": width,
            "GRID": 0 if self.scales is None else self.scales.shape[-1],
            "ZEROS": self.zeros is not None,
            "BIAS": self.bias is not None,
        }

    def expert_strides(self) -> tuple[int, int]:
        """Elements from one expert to the next, of codes and of scales."""
        scales = 0 if self.scales is None or self.scales.ndim < 3 else self.scales.stride(0)
        return (self.codes.stride(0) if self.codes.ndim > 2 else 0), scales


@triton.jit
def load_rows(x_ptr, row, on, k, K: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr):
    """Inputs k to k + BK of some rows of [*, K]: two tiles, of codes of 4 bits the even and the odd ones."""
    at = x_ptr + row.to(tl.int64)[:, None] * K
    if FORM < 2:
        column = k + tl.arange(0, BK)
        even = tl.load(at + column[None, :], mask=on[:, None] & (column < K)[None, :], other=0.0)
        odd = even
    else:
        column = k + 2 * tl.arange(0, BK // 2)
        mask = on[:, None] & (column < K)[None, :]
        even = tl.load(at + column[None, :], mask=mask, other=0.0)
        odd = tl.load(at + column[None, :] + 1, mask=mask, other=0.0)
    return even, odd


@triton.jit
def e2m1(code):
    """Codes of 4 bits, int32 -> float32, times 2^-126."""
    return (((code & 7) << 22) | ((code >> 3) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def add_product(
    acc,
    even,
    odd,
    w_ptr,
    s_ptr,
    z_ptr,
    n,
    inside,
    k,
    K: tl.constexpr,
    BK: tl.constexpr,
    FORM: tl.constexpr,
    N_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    GRID: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """acc [len(n), rows] += weights [n, k to k + BK] times the rows of `load_rows`."""
    dtype: tl.constexpr = even.dtype
    if FORM == 0:
        column = k + tl.arange(0, BK)
        at = w_ptr + n.to(tl.int64)[:, None] * N_STRIDE + column.to(tl.int64)[None, :] * K_STRIDE
        w = tl.load(at, mask=inside[:, None] & (column < K)[None, :], other=0.0)
        acc = tl.dot(w.to(dtype), tl.trans(even), acc, input_precision="ieee")
    elif FORM == 1:
        column = k + tl.arange(0, BK)
        at = w_ptr + n.to(tl.int64)[:, None] * N_STRIDE + column[None, :]
        code = tl.load(at, mask=inside[:, None] & (column < K)[None, :], other=0.0).to(tl.float32)
        place = (n // HEIGHT) * GRID + k // WIDTH
        if ZEROS:
            code -= tl.load(z_ptr + place, mask=inside, other=0.0)[:, None]
        part = tl.zeros(acc.shape, tl.float32)
        part = tl.dot(code.to(dtype), tl.trans(even), part, input_precision="ieee")
        acc += part * tl.load(s_ptr + place, mask=inside, other=0.0)[:, None]
    else:
        byte = k // 2 + tl.arange(0, BK // 2)
        within = inside[:, None] & (byte < K // 2)[None, :]
        at = w_ptr + n.to(tl.int64)[:, None] * N_STRIDE + byte[None, :]
        code = tl.load(at, mask=within, other=0).to(tl.int32)
        low = code & 15
        high = code >> 4
        if FORM == 2:
            place = (n // HEIGHT) * GRID + k // WIDTH
            first = low.to(tl.float32)
            second = high.to(tl.float32)
            if ZEROS:
                zero = tl.load(z_ptr + place, mask=inside, other=0.0)[:, None]
                first -= zero
                second -= zero
            part = tl.zeros(acc.shape, tl.float32)
            part = tl.dot(first.to(dtype), tl.trans(even), part, input_precision="ieee")
            part = tl.dot(second.to(dtype), tl.trans(odd), part, input_precision="ieee")
            acc += part * tl.load(s_ptr + place, mask=inside, other=0.0)[:, None]
        else:
            at = s_ptr + n[:, None] * GRID + (byte // 16)[None, :]
            exponent = tl.load(at, mask=within, other=0).to(tl.int32)
            scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
            first = (e2m1(low) * _E2M1_SCALE * scale).to(dtype)
            second = (e2m1(high) * _E2M1_SCALE * scale).to(dtype)
            acc = tl.dot(first, tl.trans(even), acc, input_precision="ieee")
            acc = tl.dot(second, tl.trans(odd), acc, input_precision="ieee")
    return acc
