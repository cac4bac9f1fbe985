# SPDX-License-Identifier: Apache-2.0
"""Products of int8 rows with weights that keep a file's blocks, compiled by numba.

    y = x W^T + b, or added to y        BlockProduct.multiply(rows, y)

W may consist of sections, one above the other, each in a format of its own: files mix formats among the
queries, keys and values of a layer, and one launch computes them all. A section may also have rows of its
own, as experts do (`block_experts`). A panel that many rows go through stays
in the core's own cache; with few rows, weights are read once, in order, at memory speed. A format is compiled
when it is first needed.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from radixkv_kernels.cpu.compiling import compile_kernel
from radixkv_kernels.cpu.linear.block_formats import ALL_FORMATS, NVFP4
from radixkv_kernels.cpu.linear.block_method import BlockMethod
from radixkv_kernels.cpu.linear.block_panels import BlockPanels
from radixkv_kernels.cpu.linear.block_tile import tile
from radixkv_kernels.cpu.linear.float8_tile import MOST_INPUTS, float_tile, operand_tile, widen
from radixkv_kernels.cpu.linear.launch import ArgumentBlock, float_bits
from radixkv_kernels.cpu.memory import aligned, as_float, f32_row, pointer, take

# Places in the int64 argument block of a launch.
(
    COUNTER,
    ROWS_PER_ITEM,
    INPUT,
    INPUT_STRIDE,
    OUTPUT,
    OUTPUT_STRIDE,
    ADD,
    SECTIONS,
    NUM_SECTIONS,
    ROWS_OF_EACH,
) = range(10)
NUM_ARGUMENTS = 10
# Of a section; its rows and columns are those of input and output. All have `ROWS_OF_EACH`, unless that is 0.
FUNCTION, PANELS, WEIGHT, PANEL_BYTES, UNITS, WIDTH, BIAS, FIRST_COLUMN, FIRST_ROW, ROWS, FACTOR = range(11)
SECTION_SIZE = 11
# Arguments of the format's function for a panel's work.
_ROWS, _INPUT, _STRIDE, _WEIGHT, _UNITS, _OUTPUT, _OUTPUT_STRIDE, _COLUMNS, _BIAS, _ADD, _SUMS, _FACTOR = (
    range(12)
)
_WORK_SIZE = 12
#: Rows of one work item: enough to use a panel often, few enough to share a product out among many threads.
ITEM_ROWS = 48
#: Multiplications below which waking the other threads costs more than they save.
SMALL = 65_536


def _call_intrinsic(typing_context: Any, function: Any, argument: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        octet = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [octet]).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), [builder.inttoptr(args[1], octet)])
        return context.get_dummy_value()

    return types.void(function, argument), codegen


#: Call `void function(int64 *argument)`; both are addresses.
_call: Any = intrinsic(_call_intrinsic)


@njit(forceinline=True)
def _put(work: Any, sums: Any, bias: Any, begin: int, n: int, columns: int) -> None:
    """Write the sums of a tile, or add them."""
    count = work[_COLUMNS]
    for i in range(n):
        out = f32_row(work[_OUTPUT] + (begin + i) * work[_OUTPUT_STRIDE], count)
        if work[_ADD]:
            for c in range(count):
                out[c] += sums[i * columns + c] + bias[c]
        else:
            for c in range(count):
                out[c] = sums[i * columns + c] + bias[c]


@functools.cache
def format_kernel(number: int, method: BlockMethod) -> Any:
    """Multiplies some rows by one panel of a format."""
    if method.takes_floats(ALL_FORMATS[number]):
        return _float_kernel(number, method)
    dots, lanes, emulated = int(method.dots), method.lanes, int(method.emulated)
    columns = method.columns
    heights = method.heights
    highest = heights[-1]
    has_factor = number == NVFP4
    # The largest height that n rows fill; the remainder takes smaller ones.
    fitting = tuple(max(h for h in heights if h <= max(1, n)) for n in range(highest + 1))

    def multiply(address):  # type: ignore[no-untyped-def]
        work = carray(address, (_WORK_SIZE,), np.int64)
        rows, stride = work[_ROWS], work[_STRIDE]
        sums = f32_row(work[_SUMS], highest * columns)
        bias = f32_row(work[_BIAS], columns)
        begin = 0
        while begin < rows:
            n = fitting[min(rows - begin, highest)]
            sums[: n * columns] = np.float32(0.0)
            x = work[_INPUT] + begin * stride
            tile(n, number, dots, lanes, emulated, x, stride, work[_WEIGHT], work[_UNITS], work[_SUMS])
            if has_factor:
                factor = as_float(np.int32(work[_FACTOR]))
                for i in range(n * columns):
                    sums[i] *= factor
            _put(work, sums, bias, begin, n, columns)
            begin += n

    return compile_kernel(multiply)


@functools.cache
def _float_kernel(number: int, method: BlockMethod) -> Any:
    """The same for rows of bfloat16. More rows than a tile's take the operands of one block at a time."""
    pairs, lanes, columns = int(method.pairs), method.lanes, method.columns
    inputs = ALL_FORMATS[number].inputs
    unit_bytes = ALL_FORMATS[number].column_bytes * columns
    highest = method.float_heights[-1]
    fitting = tuple(max(h for h in method.float_heights if h <= max(1, n)) for n in range(highest + 1))

    def multiply(address):  # type: ignore[no-untyped-def]
        work = carray(address, (_WORK_SIZE,), np.int64)
        rows, stride, units = work[_ROWS], work[_STRIDE], work[_UNITS]
        sums, bias = f32_row(work[_SUMS], rows * columns), f32_row(work[_BIAS], columns)
        sums[:] = np.float32(0.0)
        begin = 0
        if pairs or rows <= highest:
            while begin < rows:
                n = fitting[min(rows - begin, highest)]
                x = work[_INPUT] + begin * stride
                own = work[_SUMS] + 4 * begin * columns
                float_tile(n, number, pairs, lanes, x, stride, work[_WEIGHT], units, own)
                begin += n
        else:
            made = work[_SUMS] + 4 * ITEM_ROWS * columns
            for u in range(units):
                unit = work[_WEIGHT] + u * unit_bytes
                widen(number, pairs, lanes, unit, made)
                begin = 0
                while begin < rows:
                    n = fitting[min(rows - begin, highest)]
                    x = work[_INPUT] + begin * stride + 2 * u * inputs
                    own = work[_SUMS] + 4 * begin * columns
                    operand_tile(n, number, pairs, lanes, x, stride, made, unit, own)
                    begin += n
        _put(work, sums, bias, 0, rows, columns)

    return compile_kernel(multiply)


@functools.cache
def launch_kernel(method: BlockMethod) -> Any:
    """Shares the panels of all sections out among the threads."""
    columns = method.columns
    # The sums of an item's rows, and after them operands of a block.
    memory_size = (ITEM_ROWS + MOST_INPUTS) * columns

    def product(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (NUM_ARGUMENTS,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        per_item = arg[ROWS_PER_ITEM]
        sums, work = aligned(memory_size), np.empty(_WORK_SIZE, np.int64)
        work[_SUMS], work_at = np.int64(sums.ctypes.data), np.int64(work.ctypes.data)
        while True:
            item, left, rows, parts = take(counter), arg[NUM_SECTIONS], np.int64(0), np.int64(1)
            section = arg[SECTIONS]
            own = carray(pointer(section, np.int64), (SECTION_SIZE,))
            while left > 0:
                own = carray(pointer(section, np.int64), (SECTION_SIZE,))
                rows = arg[ROWS_OF_EACH] if arg[ROWS_OF_EACH] else own[ROWS]
                parts = (rows + per_item - 1) // per_item
                if item < own[PANELS] * parts:
                    break
                item -= own[PANELS] * parts
                section += 8 * SECTION_SIZE
                left -= 1
            if left == 0:
                break
            panel = item // parts
            first = (item - panel * parts) * per_item
            begin = own[FIRST_ROW] + first
            base = panel * columns
            work[_ROWS] = min(rows - first, per_item)
            work[_INPUT], work[_STRIDE] = arg[INPUT] + begin * arg[INPUT_STRIDE], arg[INPUT_STRIDE]
            work[_WEIGHT], work[_UNITS] = own[WEIGHT] + panel * own[PANEL_BYTES], own[UNITS]
            place = arg[OUTPUT] + begin * arg[OUTPUT_STRIDE]
            work[_OUTPUT] = place + (own[FIRST_COLUMN] + base) * 4
            work[_OUTPUT_STRIDE], work[_COLUMNS] = arg[OUTPUT_STRIDE], min(columns, own[WIDTH] - base)
            work[_BIAS], work[_ADD], work[_FACTOR] = own[BIAS] + base * 4, arg[ADD], own[FACTOR]
            _call(own[FUNCTION], work_at)
        sums[0] = np.float32(0.0)  # it lives until here

    return compile_kernel(product)


class BlockProduct:
    """`y = x W^T + b` with W in sections of panels; not thread-safe.

    Args:
        sections: weights with the same inputs, in the order of their outputs; all made for one method.
        biases: float32 [out] of each section, or None; None: there are none.
        order: int32 [in], for each input of the sections, the column of the rows that `BlockRows` was given;
            None: the same.

    Raises:
        ValueError: sections that differ in their inputs or methods.
    """

    def __init__(
        self,
        sections: Sequence[BlockPanels],
        biases: Sequence[torch.Tensor | None] | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        method, takes_floats = sections[0].method, sections[0].takes_floats
        self.in_features = sections[0].in_features
        if any((each.in_features, each.method) != (self.in_features, method) for each in sections):
            raise ValueError("sections of a product must have the same inputs and the same method")
        if any(each.takes_floats != takes_floats for each in sections):
            raise ValueError("sections of a product must take the same rows, int8 or bfloat16")
        #: Of the rows that it multiplies, for `BlockRows`.
        self.row_dtype = torch.bfloat16 if takes_floats else torch.int8
        self.order = order
        self.out_features = sum(each.out_features for each in sections)
        self._sections = tuple(sections)
        self._functions = [format_kernel(each.format.number, method) for each in sections]
        self._biases: list[torch.Tensor] = []
        self._table = np.zeros((len(sections), SECTION_SIZE), dtype=np.int64)
        first = 0
        for index, (row, each) in enumerate(zip(self._table, sections, strict=True)):
            bias = torch.zeros(each.panels * method.columns)
            own = None if biases is None else biases[index]
            if own is not None:
                bias[: each.out_features] = own.detach()
            self._biases.append(bias)
            row[FUNCTION], row[BIAS] = self._functions[index].address, bias.data_ptr()
            row[PANELS], row[WEIGHT], row[PANEL_BYTES] = each.panels, each.address, each.panel_bytes
            row[UNITS] = each.in_features // each.format.inputs
            row[WIDTH], row[FIRST_COLUMN] = each.out_features, first
            row[FACTOR] = float_bits(each.factor)
            first += each.out_features
        self._block = ArgumentBlock(NUM_ARGUMENTS)
        a = self._arguments = self._block.values
        a[NUM_SECTIONS], a[SECTIONS] = len(sections), self._table.ctypes.data
        a[ROWS_PER_ITEM] = ITEM_ROWS
        self._kernel = launch_kernel(method)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._sections) + sum(each.nbytes for each in self._biases)

    def multiply(self, rows: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> torch.Tensor:
        """Multiply rows into out, or with `add` onto the values of `out`; return `out`.

        Args:
            rows: of `BlockRows`, made for `row_dtype` and in `order`.
            out: float32 [T, out], last dimension contiguous.
        """
        a, count = self._arguments, rows.shape[0]
        a[ROWS_OF_EACH], a[INPUT], a[INPUT_STRIDE] = count, rows.data_ptr(), rows.stride(0) * rows.itemsize
        a[OUTPUT], a[OUTPUT_STRIDE], a[ADD] = out.data_ptr(), 4 * out.stride(0), add
        work = count * self.out_features * self.in_features
        self._block.run(self._kernel, on_all_threads=work >= SMALL)
        return out
