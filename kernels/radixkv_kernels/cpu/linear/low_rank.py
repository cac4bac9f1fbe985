# SPDX-License-Identifier: Apache-2.0
"""Low-rank sums of rows on a CPU, added to the rows of a product: LoRA adapters' part of a linear layer.

    out[r, part] += (x[r] . down^T)[part's ranks] . up[part]     for each row r, with its segment's matrices

A step's rows lie in segments, one after the other, each with matrices of its own; a product may consist of
several parts (queries, keys and values), each a range of its columns with an `up` of its own, while one
`down` holds the rows of all parts. One call computes all segments of a product; threads share its rows and
parts. No operation mixes rows, so a
row's bits depend on that row and its matrices only.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from radixkv_kernels.cpu.linear.launch import ArgumentBlock
from radixkv_kernels.cpu.memory import FAST, compile_kernel, f32_row, pointer, take

# Places in the int64 argument block.
(
    COUNTER,
    ROWS,
    FIRST,
    DEPTH,
    INPUT,
    INPUT_STRIDE,
    OUTPUT,
    OUTPUT_STRIDE,
    SEGMENTS,
    MAX_RANK,
    MOST_PARTS,
    CHUNK,
) = range(12)
_NUM_ARGUMENTS = 12
#: Most parts of a product.
MAX_PARTS = 3
# Places in a segment: int64 values. Rows [START, END) of the step; address of `down`, float32 [RANK, depth].
START, END, DOWN, RANK, NUM_PARTS, PARTS = range(6)
# Places in each of its parts: address of `up`, float32 [PART_RANK, WIDTH]; its first column in the output.
UP, PART_RANK, COLUMN, WIDTH = range(4)
PART_SIZE = 4
SEGMENT_SIZE = PARTS + PART_SIZE * MAX_PARTS
#: Most rows that a thread takes at a time: matrices are read once for all of them.
_MOST_ROWS = 4
#: Columns that are added to at a time, so that those of all rows stay in the L1 cache.
_COLUMNS = 512
#: Multiplications below which waking the other threads costs more than they save.
_SMALL = 32_768


@njit(fastmath=FAST, forceinline=True)
def _dot(a: Any, b: Any) -> Any:
    total = np.float32(0.0)
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@njit(fastmath=FAST, forceinline=True)
def _add_scaled(out: Any, factor: Any, up: Any) -> None:
    for c in range(len(out)):
        out[c] += factor * up[c]


@functools.cache
def _kernel() -> Any:
    def low_rank(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (_NUM_ARGUMENTS,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        rows, depth = arg[ROWS], arg[DEPTH]
        inner = np.empty((arg[CHUNK], arg[MAX_RANK]), np.float32)
        chunks = (rows + arg[CHUNK] - 1) // arg[CHUNK]
        while True:
            item = take(counter)
            if item >= chunks * arg[MOST_PARTS]:
                break
            r, p = item // arg[MOST_PARTS] * arg[CHUNK], item % arg[MOST_PARTS]
            stop = min(r + arg[CHUNK], rows)
            at = arg[SEGMENTS]
            while r < stop:
                own = carray(pointer(at, np.int64), (SEGMENT_SIZE,))
                count = min(stop, own[END] - arg[FIRST]) - r
                at += SEGMENT_SIZE * 8
                if count <= 0:
                    continue
                if p < own[NUM_PARTS]:
                    part, down = PARTS + p * PART_SIZE, own[DOWN]
                    for before in range(p):
                        down += own[PARTS + before * PART_SIZE + PART_RANK] * depth * 4
                    rank, width = own[part + PART_RANK], own[part + WIDTH]
                    x_at = arg[INPUT] + r * arg[INPUT_STRIDE]
                    for j in range(rank):
                        a = f32_row(down + j * depth * 4, depth)
                        for i in range(count):
                            inner[i, j] = _dot(f32_row(x_at + i * arg[INPUT_STRIDE], depth), a)
                    out_at = arg[OUTPUT] + r * arg[OUTPUT_STRIDE] + own[part + COLUMN] * 4
                    for c in range(0, width, _COLUMNS):
                        size = min(_COLUMNS, width - c)
                        for j in range(rank):
                            up = f32_row(own[part + UP] + (j * width + c) * 4, size)
                            for i in range(count):
                                out = f32_row(out_at + i * arg[OUTPUT_STRIDE] + c * 4, size)
                                _add_scaled(out, inner[i, j], up)
                r += count

    return compile_kernel(low_rank, fast=True)


class LowRankSums:
    """The function with its argument block; not thread-safe."""

    def __init__(self) -> None:
        self._block = ArgumentBlock(_NUM_ARGUMENTS)
        self._arguments = self._block.values
        self._kernel = _kernel()
        self._threads = torch.get_num_threads()

    def add(
        self,
        segments: int,
        most_parts: int,
        max_rank: int,
        first: int,
        count: int,
        rows: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Add the sums of rows [first, first + count) of `rows` [T, inputs] to those of `out` [T, outputs].

        Both float32, last dimension contiguous.

        Args:
            segments: address of an int64 array [number of segments, SEGMENT_SIZE], by ascending rows: all
                rows that are computed lie in them.
            most_parts, max_rank: the most of a segment.
        """
        a, (depth, width) = self._arguments, (rows.shape[1], out.shape[1])
        row_bytes, out_bytes = 4 * rows.stride(0), 4 * out.stride(0)
        a[ROWS], a[FIRST], a[DEPTH] = count, first, depth
        a[INPUT], a[INPUT_STRIDE] = rows.data_ptr() + first * row_bytes, row_bytes
        a[OUTPUT], a[OUTPUT_STRIDE] = out.data_ptr() + first * out_bytes, out_bytes
        a[SEGMENTS], a[MOST_PARTS], a[MAX_RANK] = segments, most_parts, max_rank
        a[CHUNK] = 1 if count <= self._threads else 2 if count < 4 * self._threads else _MOST_ROWS
        is_large = count * max_rank * (depth + width) >= _SMALL and count * most_parts > 1
        self._block.run(self._kernel, on_all_threads=is_large)
