# SPDX-License-Identifier: Apache-2.0
"""Gated delta rule with a decay for each channel of the key (Kimi delta attention).

As in `delta`, but that G_i is a vector, so that products of keys carry the decay inside their sum::

    A_ij = beta_i sum over d of k_i[d] k_j[d] 2^(G_i[d] - G_j[d])        (q k)_ij likewise
    S'   = diag(2^G_63) S + sum over j of (2^(G_63 - G_j) k_j) u_j

The exponents are differences of one channel's sums, never positive: 2^-G alone would overflow in a chunk.
Units are heads.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, njit

from radixkv_kernels.cpu.compiling import compile_kernel
from radixkv_kernels.cpu.memory import aligned, pointer, take
from radixkv_kernels.cpu.recurrence.arguments import (
    COUNTER,
    INPUT,
    LOG2E,
    NUM_ARGUMENTS,
    NUM_RINGS,
    NUM_ROWS,
    NUM_SLOTS,
    OUTPUT,
    RING,
    SIZE,
    SLOTS,
    UNITS,
    copy,
    cube,
    matrix,
    operation,
    operations,
)
from radixkv_kernels.cpu.recurrence.delta import norm_factor, substitute
from radixkv_kernels.cpu.recurrence.product import product
from radixkv_kernels.cpu.vectors import GROUP, exp2, fma
from radixkv_kernels.state_interface import FOLD, ROWS
from radixkv_kernels.states import GRID

_STRANDS = 8


@njit(forceinline=True)
def _faded_products(k: Any, q: Any, here: Any, other: Any, then: Any, strands: Any) -> Any:
    """Products of a row's key and query with an earlier key, faded channel by channel."""
    for w in range(_STRANDS):
        strands[0, w] = strands[1, w] = np.float32(0.0)
    for d in range(0, len(k), _STRANDS):
        for w in range(_STRANDS):
            x = other[d + w] * exp2(here[d + w] - then[d + w])
            strands[0, w] = fma(k[d + w], x, strands[0, w])
            strands[1, w] = fma(q[d + w], x, strands[1, w])
    a = b = np.float32(0.0)
    for w in range(_STRANDS):
        a += strands[0, w]
        b += strands[1, w]
    return a, b


@functools.cache
def kda_kernel() -> Any:
    """The kernel of all sizes; heads' are multiples of 8. The fifth size is a key's without padding."""

    def kda(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (NUM_ARGUMENTS,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        plan = operations(arg)
        heads, key, value = arg[SIZE], arg[SIZE + 2], arg[SIZE + 3]
        scale = np.float32(1.0) / np.sqrt(np.float32(arg[SIZE + 4]))
        rows, rings = arg[NUM_ROWS], arg[NUM_RINGS]
        slots = cube(arg[SLOTS], arg[NUM_SLOTS] * heads, key, value)
        ring_k = cube(arg[RING], rings * heads, GRID, key)
        ring_u = cube(arg[RING + 1], rings * heads, GRID, value)
        ring_g = cube(arg[RING + 2], rings * heads, GRID, key)
        q, k = (cube(arg[INPUT], rows, heads, key), cube(arg[INPUT + 1], rows, heads, key))
        v, g = cube(arg[INPUT + 2], rows, heads, value), cube(arg[INPUT + 3], rows, heads, key)
        beta = matrix(arg[INPUT + 4], rows, heads)
        out = cube(arg[OUTPUT], rows, heads, value)
        faded = aligned(2 * GRID * key).reshape(2 * GRID, key)
        columns = aligned(key * GRID).reshape(key, GRID)
        both = aligned(2 * GRID * value).reshape(2 * GRID, value)
        weights = aligned(2 * GRID * GRID).reshape(2 * GRID, GRID)
        query = np.empty(key, np.float32)
        strands = np.empty((2, _STRANDS), np.float32)
        while True:
            h = take(counter)
            if h >= arg[UNITS]:
                break
            for n in range(len(plan)):
                code, first, count, ring, at, state = operation(plan, n)
                if code == ROWS:
                    keys, decays = ring_k[ring * heads + h], ring_g[ring * heads + h]
                    for i in range(count):
                        row = first + i
                        factor = norm_factor(k[row, h], strands[0])
                        for d in range(key):
                            own = g[row, h, d] * LOG2E
                            decays[at + i, d] = own if at + i == 0 else decays[at + i - 1, d] + own
                            keys[at + i, d] = k[row, h, d] * factor
                        factor = norm_factor(q[row, h], strands[0]) * scale
                        for d in range(key):
                            query[d] = q[row, h, d] * factor
                            e = exp2(decays[at + i, d])
                            faded[i, d] = keys[at + i, d] * e
                            faded[count + i, d] = query[d] * e
                        b = beta[row, h]
                        for j in range(at + i + 1):
                            a, p = _faded_products(
                                keys[at + i], query, decays[at + i], keys[j], decays[j], strands
                            )
                            weights[i, j] = -(a * b)
                            weights[count + i, j] = p
                    product(
                        np.int64(faded.ctypes.data), key, 2 * count,
                        np.int64(slots[state * heads + h].ctypes.data), value, key // GROUP,
                        np.int64(both.ctypes.data), value, value, 0,
                    )  # fmt: skip
                    for i in range(count):
                        b = beta[first + i, h]
                        for d in range(value):
                            both[i, d] = b * (v[first + i, h, d] - both[i, d])
                    substitute(weights, ring_u[ring * heads + h], both, out[:, h], first, count, at, value)
                elif code == FOLD:
                    keys, decays = ring_k[first * heads + h], ring_g[first * heads + h]
                    base, new = slots[count * heads + h], slots[ring * heads + h]
                    for d in range(key):
                        last = decays[GRID - 1, d]
                        e = exp2(last)
                        for j in range(GRID):
                            columns[d, j] = keys[j, d] * exp2(last - decays[j, d])
                        for w in range(value):
                            new[d, w] = e * base[d, w]
                    product(
                        np.int64(columns.ctypes.data), GRID, key,
                        np.int64(ring_u[first * heads + h].ctypes.data), value, GRID // GROUP,
                        np.int64(new.ctypes.data), value, value, 1,
                    )  # fmt: skip
                else:
                    size, slot = key * value, arg[SLOTS]
                    copy(slot + (first * heads + h) * size * 4, slot + (count * heads + h) * size * 4, size)

    return compile_kernel(kda)
