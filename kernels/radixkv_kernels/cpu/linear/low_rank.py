# SPDX-License-Identifier: Apache-2.0
"""Low-rank sums of rows on a CPU, added to the rows of a product: LoRA adapters' part of a linear layer.

    out[r, part] += (x[r] . down^T)[part's ranks] . up[part]     for each row r, with its segment's matrices

A step's rows lie in segments, one after the other, each with matrices of its own; a product may consist of
several parts (queries, keys and values), each a range of its columns with an `up` of its own, while one
`down` holds the rows of all parts. One call computes all segments of a product. No operation mixes rows, so a
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
COUNTER, ROWS, FIRST, DEPTH, INPUT, INPUT_STRIDE, OUTPUT, OUTPUT_STRIDE, SEGMENTS, MAX_RANK = range(10)
_NUM_ARGUMENTS = 10
#: Most parts of a product.
MAX_PARTS = 3
# Places in a segment: int64 values. Rows [START, END) of the step; address of `down`, float32 [RANK, depth].
START, END, DOWN, RANK, NUM_PARTS, PARTS = range(6)
# Places in each of its parts: address of `up`, float32 [PART_RANK, WIDTH]; its first column in the output.
UP, PART_RANK, COLUMN, WIDTH = range(4)
PART_SIZE = 4
SEGMENT_SIZE = PARTS + PART_SIZE * MAX_PARTS
#: Rows that a thread takes at a time.
_CHUNK = 2
#: Multiplications below which waking the other threads costs more than they save.
_SMALL = 32_768


@njit(fastmath=FAST, forceinline=True)
def _dot(a: Any, b: Any) -> Any:
    total = np.float32(0.0)
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@functools.cache
def _kernel() -> Any:
    def low_rank(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (_NUM_ARGUMENTS,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        rows, depth = arg[ROWS], arg[DEPTH]
        inner = np.empty(arg[MAX_RANK], np.float32)
        while True:
            first = take(counter) * _CHUNK
            if first >= rows:
                break
            at = arg[SEGMENTS]
            for r in range(first, min(first + _CHUNK, rows)):
                own = carray(pointer(at, np.int64), (SEGMENT_SIZE,))
                while own[END] <= arg[FIRST] + r:
                    at += SEGMENT_SIZE * 8
                    own = carray(pointer(at, np.int64), (SEGMENT_SIZE,))
                x = f32_row(arg[INPUT] + r * arg[INPUT_STRIDE], depth)
                for j in range(own[RANK]):
                    inner[j] = _dot(x, f32_row(own[DOWN] + j * depth * 4, depth))
                begin = 0
                for p in range(own[NUM_PARTS]):
                    part = PARTS + p * PART_SIZE
                    width = own[part + WIDTH]
                    out = f32_row(arg[OUTPUT] + r * arg[OUTPUT_STRIDE] + own[part + COLUMN] * 4, width)
                    for j in range(own[part + PART_RANK]):
                        factor = inner[begin + j]
                        up = f32_row(own[part + UP] + j * width * 4, width)
                        for c in range(width):
                            out[c] += factor * up[c]
                    begin += own[part + PART_RANK]

    return compile_kernel(low_rank, fast=True)


class LowRankSums:
    """The function with its argument block; not thread-safe."""

    def __init__(self) -> None:
        self._block = ArgumentBlock(_NUM_ARGUMENTS)
        self._arguments = self._block.values
        self._kernel = _kernel()

    def add(self, segments: int, first: int, max_rank: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add the sums of rows [N, inputs] to the rows of `out` [N, outputs].

        Both float32, last dimension contiguous.

        Args:
            segments: address of an int64 array [number of segments, SEGMENT_SIZE], by ascending rows.
            first: the step's row that `rows` begins with; all of them lie in segments.
            max_rank: the largest of the segments.
        """
        a, count = self._arguments, rows.shape[0]
        a[ROWS], a[FIRST], a[DEPTH] = count, first, rows.shape[1]
        a[INPUT], a[INPUT_STRIDE] = rows.data_ptr(), 4 * rows.stride(0)
        a[OUTPUT], a[OUTPUT_STRIDE] = out.data_ptr(), 4 * out.stride(0)
        a[SEGMENTS], a[MAX_RANK] = segments, max_rank
        work = count * max_rank * (rows.shape[1] + out.shape[1])
        self._block.run(self._kernel, on_all_threads=count > _CHUNK and work >= _SMALL)
