# SPDX-License-Identifier: Apache-2.0
"""Gated delta rule over packed rows: base state, ring, and one routine for decodes, guesses and prompts.

With G the sum of log decays since the base, A_ij = beta_i (k_i k_j) e^(G_i - G_j), and S the base state::

    u_i = beta_i (v_i - e^G_i k_i S) - sum over j < i of A_ij u_j         what token i writes
    o_i = e^G_i q_i S + sum over j <= i of (q_i k_j) e^(G_i - G_j) u_j
    S'  = e^G_63 S + sum over j of e^(G_63 - G_j) k_j u_j                 the fold of a full ring

A ring holds u, not v: earlier tokens' writes never change, so a row follows from the rows before it by
substitution, without an inverse. Each element is one chain of multiply-adds in the order of j, whatever
pieces the rows came in. Units are key heads, with the value heads that share them.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, njit

from radixkv_kernels.cpu.compiling import compile_kernel
from radixkv_kernels.cpu.memory import aligned, pointer, prefetch, take
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
from radixkv_kernels.cpu.recurrence.product import product
from radixkv_kernels.cpu.vectors import GROUP, exp2, fma
from radixkv_kernels.state_interface import FOLD, ROWS
from radixkv_kernels.states import GRID

_EPSILON = np.float32(1e-6)
#: Strands of a sum of squares.
_STRANDS = 8


@njit(forceinline=True, error_model="numpy")
def norm_factor(row: Any, strands: Any) -> Any:
    """1 / |row|, the squares summed in strands, then in order."""
    for w in range(_STRANDS):
        strands[w] = np.float32(0.0)
    for d in range(0, len(row), _STRANDS):
        for w in range(_STRANDS):
            strands[w] = fma(row[d + w], row[d + w], strands[w])
    total = np.float32(0.0)
    for w in range(_STRANDS):
        total += strands[w]
    return np.float32(1.0) / np.sqrt(total + _EPSILON)


@njit
def stream(kq: Any, base: Any, both: Any) -> None:
    """both[:2] = kq[:2] . base: the products of one token with a state [key, value].

    The state is read once and in order, with its next rows prefetched.
    """
    key, value = base.shape
    step = GROUP * value * 4
    for d in range(0, key, GROUP):
        part = np.int64(base.ctypes.data) + d * value * 4
        for line in range(part + step, part + 2 * step, 64):
            prefetch(line)
        product(
            np.int64(kq.ctypes.data) + d * 4, key, 2, part, value, 1,
            np.int64(both.ctypes.data), value, value, np.int64(d > 0),
        )  # fmt: skip


@njit(inline="always")
def substitute(weights: Any, u: Any, both: Any, out: Any, first: int, count: int, at: int, size: int) -> None:
    """Turn `both` into writes and outputs, in place: rows 0 .. count are the base state's part of u, rows
    count .. 2 count of o; weights [2 count, GRID] are -A and (q k) e^(G_i - G_j). Writes go to u, outputs to
    rows `first` .. of out.

    Earlier rows of the ring in blocks of 8 by products, the rows of a block one by one.
    """
    done = 0
    while done < count:
        block = (at + done) // GROUP
        end = min(count, (block + 1) * GROUP - at)
        if block:
            for part in range(2):
                row = part * count + done
                product(
                    np.int64(weights.ctypes.data) + row * (GRID * 4), GRID, end - done,
                    np.int64(u.ctypes.data), size, block,
                    np.int64(both.ctypes.data) + row * (size * 4), size, size, 1,
                )  # fmt: skip
        for i in range(done, end):
            for j in range(block * GROUP, at + i):
                a, p = weights[i, j], weights[count + i, j]
                for d in range(size):
                    both[i, d] = fma(a, u[j, d], both[i, d])
                    both[count + i, d] = fma(p, u[j, d], both[count + i, d])
            p = weights[count + i, at + i]
            for d in range(size):
                u[at + i, d] = both[i, d]
                out[first + i, d] = fma(p, both[i, d], both[count + i, d])
        done = end


@functools.cache
def delta_kernel() -> Any:
    """The kernel of all sizes; heads' are multiples of 8. The fifth size is a key's without padding."""

    def delta(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (NUM_ARGUMENTS,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        plan = operations(arg)
        groups, heads, key, value = arg[SIZE], arg[SIZE + 1], arg[SIZE + 2], arg[SIZE + 3]
        per = heads // groups
        scale = np.float32(1.0) / np.sqrt(np.float32(arg[SIZE + 4]))
        rows, rings = arg[NUM_ROWS], arg[NUM_RINGS]
        slots = cube(arg[SLOTS], arg[NUM_SLOTS] * heads, key, value)
        ring_k = cube(arg[RING], rings * groups, key, GRID)
        ring_u = cube(arg[RING + 1], rings * heads, GRID, value)
        ring_g = matrix(arg[RING + 2], rings * heads, GRID)
        q, k = (cube(arg[INPUT], rows, groups, key), cube(arg[INPUT + 1], rows, groups, key))
        v = cube(arg[INPUT + 2], rows, heads, value)
        g, beta = matrix(arg[INPUT + 3], rows, heads), matrix(arg[INPUT + 4], rows, heads)
        out = cube(arg[OUTPUT], rows, heads, value)
        kq = aligned(2 * GRID * key).reshape(2 * GRID, key)
        both = aligned(2 * GRID * value).reshape(2 * GRID, value)
        dots = aligned(2 * GRID * GRID).reshape(2 * GRID, GRID)
        weights = aligned(2 * GRID * GRID).reshape(2 * GRID, GRID)
        faded = aligned(key * GRID).reshape(key, GRID)
        shares = aligned(GRID)
        strands = np.empty(_STRANDS, np.float32)
        while True:
            unit = take(counter)
            if unit >= arg[UNITS]:
                break
            for n in range(len(plan)):
                code, first, count, ring, at, state = operation(plan, n)
                if code == ROWS:
                    keys = ring_k[ring * groups + unit]
                    for i in range(count):
                        row = first + i
                        factor = norm_factor(k[row, unit], strands)
                        for d in range(key):
                            x = k[row, unit, d] * factor
                            kq[i, d] = x
                            keys[d, at + i] = x
                        factor = norm_factor(q[row, unit], strands) * scale
                        for d in range(key):
                            kq[count + i, d] = q[row, unit, d] * factor
                    product(
                        np.int64(kq.ctypes.data), key, 2 * count, np.int64(keys.ctypes.data), GRID,
                        key // GROUP, np.int64(dots.ctypes.data), GRID, -(-(at + count) // GROUP) * GROUP, 0,
                    )  # fmt: skip
                    for h in range(unit * per, (unit + 1) * per):
                        base, decays = slots[state * heads + h], ring_g[ring * heads + h]
                        if count == 1:
                            stream(kq, base, both)
                        else:
                            product(
                                np.int64(kq.ctypes.data), key, 2 * count, np.int64(base.ctypes.data), value,
                                key // GROUP, np.int64(both.ctypes.data), value, value, 0,
                            )  # fmt: skip
                        for i in range(count):
                            own = g[first + i, h] * LOG2E
                            decays[at + i] = own if at + i == 0 else decays[at + i - 1] + own
                        for i in range(count):
                            here, b = decays[at + i], beta[first + i, h]
                            e = exp2(here)
                            for j in range(at + i + 1):
                                x = exp2(here - decays[j])
                                weights[i, j] = -(dots[i, j] * x * b)
                                weights[count + i, j] = dots[count + i, j] * x
                            for d in range(value):
                                both[i, d] = b * (v[first + i, h, d] - e * both[i, d])
                                both[count + i, d] = e * both[count + i, d]
                        substitute(
                            weights, ring_u[ring * heads + h], both, out[:, h], first, count, at, value
                        )
                    continue
                for h in range(unit * per, (unit + 1) * per):
                    if code != FOLD:
                        size, slot = key * value, arg[SLOTS]
                        copy(
                            slot + (first * heads + h) * size * 4, slot + (count * heads + h) * size * 4, size
                        )
                        continue
                    keys, decays = ring_k[first * groups + unit], ring_g[first * heads + h]
                    base, new = slots[count * heads + h], slots[ring * heads + h]
                    last = decays[GRID - 1]
                    e = exp2(last)
                    for j in range(GRID):
                        shares[j] = exp2(last - decays[j])
                    for d in range(key):
                        for j in range(GRID):
                            faded[d, j] = keys[d, j] * shares[j]
                        for w in range(value):
                            new[d, w] = e * base[d, w]
                    product(
                        np.int64(faded.ctypes.data), GRID, key,
                        np.int64(ring_u[first * heads + h].ctypes.data), value, GRID // GROUP,
                        np.int64(new.ctypes.data), value, value, 1,
                    )  # fmt: skip

    return compile_kernel(delta)
