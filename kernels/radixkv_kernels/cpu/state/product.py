# SPDX-License-Identifier: Apache-2.0
"""The matrix product of the state kernels: sizes and strides are arguments of the call.

Each element is one chain of fused multiply-adds in the order of k, as in `radixkv_kernels.cpu.vectors`.
Panels of 64 columns are computed in tiles of 6 rows that stay in registers, the other columns by 8.
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
#: (lanes, vectors, rows) of a tile: wide panels, and narrow ones.
_WIDE = (LANES, 64 // LANES, 6 if LANES == 16 else 2)
_NARROW = (8, 1, 6)


def _emit(
    e: Emitter, a: Any, a_row: Any, rows: Any, b: Any, b_row: Any, groups: Any, c: Any, c_row: Any,
    first_column: Any, num_panels: Any, adds: Any, shape: tuple[int, int, int],
) -> None:  # fmt: skip
    """Panels of one shape; strides in bytes, `adds` an i1: whether sums begin with c's values."""
    lanes, vectors, height = shape
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
        whole = builder.udiv(rows, _LONG(height))
        with e.loop(whole) as index:
            tile(height, e.scaled(index, height), column)
        done = e.scaled(whole, height)
        if height > 2:
            pairs = builder.udiv(builder.sub(rows, done), _LONG(2))
            with e.loop(pairs) as index:
                tile(2, builder.add(done, e.scaled(index, 2)), column)
            done = builder.add(done, e.scaled(pairs, 2))
        with builder.if_then(builder.icmp_unsigned("<", done, rows)):
            tile(1, done, column)


def _product(
    typing_context: Any, a: Any, a_row: Any, rows: Any, b: Any, b_row: Any, groups: Any, c: Any, c_row: Any,
    width: Any, adds: Any,
) -> Any:  # fmt: skip
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Emitter(builder)
        first, a_step, count, second, b_step, num_groups, out, c_step, columns, accumulate = args
        a_step, b_step, c_step = (e.scaled(step, 4) for step in (a_step, b_step, c_step))
        common = (e, first, a_step, count, second, b_step, num_groups, out, c_step)
        flag = builder.icmp_unsigned("!=", accumulate, _LONG(0))
        wide = builder.udiv(columns, _LONG(64))
        done = e.scaled(wide, 64)
        narrow = builder.udiv(builder.sub(columns, done), _LONG(8))
        _emit(*common, _LONG(0), wide, flag, _WIDE)
        _emit(*common, e.scaled(done, 4), narrow, flag, _NARROW)
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
