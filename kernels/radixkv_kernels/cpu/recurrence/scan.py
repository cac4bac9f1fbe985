# SPDX-License-Identifier: Apache-2.0
"""Scans: Mamba's selective state space and the gated linear recurrence (RG-LRU), a token at a time.

    scan   s[c, n] = exp(dt[c] A[c, n]) s[c, n] + dt[c] x[c] b[n]        out[c] = sum over n of c[n] s[c, n]
    lru    s[c] = a[c] s[c] + x[c]                                       out[c] = s[c]

A scan needs a ring only to take guesses back. Besides its inputs, a ring keeps the state
at its end, and the number of tokens in that: a step that begins there continues from it; after tokens were
taken back, it recomputes from the slot through the remaining inputs.

Units are blocks of channels. The lengths are read by all units and written after the call.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, njit

from radixkv_kernels.cpu.compiling import compile_kernel
from radixkv_kernels.cpu.memory import pointer, take
from radixkv_kernels.cpu.recurrence.arguments import (
    CONSTANT,
    COUNTER,
    INPUT,
    LENGTHS,
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
    cube,
    matrix,
    operation,
    operations,
)
from radixkv_kernels.cpu.vectors import exp2, fma
from radixkv_kernels.state_interface import FOLD, ROWS
from radixkv_kernels.states import GRID

#: Channels of a unit.
BLOCK = 64


@njit(forceinline=True, error_model="numpy")
def _advance(s: Any, rate: Any, x: float, dt: float, b: Any) -> None:
    """Advance a channel's state [N] by a token, in place."""
    u = dt * x
    for n in range(len(s)):
        s[n] = fma(u, b[n], exp2(dt * rate[n] * LOG2E) * s[n])


@njit(forceinline=True)
def _dot(s: Any, c: Any) -> Any:
    total = np.float32(0.0)
    for n in range(len(s)):
        total = fma(s[n], c[n], total)
    return total


@functools.cache
def scan_kernel() -> Any:
    """The kernel of all sizes."""

    def scan(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (NUM_ARGUMENTS,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        plan = operations(arg)
        channels, groups, size = arg[SIZE], arg[SIZE + 1], arg[SIZE + 2]
        per = channels // groups
        rows, rings = arg[NUM_ROWS], arg[NUM_RINGS]
        slots = cube(arg[SLOTS], arg[NUM_SLOTS], channels, size)
        ring_x = cube(arg[RING], rings, GRID, channels)
        ring_dt = cube(arg[RING + 1], rings, GRID, channels)
        ring_b = cube(arg[RING + 2], rings * GRID, groups, size)
        ends = cube(arg[RING + 3], rings, channels, size)
        lengths = carray(pointer(arg[LENGTHS], np.int64), (rings,))
        x, dt = matrix(arg[INPUT], rows, channels), matrix(arg[INPUT + 1], rows, channels)
        b, c = cube(arg[INPUT + 2], rows, groups, size), cube(arg[INPUT + 3], rows, groups, size)
        out, rate = matrix(arg[OUTPUT], rows, channels), matrix(arg[CONSTANT], channels, size)
        own = np.empty(rings, np.int64)
        while True:
            unit = take(counter)
            if unit >= arg[UNITS]:
                break
            low, high = unit * BLOCK, min((unit + 1) * BLOCK, channels)
            for ring in range(rings):
                own[ring] = lengths[ring]
            for n in range(len(plan)):
                code, first, count, ring, at, state = operation(plan, n)
                if code == ROWS:
                    for channel in range(low, high):
                        group = channel // per
                        s = ends[ring, channel]
                        if at == 0 or own[ring] != at:
                            for j in range(size):
                                s[j] = slots[state, channel, j]
                            for i in range(at):
                                _advance(
                                    s, rate[channel], ring_x[ring, i, channel], ring_dt[ring, i, channel],
                                    ring_b[ring * GRID + i, group],
                                )  # fmt: skip
                        for i in range(count):
                            row = first + i
                            ring_x[ring, at + i, channel] = x[row, channel]
                            ring_dt[ring, at + i, channel] = dt[row, channel]
                            # Several units may write a group's row: all write the same.
                            ring_b[ring * GRID + at + i, group] = b[row, group]
                            _advance(s, rate[channel], x[row, channel], dt[row, channel], b[row, group])
                            out[row, channel] = _dot(s, c[row, group])
                    own[ring] = at + count
                elif code == FOLD:
                    for channel in range(low, high):
                        source = ends[first, channel] if own[first] == GRID else slots[count, channel]
                        target = slots[ring, channel]
                        for j in range(size):
                            target[j] = source[j]
                        if own[first] != GRID:
                            for i in range(GRID):
                                _advance(
                                    target, rate[channel], ring_x[first, i, channel],
                                    ring_dt[first, i, channel], ring_b[first * GRID + i, channel // per],
                                )  # fmt: skip
                else:
                    for channel in range(low, high):
                        for j in range(size):
                            slots[count, channel, j] = slots[first, channel, j]

    return compile_kernel(scan)


@functools.cache
def lru_kernel() -> Any:
    """The kernel of all sizes."""

    def lru(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (NUM_ARGUMENTS,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        plan = operations(arg)
        channels, rows, rings = arg[SIZE], arg[NUM_ROWS], arg[NUM_RINGS]
        slots = matrix(arg[SLOTS], arg[NUM_SLOTS], channels)
        ring_a, ring_x = (cube(arg[RING], rings, GRID, channels), cube(arg[RING + 1], rings, GRID, channels))
        ends = matrix(arg[RING + 2], rings, channels)
        lengths = carray(pointer(arg[LENGTHS], np.int64), (rings,))
        a, x = matrix(arg[INPUT], rows, channels), matrix(arg[INPUT + 1], rows, channels)
        out = matrix(arg[OUTPUT], rows, channels)
        own = np.empty(rings, np.int64)
        while True:
            unit = take(counter)
            if unit >= arg[UNITS]:
                break
            low, high = unit * BLOCK, min((unit + 1) * BLOCK, channels)
            for ring in range(rings):
                own[ring] = lengths[ring]
            for n in range(len(plan)):
                code, first, count, ring, at, state = operation(plan, n)
                if code == ROWS:
                    s = ends[ring]
                    if at == 0 or own[ring] != at:
                        for c in range(low, high):
                            s[c] = slots[state, c]
                        for i in range(at):
                            for c in range(low, high):
                                s[c] = fma(ring_a[ring, i, c], s[c], ring_x[ring, i, c])
                    for i in range(count):
                        for c in range(low, high):
                            ring_a[ring, at + i, c] = a[first + i, c]
                            ring_x[ring, at + i, c] = x[first + i, c]
                            s[c] = fma(a[first + i, c], s[c], x[first + i, c])
                            out[first + i, c] = s[c]
                    own[ring] = at + count
                elif code == FOLD:
                    s = slots[ring]
                    source = ends[first] if own[first] == GRID else slots[count]
                    for c in range(low, high):
                        s[c] = source[c]
                    if own[first] != GRID:
                        for i in range(GRID):
                            for c in range(low, high):
                                s[c] = fma(ring_a[first, i, c], s[c], ring_x[first, i, c])
                else:
                    for c in range(low, high):
                        slots[count, c] = slots[first, c]

    return compile_kernel(lru)
