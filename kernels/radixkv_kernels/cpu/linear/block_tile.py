# SPDX-License-Identifier: Apache-2.0
"""Vector code of a tile: a few rows of int8 groups times a panel of blocks.

A group of 32 inputs (16 for Q6_K) is summed exactly in integers, the offset of its quants times the row's sum
included; then, in the order of the inputs,

    out += column_scale * (row_scale * sum)   [+ column_least * row_scale * row_sum]

in float32 with fused multiply-adds. The order does not depend on the number of rows, nor the integers on the
instructions that add them: a row's bits are the same in any batch and with any method. Floats of 8 bits have
tiles of their own (`float8_tile`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from radixkv_kernels.cpu.linear.block_formats import (
    ALL_FORMATS,
    FLOAT_TABLES,
    GROUP,
    LARGEST_OF_TABLE,
    MXFP4_TABLE,
    NVFP4,
    BlockFormat,
    digits_of,
)
from radixkv_kernels.cpu.linear.block_method import BlockMethod
from radixkv_kernels.cpu.linear.block_rows import GROUP_BYTES, HALVES_AT, LEAST_AT, SCALE_AT, SUM_AT
from radixkv_kernels.cpu.memory import emit_prefetch

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_F16, _F32 = ir.HalfType(), ir.FloatType()
_VECTORS = 2
#: How far ahead of its use a panel is asked for, and up to how many rows: more keep memory waiting anyway.
_AHEAD, _AHEAD_ROWS = 4096, 4
#: By the bits of a quant, how many steps of four inputs 16-bit sums of two products hold without overflow;
#: quants of MXFP4 have five, by its table.
_STEPS_OF_16_BITS = {4: 8, 5: 4, 6: 2, 8: 1}

#: Operands of a step of four inputs, one for each vector, and the offset of the inputs in a row's group.
Step = tuple[list[Any], int]


class TileCode:
    """Emits a tile of `rows` rows; addresses are int64 values.

    Args:
        x, stride: of the rows of `BlockRows`.
        out: float32 [rows, columns], to which sums are added.
    """

    def __init__(
        self, builder: Any, form: BlockFormat, method: BlockMethod, rows: int, x: Any, stride: Any, out: Any
    ) -> None:
        self.b, self.form, self.method = builder, form, method
        lanes = self.lanes = method.lanes
        self.columns = method.columns
        #: Quants are multiplied as signed bytes.
        self.in_octets = form.bits == 8 or form.number in FLOAT_TABLES
        self.octets, self.shorts = ir.VectorType(_I8, 4 * lanes), ir.VectorType(_I16, 2 * lanes)
        self.words, self.floats = ir.VectorType(_I32, lanes), ir.VectorType(_F32, lanes)
        self.rows = [builder.add(x, builder.mul(stride, _I64(r))) for r in range(rows)]
        self.places = [
            [self.at(out, (r * _VECTORS + v) * 4 * lanes) for v in range(_VECTORS)] for r in range(rows)
        ]

    # Small words of the language.

    def at(self, address: Any, offset: Any) -> Any:
        return self.b.add(address, _I64(offset) if isinstance(offset, int) else offset)

    def load(self, address: Any, kind: Any, align: int = 1) -> Any:
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=align)

    def splat(self, value: Any) -> Any:
        empty = ir.Constant(ir.VectorType(value.type, self.lanes), ir.Undefined)
        one = self.b.insert_element(empty, value, _I32(0))
        return self.b.shuffle_vector(one, empty, ir.Constant(self.words, [0] * self.lanes))

    def same(self, kind: Any, value: Any) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [each.type for each in arguments])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), arguments)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.call(f"llvm.fma.v{self.lanes}f32", self.floats, x, y, z)

    def shifted(self, vector: Any, left: int) -> Any:
        """Words shifted left, or right where `left` is negative."""
        if left == 0:
            return vector
        shift = self.b.shl if left > 0 else self.b.lshr
        return shift(vector, self.same(self.words, abs(left)))

    def words_at(self, address: Any, index: int = 0) -> list[Any]:
        """Word number `index` of every column, in vectors."""
        return [
            self.load(self.at(address, (index * _VECTORS + v) * 4 * self.lanes), self.words)
            for v in range(_VECTORS)
        ]

    def halves_at(self, address: Any) -> list[Any]:
        """A float16 of every column as float32."""
        kind = ir.VectorType(_F16, self.lanes)
        return [
            self.b.fpext(self.load(self.at(address, 2 * self.lanes * v), kind), self.floats)
            for v in range(_VECTORS)
        ]

    def bfloats_at(self, address: Any) -> list[Any]:
        """A bfloat16 of every column as float32."""
        b, kind = self.b, ir.VectorType(_I16, self.lanes)
        raw = [b.zext(self.load(self.at(address, 2 * self.lanes * v), kind), self.words) for v in (0, 1)]
        return [b.bitcast(self.shifted(each, 16), self.floats) for each in raw]

    def singles_at(self, address: Any) -> list[Any]:
        """A float32 of every column."""
        return [self.load(self.at(address, 4 * self.lanes * v), self.floats) for v in range(_VECTORS)]

    def small_floats_at(self, address: Any, is_e4m3: bool) -> list[Any]:
        """A float of 8 bits of every column as float32; of E4M3, a 256th of it, as its bits are those of a
        float16 with another bias."""
        b, kind, found = self.b, ir.VectorType(_I8, self.lanes), []
        halves = ir.VectorType(_I16, self.lanes)
        for v in range(_VECTORS):
            raw = self.load(self.at(address, self.lanes * v), kind)
            if is_e4m3:
                wide = b.shl(b.sext(raw, halves), self.same(halves, 7))
                bits = b.and_(wide, self.same(halves, -0x4001))
            else:
                bits = b.shl(b.zext(raw, halves), self.same(halves, 8))
            found.append(b.fpext(b.bitcast(bits, ir.VectorType(_F16, self.lanes)), self.floats))
        return found

    def scales_at(self, address: Any) -> list[Any]:
        """A block's scale of every column as float32."""
        read = {
            "float16": self.halves_at,
            "bfloat16": self.bfloats_at,
            "float32": self.singles_at,
            "exponent": self.powers_at,
        }
        return read[self.form.scale](address)

    def zeros_at(self, address: Any) -> list[Any]:
        """A block's zero point of every column as words."""
        kind = ir.VectorType(_I8, self.lanes)
        widen = self.b.sext if self.form.bits == 8 else self.b.zext
        return [widen(self.load(self.at(address, self.lanes * v), kind), self.words) for v in range(_VECTORS)]

    def powers_at(self, address: Any) -> list[Any]:
        """A power of two of every column, stored as its exponent + 128 in a byte, as float32."""
        b, kind, found = self.b, ir.VectorType(_I8, self.lanes), []
        two = self.same(self.words, 2)
        for v in range(_VECTORS):
            stored = b.zext(self.load(self.at(address, self.lanes * v), kind), self.words)
            normal = self.shifted(b.sub(stored, self.same(self.words, 1)), 23)
            least = b.shl(self.same(self.words, 1 << 21), stored)  # 2^-128 and 2^-127 are denormal
            bits = b.select(b.icmp_unsigned("<", stored, two), least, normal)
            found.append(b.bitcast(bits, self.floats))
        return found

    def bytes_at(self, address: Any, signed: bool) -> list[Any]:
        """A byte of every column as float32."""
        kind, widen = ir.VectorType(_I8, self.lanes), self.b.sext if signed else self.b.zext
        found = [self.load(self.at(address, self.lanes * v), kind) for v in range(_VECTORS)]
        return [self.b.sitofp(widen(each, self.words), self.floats) for each in found]

    def times(self, left: list[Any], right: list[Any]) -> list[Any]:
        return [self.b.fmul(x, y) for x, y in zip(left, right, strict=True)]

    # Operands.

    def low_halves(self, address: Any, index: int) -> tuple[list[Any], list[Any]]:
        """The low and the high halves of the bytes of a word, as words."""
        raw, mask = self.words_at(address, index), self.same(self.words, 0x0F0F0F0F)
        return (
            [self.b.and_(each, mask) for each in raw],
            [self.b.and_(self.shifted(each, -4), mask) for each in raw],
        )

    def with_high(self, low: list[Any], high: list[Any], left: int, mask: int) -> list[Any]:
        """Low bits joined with those bits of the high words that a shift brings under a mask."""
        kept = self.same(self.words, mask)
        return [
            self.b.or_(x, self.b.and_(self.shifted(y, left), kept)) for x, y in zip(low, high, strict=True)
        ]

    def as_octets(self, words: list[Any]) -> list[Any]:
        return [self.b.bitcast(each, self.octets) for each in words]

    def steps_of_4(self, low: Any, high: Any | None) -> Iterable[Step]:
        """Steps of 32 quants of 4 bits, or of 5 with the address of their high bits."""
        fifth = None if high is None else self.words_at(high)
        for p in range(4):
            for half, words in enumerate(self.low_halves(low, p)):
                step = p + 4 * half
                own = words if fifth is None else self.with_high(words, fifth, 4 - step, 0x10101010)
                yield self.as_octets(own), 4 * p + 16 * half

    def steps_of_4_half(self, low: Any, half: int) -> Iterable[Step]:
        """Steps of 16 quants of 4 bits."""
        for p in range(2):
            for k, words in enumerate(self.low_halves(low, p)):
                yield self.as_octets(words), 16 * half + 4 * (2 * p + k)

    def looked_up(self, steps: Iterable[Step], values: Sequence[int]) -> Iterable[Step]:
        """Steps of quants of 4 bits, looked up in a table of bytes."""
        table = ir.Constant(self.octets, list(values) * (self.lanes // 4))
        name = "llvm.x86.avx2.pshuf.b" if self.lanes == 8 else "llvm.x86.avx512.pshuf.b.512"
        for operands, at in steps:
            yield [self.call(name, self.octets, table, each) for each in operands], at

    def steps_of_6(self, address: Any, half: int) -> Iterable[Step]:
        """Steps of 16 quants of 6 bits."""
        high = self.words_at(address)
        for p in range(2):
            for k, words in enumerate(self.low_halves(self.at(address, 4 * self.columns), p)):
                step = 2 * p + k
                own = self.with_high(words, high, 4 - 2 * step, 0x30303030)
                yield self.as_octets(own), 16 * half + 4 * step

    def steps_of_8(self, address: Any) -> Iterable[Step]:
        """Steps of 32 quants of 8 bits; unsigned for the dot product, with 128 added."""
        for step in range(8):
            words = self.words_at(address, step)
            if self.method.dots:
                flip = self.same(self.words, 0x80808080)
                words = [self.b.xor(each, flip) for each in words]
            yield self.as_octets(words), 4 * step

    # Sums.

    def sums(
        self,
        steps: Iterable[Step],
        group: Any,
        offset: int,
        sum_at: int,
        zeros: list[Any] | None = None,
        before: list[list[Any]] | None = None,
    ) -> list[list[Any]]:
        """The integer sums of a group, [rows][vectors]: of products, less `offset` times the row's sum.

        Args:
            group: offset in bytes of a row's group.
            zeros: words of every column that are added to the offset.
            before: sums, [rows][vectors], to which these are added.
        """
        b, rows = self.b, range(len(self.rows))
        places = [self.at(row, group) for row in self.rows]
        zero = ir.Constant(self.words, None)
        totals = [[zero] * _VECTORS for _ in rows]
        if zeros is not None:
            offsets = [b.sub(self.same(self.words, -offset), each) for each in zeros]
            for r in rows:
                row_sum = self.splat(self.load(self.at(places[r], sum_at), _I32, 4))
                totals[r] = [b.mul(row_sum, each) for each in offsets]
        elif offset:
            for r in rows:
                own = self.load(self.at(places[r], sum_at), _I32, 4)
                totals[r] = [self.splat(b.mul(own, _I32(-offset)))] * _VECTORS
        if before is not None:
            totals = [
                [b.add(x, y) for x, y in zip(*row, strict=True)] for row in zip(totals, before, strict=True)
            ]
        if self.method.dots:
            for operands, at in steps:
                for r in rows:
                    x = self._inputs(places[r], at)
                    for v in range(_VECTORS):
                        totals[r][v] = self._dot(totals[r][v], operands[v], x)
            return totals
        most = _STEPS_OF_16_BITS[8 if self.in_octets else 5 if self.form.is_table else self.form.bits]
        short: list[list[Any]] = []
        count = 0
        for operands, at in steps:
            for r in rows:
                x = self._inputs(places[r], at)
                new = [self._pairs(operand, x) for operand in operands]
                if count == 0:
                    short.append(new)
                else:
                    short[r] = [b.add(old, more) for old, more in zip(short[r], new, strict=True)]
            count += 1
            if count == most:
                totals, short, count = self._flushed(totals, short), [], 0
        assert count == 0
        return totals

    def _inputs(self, place: Any, offset: int) -> Any:
        """Four inputs of a row, for every column."""
        return self.b.bitcast(self.splat(self.load(self.at(place, offset), _I32, 4)), self.octets)

    def _flushed(self, totals: list[list[Any]], short: list[list[Any]]) -> list[list[Any]]:
        """32-bit totals with 16-bit sums added."""
        one = self.same(self.shorts, 1)
        wide = [[self.call("llvm.x86.avx2.pmadd.wd", self.words, each, one) for each in row] for row in short]
        return [
            [self.b.add(x, y) for x, y in zip(own, more, strict=True)]
            for own, more in zip(totals, wide, strict=True)
        ]

    def _pairs(self, w: Any, x: Any) -> Any:
        """16-bit sums of two products; signed quants lend the inputs their signs."""
        if self.in_octets:
            x = self.call("llvm.x86.avx2.psign.b", self.octets, x, w)
            w = self.call(f"llvm.abs.v{4 * self.lanes}i8", self.octets, w, _I1(0))
        return self.call("llvm.x86.avx2.pmadd.ub.sw", self.shorts, w, x)

    def _dot(self, total: Any, w: Any, x: Any) -> Any:
        """32-bit totals plus four products of an unsigned and a signed byte each."""
        if not self.method.emulated:
            # LLVM 22 types the operands of the instruction as bytes, older ones as words of 32 bits.
            if llvmlite.binding.llvm_version_info[0] < 22:
                w, x = self.b.bitcast(w, self.words), self.b.bitcast(x, self.words)
            return self.call(f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}", self.words, total, w, x)
        wide = ir.VectorType(_I32, 4 * self.lanes)
        products = self.b.mul(self.b.zext(w, wide), self.b.sext(x, wide))
        for part in range(4):
            lanes = ir.Constant(self.words, [4 * i + part for i in range(self.lanes)])
            total = self.b.add(total, self.b.shuffle_vector(products, products, lanes))
        return total

    def add(
        self, sums: list[list[Any]], group: Any, scales: list[Any], leasts: list[Any] | None = None
    ) -> None:
        """Add a group's sums to the output; `leasts` are negated, as a row's `LEAST_AT` is."""
        b = self.b
        for r, row in enumerate(self.rows):
            place = self.at(row, group)
            factor = self.splat(self.load(self.at(place, SCALE_AT), _F32, 4))
            for v in range(_VECTORS):
                pointer = b.inttoptr(self.places[r][v], self.floats.as_pointer())
                value = b.fmul(b.sitofp(sums[r][v], self.floats), factor)
                total = self.fma(value, scales[v], b.load(pointer, align=4))
                if leasts is not None:
                    least = self.splat(self.load(self.at(place, LEAST_AT), _F32, 4))
                    total = self.fma(least, leasts[v], total)
                b.store(total, pointer, align=4)

    def ahead(self, address: Any, size: int) -> None:
        if len(self.rows) <= _AHEAD_ROWS:
            for line in range(0, size, 64):
                emit_prefetch(self.b, self.at(address, line + _AHEAD))

    # Formats.

    def run(self, weight: Any, units: Any) -> None:
        """The whole depth of a panel."""
        size = self.form.column_bytes * self.columns
        with cgutils.for_range(self.b, units, intp=_I64) as loop:
            unit = self.at(weight, self.b.mul(loop.index, _I64(size)))
            if self.form.is_super:
                self._super(unit, loop.index, size)
            else:
                self._plain(unit, loop.index, size)

    def _plain(self, unit: Any, index: Any, size: int) -> None:
        """A block whose scales, if it has more than one group, are behind the quants of all."""
        own = GROUP * self.form.bits // 8 * self.columns
        scales = self.at(unit, own * self.form.groups)
        if self.form.groups == 1:
            self.ahead(unit, size)
            self._group(unit, scales, self.b.mul(index, _I64(GROUP_BYTES)))
            return
        self.ahead(scales, size - own * self.form.groups)
        with cgutils.for_range(self.b, _I64(self.form.groups), intp=_I64) as loop:
            quants = self.at(unit, self.b.mul(loop.index, _I64(own)))
            self.ahead(quants, own)
            number = self.b.add(self.b.mul(index, _I64(self.form.groups)), loop.index)
            self._group(quants, scales, self.b.mul(number, _I64(GROUP_BYTES)))

    def _group(self, quants: Any, scales: Any, group: Any) -> None:
        if self.form.number in FLOAT_TABLES:
            self._two_digits(quants, scales, group)
        elif self.form.number == NVFP4:
            self._halves(quants, scales, group)
        else:
            self._simple(quants, scales, group)

    def _super(self, unit: Any, index: Any, size: int) -> None:
        head = 2 * self.columns * (2 if self.form.has_least else 1)
        own = (size - head) // self.form.groups
        with cgutils.for_range(self.b, _I64(self.form.groups), intp=_I64) as loop:
            place = self.at(unit, self.b.add(self.b.mul(loop.index, _I64(own)), _I64(head)))
            number = self.b.add(self.b.mul(index, _I64(self.form.groups)), loop.index)
            group = self.b.mul(number, _I64(GROUP_BYTES))
            self.ahead(place, own)
            (self._scaled if self.form.has_least else self._six_bits)(unit, place, group)

    def _simple(self, quants: Any, scales: Any, group: Any) -> None:
        form, columns = self.form, self.columns
        offset = form.offset
        if form.bits == 8:
            steps = self.steps_of_8(quants)
            offset += 128 if self.method.dots else 0
        else:
            is_five = form.bits == 5
            steps = self.steps_of_4(
                self.at(quants, 4 * columns) if is_five else quants, quants if is_five else None
            )
            if form.is_table:
                steps = self.looked_up(steps, [each + offset for each in MXFP4_TABLE])
        zeros = self.zeros_at(self.at(scales, form.scale_bytes * columns)) if form.has_zero else None
        sums = self.sums(steps, group, offset, SUM_AT, zeros)
        leasts = None
        if form.has_least:
            found = self.scales_at(self.at(scales, form.scale_bytes * columns))
            leasts = [self.b.fneg(each) for each in found]
        self.add(sums, group, self.scales_at(scales), leasts)

    def _halves(self, quants: Any, scales: Any, group: Any) -> None:
        """NVFP4: a scale for 16 inputs. It is read as a 256th of itself, which the factor makes good."""
        columns = self.columns
        values = [each + self.form.offset for each in MXFP4_TABLE]
        for half in range(2):
            steps = self.looked_up(self.steps_of_4_half(self.at(quants, 8 * half * columns), half), values)
            sums = self.sums(steps, group, self.form.offset, HALVES_AT + 4 * half)
            self.add(sums, group, self.small_floats_at(self.at(scales, half * columns), True))

    def _two_digits(self, quants: Any, scales_at: Any, group: Any) -> None:
        """NF4 and FP4: the table's numbers have 16 bits, of which each pass over the group takes eight."""
        steps = list(self.steps_of_4(quants, None))
        bias = 128 if self.method.dots else 0
        sums = None
        for digits in digits_of(FLOAT_TABLES[self.form.number]):
            values = [(each + bias + 128) % 256 - 128 for each in digits]
            before = None if sums is None else [[self.shifted(each, 8) for each in row] for row in sums]
            sums = self.sums(self.looked_up(steps, values), group, bias, SUM_AT, before=before)
        assert sums is not None
        unit_of_digits = self.same(self.floats, 1 / LARGEST_OF_TABLE)
        scales = [self.b.fmul(each, unit_of_digits) for each in self.scales_at(scales_at)]
        self.add(sums, group, scales)

    def _scaled(self, unit: Any, place: Any, group: Any) -> None:
        columns, five = self.columns, self.form.bits == 5
        high = self.at(place, 2 * columns)
        low = self.at(high, 4 * columns) if five else high
        sums = self.sums(self.steps_of_4(low, high if five else None), group, 0, SUM_AT)
        scales = self.times(self.bytes_at(place, False), self.halves_at(unit))
        leasts = self.times(
            self.bytes_at(self.at(place, columns), False), self.halves_at(self.at(unit, 2 * columns))
        )
        self.add(sums, group, scales, leasts)

    def _six_bits(self, unit: Any, place: Any, group: Any) -> None:
        columns = self.columns
        whole = self.halves_at(unit)
        for half in range(2):
            quants = self.at(place, (2 + 12 * half) * columns)
            steps = self.steps_of_6(quants, half)
            sums = self.sums(steps, group, self.form.offset, HALVES_AT + 4 * half)
            scales = self.times(self.bytes_at(self.at(place, half * columns), True), whole)
            self.add(sums, group, scales)


def _tile_intrinsic(
    typing_context: Any, num_rows: Any, number: Any, dots: Any, lanes: Any, emulated: Any, x: Any,
    stride: Any, weight: Any, units: Any, out: Any,
) -> Any:  # fmt: skip
    form = ALL_FORMATS[number.literal_value]
    method = BlockMethod(bool(dots.literal_value), lanes.literal_value, bool(emulated.literal_value))

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x, stride, weight, units, out = args[5:]
        for rows in method.heights:
            with builder.if_then(builder.icmp_signed("==", args[0], _I64(rows))):
                TileCode(builder, form, method, rows, x, stride, out).run(weight, units)
        return context.get_dummy_value()

    kinds = (num_rows, number, dots, lanes, emulated, x, stride, weight, units, out)
    return types.void(*kinds), codegen


#: tile(rows, number, dots, lanes, emulated, x, stride, weight, units, out): out[rows, columns] += rows .
#: panel. `rows` is one of the method's heights; number (of the format), dots, lanes, emulated (of the method)
#: are constants; x, weight, out: addresses; stride: bytes between rows; units: blocks of a row. All int64.
tile: Any = intrinsic(prefer_literal=True)(_tile_intrinsic)
assert GROUP_BYTES >= GROUP + 20
