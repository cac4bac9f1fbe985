# SPDX-License-Identifier: Apache-2.0
"""A tile of a stored weight times a tile of rows: what all Triton kernels that multiply weights are made of.

`TiledWeight` says which forms there are; a kernel is compiled for one `TileForm` and gets the weight's
pointers as one tuple, in the order of `TiledWeight.arguments`. Weights are the tall operand: few rows still
give Hopper's wide instructions. A row's sums go over its inputs in one order in each tile of one height.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

#: 2^126: an e2m1 code in float32's exponent and mantissa is that much too small.
_E2M1_SCALE = tl.constexpr(2.0**126)


@triton.jit
def _load_inputs(at, w, column, on, FORM: tl.constexpr):
    """Inputs of some columns, of some rows."""
    if FORM.gather:
        place = tl.load(w[5] + column, mask=column < FORM.columns, other=-1)
        inside = place >= 0
    else:
        place = column
        inside = column < FORM.columns
    return tl.load(at + place[None, :], mask=on[:, None] & inside[None, :], other=0.0)


@triton.jit
def load_rows(x_ptr, w, row, on, k, BK: tl.constexpr, FORM: tl.constexpr):
    """Inputs of columns k to k + BK of some rows [*, inputs]: two tiles, of pairs the even and the odd."""
    at = x_ptr + row.to(tl.int64)[:, None] * FORM.inputs
    if FORM.pairs:
        column = k + 2 * tl.arange(0, BK // 2)
        even = _load_inputs(at, w, column, on, FORM)
        odd = _load_inputs(at, w, column + 1, on, FORM)
    else:
        even = _load_inputs(at, w, k + tl.arange(0, BK), on, FORM)
        odd = even
    return even, odd


@triton.jit
def e2m1(code):
    """Codes of 4 bits, int32 -> float32, times 2^-126."""
    return (((code & 7) << 22) | ((code >> 3) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _of_four(low, high, a, b, c, d):
    """One of four numbers by two bits."""
    return tl.where(high, tl.where(low, d, c), tl.where(low, b, a))


@triton.jit
def _looked_up(code, T: tl.constexpr):
    """Numbers of a table: choices among constants, since loads would be staged in shared memory."""
    low = (code & 1) != 0
    high = (code & 2) != 0
    return _of_four(
        (code & 4) != 0,
        (code & 8) != 0,
        _of_four(low, high, T[0], T[1], T[2], T[3]),
        _of_four(low, high, T[4], T[5], T[6], T[7]),
        _of_four(low, high, T[8], T[9], T[10], T[11]),
        _of_four(low, high, T[12], T[13], T[14], T[15]),
    )


@triton.jit
def _of_block(ptr, n, column, k, within, inside, FORM: tl.constexpr, IN_TILE: tl.constexpr):
    """What blocks have, float32: for each number (IN_TILE), or one for each output."""
    if IN_TILE and FORM.width < FORM.columns:
        at = ptr + ((n // FORM.height) * FORM.grid)[:, None] + (column // FORM.width)[None, :]
        value = tl.load(at, mask=within, other=0.0)
    else:
        at = ptr + (n // FORM.height) * FORM.grid + k // FORM.width
        value = tl.load(at, mask=inside, other=0.0)[:, None]
    if FORM.exponents and IN_TILE:
        exponent = value.to(tl.int32)
        value = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _codes_as_numbers(code, FORM: tl.constexpr):
    """Codes of a tile -> float32."""
    if FORM.kind == 3:
        value = _looked_up(code, FORM.table)
    elif FORM.kind == 4:
        value = e2m1(code) * _E2M1_SCALE
    else:
        value = code.to(tl.float32)
        if FORM.zero:
            value -= FORM.zero
    return value


@triton.jit
def add_product(acc, even, odd, w, n, inside, k, BK: tl.constexpr, FORM: tl.constexpr):
    """acc [len(n), rows] += weights [n, k to k + BK] times the rows of `load_rows`."""
    dtype: tl.constexpr = even.dtype
    if FORM.pairs:
        byte = k // 2 + tl.arange(0, BK // 2)
        column = 2 * byte
        # Of bytes, not of columns: else the compiler does not see that neighbours are in or out together.
        within = inside[:, None] & (byte < FORM.columns // 2)[None, :]
        at = w[0] + n.to(tl.int64)[:, None] * FORM.code_stride + byte[None, :]
        code = tl.load(at, mask=within, other=0).to(tl.int32)
        low = code & 15
        high = code >> 4
        if FORM.plane:
            bit = column * FORM.plane
            at = w[1] + n.to(tl.int64)[:, None] * FORM.plane_stride + (bit // 8)[None, :]
            more = tl.load(at, mask=within, other=0).to(tl.int32) >> (bit % 8)[None, :]
            low |= (more & ((1 << FORM.plane) - 1)) << 4
            high |= ((more >> FORM.plane) & ((1 << FORM.plane) - 1)) << 4
        first = _codes_as_numbers(low, FORM)
        second = _codes_as_numbers(high, FORM)
    else:
        column = k + tl.arange(0, BK)
        within = inside[:, None] & (column < FORM.columns)[None, :]
        at = w[0] + n.to(tl.int64)[:, None] * FORM.code_stride
        at += column.to(tl.int64)[None, :] * FORM.column_stride
        code = tl.load(at, mask=within, other=0.0)
        first = code if FORM.kind == 0 else _codes_as_numbers(code, FORM)
        second = first
    if FORM.has_zeros:
        zero = _of_block(w[3], n, column, k, within, inside, FORM, FORM.in_tile)
        first -= zero
        second -= zero
    if FORM.in_tile:
        scale = _of_block(w[2], n, column, k, within, inside, FORM, True)
        if FORM.super_width:
            at = (n * FORM.super_grid + k // FORM.super_width) * (2 if FORM.has_leasts else 1)
            scale *= tl.load(w[4] + at, mask=inside, other=0.0).to(tl.float32)[:, None]
        first *= scale
        second *= scale
        if FORM.has_leasts:
            least = _of_block(w[3], n, column, k, within, inside, FORM, True)
            if FORM.super_width:
                least *= tl.load(w[4] + at + 1, mask=inside, other=0.0).to(tl.float32)[:, None]
            first += least
            second += least
    if FORM.in_tile or not FORM.scaled or FORM.width >= FORM.columns:
        acc = tl.dot(first.to(dtype), tl.trans(even), acc, input_precision="ieee")
        if FORM.pairs:
            acc = tl.dot(second.to(dtype), tl.trans(odd), acc, input_precision="ieee")
    else:
        part = tl.zeros(acc.shape, tl.float32)
        part = tl.dot(first.to(dtype), tl.trans(even), part, input_precision="ieee")
        if FORM.pairs:
            part = tl.dot(second.to(dtype), tl.trans(odd), part, input_precision="ieee")
        acc += part * _of_block(w[2], n, column, k, within, inside, FORM, False)
    return acc


@triton.jit
def _finished(acc, w, n, inside, FORM: tl.constexpr):
    """Sums with what multiplies all of an output, and its bias."""
    if FORM.scaled and not FORM.in_tile and FORM.width >= FORM.columns:
        scale = tl.load(w[2] + (n // FORM.height) * FORM.grid, mask=inside, other=0.0)
        acc *= scale.to(tl.float32)[:, None]
    if FORM.bias:
        acc += tl.load(w[6] + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def multiply_tile(
    x_ptr, row, on, w, first, second, inside, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FORM: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Some rows times some outputs, with the bias: float32 [BN, BM]; and (TWO) times others, else zeros."""
    acc = tl.zeros((BN, BM), tl.float32)
    other = tl.zeros((BN, BM), tl.float32)
    for k in range(0, FORM.columns, BK):
        even, odd = load_rows(x_ptr, w, row, on, k, BK, FORM)
        acc = add_product(acc, even, odd, w, first, inside, k, BK, FORM)
        if TWO:
            other = add_product(other, even, odd, w, second, inside, k, BK, FORM)
    acc = _finished(acc, w, first, inside, FORM)
    if TWO:
        other = _finished(other, w, second, inside, FORM)
    return acc, other
