# SPDX-License-Identifier: Apache-2.0
"""RMS norm and rotary embedding for a CPU, each one pass over its rows, compiled by numba.

torch spends most of a small model's time outside its matrix products in such element-wise chains: every
operator of a chain writes its whole result to memory and wakes all threads. Both functions here read a row
once, on the threads torch already has (`openmp`), and on one thread where the rows are few. No operation
mixes rows, so a row's bits depend on that row only.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray

from radixkv_kernels.cpu.compiling import compile_kernel
from radixkv_kernels.cpu.linear.launch import ArgumentBlock, float_bits
from radixkv_kernels.cpu.memory import as_float, f32_row, pointer, take

# Places in the int64 argument block.
COUNTER, ROWS, WIDTH, INPUT, OUTPUT, WEIGHT, EPSILON, STRIDE, HEADS, COSINES, SINES = range(11)
_NUM_ARGUMENTS = 11
#: Rows a thread takes at a time.
_CHUNK = 16
#: Elements below which waking the other threads costs more than they save.
_SMALL = 32_768


@functools.cache
def _norm_kernel() -> Any:
    def norm(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (11,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        width = arg[WIDTH]
        weight = f32_row(arg[WEIGHT], width)
        epsilon = as_float(np.int32(arg[EPSILON]))
        while True:
            first = take(counter) * _CHUNK
            if first >= arg[ROWS]:
                break
            for r in range(first, min(first + _CHUNK, arg[ROWS])):
                source = f32_row(arg[INPUT] + r * width * 4, width)
                target = f32_row(arg[OUTPUT] + r * width * 4, width)
                total = np.float32(0.0)
                for i in range(width):
                    total += source[i] * source[i]
                factor = np.float32(1.0) / np.sqrt(total / np.float32(width) + epsilon)
                for i in range(width):
                    target[i] = weight[i] * (source[i] * factor)

    return compile_kernel(norm, fast=True)


@functools.cache
def _rope_kernel() -> Any:
    def rope(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (11,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        width = arg[WIDTH]
        half = width // 2
        while True:
            first = take(counter) * _CHUNK
            if first >= arg[ROWS]:
                break
            for r in range(first, min(first + _CHUNK, arg[ROWS])):
                cosines = f32_row(arg[COSINES] + r * width * 4, width)
                sines = f32_row(arg[SINES] + r * width * 4, width)
                for h in range(arg[HEADS]):
                    low = f32_row(arg[INPUT] + (r * arg[STRIDE] + h * width) * 4, half)
                    high = f32_row(arg[INPUT] + (r * arg[STRIDE] + h * width + half) * 4, half)
                    for i in range(half):
                        a, b = low[i], high[i]
                        low[i] = a * cosines[i] - b * sines[i]
                        high[i] = b * cosines[half + i] + a * sines[half + i]

    return compile_kernel(rope, fast=True)


class RowKernels:
    """The two functions with their argument block; not thread-safe."""

    def __init__(self) -> None:
        self._block = ArgumentBlock(_NUM_ARGUMENTS)
        self._arguments = self._block.values
        self._norm, self._rope = _norm_kernel(), _rope_kernel()

    def rms_norm(
        self, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`weight * x / sqrt(mean(x ** 2) + epsilon)` per row; float32, contiguous, [..., W] -> [..., W]."""
        inputs = inputs.contiguous()
        if out is None:
            out = torch.empty_like(inputs)
        a, width = self._arguments, inputs.shape[-1]
        a[WIDTH], a[ROWS] = width, inputs.numel() // width
        a[INPUT], a[OUTPUT], a[WEIGHT] = inputs.data_ptr(), out.data_ptr(), weight.data_ptr()
        a[EPSILON] = float_bits(epsilon)
        self._block.run(self._norm, on_all_threads=inputs.numel() >= _SMALL)
        return out

    def rotate(self, rows: torch.Tensor, heads: int, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Rotary embedding (halves rotated) of the first `heads` heads of each row, in place.

        Args:
            rows: float32 [T, W], last dimension contiguous; head h is columns [h * D, (h + 1) * D).
            cosines, sines: float32 [T, D], contiguous.
        """
        a, width = self._arguments, cosines.shape[-1]
        a[WIDTH], a[ROWS], a[HEADS], a[STRIDE] = width, rows.shape[0], heads, rows.stride(0)
        a[INPUT], a[COSINES], a[SINES] = rows.data_ptr(), cosines.data_ptr(), sines.data_ptr()
        self._block.run(self._rope, on_all_threads=rows.shape[0] * heads * width >= _SMALL)
