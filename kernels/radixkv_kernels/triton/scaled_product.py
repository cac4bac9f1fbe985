# SPDX-License-Identifier: Apache-2.0
"""Products of rows and weights that are both floats of 8 bits, by torch's library: twice bfloat16's speed.

    rows              weights
    one scale each    one scale for each output      Ada, Hopper and later
    1 x 128           blocks of 128 x 128            Hopper

On a CPU the same numbers are multiplied in float32: the reference that tests use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from radixkv_kernels.triton.fp8_rows import GROUP, Fp8Rows
from radixkv_kernels.triton.tiled_weight import BYTES, TiledWeight

#: Sizes of weights are multiples of it.
_SIZE_MULTIPLE = 16
#: Scales of an output's blocks take a multiple of this in memory.
_SCALE_MULTIPLE = 4


@dataclass(frozen=True)
class ScaledProduct:
    """A weight as torch's scaled products take it.

    Attributes:
        codes: e4m3 [out, in].
        scales: float32, [1, out] or [in / 128, out / 128] with inputs' neighbours one after the other.
        group: inputs that share a scale in rows.
        bias: [out] or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group: int
    bias: torch.Tensor | None

    def multiply(self, rows: Fp8Rows) -> torch.Tensor:
        """[T, in] -> [T, out], in the rows' dtype."""
        if rows.codes.device.type == "cpu":
            return self.reference(rows)
        out = torch._scaled_mm(
            rows.codes, self.codes.t(), scale_a=rows.scales, scale_b=self.scales, out_dtype=rows.dtype
        )[: rows.count]
        return out if self.bias is None else out.add_(self.bias)

    def reference(self, rows: Fp8Rows) -> torch.Tensor:
        """The same from dequantised operands, multiplied in float32."""
        scales, weight = self.scales.t(), self.codes.to(torch.float32)
        if scales.shape[1] > 1 or self.group < weight.shape[1]:
            scales = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        out = F.linear(rows.numbers(), weight * scales[: weight.shape[0], : weight.shape[1]])
        return (out if self.bias is None else out + self.bias.to(torch.float32)).to(rows.dtype)


def scaled_product(weight: TiledWeight) -> ScaledProduct | None:
    """A weight for torch's products; None: they don't take its form or its sizes."""
    sizes, scales = (weight.out_features, weight.in_features), weight.scales
    if weight.kind != BYTES or weight.codes.dtype != torch.float8_e4m3fn or weight.codes.ndim != 2:
        return None
    if scales is None or weight.zeros is not None or any(size % _SIZE_MULTIPLE for size in sizes):
        return None
    scales = scales.to(torch.float32)
    if scales.shape[1] == 1 and weight.block[1] >= weight.in_features:
        by_output = scales.repeat_interleave(weight.block[0], 0)[: weight.out_features]
        return ScaledProduct(weight.codes, by_output.reshape(1, -1), weight.in_features, weight.bias)
    if weight.block != (GROUP, GROUP) or any(size % GROUP for size in sizes):
        return None
    width = scales.shape[1]
    padded = scales.new_zeros(len(scales), -(-width // _SCALE_MULTIPLE) * _SCALE_MULTIPLE)
    padded[:, :width] = scales
    return ScaledProduct(weight.codes, padded[:, :width].t(), GROUP, weight.bias)
