# SPDX-License-Identifier: Apache-2.0
"""The matrix product of the state kernels: sizes and strides are arguments of the call.

Each element is one chain of fused multiply-adds in the order of k, as in `radixkv_kernels.cpu.vectors`.
Tiles of rows and columns stay in registers: of 32 registers (AVX-512) 6 rows by 64 columns, of 16 (AVX2)
6 by 16; rows that are left over, such as a decode's, 2 by as many columns as give enough chains at once.
The last columns are computed by 8.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from radixkv_kernels.cpu.vectors import GROUP, LANES, Emitter

_LONG, _FLOAT = ir.IntType(64), ir.FloatType()
_Shape = tuple[int, int]
#: (lanes, vectors) of a tile of 6 rows, of 2 or 1, and of the last columns.
_TALL: _Shape = (16, 4) if LANES == 16 else (8, 2)
_FLAT: _Shape = (16, 4) if LANES == 16 else (8, 4)
_LAST: _Shape = (8, 1)
_HEIGHT = 6


def _emit(
    e: Emitter, a: Any, a_row: Any, first_row: Any, rows: Any, b: Any, b_row: Any, groups: Any, c: Any,
    c_row: Any, adds: Any, first_column: Any, num_panels: Any, shape: _Shape, height: int,
) -> None:  # fmt: skip
    """Panels of one shape over the rows [first_row, rows), as far as tiles of `height` rows go; strides in
    bytes, `adds` an i1: whether sums begin with c's values."""
    lanes, vectors = shape
    builder, kind = e.builder, ir.VectorType(_FLOAT, lanes)

    def tile(count: int, first: Any, column: Any) -> None:
        a_at = e.at(a, builder.mul(first, a_row))
        c_at = e.at(e.at(c, builder.mul(first, c_row)), column)
        rows_at = [e.at(c_at, builder.mul(_LONG(i), c_row)) for i in range(count)]
        inputs_at = [e.at(a_at, builder.mul(_LONG(i), a_row)) for i in range(count)]
        zero = e.constant(0.0, kind)
        sums = []
        for row in rows_at:
            own = []
            for v in range(vectors):
                place = e.variable(kind, zero)
                with builder.if_then(adds):
                    builder.store(e.load(e.at(row, v * lanes * 4), lanes), place)
                own.append(place)
            sums.append(own)
        with e.loop(groups) as group:
            b_at = e.at(e.at(b, column), builder.mul(group, builder.mul(_LONG(GROUP), b_row)))
            for k in range(GROUP):
                source = e.at(b_at, builder.mul(_LONG(k), b_row))
                loaded = [e.load(e.at(source, v * lanes * 4), lanes) for v in range(vectors)]
                for i in range(count):
                    at = e.at(e.at(inputs_at[i], e.scaled(group, GROUP * 4)), k * 4)
                    x = e.splat(e.scalar(at), lanes)
                    for v in range(vectors):
                        builder.store(e.call("fma", x, loaded[v], builder.load(sums[i][v])), sums[i][v])
        for row, own in zip(rows_at, sums, strict=True):
            for v, place in enumerate(own):
                e.store(builder.load(place), e.at(row, v * lanes * 4))

    with e.loop(num_panels) as panel:
        column = builder.add(first_column, e.scaled(panel, lanes * vectors * 4))
        count = builder.udiv(builder.sub(rows, first_row), _LONG(height))
        with e.loop(count) as index:
            tile(height, builder.add(first_row, e.scaled(index, height)), column)


def _product(
    typing_context: Any, a: Any, a_row: Any, rows: Any, b: Any, b_row: Any, groups: Any, c: Any, c_row: Any,
    width: Any, adds: Any,
) -> Any:  # fmt: skip
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Emitter(builder)
        first, a_step, count, second, b_step, num_groups, out, c_step, columns, accumulate = args
        a_step, b_step, c_step = (e.scaled(step, 4) for step in (a_step, b_step, c_step))
        flag = builder.icmp_unsigned("!=", accumulate, _LONG(0))
        row: Any = _LONG(0)
        for shape, height in ((_TALL, _HEIGHT), (_FLAT, 2), (_FLAT, 1)):
            common = (e, first, a_step, row, count, second, b_step, num_groups, out, c_step, flag)
            size = shape[0] * shape[1]
            panels = builder.udiv(columns, _LONG(size))
            done = e.scaled(panels, size)
            last = builder.udiv(builder.sub(columns, done), _LONG(_LAST[0]))
            _emit(*common, _LONG(0), panels, shape, height)
            _emit(*common, e.scaled(done, 4), last, _LAST, height)
            row = builder.sub(count, builder.urem(builder.sub(count, row), _LONG(height)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), codegen


_intrinsic: Any = intrinsic(_product)


@njit
def product(
    a: int, a_row: int, rows: int, b: int, b_row: int, groups: int, c: int, c_row: int, width: int, adds: int
) -> None:
    """c[rows, width] (+)= a[rows, k] . b[k, width] with k = 8 * groups.

    Args:
        a, b, c: addresses of float32; `*_row` floats from row to row.
        width: a multiple of 8.
        adds: 1: c is added to; 0: it is overwritten.
    """
    _intrinsic(a, a_row, rows, b, b_row, groups, c, c_row, width, adds)
