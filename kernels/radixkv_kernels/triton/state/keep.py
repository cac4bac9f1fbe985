# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels after a layer's rows were computed: its last inputs go into the rings, and, in the same
launch, what heads gave is normed and gated.

Rings are filled at the end, since programs of several heads read inputs that one of them would overwrite.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from radixkv_kernels.gated_heads import GatedHeads
from radixkv_kernels.triton.state.conv import sigmoid, silu
from radixkv_kernels.triton.state.tables import StepTables

BLOCK, WARPS = 256, 2
#: Numbers that a program norms, if one norm has no more, and its warps.
NORM_BLOCK, NORM_WARPS = 1024, 4
#: Parts of rings that a launch fills at most.
_PARTS = 5

Pair = tuple[torch.Tensor, torch.Tensor]


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
def _keep_one_of(
    kept_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, ring_a_ptr, ring_b_ptr, ring_c_ptr, ring_d_ptr, ring_e_ptr,
    a_stride, b_stride, c_stride, d_stride, e_stride, block, A: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SIZE_A: tl.constexpr, SIZE_B: tl.constexpr,
    SIZE_C: tl.constexpr, SIZE_D: tl.constexpr, SIZE_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one block of the A, B, C, D and E numbers of a row."""
    after_a: tl.constexpr = (A + BLOCK - 1) // BLOCK
    after_b: tl.constexpr = after_a + (B + BLOCK - 1) // BLOCK
    after_c: tl.constexpr = after_b + (C + BLOCK - 1) // BLOCK
    after_d: tl.constexpr = after_c + (D + BLOCK - 1) // BLOCK
    if block < after_a:
        _keep(kept_ptr, a_ptr, ring_a_ptr, a_stride, block, SIZE_A, A, BLOCK)
    elif block < after_b:
        _keep(kept_ptr, b_ptr, ring_b_ptr, b_stride, block - after_a, SIZE_B, B, BLOCK)
    elif block < after_c:
        _keep(kept_ptr, c_ptr, ring_c_ptr, c_stride, block - after_b, SIZE_C, C, BLOCK)
    elif block < after_d:
        _keep(kept_ptr, d_ptr, ring_d_ptr, d_stride, block - after_c, SIZE_D, D, BLOCK)
    else:
        _keep(kept_ptr, e_ptr, ring_e_ptr, e_stride, block - after_d, SIZE_E, E, BLOCK)


@triton.jit
def keep_kernel(
    header_ptr, kept_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, ring_a_ptr, ring_b_ptr, ring_c_ptr, ring_d_ptr,
    ring_e_ptr, a_stride, b_stride, c_stride, d_stride, e_stride, A: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SIZE_A: tl.constexpr, SIZE_B: tl.constexpr,
    SIZE_C: tl.constexpr, SIZE_D: tl.constexpr, SIZE_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (kept rows, blocks of BLOCK of A, B, C, D and E numbers a row). A ring holds its rows one after
    the other, whatever shape the CPU's kernels see in it."""
    if tl.program_id(0) >= tl.load(header_ptr + 3):
        return
    _keep_one_of(
        kept_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, ring_a_ptr, ring_b_ptr, ring_c_ptr, ring_d_ptr,
        ring_e_ptr, a_stride, b_stride, c_stride, d_stride, e_stride, tl.program_id(1), A, B, C, D, E,
        SIZE_A, SIZE_B, SIZE_C, SIZE_D, SIZE_E, BLOCK,
    )  # fmt: skip


@triton.jit
def leave_kernel(
    header_ptr, kept_ptr, x_ptr, gate_ptr, norm_ptr, skip_ptr, values_ptr, out_ptr, a_ptr, b_ptr, c_ptr,
    d_ptr, e_ptr, ring_a_ptr, ring_b_ptr, ring_c_ptr, ring_d_ptr, ring_e_ptr, gate_stride, values_stride,
    eps, a_stride, b_stride, c_stride, d_stride, e_stride, A: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SIZE_A: tl.constexpr, SIZE_B: tl.constexpr,
    SIZE_C: tl.constexpr, SIZE_D: tl.constexpr, SIZE_E: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, V: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, NORMS: tl.constexpr,
    WEIGHTS: tl.constexpr, SKIP: tl.constexpr, SILU: tl.constexpr, GATE_FIRST: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of NORMS times W of a row's N numbers, then as `keep_kernel`).

    SKIP: values of heads of V numbers, times the head's share, are added first. WEIGHTS: how many the norm
    has; 0: there is none. Rows past the plan's become zero.
    """
    blocks: tl.constexpr = (N // W + NORMS - 1) // NORMS
    block = tl.program_id(1)
    if block >= blocks:
        if tl.program_id(0) >= tl.load(header_ptr + 3):
            return
        _keep_one_of(
            kept_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, ring_a_ptr, ring_b_ptr, ring_c_ptr, ring_d_ptr,
            ring_e_ptr, a_stride, b_stride, c_stride, d_stride, e_stride, block - blocks, A, B, C, D, E,
            SIZE_A, SIZE_B, SIZE_C, SIZE_D, SIZE_E, BLOCK,
        )  # fmt: skip
        return
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    norm, within = block * NORMS + tl.arange(0, NORMS)[:, None], tl.arange(0, WP)[None, :]
    column = norm * W + within
    inside = (norm < N // W) & (within < W)
    is_row = inside & (within < tl.where(row < tl.load(header_ptr + 2), W, 0))
    x = tl.load(x_ptr + row * N + column, mask=is_row, other=0.0).to(dtype).to(tl.float32)
    if SKIP:
        values = tl.load(values_ptr + row * values_stride + column, mask=is_row, other=0.0).to(tl.float32)
        x += values * tl.load(skip_ptr + column // V, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=is_row, other=0.0).to(tl.float32)
    if SILU:
        gate = silu(gate)
    else:
        gate = sigmoid(gate)
    if GATE_FIRST:
        x *= gate
    if WEIGHTS:
        x *= tl.rsqrt(tl.sum(x * x, 1) / W + eps)[:, None]
        weight = tl.load(norm_ptr + column % WEIGHTS, mask=inside, other=0.0).to(tl.float32)
        if WIDE:
            x *= weight
        else:
            x = (x.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    if not GATE_FIRST:
        x *= gate
    tl.store(out_ptr + row * N + column, x.to(dtype), mask=inside)


def norm_constants(width: int) -> dict[str, int]:
    """Constants of `leave_kernel` for norms of so many numbers."""
    padded = triton.next_power_of_2(width)
    return {"W": width, "WP": padded, "NORMS": max(1, NORM_BLOCK // padded)}


def norm_warps(width: int) -> int:
    """Warps of a program with norms of so many numbers."""
    return min(16, max(NORM_WARPS, triton.next_power_of_2(width) // NORM_BLOCK))


def keep_rows(tables: StepTables, pairs: Sequence[Pair]) -> None:
    """Write rows [T, ...] into parts of rings [num_rings, ...]; at most five pairs of both."""
    if not tables.grids["kept"]:
        return
    arguments, constants, blocks = _arguments(pairs)
    keep_kernel[(tables.grids["kept"], blocks)](
        tables.header, tables.kept, *arguments, **constants, num_warps=WARPS
    )


def leave_rows(
    tables: StepTables,
    of: GatedHeads,
    x: torch.Tensor,
    gate: torch.Tensor,
    values: torch.Tensor,
    pairs: Sequence[Pair],
) -> torch.Tensor:
    """Norm and gate what heads gave, and `keep_rows`.

    Args:
        x: float32 [T, heads, V], rounded to the gate's dtype first.
        gate: [T, heads * V]; `values`: the same, for the skip.

    Returns:
        [T, heads * V] in the gate's dtype, contiguous; padding rows are zero.
    """
    norm, rows, width = of.norm, len(x), of.value_width
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    arguments, constants, keep_blocks = _arguments(pairs)
    sizes = norm_constants(norm.width)
    nothing = gate  # stands for what is not read
    weight = nothing if norm.weight is None else norm.weight
    leave_kernel[(rows, triton.cdiv(width // norm.width, sizes["NORMS"]) + keep_blocks)](
        tables.header,
        tables.kept,
        x,
        gate,
        weight,
        nothing if of.skip is None else of.skip,
        values,
        out,
        *arguments[: 2 * _PARTS],
        gate.stride(0),
        values.stride(0),
        norm.eps,
        *arguments[2 * _PARTS :],
        **constants,
        N=width,
        V=of.value_size,
        **sizes,
        WEIGHTS=0 if norm.weight is None else len(norm.weight),
        SKIP=of.skip is not None,
        SILU=norm.silu,
        GATE_FIRST=norm.gate_first,
        WIDE=norm.wide,
        num_warps=norm_warps(norm.width),
        enable_fp_fusion=False,
    )
    return out


def _arguments(pairs: Sequence[Pair]) -> tuple[list[torch.Tensor | int], dict[str, int], int]:
    """Sources, rings and strides; the kernels' constants; blocks of a row."""
    # What stands for a missing pair has no columns.
    full = [(*pair, pair[0][0].numel()) for pair in pairs] + [(*pairs[0], 0)] * (_PARTS - len(pairs))
    sources, rings, widths = zip(*full, strict=True)
    constants = dict(zip("ABCDE", widths, strict=True))
    constants |= {f"SIZE_{name}": ring.stride(0) for name, ring in zip("ABCDE", rings, strict=True)}
    constants["BLOCK"] = BLOCK
    blocks = sum(triton.cdiv(width, BLOCK) for width in widths)
    return [*sources, *rings, *(source.stride(0) for source in sources)], constants, blocks
