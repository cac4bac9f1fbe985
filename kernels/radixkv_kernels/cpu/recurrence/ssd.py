# SPDX-License-Identifier: Apache-2.0
"""Linear attention with one decay a head (Mamba 2, lightning attention): the delta rule without substitution.

With G the sum of log decays since the base and S the base state::

    o_i = e^G_i q_i S + sum over j <= i of (q_i k_j) e^(G_i - G_j) u_j
    S'  = e^G_63 S + sum over j of e^(G_63 - G_j) k_j u_j

Units are groups of heads that share queries and keys.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray

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
from radixkv_kernels.cpu.recurrence.product import product
from radixkv_kernels.cpu.vectors import GROUP, exp2
from radixkv_kernels.state_interface import FOLD, ROWS
from radixkv_kernels.states import GRID


@functools.cache
def ssd_kernel() -> Any:
    """The kernel of all sizes; heads' are multiples of 8."""

    def ssd(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (NUM_ARGUMENTS,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        plan = operations(arg)
        groups, heads, key, value = arg[SIZE], arg[SIZE + 1], arg[SIZE + 2], arg[SIZE + 3]
        per = heads // groups
        rows, rings = arg[NUM_ROWS], arg[NUM_RINGS]
        slots = cube(arg[SLOTS], arg[NUM_SLOTS] * heads, key, value)
        ring_k = cube(arg[RING], rings * groups, key, GRID)
        ring_u = cube(arg[RING + 1], rings * heads, GRID, value)
        ring_g = matrix(arg[RING + 2], rings * heads, GRID)
        q, k = (cube(arg[INPUT], rows, groups, key), cube(arg[INPUT + 1], rows, groups, key))
        u, g = cube(arg[INPUT + 2], rows, heads, value), matrix(arg[INPUT + 3], rows, heads)
        out = cube(arg[OUTPUT], rows, heads, value)
        own_q = aligned(GRID * key).reshape(GRID, key)
        sums = aligned(GRID * value).reshape(GRID, value)
        dots = aligned(GRID * GRID).reshape(GRID, GRID)
        weights = aligned(GRID * GRID).reshape(GRID, GRID)
        faded = aligned(key * GRID).reshape(key, GRID)
        while True:
            unit = take(counter)
            if unit >= arg[UNITS]:
                break
            for n in range(len(plan)):
                code, first, count, ring, at, state = operation(plan, n)
                if code == ROWS:
                    keys = ring_k[ring * groups + unit]
                    for i in range(count):
                        for d in range(key):
                            keys[d, at + i] = k[first + i, unit, d]
                            own_q[i, d] = q[first + i, unit, d]
                    product(
                        np.int64(own_q.ctypes.data), key, count, np.int64(keys.ctypes.data), GRID,
                        key // GROUP, np.int64(dots.ctypes.data), GRID, GRID, 0,
                    )  # fmt: skip
                    end = at + count
                    blocks = (end + GROUP - 1) // GROUP
                    for h in range(unit * per, (unit + 1) * per):
                        writes, decays = ring_u[ring * heads + h], ring_g[ring * heads + h]
                        product(
                            np.int64(own_q.ctypes.data), key, count,
                            np.int64(slots[state * heads + h].ctypes.data), value, key // GROUP,
                            np.int64(sums.ctypes.data), value, value, 0,
                        )  # fmt: skip
                        for i in range(count):
                            own = g[first + i, h] * LOG2E
                            decays[at + i] = own if at + i == 0 else decays[at + i - 1] + own
                            for d in range(value):
                                writes[at + i, d] = u[first + i, h, d]
                        # Places beyond the end may hold NaN, which zero weights would not cancel.
                        for i in range(end, blocks * GROUP):
                            for d in range(value):
                                writes[i, d] = np.float32(0.0)
                        for i in range(count):
                            here = decays[at + i]
                            e = exp2(here)
                            for j in range(at + i + 1):
                                weights[i, j] = dots[i, j] * exp2(here - decays[j])
                            for j in range(at + i + 1, blocks * GROUP):
                                weights[i, j] = np.float32(0.0)
                            for d in range(value):
                                sums[i, d] = e * sums[i, d]
                        product(
                            np.int64(weights.ctypes.data), GRID, count, np.int64(writes.ctypes.data), value,
                            blocks, np.int64(sums.ctypes.data), value, value, 1,
                        )  # fmt: skip
                        for i in range(count):
                            for d in range(value):
                                out[first + i, h, d] = sums[i, d]
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
                        x = exp2(last - decays[j])
                        for d in range(key):
                            faded[d, j] = keys[d, j] * x
                    for d in range(key):
                        for w in range(value):
                            new[d, w] = e * base[d, w]
                    product(
                        np.int64(faded.ctypes.data), GRID, key,
                        np.int64(ring_u[first * heads + h].ctypes.data), value, GRID // GROUP,
                        np.int64(new.ctypes.data), value, value, 1,
                    )  # fmt: skip

    return compile_kernel(ssd)
