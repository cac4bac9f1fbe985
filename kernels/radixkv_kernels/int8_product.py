"""Products of int8 rows with int8 weights on a CPU with dot-product instructions (VNNI), compiled by numba.

`vpdpbusd` multiplies four unsigned by four signed bytes and adds the sum to an int32: activations are stored
with 128 added, and the accumulators start at -128 times the weights' column sums, so that the int32 results
are exact. A float product follows per element:

    out[r, c] = accumulator[r, c] * (row_scale[r] * column_scale[c]) + bias[c]   (+ out[r, c])

No operation mixes rows and integers have no rounding, so a row's bits depend on that row only.

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

from radixkv_kernels.numba_attention import _compile, _f32_row, _pointer, _take
from radixkv_kernels.openmp import run_here, run_parallel

# Places in the int64 argument block.
(
    COUNTER,
    ROWS,
    STEPS,
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
_TILE_ROWS = 8
_VECTORS = 3
#: Rows of one work item: enough to use a panel often, few enough to share a product out among many threads.
_ITEM_ROWS = 64
#: Multiplications below which waking the other threads costs more than they save.
_SMALL = 65_536


@functools.cache
def vector_lanes() -> int:
    """int32 lanes of this processor's widest dot-product instruction: 16, 8, or 0 where there is none."""
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512vnni"):
        return 16
    return 8 if features.get("avxvnni") else 0


def _make_tile(rows: int, lanes: int) -> Any:
    """An intrinsic that multiplies `rows` rows by one panel and stores the int32 sums, row after row.

    Its arguments, all int64: address of the first row, bytes between rows, address of the panel, number of
    4-input steps, address of the accumulators' start values, address of the result.
    """
    int32, int64 = ir.IntType(32), ir.IntType(64)
    vector, octets = ir.VectorType(int32, lanes), ir.VectorType(ir.IntType(8), 4 * lanes)
    # LLVM 22 types the operands as bytes, older ones as words.
    operand = octets if llvmlite.binding.llvm_version_info[0] >= 22 else vector
    name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    size = 4 * lanes

    def tile(typing_context: Any, x: Any, stride: Any, weight: Any, steps: Any, starts: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x, stride, weight, steps, starts, out = args
            kind = ir.FunctionType(vector, [vector, operand, operand])
            dot = cgutils.get_or_insert_function(builder.module, kind, name)

            def at(base: Any, offset: Any, element: Any) -> Any:
                return builder.inttoptr(builder.add(base, offset), element.as_pointer())

            def load(base: Any, offset: Any, element: Any) -> Any:
                return builder.load(at(base, offset, element), align=4)

            row_bases = [builder.add(x, builder.mul(stride, int64(r))) for r in range(rows)]
            first = [load(starts, int64(v * size), vector) for v in range(_VECTORS)]
            before, loop = builder.block, builder.append_basic_block("steps")
            after = builder.append_basic_block("sums")
            builder.branch(loop)
            builder.position_at_end(loop)
            step = builder.phi(int64)
            step.add_incoming(int64(0), before)
            sums = [[builder.phi(vector) for _ in range(_VECTORS)] for _ in range(rows)]
            for row in sums:
                for v in range(_VECTORS):
                    row[v].add_incoming(first[v], before)
            offset = builder.mul(step, int64(_VECTORS * size))
            columns = [
                builder.bitcast(load(weight, builder.add(offset, int64(v * size)), vector), operand)
                for v in range(_VECTORS)
            ]
            within = builder.mul(step, int64(4))
            for r, row in enumerate(sums):
                four = load(row_bases[r], within, int32)
                single = builder.insert_element(ir.Constant(vector, ir.Undefined), four, int32(0))
                mask = ir.Constant(vector, [0] * lanes)
                spread = builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), mask)
                spread = builder.bitcast(spread, operand)
                for v in range(_VECTORS):
                    row[v].add_incoming(builder.call(dot, [row[v], spread, columns[v]]), loop)
            following = builder.add(step, int64(1))
            step.add_incoming(following, loop)
            builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
            builder.position_at_end(after)
            for r, row in enumerate(sums):
                for v in range(_VECTORS):
                    place = at(out, int64((r * _VECTORS + v) * size), vector)
                    builder.store(row[v].incomings[1][0], place, align=4)
            return context.get_dummy_value()

        return types.void(x, stride, weight, steps, starts, out), codegen

    return intrinsic(tile)


@functools.cache
def _product_kernel(lanes: int) -> Any:
    one, two, three, four, five, six, seven, eight = (_make_tile(r, lanes) for r in range(1, 9))
    columns = _VECTORS * lanes

    def product(pointer):  # type: ignore[no-untyped-def]
        arg = carray(pointer, (16,), np.int64)
        counter = _pointer(arg[COUNTER], np.int64)
        rows, steps, width = arg[ROWS], arg[STEPS], arg[WIDTH]
        stride, per_item = arg[INPUT_STRIDE], arg[ROWS_PER_ITEM]
        row_scales = _f32_row(arg[ROW_SCALES], rows)
        scratch = np.empty(8 * columns, np.int32)
        sums = np.int64(scratch.ctypes.data)
        groups = (rows + per_item - 1) // per_item
        while True:
            item = _take(counter)
            if item >= arg[PANELS] * groups:
                break
            panel = item // groups
            begin = (item - panel * groups) * per_item
            end = min(rows, begin + per_item)
            base = panel * columns
            count = min(columns, width - base)
            weight = arg[WEIGHT] + base * steps * 4
            starts = arg[STARTS] + base * 4
            scales = _f32_row(arg[COLUMN_SCALES] + base * 4, columns)
            bias = _f32_row(arg[BIAS] + base * 4, columns)
            for r in range(begin, end, 8):
                x = arg[INPUT] + r * stride
                n = min(8, end - r)
                if n == 8:
                    eight(x, stride, weight, steps, starts, sums)
                elif n == 1:
                    one(x, stride, weight, steps, starts, sums)
                elif n == 2:
                    two(x, stride, weight, steps, starts, sums)
                elif n == 3:
                    three(x, stride, weight, steps, starts, sums)
                elif n == 4:
                    four(x, stride, weight, steps, starts, sums)
                elif n == 5:
                    five(x, stride, weight, steps, starts, sums)
                elif n == 6:
                    six(x, stride, weight, steps, starts, sums)
                else:
                    seven(x, stride, weight, steps, starts, sums)
                for i in range(n):
                    factor = row_scales[r + i]
                    out = _f32_row(arg[OUTPUT] + ((r + i) * arg[OUTPUT_STRIDE] + base) * 4, columns)
                    own = carray(_pointer(sums + i * columns * 4, np.int32), (columns,))
                    if arg[ADD]:
                        for c in range(count):
                            out[c] += np.float32(own[c]) * (factor * scales[c]) + bias[c]
                    else:
                        for c in range(count):
                            out[c] = np.float32(own[c]) * (factor * scales[c]) + bias[c]

    return _compile(product)


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
        panels, steps = -(-self.out_features // columns), -(-self.in_features // 4)
        #: Bytes between rows of activations; the bytes from `in_features` on may hold anything.
        self.row_bytes = steps * 4
        padded = torch.zeros(panels * columns, steps * 4, dtype=torch.int8)
        padded[: self.out_features, : self.in_features] = weight
        self._weight = padded.view(panels, columns, steps, 4).transpose(1, 2).contiguous()
        self._starts = padded.sum(dim=1, dtype=torch.int32) * -128
        self._scales = torch.zeros(panels * columns)
        self._scales[: self.out_features] = scales
        self._bias = torch.zeros(panels * columns)
        if bias is not None:
            self._bias[: self.out_features] = bias
        self._counter = np.zeros(1, dtype=np.int64)
        a = self._arguments = np.zeros(_NUM_ARGUMENTS, dtype=np.int64)
        a[COUNTER] = self._counter.ctypes.data
        a[STEPS], a[PANELS], a[WIDTH] = steps, panels, self.out_features
        a[INPUT_STRIDE], a[ROWS_PER_ITEM] = self.row_bytes, _ITEM_ROWS
        a[WEIGHT], a[STARTS] = self._weight.data_ptr(), self._starts.data_ptr()
        a[COLUMN_SCALES], a[BIAS] = self._scales.data_ptr(), self._bias.data_ptr()
        self._address = a.ctypes.data
        self._kernel = _product_kernel(lanes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a packed weight holds addresses and cannot be copied or pickled")

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self._weight, self._starts, self._scales, self._bias))

    def multiply(
        self, rows: torch.Tensor, row_scales: torch.Tensor, out: torch.Tensor, *, add: bool = False
    ) -> torch.Tensor:
        """`out = rows W^T + bias` in real units, or with `add` the same added to `out`; returns `out`.

        Args:
            rows: uint8 [T, row_bytes], contiguous: int8 values plus 128.
            row_scales: float32 [T], contiguous.
            out: float32 [T, out], last dimension contiguous.
        """
        a = self._arguments
        count = rows.shape[0]
        a[ROWS], a[INPUT], a[ROW_SCALES] = count, rows.data_ptr(), row_scales.data_ptr()
        a[OUTPUT], a[OUTPUT_STRIDE], a[ADD] = out.data_ptr(), out.stride(0), add
        self._counter[0] = 0
        work = count * self.out_features * self.in_features
        (run_here if work < _SMALL else run_parallel)(self._kernel.address, self._address)
        return out
