# SPDX-License-Identifier: Apache-2.0
"""The attention kernel's products with a chunk of keys and of values, compiled per head size and storage.

They are small functions that the kernel calls by their addresses, so that a further head size or storage
compiles in a second or two: the loops around them, which take most of a compiler's time, are compiled once.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray

from radixkv_kernels.cpu.attention.stored_rows import FLOAT32, element_size, widen
from radixkv_kernels.cpu.compiling import compile_kernel
from radixkv_kernels.cpu.memory import pointer
from radixkv_kernels.cpu.vectors import GROUP, LANES, scores, transpose, weigh

#: KV positions per segment: the unit of splitting and sharing, and the length of a row of weights.
SEGMENT = 256


def square_of(head_size: int, block_size: int) -> int:
    """Return the side of the squares in which keys are transposed: a vector's width, where a block and a head
    have room for one."""
    return LANES if block_size % LANES == 0 and head_size % LANES == 0 else GROUP


@functools.cache
def score_product(head_size: int, kind: int, square: int, value_bytes: int) -> int:
    """Return the address of the compiled product of query rows and a chunk of keys.

    Its int64 parameters: places (address of the cache rows of groups of 8 keys), count (squares of this
    chunk), ahead (squares of the segment from here on), key, key_scale, value (addresses of the layer's
    storage), q, rows, columns, first (column of the first square), wide, out (rows `SEGMENT` floats apart).
    `value_bytes` is the size of a stored value: values are prefetched while keys are transposed.
    """
    product = _make_score(head_size, kind, square, value_bytes)
    _keep.append(product)
    return product.address


@functools.cache
def value_product(value_size: int, value_row: int, kind: int) -> int:
    """Return the address of the compiled product of weights and a chunk of values, added to `out`.

    Its int64 parameters: places (address of the cache rows of groups of 8 values), count (values), value,
    value_scale (addresses of the layer's storage), weights (rows `SEGMENT` floats apart), rows, addresses
    (scratch of a number per group), wide (scratch of a chunk), out. Stored values are `value_row` elements
    apart.
    """
    product = _make_weigh(value_size, value_row, kind)
    _keep.append(product)
    return product.address


_keep: list[Any] = []


def _make_score(head_size: int, kind: int, square: int, value_bytes: int) -> Any:
    def score(  # type: ignore[no-untyped-def]
        places, count, ahead, key, key_scale, value, q, rows, columns, first, wide, out
    ):
        groups = square // GROUP
        row_bytes = head_size * element_size(kind)
        cached = carray(pointer(places, np.int64), (ahead * groups,))
        for s in range(count):
            row = cached[s * groups]
            key_at = key + row * row_bytes
            # Memory is what limits a few rows: ask for the next keys, and for these keys' values.
            next_key = key_at
            if s + 1 < ahead:
                next_key = key + cached[(s + 1) * groups] * row_bytes
            if kind != FLOAT32:
                widen(kind, key_at, key_scale + row * 4, square, square, head_size, wide)
                key_at = wide
            transpose(
                key_at,
                columns + (first + s * square) * 4,
                head_size,
                square,
                kind,
                next_key,
                value + row * value_bytes,
            )
        scores(q, rows, columns, out, head_size, SEGMENT)

    return compile_kernel(score, parameters=12)


def _make_weigh(value_size: int, value_row: int, kind: int) -> Any:
    def weigh_values(  # type: ignore[no-untyped-def]
        places, count, value, value_scale, weights, rows, addresses, wide, out
    ):
        row_bytes = value_row * element_size(kind)
        groups = (count + GROUP - 1) // GROUP
        cached = carray(pointer(places, np.int64), (groups,))
        found = carray(pointer(addresses, np.int64), (groups,))
        for g in range(groups):
            row = cached[g]
            value_at = value + row * row_bytes
            written = min(count - g * GROUP, np.int64(GROUP))
            # Slots past the context may hold NaN, which zero weights would not cancel.
            if kind != FLOAT32 or written < GROUP:
                target = wide + g * (GROUP * value_row * 4)
                widen(kind, value_at, value_scale + row * 4, written, GROUP, value_row, target)
                value_at = target
            found[g] = value_at
        weigh(weights, rows, addresses, groups, out, value_size, SEGMENT, value_row)

    return compile_kernel(weigh_values, parameters=9)
