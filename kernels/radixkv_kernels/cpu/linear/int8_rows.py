# SPDX-License-Identifier: Apache-2.0
"""Rows of activations to int8 on a CPU, alone or at the end of an RMS norm or a gated SiLU; by numba.

Symmetric, one scale per row and group of 64 columns: `x = scale * q` with q in [-127, 127], stored as the
product's method takes it: as a byte with 128 added, or as a 16-bit word. With one scale for a whole row, its
few large values would leave the others too few steps (docs/lab/log.md). Each function reads its rows once
from memory. No operation mixes rows, so a row's bits depend on that row only.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from radixkv_kernels.cpu.compiling import compile_kernel
from radixkv_kernels.cpu.linear.int8_product import GROUP, Int8Method, default_method
from radixkv_kernels.cpu.linear.launch import ArgumentBlock, float_bits
from radixkv_kernels.cpu.memory import FAST, as_float, f32_row, pointer, take
from radixkv_kernels.cpu.vectors import exp2

# Places in the int64 argument block.
COUNTER, ROWS, WIDTH, INPUT, INPUT_STRIDE, OUTPUT, OUTPUT_STRIDE, SCALES, WEIGHT, EPSILON = range(10)
_NUM_ARGUMENTS = 10
#: Rows a thread takes at a time.
_CHUNK = 8
#: Elements below which waking the other threads costs more than they save.
_SMALL = 16_384
_LOG2E = np.float32(1.4426950408889634)
_TINY = np.float32(1e-30)


@njit(forceinline=True)
def largest(row: Any) -> Any:
    """The largest magnitude: magnitudes of floats order as their bits do, and integer maxima use vectors."""
    bits = row.view(np.int32)
    top = np.int32(0)
    for i in range(len(bits)):
        top = max(top, bits[i] & np.int32(0x7FFFFFFF))
    return as_float(np.int32(top))


@njit(fastmath=FAST, forceinline=True)
def _store(row: Any, target: int, scales: int, size: int) -> None:
    """The row in elements of `size` bytes, each group's largest magnitude as 127, and the groups' scales."""
    width = len(row)
    for g in range((width + GROUP - 1) // GROUP):
        group = row[g * GROUP : min(width, (g + 1) * GROUP)]
        top = max(largest(group), _TINY)
        f32_row(scales + g * 4, 1)[0] = top * np.float32(1.0 / 127.0)
        factor = np.float32(127.0) / top
        if size == 1:
            octets = carray(pointer(target + g * GROUP, np.uint8), (len(group),))
            for i in range(len(group)):
                octets[i] = np.uint8(np.int32(np.rint(group[i] * factor)) + np.int32(128))
        else:
            words = carray(pointer(target + g * GROUP * 2, np.int16), (len(group),))
            for i in range(len(group)):
                words[i] = np.int16(np.int32(np.rint(group[i] * factor)))


# numpy's error model: Python's would test every divisor for zero, and the loop could not use vectors.
@njit(fastmath=FAST | {"nnan"}, error_model="numpy", forceinline=True)
def gate_rows(gate: Any, up: Any, out: Any) -> None:
    """out = silu(gate) * up, through exp of a non-positive argument, which cannot overflow."""
    for i in range(len(out)):
        x = gate[i]
        e = exp2(-abs(x) * _LOG2E)
        numerator = x if x >= 0 else x * e
        out[i] = numerator * up[i] / (np.float32(1.0) + e)


#: Operations applied to a row before it is quantised.
_NOTHING, _NORM, _GATE = range(3)


@functools.cache
def _kernel(before: int, size: int) -> Any:
    def quantize(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (_NUM_ARGUMENTS,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        step = arg[OUTPUT_STRIDE] // GROUP * 4
        width = arg[WIDTH]
        weight = f32_row(arg[WEIGHT], width)
        epsilon = as_float(np.int32(arg[EPSILON]))
        own = np.empty(width, np.float32)
        while True:
            first = take(counter) * _CHUNK
            if first >= arg[ROWS]:
                break
            for r in range(first, min(first + _CHUNK, arg[ROWS])):
                row = f32_row(arg[INPUT] + r * arg[INPUT_STRIDE] * 4, width)
                if before == _NORM:
                    total = np.float32(0.0)
                    for i in range(width):
                        total += row[i] * row[i]
                    factor = np.float32(1.0) / np.sqrt(total / np.float32(width) + epsilon)
                    for i in range(width):
                        own[i] = weight[i] * (row[i] * factor)
                if before == _GATE:
                    gate_rows(row, f32_row(arg[INPUT] + (r * arg[INPUT_STRIDE] + width) * 4, width), own)
                source = row if before == _NOTHING else own
                _store(source, arg[OUTPUT] + r * arg[OUTPUT_STRIDE] * size, arg[SCALES] + r * step, size)

    return compile_kernel(quantize, fast=True)


class Int8Rows:
    """The three functions with their argument block; not thread-safe.

    Each returns the row elements, [T, row_width], with the first W of a row written, and the scales,
    float32 [T, row_width / 64]; `row_width` is the width that the next product reads.

    Args:
        method: of the products that the rows go to; None: the fastest.
    """

    def __init__(self, method: Int8Method | None = None) -> None:
        self.method = default_method() if method is None else method
        self._block = ArgumentBlock(_NUM_ARGUMENTS)
        self._arguments = self._block.values
        size = self.method.row_dtype.itemsize
        self._plain, self._norm, self._gated = (_kernel(each, size) for each in (_NOTHING, _NORM, _GATE))

    def quantize(self, rows: torch.Tensor, row_width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [T, W], last dimension contiguous."""
        return self._run(self._plain, rows, rows.shape[1], row_width)

    def norm(
        self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float, row_width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`weight * x / sqrt(mean(x ** 2) + epsilon)` of float32 [T, W]; weight [W], contiguous."""
        self._arguments[WEIGHT] = weight.data_ptr()
        self._arguments[EPSILON] = float_bits(epsilon)
        return self._run(self._norm, rows, rows.shape[1], row_width)

    def gated(self, rows: torch.Tensor, row_width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`silu(gate) * up` of float32 [T, 2 W], the gates first."""
        return self._run(self._gated, rows, rows.shape[1] // 2, row_width)

    def _run(
        self, kernel: Any, rows: torch.Tensor, width: int, row_width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = rows.shape[0]
        out = torch.empty(count, row_width, dtype=self.method.row_dtype)
        scales = torch.empty(count, row_width // GROUP)
        a = self._arguments
        a[ROWS], a[WIDTH], a[INPUT], a[INPUT_STRIDE] = count, width, rows.data_ptr(), rows.stride(0)
        a[OUTPUT], a[OUTPUT_STRIDE], a[SCALES] = out.data_ptr(), row_width, scales.data_ptr()
        self._block.run(kernel, on_all_threads=count * width >= _SMALL)
        return out, scales
