# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that puts a step's last inputs into the rings, after the layer's rows were computed.

It runs after them, since programs of several heads read inputs that one of them would overwrite.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from radixkv_kernels.triton.state.tables import StepTables

BLOCK, WARPS = 256, 2


@triton.jit
def _keep(kept_ptr, source_ptr, ring_ptr, stride, block, SIZE: tl.constexpr, WIDTH: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Copy one block of one row to its place in a ring of SIZE numbers."""
    kept = kept_ptr + tl.program_id(0) * 4
    row, ring, place = tl.load(kept).to(tl.int64), tl.load(kept + 1).to(tl.int64), tl.load(kept + 2)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(source_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(ring_ptr + ring * SIZE + place * WIDTH + column, x, mask=inside)


@triton.jit
def keep_kernel(
    header_ptr, kept_ptr, a_ptr, b_ptr, c_ptr, d_ptr, ring_a_ptr, ring_b_ptr, ring_c_ptr, ring_d_ptr,
    a_stride, b_stride,
    c_stride, d_stride, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    SIZE_A: tl.constexpr, SIZE_B: tl.constexpr, SIZE_C: tl.constexpr, SIZE_D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (kept rows, blocks of BLOCK of A, B, C and D numbers a row). A ring holds its rows one after the
    other, whatever shape the CPU's kernels see in it."""
    if tl.program_id(0) >= tl.load(header_ptr + 4):
        return
    block = tl.program_id(1)
    after_a: tl.constexpr = (A + BLOCK - 1) // BLOCK
    after_b: tl.constexpr = after_a + (B + BLOCK - 1) // BLOCK
    after_c: tl.constexpr = after_b + (C + BLOCK - 1) // BLOCK
    if block < after_a:
        _keep(kept_ptr, a_ptr, ring_a_ptr, a_stride, block, SIZE_A, A, BLOCK)
    elif block < after_b:
        _keep(kept_ptr, b_ptr, ring_b_ptr, b_stride, block - after_a, SIZE_B, B, BLOCK)
    elif block < after_c:
        _keep(kept_ptr, c_ptr, ring_c_ptr, c_stride, block - after_b, SIZE_C, C, BLOCK)
    else:
        _keep(kept_ptr, d_ptr, ring_d_ptr, d_stride, block - after_c, SIZE_D, D, BLOCK)


def keep_rows(tables: StepTables, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write rows [T, ...] into parts of rings [num_rings, ...]; at most four pairs of both."""
    if not tables.grids["kept"]:
        return
    # What stands for a missing pair has no columns.
    full = [(*pair, pair[0][0].numel()) for pair in pairs] + [(*pairs[0], 0)] * (4 - len(pairs))
    sources, rings, widths = zip(*full, strict=True)
    keep_kernel[(tables.grids["kept"], sum(triton.cdiv(width, BLOCK) for width in widths))](
        tables.header,
        tables.kept,
        *sources,
        *rings,
        *(source.stride(0) for source in sources),
        *widths,
        *(ring.stride(0) for ring in rings),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
