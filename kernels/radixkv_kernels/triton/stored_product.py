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

from radixkv_kernels.triton.weight_tiles import MXFP4, TiledWeight, add_product, load_rows

#: Rows of a tile where a row's bits must not depend on the number of rows: instructions differ by tile.
FIXED_ROWS = 16


@triton.jit
def stored_product_kernel(
    x_ptr,
    w_ptr,
    s_ptr,
    z_ptr,
    bias_ptr,
    out_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FORM: tl.constexpr,
    N_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    GRID: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Grid (ceil(T / BM), ceil(N / BN)): out [T, N] = x [T, K] times the weight's transpose, and the bias."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    on = row < rows
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = n < N
    acc = tl.zeros((BN, BM), tl.float32)
    for k in range(0, K, BK):
        even, odd = load_rows(x_ptr, row, on, k, K, BK, FORM)
        acc = add_product(
            acc, even, odd, w_ptr, s_ptr, z_ptr, n, inside, k, K, BK, FORM, N_STRIDE, K_STRIDE, HEIGHT, WIDTH,
            GRID, ZEROS,
        )  # fmt: skip
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = out_ptr + row.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & on[None, :])


def stored_product_tile(weight: TiledWeight, dtype: torch.dtype, rows: int) -> dict[str, int]:
    """Rows, outputs and inputs of a program's tile, warps and stages."""
    height = FIXED_ROWS
    while height < min(rows, 128):
        height *= 2
    if dtype == torch.float32:
        return {"BM": min(height, 32), "BN": 32, "BK": weight.step(32), "num_warps": 4, "num_stages": 2}
    most = 128 if weight.form == MXFP4 else 64
    warps = 8 if height == 128 else 4
    return {"BM": height, "BN": 64, "BK": weight.step(most), "num_warps": warps, "num_stages": 4}


def multiply_stored(rows: torch.Tensor, weight: TiledWeight, *, fixed_rows: bool = False) -> torch.Tensor:
    """Multiply rows [T, in], contiguous, by a stored weight -> [T, out], summed up in float32.

    Args:
        fixed_rows: a row's bits do not depend on the number of rows.
    """
    count = len(rows)
    out = rows.new_empty(count, weight.out_features)
    if count:
        tile = stored_product_tile(weight, rows.dtype, FIXED_ROWS if fixed_rows else count)
        stored_product_kernel[(-(-count // tile["BM"]), -(-weight.out_features // tile["BN"]))](
            rows,
            *weight.arguments(),
            out,
            count,
            N=weight.out_features,
            K=weight.in_features,
            **tile,
            **weight.constants(),
        )
    return out
