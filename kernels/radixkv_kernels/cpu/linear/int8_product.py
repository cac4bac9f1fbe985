# SPDX-License-Identifier: Apache-2.0
"""Products of int8 rows with int8 weights on an x86 CPU, compiled by numba.

Two instructions multiply and add up neighbours, and either gives the int32 sum of 64 products exactly:

    vpdpbusd (VNNI)    four bytes, the first factor unsigned: activations are stored with 128 added, and the
                       accumulators start at -128 times the weights' column sums
    vpmaddwd (AVX2,    two 16-bit words: activations are stored as words, weights as bytes that are widened
              AVX-512) when they are loaded; vpmaddubsw, for bytes, would saturate

Each group of 64 inputs has a scale per row; groups are added in float32, in order:

    out[r, c] = column_scale[c] * sum over groups of (row_scale[r, g] * accumulator[r, c, g]) + bias[c]

(plus what `out` held, if asked for). No operation mixes rows, so a row's bits depend on that row only, and
they are the same with either instruction and any vector width.

Weights lie in panels of 2 or 3 vectors of columns, in the order the loop reads them: [panel][input / n]
[column][n inputs], n = 4 or 2. A tile of rows by one panel keeps its accumulators in registers; a panel that
many rows go through stays in the core's own cache, and for few rows weights are read once, in order, at
memory speed.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from radixkv_kernels.cpu.compiling import compile_kernel
from radixkv_kernels.cpu.isa import features
from radixkv_kernels.cpu.linear.launch import ArgumentBlock
from radixkv_kernels.cpu.memory import f32_row, pointer, take

# Places in the int64 argument block.
(
    COUNTER,
    ROWS,
    GROUPS,
    PANELS,
    WIDTH,
    INPUT,
    INPUT_STRIDE,
    ROW_SCALES,
    WEIGHT,
    STARTS,
    COLUMN_SCALES,
    BIAS,
    OUTPUT,
    OUTPUT_STRIDE,
    ADD,
    ROWS_PER_ITEM,
) = range(16)
_NUM_ARGUMENTS = 16
#: Inputs that share a row's scale.
GROUP = 64
#: Rows of one work item: enough to use a panel often, few enough to share a product out among many threads.
_ITEM_ROWS = 48
#: Multiplications below which waking the other threads costs more than they save.
_SMALL = 65_536
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)


@dataclass(frozen=True, slots=True)
class Int8Method:
    """A way to multiply.

    Attributes:
        inputs: products that an instruction adds up: 4 with VNNI, 2 with 16-bit multiply-adds.
        lanes: int32 values of a vector.
    """

    inputs: int
    lanes: int

    @property
    def row_dtype(self) -> torch.dtype:
        """Of quantised activations: uint8 with 128 added, or int16."""
        return torch.uint8 if self.inputs == 4 else torch.int16

    @property
    def vectors(self) -> int:
        """Vectors of a panel: with as many accumulators for each row of a tile, they fit the registers."""
        return 3 if self.lanes == 16 else 2

    @property
    def tile_rows(self) -> int:
        return 8 if self.lanes == 16 else 6

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes


@functools.cache
def methods() -> tuple[Int8Method, ...]:
    """The vector extensions of this processor, fastest first; empty: neither VNNI nor AVX2."""
    has, found = features(), []
    if "avx512vnni" in has:
        found.append(Int8Method(4, 16))
    if "avxvnni" in has or {"avx512vnni", "avx512vl"} <= has:
        found.append(Int8Method(4, 8))
    if "avx512bw" in has:
        found.append(Int8Method(2, 16))
    if {"avx2", "fma"} <= has:
        found.append(Int8Method(2, 8))
    return tuple(found)


def default_method() -> Int8Method:
    """The fastest method.

    Raises:
        ValueError: there is none.
    """
    if not methods():
        raise ValueError("this processor has neither VNNI nor AVX2: no int8 products")
    return methods()[0]


class _TileCode:
    """Emits the code of one tile."""

    def __init__(self, builder: Any, rows: int, method: Int8Method) -> None:
        lanes = method.lanes
        self.builder, self.rows, self.size, self.method = builder, rows, 4 * lanes, method
        self.vector = ir.VectorType(_INT32, lanes)
        self.floats = ir.VectorType(ir.FloatType(), lanes)
        octets, words = (
            ir.VectorType(ir.IntType(8), 4 * lanes),
            ir.VectorType(ir.IntType(16), 2 * lanes),
        )
        if method.inputs == 4:
            # LLVM 22 types the operands of the instruction as bytes, older ones as words of 32 bits.
            self.operand = octets if llvmlite.binding.llvm_version_info[0] >= 22 else self.vector
            kind = ir.FunctionType(self.vector, [self.vector, self.operand, self.operand])
            name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
        else:
            self.operand = words
            kind = ir.FunctionType(self.vector, [words, words])
            name = "llvm.x86.avx512.pmaddw.d.512" if lanes == 16 else "llvm.x86.avx2.pmadd.wd"
        self.dot = cgutils.get_or_insert_function(builder.module, kind, name)
        kind = ir.FunctionType(self.floats, [self.floats] * 3)
        self.fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{lanes}f32")
        self.zeros = ir.Constant(self.vector, [0] * lanes)

    def at(self, base: Any, offset: Any, element: Any) -> Any:
        return self.builder.inttoptr(self.builder.add(base, offset), element.as_pointer())

    def load(self, base: Any, offset: Any, element: Any) -> Any:
        return self.builder.load(self.at(base, offset, element), align=4)

    def spread(self, single: Any, kind: Any) -> Any:
        """A vector of copies of one number."""
        empty = ir.Constant(kind, ir.Undefined)
        return self.builder.shuffle_vector(
            self.builder.insert_element(empty, single, _INT32(0)), empty, self.zeros
        )

    def weights(self, base: Any, offset: Any) -> Any:
        """A vector of columns, as the instruction takes it."""
        b = self.builder
        if self.method.inputs == 4:
            return b.bitcast(self.load(base, offset, self.vector), self.operand)
        narrow = ir.VectorType(ir.IntType(8), 2 * self.method.lanes)
        return b.sext(self.load(base, offset, narrow), self.operand)

    def multiplied(self, total: Any, inputs: Any, columns: Any) -> Any:
        """`total` plus the products."""
        if self.method.inputs == 4:
            return self.builder.call(self.dot, [total, inputs, columns])
        return self.builder.add(total, self.builder.call(self.dot, [inputs, columns]))

    def sums(self, x: Any, stride: Any, weight: Any, starts: Any) -> list[list[Any]]:
        """The int32 sums of one group, [rows][vectors]."""
        b, vectors = self.builder, self.method.vectors
        # Bytes of a vector of weights: each input of a column takes one.
        width = self.method.lanes * self.method.inputs
        bases = [b.add(x, b.mul(stride, _INT64(r))) for r in range(self.rows)]
        if self.method.inputs == 4:
            first = [self.load(starts, _INT64(v * self.size), self.vector) for v in range(vectors)]
        else:
            first = [self.zeros] * vectors
        before, loop, after = b.block, b.append_basic_block("steps"), b.append_basic_block("sums")
        b.branch(loop)
        b.position_at_end(loop)
        step = b.phi(_INT64)
        step.add_incoming(_INT64(0), before)
        sums = [[b.phi(self.vector) for _ in range(vectors)] for _ in range(self.rows)]
        # Four bytes of inputs a step: as many as the instruction takes.
        offset, within = b.mul(step, _INT64(vectors * width)), b.mul(step, _INT64(4))
        columns = [self.weights(weight, b.add(offset, _INT64(v * width))) for v in range(vectors)]
        results = []
        for base, row in zip(bases, sums, strict=True):
            four = b.bitcast(self.spread(self.load(base, within, _INT32), self.vector), self.operand)
            results.append([self.multiplied(row[v], four, columns[v]) for v in range(vectors)])
            for v in range(vectors):
                row[v].add_incoming(first[v], before)
                row[v].add_incoming(results[-1][v], loop)
        following = b.add(step, _INT64(1))
        step.add_incoming(following, loop)
        steps = GROUP // self.method.inputs
        b.cbranch(b.icmp_signed("<", following, _INT64(steps)), loop, after)
        b.position_at_end(after)
        return results

    def add(self, sums: list[list[Any]], scale: Any, scale_stride: Any, out: Any) -> None:
        """out += scale * sums, row by row."""
        b = self.builder
        for r, row in enumerate(sums):
            factor = self.load(scale, b.mul(scale_stride, _INT64(r)), ir.FloatType())
            factor = self.spread(factor, self.floats)
            for v in range(self.method.vectors):
                place = self.at(out, _INT64((r * self.method.vectors + v) * self.size), self.floats)
                wide = b.sitofp(row[v], self.floats)
                b.store(b.call(self.fma, [wide, factor, b.load(place, align=4)]), place, align=4)


def _tile_intrinsic(
    typing_context: Any, num_rows: Any, inputs: Any, lanes: Any, x: Any, stride: Any, scale: Any,
    scale_stride: Any, weight: Any, starts: Any, out: Any,
) -> Any:  # fmt: skip
    method = Int8Method(inputs.literal_value, lanes.literal_value)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x, stride, scale, scale_stride, weight, starts, out = args[3:]
        for rows in range(1, method.tile_rows + 1):
            with builder.if_then(builder.icmp_signed("==", args[0], _INT64(rows))):
                code = _TileCode(builder, rows, method)
                code.add(code.sums(x, stride, weight, starts), scale, scale_stride, out)
        return context.get_dummy_value()

    return types.void(num_rows, inputs, lanes, x, stride, scale, scale_stride, weight, starts, out), codegen


#: tile(rows, inputs, lanes, x, stride, scale, scale_stride, weight, starts, out): multiplies `rows` rows by
#: one group of a panel and adds the products to float32 sums. At most as many rows as the method's tile has;
#: inputs and lanes are constants that tell the method; the others int64: address of the first row, bytes
#: between rows, address of the first row's scale, bytes between rows' scales, addresses of the group's
#: weights, of the accumulators' start values, and of the sums, [rows][columns].
_tile: Any = intrinsic(prefer_literal=True)(_tile_intrinsic)


@functools.cache
def _product_kernel(inputs: int, lanes: int) -> Any:
    # Nothing but numbers enters the kernel from here: they are what numba's cache on disk knows it by.
    method = Int8Method(inputs, lanes)
    columns, tile_rows, group_bytes = method.columns, method.tile_rows, GROUP * method.row_dtype.itemsize

    def product(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (16,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        rows, groups, width = arg[ROWS], arg[GROUPS], arg[WIDTH]
        stride, per_item = arg[INPUT_STRIDE], arg[ROWS_PER_ITEM]
        step = groups * 4
        scratch = np.empty((tile_rows, columns), np.float32)
        sums = np.int64(scratch.ctypes.data)
        parts = (rows + per_item - 1) // per_item
        while True:
            item = take(counter)
            if item >= arg[PANELS] * parts:
                break
            panel = item // parts
            begin = (item - panel * parts) * per_item
            end = min(rows, begin + per_item)
            base = panel * columns
            count = min(columns, width - base)
            scales = f32_row(arg[COLUMN_SCALES] + base * 4, columns)
            bias = f32_row(arg[BIAS] + base * 4, columns)
            for r in range(begin, end, tile_rows):
                n = min(tile_rows, end - r)
                for i in range(n):
                    for c in range(columns):
                        scratch[i, c] = np.float32(0.0)
                for g in range(groups):
                    x = arg[INPUT] + r * stride + g * group_bytes
                    own = arg[ROW_SCALES] + r * step + g * 4
                    weight = arg[WEIGHT] + (panel * groups + g) * (columns * GROUP)
                    starts = arg[STARTS] + (panel * groups + g) * (columns * 4)
                    _tile(n, inputs, lanes, x, stride, own, step, weight, starts, sums)
                for i in range(n):
                    out = f32_row(arg[OUTPUT] + ((r + i) * arg[OUTPUT_STRIDE] + base) * 4, columns)
                    if arg[ADD]:
                        for c in range(count):
                            out[c] += scratch[i, c] * scales[c] + bias[c]
                    else:
                        for c in range(count):
                            out[c] = scratch[i, c] * scales[c] + bias[c]

    return compile_kernel(product, fast=True)


class PackedInt8:
    """An int8 weight in panels, ready to be multiplied; not thread-safe.

    Args:
        weight: int8 [out, in].
        scales: float32 [out], the value of one unit of each output's weights.
        bias: float32 [out] or None.
        method: one of `methods()`; None: the fastest.

    Attributes:
        method: how it multiplies: rows must be quantised for it.
        row_width: elements of a row of activations; those from `in_features` on may hold anything.

    Raises:
        ValueError: the processor has no such method, or none at all.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None = None,
        method: Int8Method | None = None,
    ) -> None:
        self.method = method = default_method() if method is None else method
        if method not in methods():
            raise ValueError(f"no int8 products by {method} on this processor")
        self.out_features, self.in_features = weight.shape
        columns = method.columns
        panels, groups = -(-self.out_features // columns), -(-self.in_features // GROUP)
        self.row_width = groups * GROUP
        padded = torch.zeros(panels * columns, self.row_width, dtype=torch.int8)
        padded[: self.out_features, : self.in_features] = weight
        parts = padded.view(panels, columns, self.row_width // method.inputs, method.inputs)
        self._weight = parts.transpose(1, 2).contiguous()
        sums = padded.view(panels, columns, groups, GROUP).sum(dim=3, dtype=torch.int32)
        self._starts = (sums * -128).transpose(1, 2).contiguous()
        self._scales = torch.zeros(panels * columns)
        self._scales[: self.out_features] = scales
        self._bias = torch.zeros(panels * columns)
        if bias is not None:
            self._bias[: self.out_features] = bias
        self._block = ArgumentBlock(_NUM_ARGUMENTS)
        a = self._arguments = self._block.values
        a[GROUPS], a[PANELS], a[WIDTH] = groups, panels, self.out_features
        a[INPUT_STRIDE], a[ROWS_PER_ITEM] = self.row_width * method.row_dtype.itemsize, _ITEM_ROWS
        a[WEIGHT], a[STARTS] = self._weight.data_ptr(), self._starts.data_ptr()
        a[COLUMN_SCALES], a[BIAS] = self._scales.data_ptr(), self._bias.data_ptr()
        self._kernel = _product_kernel(method.inputs, method.lanes)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self._weight, self._starts, self._scales, self._bias))

    def multiply(
        self, rows: torch.Tensor, row_scales: torch.Tensor, out: torch.Tensor, *, add: bool = False
    ) -> torch.Tensor:
        """`out = rows W^T + bias` in real units, or with `add` the same added to `out`; returns `out`.

        Args:
            rows: [T, row_width], contiguous, of the method's `row_dtype`: see `int8_rows`.
            row_scales: float32 [T, row_width / 64], contiguous.
            out: float32 [T, out], last dimension contiguous.
        """
        a = self._arguments
        count = rows.shape[0]
        a[ROWS], a[INPUT], a[ROW_SCALES] = count, rows.data_ptr(), row_scales.data_ptr()
        a[OUTPUT], a[OUTPUT_STRIDE], a[ADD] = out.data_ptr(), out.stride(0), add
        work = count * self.out_features * self.in_features
        self._block.run(self._kernel, on_all_threads=work >= _SMALL)
        return out
