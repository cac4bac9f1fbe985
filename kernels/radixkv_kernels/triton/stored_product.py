# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of a linear layer whose weight is a stored form: rows times codes, and the bias.

The form is read tile by tile (`weight_tiles.py`) and never expanded. Programs have 64 outputs and
16 to 128 rows; a row's sums go over its inputs in one order in each of these.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.triton.tiled_weight import FIXED_ROWS, TiledWeight
from radixkv_kernels.triton.weight_tiles import multiply_tile


@triton.jit
def stored_product_kernel(
    x_ptr,
    w_ptr,
    plane_ptr,
    s_ptr,
    z_ptr,
    super_ptr,
    order_ptr,
    bias_ptr,
    out_ptr,
    rows,
    out_stride,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FORM: tl.constexpr,
):
    """Grid (ceil(T / BM), ceil(N / BN)): out [T, N] = x times the weight's transpose, and the bias."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    on = row < rows
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = n < N
    w = (w_ptr, plane_ptr, s_ptr, z_ptr, super_ptr, order_ptr, bias_ptr)
    acc, _ = multiply_tile(x_ptr, row, on, w, n, n, inside, BM, BN, BK, FORM, False)
    at = out_ptr + row.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & on[None, :])


def multiply_stored(
    rows: torch.Tensor, weight: TiledWeight, *, out: torch.Tensor | None = None, fixed_rows: bool = False
) -> torch.Tensor:
    """Multiply rows [T, in], contiguous, by a stored weight -> [T, out], summed up in float32.

    Args:
        out: where to put the result; its last dimension is contiguous.
        fixed_rows: a row's bits do not depend on the number of rows.
    """
    count = len(rows)
    if out is None:
        out = rows.new_empty(count, weight.out_features)
    if count:
        tile = weight.tile(rows.dtype, FIXED_ROWS if fixed_rows else count)
        stored_product_kernel[(-(-count // tile["BM"]), -(-weight.out_features // tile["BN"]))](
            rows,
            *weight.arguments(),
            out,
            count,
            out.stride(0),
            N=weight.out_features,
            FORM=weight.form,
            **tile,
        )
    return out
