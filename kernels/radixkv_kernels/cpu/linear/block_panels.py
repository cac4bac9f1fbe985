# SPDX-License-Identifier: Apache-2.0
"""Rows of blocks to panels, by a compiled shuffle of bytes; see `block_formats` for the order.

Nothing is rounded: a panel holds the same scales and quants as the file, and they dequantise to the same
numbers.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from radixkv_kernels.cpu.compiling import compile_kernel
from radixkv_kernels.cpu.large_pages import ask_for_large_pages
from radixkv_kernels.cpu.linear.block_formats import ALL_FORMATS, MXFP4, Q4_1, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0
from radixkv_kernels.cpu.linear.block_method import BlockMethod, default_method
from radixkv_kernels.cpu.linear.launch import ArgumentBlock
from radixkv_kernels.cpu.memory import pointer, take

# Places in the int64 argument block.
(
    COUNTER,
    PANELS,
    UNITS,
    OUTPUTS,
    SOURCE,
    ROW_BYTES,
    ORDER,
    TARGET,
    NUMBER,
    FILE_BYTES,
    UNIT_BYTES,
    COLUMNS,
    IS_SUPER,
    SCALE_BYTES,
    HAS_ZERO,
    LEAST_BYTES,
    IN_PAIRS,
) = range(17)
_NUM_ARGUMENTS = 17
#: Numbers of formats below are ggml's.
_FIRST_OF_CHECKPOINTS = 1000
_CACHE_LINE = 64
_NIBBLES, _ONES, _PAIRS = np.uint32(0x0F0F0F0F), np.uint32(0x01010101), np.uint32(0x03030303)


@njit(inline="always")
def _word(address: int) -> Any:
    return carray(pointer(address, np.uint32), (1,))[0]


@njit(inline="always")
def _half(address: int) -> Any:
    return carray(pointer(address, np.uint16), (1,))[0]


@njit(inline="always")
def _byte(address: int) -> Any:
    return carray(pointer(address, np.uint8), (1,))[0]


@njit(inline="always")
def _put_word(address: int, value: Any) -> None:
    carray(pointer(address, np.uint32), (1,))[0] = np.uint32(value)


@njit(inline="always")
def _put_half(address: int, value: Any) -> None:
    carray(pointer(address, np.uint16), (1,))[0] = np.uint16(value)


@njit(inline="always")
def _put_byte(address: int, value: Any) -> None:
    carray(pointer(address, np.uint8), (1,))[0] = np.uint8(value)


@njit(inline="always")
def _spread(bits: Any) -> Any:
    """Bits 0 to 3 of a word as the lowest bits of its four bytes."""
    return (bits * np.uint32(0x00204081)) & _ONES


@njit
def _simple_block(number: int, source: int, target: int, column: int, columns: int) -> None:
    """A block of 32 inputs: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4."""
    scales = 4 if number in (Q4_1, Q5_1) else 2
    if number == MXFP4:
        scales = 1
    quants = source + scales
    place = target
    if number in (Q5_0, Q5_1):
        bits, high = _word(quants), np.uint32(0)
        for s in range(8):
            high |= _spread((bits >> np.uint32(4 * s)) & np.uint32(15)) << np.uint32(s)
        _put_word(place + 4 * column, high)
        quants, place = quants + 4, place + 4 * columns
    words = 8 if number == Q8_0 else 4
    for p in range(words):
        _put_word(place + (p * columns + column) * 4, _word(quants + 4 * p))
    place += words * columns * 4
    if number == MXFP4:
        _put_byte(place + column, _byte(source))
    for s in range(scales // 2):
        _put_half(place + (s * columns + column) * 2, _half(source + 2 * s))


@njit
def _stored_block(
    scales: int, least: int, has_zero: int, in_pairs: int, size: int,
    source: int, target: int, column: int, columns: int,
) -> None:  # fmt: skip
    """A block of a checkpoint's format: 32 inputs, and before them scales, least value and zero point."""
    quants = source + scales + least + has_zero
    quant_bytes = size - scales - least - has_zero
    place = target
    if in_pairs:
        at = place + column // 16 * 64 + column % 16 // 4 * 16 + column % 4 * 2
        for i in range(quant_bytes):
            _put_byte(at + i // 4 * 4 * columns + i % 4 // 2 * 8 + i % 2, _byte(quants + i))
    else:
        for p in range(quant_bytes // 4):
            _put_word(place + (p * columns + column) * 4, _word(quants + 4 * p))
    place += quant_bytes * columns
    if scales == 4:
        _put_word(place + 4 * column, _word(source))
        if least:
            _put_word(place + 4 * (columns + column), _word(source + 4))
    elif quant_bytes == 16 and size == 18:  # two scales of a byte each
        _put_byte(place + column, _byte(source))
        _put_byte(place + columns + column, _byte(source + 1))
    else:
        _put_half(place + 2 * column, _half(source))
        if least:
            _put_half(place + 2 * (columns + column), _half(source + 2))
    if has_zero:
        _put_byte(place + scales * columns + column, _byte(source + scales))


@njit
def _scaled_block(number: int, source: int, target: int, column: int, columns: int) -> None:
    """A block of 256 inputs with least values: Q4_K, Q5_K."""
    _put_half(target + 2 * column, _half(source))
    _put_half(target + 2 * (columns + column), _half(source + 2))
    scales, high_bits = source + 4, source + 16
    quants = source + (48 if number == Q5_K else 16)
    for g in range(8):
        place = target + 4 * columns + g * (22 if number == Q5_K else 18) * columns
        if g < 4:
            scale, least = _byte(scales + g) & 63, _byte(scales + 4 + g) & 63
        else:
            both = _byte(scales + 4 + g)
            scale = (both & 15) | (_byte(scales + g - 4) >> 6 << 4)
            least = (both >> 4) | (_byte(scales + g) >> 6 << 4)
        _put_byte(place + column, scale)
        _put_byte(place + columns + column, least)
        place += 2 * columns
        if number == Q5_K:
            high = np.uint32(0)
            for s in range(8):
                high |= ((_word(high_bits + 4 * s) >> np.uint32(g)) & _ONES) << np.uint32(s)
            _put_word(place + 4 * column, high)
            place += 4 * columns
        shift, own = np.uint32(4 * (g % 2)), quants + g // 2 * 32
        for p in range(4):
            first = (_word(own + 4 * p) >> shift) & _NIBBLES
            second = (_word(own + 16 + 4 * p) >> shift) & _NIBBLES
            _put_word(place + (p * columns + column) * 4, first | (second << np.uint32(4)))


@njit
def _six_bit_block(source: int, target: int, column: int, columns: int) -> None:
    """A block of Q6_K."""
    _put_half(target + 2 * column, _half(source + 208))
    for g in range(8):
        place = target + 2 * columns + g * 26 * columns
        low, high = source + g // 4 * 64 + g % 2 * 32, source + 128 + g // 4 * 32
        low_shift, high_shift = np.uint32(g % 4 // 2 * 4), np.uint32(g % 4 * 2)
        for h in range(2):
            _put_byte(place + h * columns + column, _byte(source + 192 + 2 * g + h))
        place += 2 * columns
        for h in range(2):
            bits = np.uint32(0)
            for s in range(4):
                bits |= ((_word(high + 16 * h + 4 * s) >> high_shift) & _PAIRS) << np.uint32(2 * s)
            _put_word(place + 4 * column, bits)
            for p in range(2):
                first = (_word(low + 16 * h + 8 * p) >> low_shift) & _NIBBLES
                second = (_word(low + 16 * h + 8 * p + 4) >> low_shift) & _NIBBLES
                word = first | (second << np.uint32(4))
                _put_word(place + ((1 + p) * columns + column) * 4, word)
            place += 12 * columns


@functools.cache
def _kernel() -> Any:
    """Return the kernel of all formats: compiling takes seconds, testing each block's format little."""

    def repack(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (_NUM_ARGUMENTS,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        number, columns = arg[NUMBER], arg[COLUMNS]
        file_bytes, unit_bytes = arg[FILE_BYTES], arg[UNIT_BYTES]
        units, outputs, row_bytes = arg[UNITS], arg[OUTPUTS], arg[ROW_BYTES]
        order = carray(pointer(arg[ORDER], np.int64), (outputs,))
        while True:
            panel = take(counter)
            if panel >= arg[PANELS]:
                break
            count = min(columns, outputs - panel * columns)
            target = arg[TARGET] + panel * units * unit_bytes
            if count < columns:
                carray(pointer(target, np.uint8), (units * unit_bytes,))[:] = 0
            for column in range(count):
                source = arg[SOURCE] + order[panel * columns + column] * row_bytes
                for u in range(units):
                    block, place = source + u * file_bytes, target + u * unit_bytes
                    if number > _FIRST_OF_CHECKPOINTS:
                        _stored_block(
                            arg[SCALE_BYTES], arg[LEAST_BYTES], arg[HAS_ZERO],
                            arg[IN_PAIRS], file_bytes, block, place, column, columns,
                        )  # fmt: skip
                    elif not arg[IS_SUPER]:
                        _simple_block(number, block, place, column, columns)
                    elif number == Q6_K:
                        _six_bit_block(block, place, column, columns)
                    else:
                        _scaled_block(number, block, place, column, columns)

    return compile_kernel(repack)


class BlockPanels:
    """A weight in panels.

    Args:
        number: of the format, one of `ALL_FORMATS`.
        rows: uint8 [rows, bytes of a row], C-contiguous: blocks, as a file has them; not kept.
        order: int64 [out], the row that becomes each output, not all rows perhaps; None: as they are.
        method: of the products; None: the fastest.
        factor: by which all of it is multiplied.

    Attributes:
        out_features, in_features: its shape.
        format: its `BlockFormat`.
        takes_floats: it is multiplied by rows of bfloat16.
        address, panel_bytes: of the first panel, and from panel to panel.

    Raises:
        ValueError: rows that are not whole blocks; or the processor has no such method.
    """

    def __init__(
        self,
        number: int,
        rows: np.ndarray[Any, Any],
        order: np.ndarray[Any, Any] | None = None,
        method: BlockMethod | None = None,
        factor: float = 1.0,
    ) -> None:
        self.factor = factor
        self.method = default_method() if method is None else method
        self.format = ALL_FORMATS[number]
        self.takes_floats = self.method.takes_floats(self.format)
        count, row_bytes = rows.shape
        units, rest = divmod(row_bytes, self.format.file_bytes)
        if rest or not units or rows.dtype != np.uint8 or not rows.flags.c_contiguous:
            raise ValueError(f"rows of {row_bytes} bytes are not whole blocks of {self.format.name}")
        self.in_features = units * self.format.inputs
        order = np.arange(count) if order is None else order
        order = np.ascontiguousarray(order, dtype=np.int64)
        if order.ndim != 1 or not len(order) or order.min() < 0 or order.max() >= count:
            raise ValueError(f"an order must name rows out of {count}")
        self.out_features = len(order)
        columns = self.method.columns
        self.panels = -(-self.out_features // columns)
        unit_bytes = self.format.column_bytes * columns
        self.panel_bytes = units * unit_bytes
        self._memory = torch.empty(self.panels * self.panel_bytes + _CACHE_LINE, dtype=torch.uint8)
        ask_for_large_pages(self._memory)
        self.address = -(-self._memory.data_ptr() // _CACHE_LINE) * _CACHE_LINE
        block = ArgumentBlock(_NUM_ARGUMENTS)
        a = block.values
        a[PANELS], a[UNITS], a[OUTPUTS] = self.panels, units, self.out_features
        a[SOURCE], a[ROW_BYTES] = rows.ctypes.data, row_bytes
        a[ORDER], a[TARGET] = order.ctypes.data, self.address
        a[NUMBER], a[FILE_BYTES], a[UNIT_BYTES] = number, self.format.file_bytes, unit_bytes
        a[COLUMNS], a[IS_SUPER] = columns, self.format.is_super
        a[SCALE_BYTES], a[HAS_ZERO] = self.format.scale_bytes, self.format.has_zero
        a[LEAST_BYTES] = self.format.least_bytes
        a[IN_PAIRS] = self.takes_floats and self.method.pairs
        block.run(_kernel(), on_all_threads=True)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def __repr__(self) -> str:
        return f"BlockPanels({self.format.name}, {self.out_features}x{self.in_features})"
