# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of low-rank changes: LoRA adapters' part of a linear layer, on rows of many adapters.

    for each tile (rows [start, end) of the step, all of one adapter):
        for each part of the product (a linear layer):
            inner[rows, part] = x[rows] . down^T          `low_rank_inner_kernel`
            out[rows, columns of part] += inner . up      `low_rank_add_kernel`

A product may consist of several linear layers with the same input (queries, keys and values). An adapter has
a *slot*, a row of a table on the device with the places of its matrices; adapters of any ranks run in one
launch.

    tiles     int32 [tiles, 3]            first row, row after the last, slot; no rows: nothing is done
    places    int64 [slots, parts, 3]     addresses of down [rank, inputs] and up [rank, outputs]; rank;
                                          rank 0: the adapter leaves this linear layer as it is
    columns   int32 [parts, 2]            first of its columns, and how many

Launches depend on shapes alone: a recorded step is replayed with other tiles and places. Sums are float32,
each in a fixed order, so a row's bits do not depend on the rows beside it.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

#: Rows of a tile, and ranks that a program sums at once: the least that tensor cores multiply.
TILE_ROWS, TILE_RANKS = 16, 16
#: Numbers in a row of the tables of tiles and places.
TILE_WIDTH, PLACE_WIDTH = 3, 3
#: Matrices begin at a multiple of this many bytes.
ALIGNMENT = 16
_TILE_INPUTS, _TILE_OUTPUTS = 128, 128


@triton.jit
def low_rank_inner_kernel(
    rows_ptr, inner_ptr, tiles_ptr, places_ptr, rows_stride, slot_stride, first_part,
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, WIDTH / BR, PARTS): inner float32 [T, PARTS, WIDTH], ranks of the tile's adapter only."""
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    start, end = tl.load(tiles_ptr + tl.program_id(0) * 3), tl.load(tiles_ptr + tl.program_id(0) * 3 + 1)
    if start >= end:
        return
    part, slot = tl.program_id(2), tl.load(tiles_ptr + tl.program_id(0) * 3 + 2).to(tl.int64)
    place = places_ptr + slot * slot_stride + (first_part + part) * 3
    rank = tl.load(place + 2).to(tl.int32)
    first_rank = tl.program_id(1) * BR
    if first_rank >= rank:
        return
    down = tl.multiple_of(tl.load(place), 16).to(tl.pointer_type(dtype))
    row = start + tl.arange(0, BM)
    own_rank = first_rank + tl.arange(0, BR)
    column = tl.arange(0, BK)
    x_at = rows_ptr + row[:, None].to(tl.int64) * rows_stride + column[None, :]
    down_at = down + own_rank[None, :] * INPUTS + column[:, None]
    sums = tl.zeros((BM, BR), dtype=tl.float32)
    for k in range(0, INPUTS, BK):
        inside = column < INPUTS - k
        x = tl.load(x_at + k, mask=(row < end)[:, None] & inside[None, :], other=0.0)
        a = tl.load(down_at + k, mask=(own_rank < rank)[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(x, a, sums, input_precision=PRECISION)
    at = inner_ptr + (row[:, None].to(tl.int64) * PARTS + part) * WIDTH + own_rank[None, :]
    tl.store(at, sums, mask=(row < end)[:, None] & (own_rank < rank)[None, :])


@triton.jit
def low_rank_add_kernel(
    inner_ptr, out_ptr, tiles_ptr, places_ptr, columns_ptr, out_stride, slot_stride, first_part,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, ceil(most columns of a part / BN), PARTS): add the changes to out [T, outputs]."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    start, end = tl.load(tiles_ptr + tl.program_id(0) * 3), tl.load(tiles_ptr + tl.program_id(0) * 3 + 1)
    if start >= end:
        return
    part, slot = tl.program_id(2), tl.load(tiles_ptr + tl.program_id(0) * 3 + 2).to(tl.int64)
    first_column, num_columns = tl.load(columns_ptr + part * 2), tl.load(columns_ptr + part * 2 + 1)
    if ALIGNED:
        first_column, num_columns = tl.multiple_of(first_column, 16), tl.multiple_of(num_columns, 16)
    place = places_ptr + slot * slot_stride + (first_part + part) * 3
    rank = tl.load(place + 2).to(tl.int32)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    if (rank == 0) | (tl.program_id(1) * BN >= num_columns):
        return
    up = tl.multiple_of(tl.load(place + 1), 16).to(tl.pointer_type(dtype))
    row = start + tl.arange(0, BM)
    inner_at = inner_ptr + (row[:, None].to(tl.int64) * PARTS + part) * WIDTH
    inside, filled = column < num_columns, row < end
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for first_rank in range(0, rank, BR):
        own_rank = first_rank + tl.arange(0, BR)
        own = own_rank < rank
        a = tl.load(inner_at + own_rank[None, :], mask=filled[:, None] & own[None, :], other=0.0)
        at = up + own_rank[:, None] * num_columns + column[None, :]
        b = tl.load(at, mask=own[:, None] & inside[None, :], other=0.0)
        sums = tl.dot(a, b.to(tl.float32), sums, input_precision=PRECISION)
    out_at = out_ptr + row[:, None].to(tl.int64) * out_stride + first_column + column[None, :]
    mask = filled[:, None] & inside[None, :]
    out = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at, (out + sums).to(dtype), mask=mask)


@dataclass(frozen=True, slots=True)
class LowRankProduct:
    """A product that adapters may change.

    Attributes:
        first_part: number of its first linear layer in the model.
        columns: int32 [parts, 2], on the device; each part begins where the last one ends.
        widths: columns of each part.
    """

    first_part: int
    columns: torch.Tensor
    widths: tuple[int, ...]


def cut_tiles(segments: Iterable[tuple[int, int, int]]) -> npt.NDArray[np.int32]:
    """Cut segments (first row, row after the last, slot) into tiles of at most `TILE_ROWS` rows.

    >>> cut_tiles([(2, 20, 5), (20, 20, 6), (30, 31, 0)]).tolist()
    [[2, 18, 5], [18, 20, 5], [30, 31, 0]]
    """
    tiles = [
        (first, min(first + TILE_ROWS, end), slot)
        for start, end, slot in segments
        for first in range(start, end, TILE_ROWS)
    ]
    return np.array(tiles, dtype=np.int32).reshape(-1, TILE_WIDTH)


def add_low_rank(
    product: LowRankProduct,
    rows: torch.Tensor,
    out: torch.Tensor,
    tiles: torch.Tensor,
    places: torch.Tensor,
    max_rank: int,
) -> None:
    """Add the changes of all tiles to a product's outputs; two launches, whatever the tiles hold.

    Args:
        rows: the product's inputs [T, inputs], last dimension contiguous.
        out: its outputs [T, outputs], last dimension contiguous, of the same dtype as rows and matrices.
        tiles: int32 [tiles, TILE_WIDTH]; of no tiles nothing is launched.
        places: int64 [slots, parts of the model, PLACE_WIDTH].
        max_rank: most ranks of an adapter.

    Raises:
        ValueError: dtypes differ, or a last dimension is not contiguous.
    """
    if rows.dtype != out.dtype or rows.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("rows and outputs must be of one dtype, with contiguous last dimensions")
    if not len(tiles) or not len(rows):
        return
    constants = low_rank_constants(
        rows.shape[1], product.widths, max_rank, is_wide=rows.dtype == torch.float32
    )
    parts, width, columns = len(product.widths), constants[0]["WIDTH"], constants[1]["BN"]
    inner = rows.new_empty(len(rows), parts, width, dtype=torch.float32)
    table = (tiles, places)
    strides = (places.stride(0), product.first_part)
    low_rank_inner_kernel[(len(tiles), width // TILE_RANKS, parts)](
        rows, inner, *table, rows.stride(0), *strides, **constants[0]
    )
    low_rank_add_kernel[(len(tiles), -(-max(product.widths) // columns), parts)](
        inner, out, *table, product.columns, out.stride(0), *strides, **constants[1]
    )


def low_rank_constants(
    inputs: int, widths: Sequence[int], max_rank: int, *, is_wide: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants of the two kernels for a product whose parts have these widths; `is_wide`: of float32."""
    common = {
        "WIDTH": -(-max_rank // TILE_RANKS) * TILE_RANKS,
        "PARTS": len(widths),
        "BM": TILE_ROWS,
        "BR": TILE_RANKS,
        # float32 is multiplied as it is; TF32 has more bits than narrower types.
        "PRECISION": "ieee" if is_wide else "tf32",
    }
    inner = {"INPUTS": inputs, "BK": min(_TILE_INPUTS, max(16, triton.next_power_of_2(inputs)))}
    add = {
        "BN": min(_TILE_OUTPUTS, max(16, triton.next_power_of_2(max(widths)))),
        "ALIGNED": all(width % 16 == 0 for width in widths),
    }
    return common | inner, common | add
