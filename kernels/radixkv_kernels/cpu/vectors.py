# SPDX-License-Identifier: Apache-2.0
"""The inner loops of the CPU attention kernel, emitted as vector code: product, transposition, softmax.

Loops that a compiler vectorises by itself are only as good as its guesses, and where it may reorder sums,
different copies of one loop round differently. Here every vector operation is spelled out:

    product     c[i, :] (+)= sum over k of a[i, k] * b[k, :]     one fused multiply-add per k, in order
    transpose   keys as they lie in the cache -> columns         shuffles
    softmax     row <- 2 ** (row - max)                          maximum, sum in 16 strands, then a tree

An element's value depends on its inputs and on k's order only: not on the number of rows, on the vector
width, nor on which variant of the unrolled code computed it. LLVM splits vectors that the processor lacks.

A product's tile of rows x vectors stays in registers: 6 x 4 for 32 registers of 16 floats (AVX-512), 6 x 2
for 16 of 8 (AVX2). Per step of k it loads 4 vectors and 6 scalars for 24 multiply-adds.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from radixkv_kernels.cpu.isa import features
from radixkv_kernels.cpu.memory import emit_prefetch

#: Keys whose scores are computed together; columns of a transposed tile.
CHUNK = 64
#: Keys with consecutive addresses in any cache: the smallest block.
GROUP = 8
#: Bytes of an element by storage kind: float32, bfloat16, float16, int8, fp8_e4m3, fp8_e5m2.
ELEMENT_SIZES = (4, 2, 2, 1, 1, 1)
#: Strands of a softmax's sum.
STRANDS = 16


def has_multiply_add() -> bool:
    """Return True if kernels may fuse multiply and add in one rounding; elsewhere it is a slow call."""
    return platform.machine() in ("aarch64", "arm64") or not features().isdisjoint(("avx512f", "fma"))


_wide = "avx512f" in features()
#: Floats per vector, and accumulators that fit the registers beside a product's loaded operands.
LANES, _ACCUMULATORS = (16, 24) if _wide else (8, 12)

_FLOAT, _WORD, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)

# Cephes' exp2f on [-0.5, 0.5], highest power first.
_EXP2 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
_EXP2_FLOOR = -125.0


class Emitter:
    """Float vectors on top of a numba function's IR builder. Addresses are int64 values."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def at(self, address: Any, offset: Any) -> Any:
        """address + offset; the offset is a Python int or an int64 value."""
        offset = _LONG(offset) if isinstance(offset, int) else offset
        return self.builder.add(address, offset)

    def scaled(self, value: Any, factor: int) -> Any:
        return self.builder.mul(value, _LONG(factor))

    def load(self, address: Any, lanes: int) -> Any:
        kind = ir.VectorType(_FLOAT, lanes).as_pointer()
        return self.builder.load(self.builder.inttoptr(address, kind), align=4)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=4)

    def scalar(self, address: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, _FLOAT.as_pointer()), align=4)

    def splat(self, value: Any, lanes: int) -> Any:
        """A value in every lane of a vector."""
        undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
        one = self.builder.insert_element(undefined, value, _WORD(0))
        return self.shuffle(one, undefined, [0] * lanes)

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_WORD, len(lanes)), lanes))

    def constant(self, value: float, kind: Any) -> Any:
        if isinstance(kind, ir.VectorType):
            return ir.Constant(kind, [value] * kind.count)
        return ir.Constant(kind, value)

    def call(self, name: str, *args: Any) -> Any:
        """An LLVM intrinsic on floats or float vectors."""
        kind = args[0].type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(kind, [kind] * len(args)), f"llvm.{name}.{suffix}"
        )
        return self.builder.call(function, args)

    def larger(self, a: Any, b: Any) -> Any:
        """max(a, b), in one instruction."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def reduce(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All lanes by a tree of halves."""
        lanes = vector.type.count
        while lanes > 1:
            lanes //= 2
            low = self.shuffle(vector, vector, list(range(lanes)))
            high = self.shuffle(vector, vector, list(range(lanes, 2 * lanes)))
            vector = combine(low, high)
        return self.builder.extract_element(vector, _WORD(0))

    def exp2(self, x: Any) -> Any:
        """2 ** x for x <= 0, exactly 0 from -125 down: a polynomial, exponent set by its bits."""
        b, kind = self.builder, x.type
        vector = isinstance(kind, ir.VectorType)
        whole_kind = ir.VectorType(_WORD, kind.count) if vector else _WORD
        floor = self.constant(_EXP2_FLOOR, kind)
        inside = b.fcmp_ordered(">", x, floor)
        v = b.select(inside, x, floor)
        whole = self.call("rint", v)
        y = b.fsub(v, whole)
        p = self.constant(_EXP2[0], kind)
        for c in _EXP2[1:]:
            p = self.call("fma", p, y, self.constant(c, kind))
        bits = b.add(b.fptosi(whole, whole_kind), self.constant(127, whole_kind))
        power = b.bitcast(b.shl(bits, self.constant(23, whole_kind)), kind)
        return b.select(inside, b.fmul(p, power), self.constant(0.0, kind))

    def variable(self, kind: Any, value: Any) -> Any:
        place = cgutils.alloca_once(self.builder, kind)
        self.builder.store(value, place)
        return place

    @contextmanager
    def loop(self, count: Any) -> Iterator[Any]:
        """`for index in range(count)`; yields the index."""
        with cgutils.for_range(self.builder, count, intp=_LONG) as loop:
            yield loop.index


def _largest_divisor(n: int, most: int) -> int:
    return next(d for d in range(most, 0, -1) if n % d == 0)


def emit_product(
    e: Emitter,
    a: Any,
    a_row: int,
    num_rows: Any,
    b_group: Callable[[Any], Any],
    num_groups: Any,
    b_row: int,
    width: int,
    c: Any,
    c_row: int,
    accumulate: bool,
) -> None:
    """c[i, 0:width] (+)= sum over k of a[i, k] * b[k, 0:width], k in groups of `GROUP`.

    Args:
        a, c: addresses; `a_row` and `c_row` bytes from row to row, elements of a row adjacent.
        num_rows, num_groups: int64 values.
        b_group: group index -> address of its first row; `b_row` bytes from row to row.
        width: columns, a multiple of 8.
    """
    lanes = LANES if width % LANES == 0 else 8
    vectors = _largest_divisor(width // lanes, min(6, _ACCUMULATORS // 2 if _wide else 2))
    height = min(6, _ACCUMULATORS // vectors)

    def tile(rows: int, first_row: Any, column: Any) -> None:
        kind = ir.VectorType(_FLOAT, lanes)
        a_at = e.at(a, e.scaled(first_row, a_row))
        c_at = e.at(e.at(c, e.scaled(first_row, c_row)), column)
        places = [[e.at(c_at, i * c_row + v * lanes * 4) for v in range(vectors)] for i in range(rows)]
        zero = e.constant(0.0, kind)
        sums = [
            [e.variable(kind, e.load(place, lanes) if accumulate else zero) for place in row]
            for row in places
        ]
        # Unrolled, but less in the rarer variants: they are many, and cost compile time.
        unroll = GROUP if rows == height else 4
        with e.loop(num_groups) as group, e.loop(_LONG(GROUP // unroll)) as part:
            b_at = e.at(e.at(b_group(group), column), e.scaled(part, unroll * b_row))
            a_group = e.at(e.at(a_at, e.scaled(group, GROUP * 4)), e.scaled(part, unroll * 4))
            for k in range(unroll):
                loaded = [e.load(e.at(b_at, k * b_row + v * lanes * 4), lanes) for v in range(vectors)]
                for i in range(rows):
                    x = e.splat(e.scalar(e.at(a_group, i * a_row + k * 4)), lanes)
                    for v in range(vectors):
                        new = e.call("fma", x, loaded[v], e.builder.load(sums[i][v]))
                        e.builder.store(new, sums[i][v])
        for row, row_sums in zip(places, sums, strict=True):
            for place, total in zip(row, row_sums, strict=True):
                e.store(e.builder.load(total), place)

    with e.loop(_LONG(width // (vectors * lanes))) as panel:
        column = e.scaled(panel, vectors * lanes * 4)
        whole = e.builder.udiv(num_rows, _LONG(height))
        with e.loop(whole) as index:
            tile(height, e.scaled(index, height), column)
        first = e.scaled(whole, height)
        rest = e.builder.sub(num_rows, first)
        for rows in range(1, height):
            with e.builder.if_then(e.builder.icmp_unsigned("==", rest, _LONG(rows))):
                tile(rows, first, column)


def _transposed(e: Emitter, rows: list[Any]) -> list[Any]:
    """A square of vectors transposed: log2(n) rounds that exchange ever smaller off-diagonal squares."""
    n = len(rows)
    step = n // 2
    while step:
        for i in range(n):
            if not i & step:
                a, b = rows[i], rows[i | step]
                rows[i] = e.shuffle(a, b, [n + j - step if j & step else j for j in range(n)])
                rows[i | step] = e.shuffle(a, b, [n + j if j & step else j + step for j in range(n)])
        step //= 2
    return rows


def _exp2_intrinsic(typing_context: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return Emitter(builder).exp2(args[0])

    return types.float32(types.float32), codegen


def _fma_intrinsic(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return Emitter(builder).call("fma", *args)

    return types.float32(types.float32, types.float32, types.float32), codegen


def _transpose_intrinsic(
    typing_context: Any, keys: Any, columns: Any, size: Any, count: Any, kind: Any, next_a: Any, next_b: Any
) -> Any:
    head_size, square = size.literal_value, count.literal_value
    element = ELEMENT_SIZES[kind.literal_value]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Emitter(builder)
        source, target = args[0], args[1]
        # Each step reads square x square floats; as many elements of either run are asked for meanwhile.
        step = square * square * element
        with e.loop(_LONG(head_size // square)) as index:
            for ahead in args[5:7]:
                for offset in range(0, step, 64):
                    emit_prefetch(builder, e.at(e.at(ahead, e.scaled(index, step)), offset))
            at = e.at(source, e.scaled(index, square * 4))
            rows = [e.load(e.at(at, n * head_size * 4), square) for n in range(square)]
            out = e.at(target, e.scaled(index, square * CHUNK * 4))
            for d, vector in enumerate(_transposed(e, rows)):
                e.store(vector, e.at(out, d * CHUNK * 4))
        return context.get_dummy_value()

    return types.void(keys, columns, size, count, kind, next_a, next_b), codegen


def _scores_intrinsic(
    typing_context: Any, q: Any, rows: Any, columns: Any, scores: Any, size: Any, width: Any
) -> Any:
    head_size, row = size.literal_value, width.literal_value

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Emitter(builder)
        query, num_rows, keys, out = args[:4]
        emit_product(
            e, query, head_size * 4, num_rows,
            lambda group: e.at(keys, e.scaled(group, GROUP * CHUNK * 4)), _LONG(head_size // GROUP),
            CHUNK * 4, CHUNK, out, row * 4, False,
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(q, rows, columns, scores, size, width), codegen


def _weigh_intrinsic(
    typing_context: Any,
    weights: Any,
    rows: Any,
    addresses: Any,
    groups: Any,
    out: Any,
    size: Any,
    width: Any,
    stride: Any,
) -> Any:
    head_size, row, value_row = size.literal_value, width.literal_value, stride.literal_value

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Emitter(builder)
        scores, num_rows, places, num_groups, target = args[:5]

        def value_rows(group: Any) -> Any:
            return builder.load(builder.inttoptr(e.at(places, e.scaled(group, 8)), _LONG.as_pointer()))

        emit_product(
            e, scores, row * 4, num_rows, value_rows, num_groups, value_row * 4, head_size, target,
            head_size * 4, True,
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(weights, rows, addresses, groups, out, size, width, stride), codegen


def _softmax_intrinsic(typing_context: Any, row: Any, count: Any, top_at: Any, sum_at: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Emitter(builder)
        address, vectors, top_at, sum_at = args
        kind = ir.VectorType(_FLOAT, STRANDS)
        top = e.variable(kind, e.constant(float("-inf"), kind))
        with e.loop(vectors) as index:
            new = e.larger(e.load(e.at(address, e.scaled(index, STRANDS * 4)), STRANDS), builder.load(top))
            builder.store(new, top)
        highest = e.reduce(builder.load(top), e.larger)
        base = e.splat(highest, STRANDS)
        sums = e.variable(kind, e.constant(0.0, kind))
        with e.loop(vectors) as index:
            place = e.at(address, e.scaled(index, STRANDS * 4))
            weight = e.exp2(builder.fsub(e.load(place, STRANDS), base))
            e.store(weight, place)
            builder.store(builder.fadd(builder.load(sums), weight), sums)
        e.store(highest, top_at)
        e.store(e.reduce(builder.load(sums), builder.fadd), sum_at)
        return context.get_dummy_value()

    return types.void(row, count, top_at, sum_at), codegen


#: float32 -> float32: 2 ** x for x <= 0.
exp2: Any = intrinsic(_exp2_intrinsic)
#: float32 a * b + c, rounded once.
fma: Any = intrinsic(_fma_intrinsic)
#: transpose(keys, columns, head_size, square, kind, next_a, next_b): `square` rows of float32 keys become
#: that many columns of [head_size, CHUNK]. Meanwhile as many stored rows are prefetched from next_a and
#: next_b.
transpose: Any = intrinsic(prefer_literal=True)(_transpose_intrinsic)
#: scores(q, rows, columns, scores, head_size, width): scores[rows, :CHUNK] = q[rows] . columns; rows of
#: `scores` are `width` floats apart.
scores: Any = intrinsic(prefer_literal=True)(_scores_intrinsic)
#: weigh(weights, rows, addresses, groups, out, value_size, width, value_row): out[rows] += weights[rows] .
#: values, with one address per group of values; values of a group are `value_row` floats apart.
weigh: Any = intrinsic(prefer_literal=True)(_weigh_intrinsic)
#: softmax(row, count, top_at, sum_at): `count` x STRANDS logits become weights; maximum and sum are stored.
softmax: Any = intrinsic(_softmax_intrinsic)
