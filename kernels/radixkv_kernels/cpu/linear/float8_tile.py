# SPDX-License-Identifier: Apache-2.0
"""Vector code of a tile: a few rows of bfloat16 times a panel of floats of 8 bits, or of NF4 and FP4.

Rows and floats of 8 bits are exact in the products, the numbers of a table are rounded to bfloat16. A block's
products are added up in the order of its inputs, in float32; then, block by block, `out += scale * sum`. The
order does not depend on the number of rows: a row's bits are the same in any batch, but not with another
method.

    vdpbf16ps     products of pairs of inputs; pairs of bfloat16 come from tables of their two bytes
    float32       input by input; a float's bits, shifted, are those of a float32 that is smaller by a power
                  of two (`_POWERS`), half of which the row makes good and half of it the scale

With float32, a panel has words of 4 inputs of a column. With vdpbf16ps, it has 64 bytes for 4 inputs of 16
columns: for each 4 columns, 8 bytes of the first two inputs, a pair after the other, and 8 of the last two.
Interleaved, they are two vectors of pairs. NF4 and FP4, which `block_tile` multiplies without vdpbf16ps, have
bytes of two quants in the place of the first one.

With float32, many rows take a panel in parts of a block, which are widened once for all of them
("operands"). Pairs cost too little for that: they would be read again as slowly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from radixkv_kernels.cpu.linear.block_formats import (
    ALL_FORMATS,
    E4M3,
    E4M3_128,
    FLOAT_TABLES,
    GROUP,
    BlockFormat,
)
from radixkv_kernels.cpu.linear.block_method import BlockMethod
from radixkv_kernels.cpu.linear.block_tile import TileCode

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_VECTORS = 2
_SIGNS = 0x80808080
#: Half the exponent by which E4M3 and E5M2 are smaller as float32, and the bits that they have of it.
_POWERS = {True: (60, 4, 0x87F00000), False: (56, 3, 0x8FE00000)}
#: Inputs of a block, at most.
MOST_INPUTS = 128


@functools.cache
def _bytes_of_bfloats(is_e4m3: bool) -> tuple[list[int], list[int]]:
    """The low and the high bytes of the bfloat16 that each float of 8 bits without a sign is."""
    dtype = torch.float8_e4m3fn if is_e4m3 else torch.float8_e5m2
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).to(torch.bfloat16)
    pairs = numbers.view(torch.uint8).view(-1, 2).numpy().astype(np.int8)
    return pairs[:, 0].tolist(), pairs[:, 1].tolist()


@functools.cache
def _bytes_of_table(values: tuple[float, ...]) -> tuple[list[int], list[int]]:
    """The low and the high bytes of a table's numbers as bfloat16."""
    pairs = torch.tensor(values).to(torch.bfloat16).view(torch.uint8).view(-1, 2).numpy().astype(np.int8)
    return pairs[:, 0].tolist(), pairs[:, 1].tolist()


class FloatTileCode(TileCode):
    """Emits a tile of floats; see `TileCode`, rows are those of bfloat16."""

    def __init__(
        self, builder: Any, form: BlockFormat, method: BlockMethod, rows: int, x: Any, stride: Any, out: Any
    ) -> None:
        super().__init__(builder, form, method, rows, x, stride, out)
        self.is_e4m3 = form.number in (E4M3, E4M3_128)
        half, self.shift, self.mask = _POWERS[self.is_e4m3]
        self.power = 2.0**half
        self.group_bytes = GROUP * form.bits // 8 * self.columns
        self.operand_bytes = GROUP * 4 * self.columns

    def run(self, weight: Any, units: Any) -> None:
        """The whole depth of a panel."""
        size = self.form.column_bytes * self.columns
        with cgutils.for_range(self.b, units, intp=_I64) as loop:
            unit = self.at(weight, self.b.mul(loop.index, _I64(size)))
            inputs = self.b.mul(loop.index, _I64(2 * self.form.inputs))
            self._block(inputs, lambda group: self._decoded(self._codes(unit, group)), self._scales(unit))

    def run_operands(self, operands: Any, unit: Any) -> None:
        """A block of a panel, of which `widen` has made operands."""
        self._block(_I64(0), lambda group: self._made(operands, group), self._scales(unit))

    def widen(self, unit: Any, operands: Any) -> None:
        """Make operands of a block's floats."""
        with cgutils.for_range(self.b, _I64(self.form.groups), intp=_I64) as loop:
            target = self.at(operands, self.b.mul(loop.index, _I64(self.operand_bytes)))
            for step, vectors in enumerate(self._decoded(self._codes(unit, loop.index))):
                for v, each in enumerate(vectors):
                    at = self.at(target, (step * _VECTORS + v) * 4 * self.lanes)
                    self.b.store(each, self.b.inttoptr(at, each.type.as_pointer()), align=4)

    def _block(self, inputs: Any, operands_of: Callable[[Any], Iterable[list[Any]]], scales_at: Any) -> None:
        """Add a block to the output.

        Args:
            inputs: offset in bytes of a row's block.
            operands_of: of the group with a number.
        """
        b, zero = self.b, ir.Constant(self.floats, None)
        places = [[cgutils.alloca_once(b, self.floats) for _ in range(_VECTORS)] for _ in self.rows]
        for row in places:
            for place in row:
                b.store(zero, place)
        with cgutils.for_range(b, _I64(self.form.groups), intp=_I64) as loop:
            group = self.at(inputs, b.mul(loop.index, _I64(2 * GROUP)))
            read = [self._input(self.at(row, group)) for row in self.rows]
            sums = [[b.load(place) for place in row] for row in places]
            for step, weights in enumerate(operands_of(loop.index)):
                for r, one in enumerate(read):
                    x = self.splat(self.load(self.at(one, 4 * step), _I32, 4))
                    sums[r] = [self._added(old, w, x) for old, w in zip(sums[r], weights, strict=True)]
            for row, own in zip(places, sums, strict=True):
                for place, each in zip(row, own, strict=True):
                    b.store(each, place)
        scales = self.singles_at(scales_at)
        if not self.method.pairs:
            scales = [b.fmul(each, self.same(self.floats, self.power)) for each in scales]
        for r, row in enumerate(places):
            for v, place in enumerate(row):
                pointer = b.inttoptr(self.places[r][v], self.floats.as_pointer())
                b.store(self.fma(b.load(place), scales[v], b.load(pointer, align=4)), pointer, align=4)

    def _codes(self, unit: Any, group: Any) -> Any:
        """Address of a group's floats; those that follow are asked for."""
        found = self.at(unit, self.b.mul(group, _I64(self.group_bytes)))
        self.ahead(found, self.group_bytes)
        return found

    def _scales(self, unit: Any) -> Any:
        return self.at(unit, self.form.groups * self.group_bytes)

    def _input(self, group: Any) -> Any:
        """Address of a row's group, as words of a pair or as float32."""
        if self.method.pairs:
            return group
        b, words, floats = self.b, ir.VectorType(_I32, GROUP), ir.VectorType(_F32, GROUP)
        place = cgutils.alloca_once(b, floats)
        raw = b.zext(self.load(group, ir.VectorType(_I16, GROUP), 4), words)
        x = b.bitcast(b.shl(raw, self.same(words, 16)), floats)
        b.store(b.fmul(x, self.same(floats, self.power)), place)
        return b.ptrtoint(place, _I64)

    def _added(self, total: Any, w: Any, x: Any) -> Any:
        if self.method.pairs:
            return self.call("llvm.x86.avx512bf16.dpbf16ps.512", self.floats, total, w, x)
        return self.fma(self.b.bitcast(x, self.floats), w, total)

    def _made(self, operands: Any, group: Any) -> Iterable[list[Any]]:
        own = self.at(operands, self.b.mul(group, _I64(self.operand_bytes)))
        for i in range(GROUP):
            yield self.singles_at(self.at(own, i * 4 * self.columns))

    def _decoded(self, codes: Any) -> Iterable[list[Any]]:
        """Operands of each step."""
        if self.form.bits == 4:
            for half in range(2):
                for p in range(4):
                    words = self.low_halves(codes, p)[half]
                    yield from (list(each) for each in zip(*map(self._pairs_of_table, words), strict=True))
            return
        make = self._pairs_of if self.method.pairs else self._floats_of
        for i in range(GROUP // 4):
            yield from (list(vectors) for vectors in zip(*map(make, self.words_at(codes, i)), strict=True))

    def _floats_of(self, words: Any) -> list[Any]:
        """The floats in each byte of words, smaller by twice the power."""
        b, shift, mask = self.b, self.same(self.words, self.shift), self.same(self.words, self.mask)
        return [
            b.bitcast(b.and_(b.ashr(self.shifted(words, 24 - 8 * part), shift), mask), self.floats)
            for part in range(4)
        ]

    def _pairs_of(self, words: Any) -> list[Any]:
        """Pairs of bfloat16 of 64 floats of 8 bits, in two vectors."""
        b = self.b
        octets = b.bitcast(words, self.octets)
        low, high = (
            self.call(
                "llvm.x86.avx512.vpermi2var.qi.512", self.octets, ir.Constant(self.octets, table[:64]),
                octets, ir.Constant(self.octets, table[64:]),
            )
            for table in _bytes_of_bfloats(self.is_e4m3)
        )  # fmt: skip
        high = b.or_(high, b.bitcast(b.and_(words, self.same(self.words, _SIGNS)), self.octets))
        return self._interleaved(low, high)

    def _pairs_of_table(self, words: Any) -> list[Any]:
        """The same of 64 quants of 4 bits."""
        found = []
        for table in _bytes_of_table(FLOAT_TABLES[self.form.number]):
            numbers = ir.Constant(self.octets, table * 4)
            octets = self.b.bitcast(words, self.octets)
            found.append(self.call("llvm.x86.avx512.pshuf.b.512", self.octets, numbers, octets))
        return self._interleaved(*found)

    def _interleaved(self, low: Any, high: Any) -> list[Any]:
        b, found = self.b, []
        for half in range(2):
            lanes = [
                16 * lane + 8 * half + i + (64 if is_high else 0)
                for lane in range(4)
                for i in range(8)
                for is_high in (False, True)
            ]
            index = ir.Constant(ir.VectorType(_I32, 64), lanes)
            found.append(b.bitcast(b.shuffle_vector(low, high, index), self.words))
        return found


def _code(builder: Any, number: Any, pairs: Any, lanes: Any, rows: int, x: Any, stride: Any, out: Any) -> Any:
    method = BlockMethod(True, lanes.literal_value, pairs=bool(pairs.literal_value))
    return FloatTileCode(builder, ALL_FORMATS[number.literal_value], method, rows, x, stride, out)


def _tile_intrinsic(
    typing_context: Any, num_rows: Any, number: Any, pairs: Any, lanes: Any, x: Any, stride: Any, weight: Any,
    units: Any, out: Any,
) -> Any:  # fmt: skip
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x, stride, weight, units, out = args[4:]
        for rows in BlockMethod(True, lanes.literal_value).float_heights:
            with builder.if_then(builder.icmp_signed("==", args[0], _I64(rows))):
                _code(builder, number, pairs, lanes, rows, x, stride, out).run(weight, units)
        return context.get_dummy_value()

    return types.void(num_rows, number, pairs, lanes, x, stride, weight, units, out), codegen


def _operand_tile_intrinsic(
    typing_context: Any, num_rows: Any, number: Any, pairs: Any, lanes: Any, x: Any, stride: Any,
    operands: Any, unit: Any, out: Any,
) -> Any:  # fmt: skip
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x, stride, operands, unit, out = args[4:]
        for rows in BlockMethod(True, lanes.literal_value).float_heights:
            with builder.if_then(builder.icmp_signed("==", args[0], _I64(rows))):
                _code(builder, number, pairs, lanes, rows, x, stride, out).run_operands(operands, unit)
        return context.get_dummy_value()

    return types.void(num_rows, number, pairs, lanes, x, stride, operands, unit, out), codegen


def _widen_intrinsic(
    typing_context: Any, number: Any, pairs: Any, lanes: Any, unit: Any, operands: Any
) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        nothing = _I64(0)
        _code(builder, number, pairs, lanes, 0, nothing, nothing, nothing).widen(args[3], args[4])
        return context.get_dummy_value()

    return types.void(number, pairs, lanes, unit, operands), codegen


#: float_tile(rows, number, pairs, lanes, x, stride, weight, units, out): out[rows, columns] += rows . panel.
#: `rows` is one of the method's float heights; number (of the format), pairs, lanes (of the method) are
#: constants; x, weight, out: addresses; stride: bytes between rows; units: blocks of a row. All int64.
float_tile: Any = intrinsic(prefer_literal=True)(_tile_intrinsic)
#: operand_tile(rows, number, pairs, lanes, x, stride, operands, unit, out): the same for a block whose
#: operands are made; x: of the block's first input.
operand_tile: Any = intrinsic(prefer_literal=True)(_operand_tile_intrinsic)
#: widen(number, pairs, lanes, unit, operands): make operands of a block, float32 [inputs, columns] at most.
widen: Any = intrinsic(prefer_literal=True)(_widen_intrinsic)
