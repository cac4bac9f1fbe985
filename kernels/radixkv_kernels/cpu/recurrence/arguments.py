# SPDX-License-Identifier: Apache-2.0
"""Arguments and helpers that the kernels of all kinds of states share.

A kernel's threads take *units*, heads or blocks of channels, which no two operations mix. For its unit a
thread carries out the whole plan, operation after operation.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from radixkv_kernels.cpu.memory import pointer
from radixkv_kernels.cpu.vectors import exp2
from radixkv_kernels.state_interface import OPERATION_SIZE

# Places in the int64 argument block. Sizes come from the state's shape.
COUNTER, OPERATIONS, NUM_OPERATIONS, UNITS, NUM_SLOTS, NUM_RINGS, NUM_ROWS, SLOTS = range(8)
RING, LENGTHS, OUTPUT, INPUT, CONSTANT, SIZE = 8, 12, 13, 14, 20, 24
NUM_ARGUMENTS = 32

LOG2E = np.float32(1.4426950408889634)


@njit(forceinline=True)
def operations(arg: Any) -> Any:
    """The plan as an int64 array [n, OPERATION_SIZE]."""
    return carray(pointer(arg[OPERATIONS], np.int64), (arg[NUM_OPERATIONS], np.int64(OPERATION_SIZE)))


@njit(forceinline=True)
def operation(plan: Any, n: int) -> Any:
    """The values of one operation."""
    return plan[n, 0], plan[n, 1], plan[n, 2], plan[n, 3], plan[n, 4], plan[n, 5]


@njit(forceinline=True)
def matrix(address: int, rows: int, width: int) -> Any:
    """A view of float32 [rows, width] at an address."""
    return carray(pointer(address, np.float32), (np.int64(rows), np.int64(width)))


@njit(forceinline=True)
def cube(address: int, first: int, second: int, third: int) -> Any:
    """A view of float32 [first, second, third] at an address."""
    return carray(pointer(address, np.float32), (np.int64(first), np.int64(second), np.int64(third)))


@njit
def copy(source: int, target: int, count: int) -> None:
    """Copy float32 from address to address."""
    a = carray(pointer(source, np.float32), (np.int64(count),))
    b = carray(pointer(target, np.float32), (np.int64(count),))
    for i in range(len(a)):
        b[i] = a[i]


@njit(forceinline=True, error_model="numpy")
def silu(x: float) -> Any:
    """x * sigmoid(x) through an exponential that can't overflow."""
    e = exp2(-abs(x) * LOG2E)
    return (x if x >= 0 else x * e) / (np.float32(1.0) + e)
