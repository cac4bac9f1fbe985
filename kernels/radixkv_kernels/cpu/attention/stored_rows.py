# SPDX-License-Identifier: Apache-2.0
"""Rows of the cache, widened from their stored type to float32, compiled by numba."""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import numpy as np
from numba import carray, njit

from radixkv_kernels.cpu.memory import as_float, f32_row, pointer

# Storage kinds.
FLOAT32, BFLOAT16, FLOAT16, INT8, FP8_E4M3, FP8_E5M2 = range(6)


@njit(forceinline=True)
def element_size(kind: int) -> int:
    """Bytes of a stored element."""
    if kind == FLOAT32:
        return 4
    return 2 if kind <= FLOAT16 else 1


@njit(forceinline=True)
def widen(kind: int, address: int, scale: int, count: int, num_rows: int, size: int, rows: int) -> None:
    """Stored rows as float32 at `rows`, times their scales if quantised; rows from `count` on become zero."""
    n = count * size
    flat = f32_row(rows, num_rows * size)
    if kind == FLOAT32:
        wide = f32_row(address, n)
        for i in range(n):
            flat[i] = wide[i]
    elif kind == BFLOAT16:
        half = carray(pointer(address, np.uint16), (n,))
        for i in range(n):
            flat[i] = as_float(np.int32(half[i]) << np.int32(16))
    elif kind == FLOAT16:
        half = carray(pointer(address, np.uint16), (n,))
        for i in range(n):
            x = np.int32(half[i])
            # The exponent's bias moves from 15 to 127; subnormals come out right as well.
            moved = ((x & np.int32(0x7FFF)) << np.int32(13)) | ((x & np.int32(0x8000)) << np.int32(16))
            flat[i] = as_float(np.int32(moved)) * np.float32(2.0**112)
    elif kind == INT8:
        small = carray(pointer(address, np.int8), (n,))
        for i in range(n):
            flat[i] = np.float32(small[i])
    else:
        byte = carray(pointer(address, np.uint8), (n,))
        shift = np.int32(20) if kind == FP8_E4M3 else np.int32(21)
        bias = np.float32(2.0**120) if kind == FP8_E4M3 else np.float32(2.0**112)
        for i in range(n):
            x = np.int32(byte[i])
            moved = ((x & np.int32(0x7F)) << shift) | ((x & np.int32(0x80)) << np.int32(24))
            flat[i] = as_float(np.int32(moved)) * bias
    if kind >= INT8:
        factors = f32_row(scale, count)
        for r in range(count):
            for i in range(size):
                flat[r * size + i] *= factors[r]
    for i in range(n, num_rows * size):
        flat[i] = np.float32(0.0)
