"""Products of int8 rows with int8 weights on a CPU with dot-product instructions (VNNI), compiled by numba.

`vpdpbusd` multiplies four unsigned by four signed bytes and adds the sum to an int32: activations are stored
with 128 added, and the accumulators start at -128 times the weights' column sums, so that the int32 results
are exact. Each group of 64 inputs has a scale per row; groups are added in float32, in order:

    out[r, c] = column_scale[c] * sum over groups of (row_scale[r, g] * accumulator[r, c, g]) + bias[c]

(plus what `out` held, if asked for). No operation mixes rows, so a row's bits depend on that row only.

Weights lie in panels of 3 vectors of columns, in the order the loop reads them: [panel][input / 4][column]
[4 inputs]. A tile of 8 rows by one panel keeps its 24 accumulators in registers; one that many rows go
through stays in the core's own cache, and for few rows weights are read once, in order, at memory speed.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from radixkv_kernels.cpu.linear.launch import ArgumentBlock
from radixkv_kernels.cpu.memory import compile_kernel, f32_row, pointer, take

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
_STEPS = GROUP // 4
_VECTORS = 3
#: Rows of one work item: enough to use a panel often, few enough to share a product out among many threads.
_ITEM_ROWS = 64
#: Multiplications below which waking the other threads costs more than they save.
_SMALL = 65_536
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)


@functools.cache
def vector_lanes() -> int:
    """int32 lanes of this processor's widest dot-product instruction: 16, 8, or 0 where there is none."""
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512vnni"):
        return 16
    return 8 if features.get("avxvnni") else 0


class _TileCode:
    """Emits the code of one tile; lanes int32 per vector, `_VECTORS` vectors per row."""

    def __init__(self, builder: Any, rows: int, lanes: int) -> None:
        self.builder, self.rows, self.size = builder, rows, 4 * lanes
        self.vector = ir.VectorType(_INT32, lanes)
        self.floats = ir.VectorType(ir.FloatType(), lanes)
        # LLVM 22 types the operands of the instruction as bytes, older ones as words.
        octets = ir.VectorType(ir.IntType(8), 4 * lanes)
        self.operand = octets if llvmlite.binding.llvm_version_info[0] >= 22 else self.vector
        kind = ir.FunctionType(self.vector, [self.vector, self.operand, self.operand])
        name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
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

    def sums(self, x: Any, stride: Any, weight: Any, starts: Any) -> list[list[Any]]:
        """The int32 sums of one group, [rows][vectors]."""
        b, dot = self.builder, self.dot
        bases = [b.add(x, b.mul(stride, _INT64(r))) for r in range(self.rows)]
        first = [self.load(starts, _INT64(v * self.size), self.vector) for v in range(_VECTORS)]
        before, loop, after = b.block, b.append_basic_block("steps"), b.append_basic_block("sums")
        b.branch(loop)
        b.position_at_end(loop)
        step = b.phi(_INT64)
        step.add_incoming(_INT64(0), before)
        sums = [[b.phi(self.vector) for _ in range(_VECTORS)] for _ in range(self.rows)]
        offset, within = b.mul(step, _INT64(_VECTORS * self.size)), b.mul(step, _INT64(4))
        columns = [
            b.bitcast(self.load(weight, b.add(offset, _INT64(v * self.size)), self.vector), self.operand)
            for v in range(_VECTORS)
        ]
        results = []
        for base, row in zip(bases, sums, strict=True):
            four = b.bitcast(self.spread(self.load(base, within, _INT32), self.vector), self.operand)
            results.append([b.call(dot, [row[v], four, columns[v]]) for v in range(_VECTORS)])
            for v in range(_VECTORS):
                row[v].add_incoming(first[v], before)
                row[v].add_incoming(results[-1][v], loop)
        following = b.add(step, _INT64(1))
        step.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, _INT64(_STEPS)), loop, after)
        b.position_at_end(after)
        return results

    def add(self, sums: list[list[Any]], scale: Any, scale_stride: Any, out: Any) -> None:
        """out += scale * sums, row by row."""
        b = self.builder
        for r, row in enumerate(sums):
            factor = self.load(scale, b.mul(scale_stride, _INT64(r)), ir.FloatType())
            factor = self.spread(factor, self.floats)
            for v in range(_VECTORS):
                place = self.at(out, _INT64((r * _VECTORS + v) * self.size), self.floats)
                wide = b.sitofp(row[v], self.floats)
                b.store(b.call(self.fma, [wide, factor, b.load(place, align=4)]), place, align=4)


def _make_tile(rows: int, lanes: int) -> Any:
    """An intrinsic that multiplies `rows` rows by one group of a panel and adds the products to float32 sums.

    Its arguments, all int64: address of the first row, bytes between rows, address of the first row's scale,
    bytes between rows' scales, addresses of the group's weights, of the accumulators' start values, and of
    the sums, [rows][columns].
    """

    def tile(
        typing_context: Any,
        x: Any,
        stride: Any,
        scale: Any,
        scale_stride: Any,
        weight: Any,
        starts: Any,
        out: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x, stride, scale, scale_stride, weight, starts, out = args
            code = _TileCode(builder, rows, lanes)
            code.add(code.sums(x, stride, weight, starts), scale, scale_stride, out)
            return context.get_dummy_value()

        return types.void(x, stride, scale, scale_stride, weight, starts, out), codegen

    return intrinsic(tile)


@functools.cache
def _product_kernel(lanes: int) -> Any:
    one, two, three, four, five, six, seven, eight = (_make_tile(r, lanes) for r in range(1, 9))
    columns = _VECTORS * lanes

    def product(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (16,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        rows, groups, width = arg[ROWS], arg[GROUPS], arg[WIDTH]
        stride, per_item = arg[INPUT_STRIDE], arg[ROWS_PER_ITEM]
        step = groups * 4
        scratch = np.empty((8, columns), np.float32)
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
            for r in range(begin, end, 8):
                n = min(8, end - r)
                for i in range(n):
                    for c in range(columns):
                        scratch[i, c] = np.float32(0.0)
                for g in range(groups):
                    x = arg[INPUT] + r * stride + g * GROUP
                    own = arg[ROW_SCALES] + r * step + g * 4
                    weight = arg[WEIGHT] + (panel * groups + g) * (columns * GROUP)
                    starts = arg[STARTS] + (panel * groups + g) * (columns * 4)
                    if n == 8:
                        eight(x, stride, own, step, weight, starts, sums)
                    elif n == 1:
                        one(x, stride, own, step, weight, starts, sums)
                    elif n == 2:
                        two(x, stride, own, step, weight, starts, sums)
                    elif n == 3:
                        three(x, stride, own, step, weight, starts, sums)
                    elif n == 4:
                        four(x, stride, own, step, weight, starts, sums)
                    elif n == 5:
                        five(x, stride, own, step, weight, starts, sums)
                    elif n == 6:
                        six(x, stride, own, step, weight, starts, sums)
                    else:
                        seven(x, stride, own, step, weight, starts, sums)
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
        scales: float32 [out], what one unit of each output's weights stands for.
        bias: float32 [out] or None.
        lanes: `vector_lanes()`, or 8 to use half the vector width.

    Raises:
        ValueError: the processor has no such instruction.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None = None,
        lanes: int | None = None,
    ) -> None:
        lanes = vector_lanes() if lanes is None else lanes
        if not 0 < lanes <= vector_lanes():
            raise ValueError(f"no int8 dot product of {lanes} lanes on this processor")
        self.out_features, self.in_features = weight.shape
        columns = _VECTORS * lanes
        panels, groups = -(-self.out_features // columns), -(-self.in_features // GROUP)
        #: Bytes between rows of activations; the bytes from `in_features` on may hold anything.
        self.row_bytes = groups * GROUP
        padded = torch.zeros(panels * columns, self.row_bytes, dtype=torch.int8)
        padded[: self.out_features, : self.in_features] = weight
        self._weight = padded.view(panels, columns, groups * _STEPS, 4).transpose(1, 2).contiguous()
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
        a[INPUT_STRIDE], a[ROWS_PER_ITEM] = self.row_bytes, _ITEM_ROWS
        a[WEIGHT], a[STARTS] = self._weight.data_ptr(), self._starts.data_ptr()
        a[COLUMN_SCALES], a[BIAS] = self._scales.data_ptr(), self._bias.data_ptr()
        self._kernel = _product_kernel(lanes)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self._weight, self._starts, self._scales, self._bias))

    def multiply(
        self, rows: torch.Tensor, row_scales: torch.Tensor, out: torch.Tensor, *, add: bool = False
    ) -> torch.Tensor:
        """`out = rows W^T + bias` in real units, or with `add` the same added to `out`; returns `out`.

        Args:
            rows: uint8 [T, row_bytes], contiguous: int8 values plus 128.
            row_scales: float32 [T, row_bytes / 64], contiguous.
            out: float32 [T, out], last dimension contiguous.
        """
        a = self._arguments
        count = rows.shape[0]
        a[ROWS], a[INPUT], a[ROW_SCALES] = count, rows.data_ptr(), row_scales.data_ptr()
        a[OUTPUT], a[OUTPUT_STRIDE], a[ADD] = out.data_ptr(), out.stride(0), add
        work = count * self.out_features * self.in_features
        self._block.run(self._kernel, on_all_threads=work >= _SMALL)
        return out
