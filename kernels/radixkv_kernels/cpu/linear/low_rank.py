# SPDX-License-Identifier: Apache-2.0
"""Low-rank changes of a product's rows on a CPU: LoRA adapters' part of a linear layer.

    inner[r] = x[r] . down^T        `LowRankSums.inner`, before the product
    out[r] += inner[r] . up         inside the product, on its sums in the L1 cache, or `LowRankSums.add`

A step's rows lie in segments, one after the other, each with matrices of its own. A product may consist of
several linear layers (queries, keys and values): one `down` holds the ranks of all, and each panel of the
product's columns has the ranks that change it. Matrices lie in panels, in the order the loops read them:

    down    [ranks / DOWN_COLUMNS][input][DOWN_COLUMNS]        zeros after the last rank
    up      for each panel of outputs [its ranks][COLUMNS]

Each sum adds its products in order, one fused multiply-add each, so a row's bits depend on that row and its
matrices only.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from radixkv_kernels.cpu.compiling import compile_kernel
from radixkv_kernels.cpu.linear.float_product import COLUMNS
from radixkv_kernels.cpu.linear.launch import ArgumentBlock
from radixkv_kernels.cpu.memory import aligned, call, emit_prefetch, f32_row, pointer, take
from radixkv_kernels.cpu.vectors import LANES, Emitter

#: Ranks of a panel of `down`.
DOWN_COLUMNS = 16
# Places in the block of a product's changes: address of the function that adds them to a product's sums; the
# inner values float32 [rows from FIRST on, INNER_STRIDE bytes]; the segments.
FUNCTION, INNER, INNER_STRIDE, FIRST, NUM_SEGMENTS, SEGMENTS = range(6)
_BLOCK_SIZE = 6
# Places in a segment: int64 values. Rows [START, END) of the step; addresses of `down` and of the table of
# `up`; RANK: of all parts, 0: these rows stay as they are.
START, END, DOWN, RANK, UPS = range(5)
SEGMENT_SIZE = 5
# Places in a row of the table, one for each panel of outputs: address of its `up`, and the ranks it takes.
UP, FIRST_RANK, NUM_RANKS = range(3)
UP_SIZE = 3
# Places in the int64 argument block of a launch.
COUNTER, CHANGES, ROWS, DEPTH, INPUT, INPUT_STRIDE, OUTPUT, OUTPUT_STRIDE, WIDTH, CHUNK, PANELS = range(11)
_NUM_ARGUMENTS = 11
#: Rows of a tile: with their sums, two vectors each, a processor of 16 registers is full.
_TILE_ROWS = 6
#: Rows whose outputs are added to at a time.
_ITEM_ROWS = 48
#: Multiplications below which waking the other threads costs more than they save.
_SMALL = 32_768
_UNROLL = 4
_DOWN_VECTORS, _UP_VECTORS = DOWN_COLUMNS // LANES, COLUMNS // LANES
_LONG = ir.IntType(64)


def _tile_intrinsic(
    typing_context: Any, num_rows: Any, vectors: Any, x: Any, stride: Any, panel: Any, depth: Any,
    ahead: Any, out: Any,
) -> Any:  # fmt: skip
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for rows in range(1, _TILE_ROWS + 1):
            with builder.if_then(builder.icmp_signed("==", args[0], _LONG(rows))):
                _emit_tile(Emitter(builder), rows, vectors.literal_value, *args[2:])
        return context.get_dummy_value()

    return types.void(num_rows, vectors, x, stride, panel, depth, ahead, out), codegen


def _emit_tile(
    e: Emitter, rows: int, vectors: int, x: Any, stride: Any, panel: Any, depth: Any, ahead: Any, out: Any
) -> None:
    builder, floats = e.builder, ir.VectorType(ir.FloatType(), LANES)
    places = [[e.at(out, (r * vectors + v) * LANES * 4) for v in range(vectors)] for r in range(rows)]
    sums = [[e.variable(floats, e.load(place, LANES)) for place in own] for own in places]
    bases = [builder.add(x, builder.mul(stride, _LONG(r))) for r in range(rows)]

    def step(number: Any) -> None:
        at = e.at(panel, e.scaled(number, vectors * LANES * 4))
        columns = [e.load(e.at(at, v * LANES * 4), LANES) for v in range(vectors)]
        for base, own in zip(bases, sums, strict=True):
            value = e.splat(e.scalar(e.at(base, e.scaled(number, 4))), LANES)
            for column, place in zip(columns, own, strict=True):
                builder.store(e.call("fma", value, column, builder.load(place)), place)

    whole = builder.udiv(depth, _LONG(_UNROLL))
    with e.loop(whole) as index:
        at = e.scaled(index, _UNROLL)
        with builder.if_then(builder.icmp_signed("!=", ahead, _LONG(0))):
            later = e.at(e.at(panel, e.scaled(at, vectors * LANES * 4)), ahead)
            for line in range(0, _UNROLL * vectors * LANES * 4, 64):
                emit_prefetch(builder, e.at(later, line))
        for k in range(_UNROLL):
            step(builder.add(at, _LONG(k)))
    done = e.scaled(whole, _UNROLL)
    with e.loop(builder.sub(depth, done)) as index:
        step(builder.add(done, index))
    for own, row in zip(sums, places, strict=True):
        for total, place in zip(own, row, strict=True):
            e.store(builder.load(total), place)


#: tile(rows, vectors, x, stride, panel, depth, ahead, out):
#: out[rows, vectors * LANES] += x[rows, depth] . panel. At most `_TILE_ROWS` rows; vectors is a constant; x,
#: panel, out: addresses; stride: bytes from row to row; ahead: bytes from the reads to the prefetches, or 0.
_tile: Any = intrinsic(prefer_literal=True)(_tile_intrinsic)


@functools.cache
def _inner_kernel() -> Any:
    def inner(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (_NUM_ARGUMENTS,), np.int64)
        block = carray(pointer(arg[CHANGES], np.int64), (_BLOCK_SIZE,))
        counter = pointer(arg[COUNTER], np.int64)
        sums = aligned(_TILE_ROWS * DOWN_COLUMNS)
        sums_at = np.int64(sums.ctypes.data)
        panels, depth, stride, first = arg[PANELS], arg[DEPTH], arg[INPUT_STRIDE], block[FIRST]
        chunks = (arg[ROWS] + arg[CHUNK] - 1) // arg[CHUNK]
        while True:
            item = take(counter)
            if item >= chunks * panels:
                break
            begin, p = first + item // panels * arg[CHUNK], item % panels
            stop = min(begin + arg[CHUNK], first + arg[ROWS])
            for s in range(block[NUM_SEGMENTS]):
                own = carray(pointer(block[SEGMENTS] + s * SEGMENT_SIZE * 8, np.int64), (SEGMENT_SIZE,))
                low, high = max(begin, own[START]), min(stop, own[END])
                if low < high and p * DOWN_COLUMNS < own[RANK]:
                    n = high - low
                    sums[: n * DOWN_COLUMNS] = np.float32(0.0)
                    down = own[DOWN] + p * depth * DOWN_COLUMNS * 4
                    _tile(n, _DOWN_VECTORS, arg[INPUT] + low * stride, stride, down, depth, 0, sums_at)
                    for i in range(n):
                        at = block[INNER] + (low - first + i) * block[INNER_STRIDE] + p * DOWN_COLUMNS * 4
                        f32_row(at, DOWN_COLUMNS)[:] = sums[i * DOWN_COLUMNS : (i + 1) * DOWN_COLUMNS]

    return compile_kernel(inner)


@functools.cache
def _change_function() -> Any:
    def change(block_at, begin, n, panel, group, sums):  # type: ignore[no-untyped-def]
        """Add the changes of rows [begin, begin + n) to their sums [group, n, COLUMNS] of a few panels."""
        block = carray(pointer(block_at, np.int64), (_BLOCK_SIZE,))
        stride = block[INNER_STRIDE]
        for s in range(block[NUM_SEGMENTS]):
            own = carray(pointer(block[SEGMENTS] + s * SEGMENT_SIZE * 8, np.int64), (SEGMENT_SIZE,))
            low, high = max(begin, own[START]), min(begin + n, own[END])
            if low < high and own[RANK]:
                for p in range(group):
                    up = carray(pointer(own[UPS] + (panel + p) * UP_SIZE * 8, np.int64), (UP_SIZE,))
                    if up[NUM_RANKS]:
                        tiles, r = (high - low + _TILE_ROWS - 1) // _TILE_ROWS, low
                        # The next panel lies behind this one; between them, other adapters' are read.
                        ahead = up[NUM_RANKS] * COLUMNS * 4
                        for tile in range(tiles):
                            after = low + (high - low) * (tile + 1) // tiles
                            x = block[INNER] + (r - block[FIRST]) * stride + up[FIRST_RANK] * 4
                            out = sums + (p * n + r - begin) * COLUMNS * 4
                            _tile(after - r, _UP_VECTORS, x, stride, up[UP], up[NUM_RANKS], ahead, out)
                            r, ahead = after, 0

    return compile_kernel(change, parameters=6)


@functools.cache
def _add_kernel() -> Any:
    def add(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (_NUM_ARGUMENTS,), np.int64)
        block = carray(pointer(arg[CHANGES], np.int64), (_BLOCK_SIZE,))
        counter = pointer(arg[COUNTER], np.int64)
        sums = aligned(_ITEM_ROWS * COLUMNS)
        sums_at = np.int64(sums.ctypes.data)
        first, rows, panels = block[FIRST], arg[ROWS], arg[PANELS]
        parts = (rows + _ITEM_ROWS - 1) // _ITEM_ROWS
        while True:
            item = take(counter)
            if item >= parts * panels:
                break
            begin, p = first + item % parts * _ITEM_ROWS, item // parts
            n, column = min(_ITEM_ROWS, first + rows - begin), p * COLUMNS
            width = min(COLUMNS, arg[WIDTH] - column)
            sums[: n * COLUMNS] = np.float32(0.0)
            call(block[FUNCTION], (arg[CHANGES], begin, n, p, 1, sums_at))
            for i in range(n):
                out = f32_row(arg[OUTPUT] + (begin + i) * arg[OUTPUT_STRIDE] + column * 4, width)
                own = sums[i * COLUMNS : i * COLUMNS + width]
                for c in range(width):
                    out[c] += own[c]

    return compile_kernel(add)


class LowRankSums:
    """The functions with their argument blocks; not thread-safe."""

    def __init__(self) -> None:
        self._kernel = _inner_kernel()
        self._change = _change_function()
        self._block = ArgumentBlock(_NUM_ARGUMENTS)
        self._arguments = self._block.values
        self._changes = np.zeros(_BLOCK_SIZE, np.int64)
        self._address: int = self._changes.ctypes.data
        self._changes[FUNCTION] = self._change.address
        self._arguments[CHANGES] = self._address
        self._inner = np.empty(0, np.float32)

    def inner(
        self, segments: int, num_segments: int, rank: int, first: int, count: int, rows: torch.Tensor
    ) -> int:
        """Multiply rows [first, first + count) with the `down` of their segments.

        Args:
            rows: float32 [T, inputs], last dimension contiguous.
            segments: address of an int64 array [num_segments, SEGMENT_SIZE], by ascending rows.
            rank: the most of a segment.

        Returns:
            Address of the changes, for a product of the same rows; valid until the next call.
        """
        a, c = self._arguments, self._changes
        depth, stride = rows.shape[1], 4 * rows.stride(0)
        panels = -(-rank // DOWN_COLUMNS)
        width = panels * DOWN_COLUMNS
        if self._inner.size < count * width:
            self._inner = np.empty(count * width, np.float32)
            c[INNER] = self._inner.ctypes.data
        c[INNER_STRIDE], c[FIRST], c[NUM_SEGMENTS], c[SEGMENTS] = 4 * width, first, num_segments, segments
        a[ROWS], a[DEPTH], a[PANELS], a[CHUNK] = count, depth, panels, min(_TILE_ROWS, (count + 1) // 2)
        a[INPUT], a[INPUT_STRIDE] = rows.data_ptr(), stride
        self._block.run(self._kernel, on_all_threads=count * width * depth >= _SMALL and count * panels > 1)
        return self._address

    def add(
        self,
        segments: int,
        num_segments: int,
        rank: int,
        first: int,
        count: int,
        rows: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Add the changes of rows [first, first + count) to the same rows of `out` float32 [T, outputs].

        The last dimension of `rows` and `out` is contiguous. See `inner`.
        """
        self.inner(segments, num_segments, rank, first, count, rows)
        a, width = self._arguments, out.shape[1]
        a[OUTPUT], a[OUTPUT_STRIDE], a[WIDTH] = out.data_ptr(), 4 * out.stride(0), width
        a[PANELS] = -(-width // COLUMNS)
        self._block.run(_add_kernel(), on_all_threads=count * rank * width >= _SMALL)
