# SPDX-License-Identifier: Apache-2.0
"""Short causal convolutions, one filter a channel: the state is the last inputs.

    out[t] = activation(bias + weight[0] x[t - K + 1] + ... + weight[K - 1] x[t])

Units are blocks of channels. A row's inputs are first written to the ring; inputs before the ring are the
slot's.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, njit

from radixkv_kernels.cpu.compiling import compile_kernel
from radixkv_kernels.cpu.memory import f32_row, pointer, take
from radixkv_kernels.cpu.recurrence.arguments import (
    CONSTANT,
    COUNTER,
    INPUT,
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
    silu,
)
from radixkv_kernels.cpu.vectors import fma
from radixkv_kernels.state_interface import FOLD, ROWS
from radixkv_kernels.states import GRID

#: Channels of a unit.
BLOCK = 128


@njit(forceinline=True, error_model="numpy")
def _rows(
    x: Any, weight: Any, bias: Any, tail: Any, ring: Any, out: Any, count: int, at: int, low: int, high: int,
    has_bias: bool, has_silu: bool,
) -> None:  # fmt: skip
    """Rows of one piece: x and out [count, C], tail [K - 1, C], ring [GRID, C]."""
    taps = len(weight)
    for i in range(count):
        for c in range(low, high):
            ring[at + i, c] = x[i, c]
        for c in range(low, high):
            out[i, c] = bias[c] if has_bias else np.float32(0.0)
        for k in range(taps):
            place = at + i + k - taps + 1
            source = ring[place] if place >= 0 else tail[taps - 1 + place]
            for c in range(low, high):
                out[i, c] = fma(weight[k, c], source[c], out[i, c])
        if has_silu:
            for c in range(low, high):
                out[i, c] = silu(out[i, c])


@functools.cache
def conv_kernel() -> Any:
    """The kernel of all sizes; the last two sizes say whether there are a bias and a SiLU."""

    def conv(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (NUM_ARGUMENTS,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        plan = operations(arg)
        channels, taps = arg[SIZE], arg[SIZE + 1]
        slots = cube(arg[SLOTS], arg[NUM_SLOTS], taps - 1, channels)
        rings = cube(arg[RING], arg[NUM_RINGS], GRID, channels)
        x = matrix(arg[INPUT], arg[NUM_ROWS], channels)
        out = matrix(arg[OUTPUT], arg[NUM_ROWS], channels)
        weight = matrix(arg[CONSTANT], taps, channels)
        bias = f32_row(arg[CONSTANT + 1], channels)
        while True:
            unit = take(counter)
            if unit >= arg[UNITS]:
                break
            low, high = unit * BLOCK, min((unit + 1) * BLOCK, channels)
            for n in range(len(plan)):
                code, a, b, c, d, e = operation(plan, n)
                if code == ROWS:
                    _rows(
                        x[a : a + b], weight, bias, slots[e], rings[c], out[a : a + b], b, d, low, high,
                        arg[SIZE + 2] > 0, arg[SIZE + 3] > 0,
                    )  # fmt: skip
                    continue
                for k in range(taps - 1):
                    source = rings[a, GRID - taps + 1 + k] if code == FOLD else slots[a, k]
                    target = slots[c if code == FOLD else b, k]
                    for channel in range(low, high):
                        target[channel] = source[channel]

    return compile_kernel(conv)
