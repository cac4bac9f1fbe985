# SPDX-License-Identifier: Apache-2.0
"""Rows of activations for products with blocks, alone or after an RMS norm or a gated SiLU; by numba.

Weights that are floats of 8 bits take rows of bfloat16, as they are. All others take int8:
symmetric, one scale per row and group of 32 columns: `x = scale * q` with q in [-127, 127]. A group takes a
cache line, with all that a product of any format needs of it:

    bytes 0 to 31     q
    32                scale, float32
    36                -scale * sum of q, float32: by which a least value is multiplied
    40                sum of q, int32; 44 and 48: of its halves

No operation mixes rows, so a row's bits depend on that row only.
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
from radixkv_kernels.cpu.linear.block_formats import GROUP
from radixkv_kernels.cpu.linear.int8_rows import gate_rows, largest
from radixkv_kernels.cpu.linear.launch import ArgumentBlock, float_bits
from radixkv_kernels.cpu.memory import as_float, f32_row, pointer, take

#: Bytes of a group, and places within them.
GROUP_BYTES, SCALE_AT, LEAST_AT, SUM_AT, HALVES_AT = 64, 32, 36, 40, 44
#: Bytes after a row: rows a power of two apart would share few sets of the L1 cache.
_GAP = 64
# Places in the int64 argument block.
COUNTER, ROWS, WIDTH, INPUT, INPUT_STRIDE, OUTPUT, OUTPUT_STRIDE, WEIGHT, EPSILON, ORDER = range(10)
_NUM_ARGUMENTS = 10
#: Rows a thread takes at a time.
_CHUNK = 8
#: Elements below which waking the other threads costs more than they save.
_SMALL = 16_384
_TINY = np.float32(1e-30)
#: Operations applied to a row before it is rounded.
_NOTHING, _NORM, _GATE = range(3)


# No reordering: the product -scale * sum is rounded as the float32 formula says.
@njit(error_model="numpy", forceinline=True)
def _store(row: Any, target: int) -> None:
    for g in range(len(row) // GROUP):
        group, at = row[g * GROUP : (g + 1) * GROUP], target + g * GROUP_BYTES
        top = max(largest(group), _TINY)
        scale, factor = top * np.float32(1.0 / 127.0), np.float32(127.0) / top
        octets = carray(pointer(at, np.int8), (GROUP,))
        for i in range(GROUP):
            octets[i] = np.int8(np.int32(np.rint(group[i] * factor)))
        first, second = np.int32(0), np.int32(0)
        for i in range(GROUP // 2):
            first += np.int32(octets[i])
            second += np.int32(octets[GROUP // 2 + i])
        numbers, sums = f32_row(at + SCALE_AT, 2), carray(pointer(at + SUM_AT, np.int32), (3,))
        numbers[0], numbers[1] = scale, -(scale * np.float32(first + second))
        sums[0], sums[1], sums[2] = first + second, first, second


@njit(error_model="numpy", forceinline=True)
def _store_floats(row: Any, target: int) -> None:
    words = row.view(np.uint32)
    out = carray(pointer(target, np.uint16), (len(row),))
    for i in range(len(row)):
        bits = words[i]
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        out[i] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@functools.cache
def _kernel(before: int, to_floats: bool) -> Any:
    def quantize(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (_NUM_ARGUMENTS,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        width = arg[WIDTH]
        weight = f32_row(arg[WEIGHT], width)
        epsilon = as_float(np.int32(arg[EPSILON]))
        own, moved = np.empty(width, np.float32), np.empty(width, np.float32)
        while True:
            begin = take(counter) * _CHUNK
            if begin >= arg[ROWS]:
                break
            for r in range(begin, min(begin + _CHUNK, arg[ROWS])):
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
                done, target = row if before == _NOTHING else own, arg[OUTPUT] + r * arg[OUTPUT_STRIDE]
                if arg[ORDER]:
                    order = carray(pointer(arg[ORDER], np.int32), (width,))
                    for i in range(width):
                        moved[i] = done[order[i]]
                    done = moved
                if to_floats:
                    _store_floats(done, target)
                else:
                    _store(done, target)

    return compile_kernel(quantize, fast=True)


def widened(rows: torch.Tensor, width: int) -> torch.Tensor:
    """The numbers that rows of `BlockRows` stand for, as float32 [T, width]."""
    if rows.dtype == torch.bfloat16:
        return rows[:, :width].float()
    groups = rows[:, : width // GROUP * GROUP_BYTES].reshape(len(rows), -1, GROUP_BYTES)
    scales = groups[:, :, SCALE_AT : SCALE_AT + 4].contiguous().view(torch.float32)
    return (groups[:, :, :GROUP].view(torch.int8) * scales).view(len(rows), width)


class BlockRows:
    """The three functions with their memory; not thread-safe.

    Each returns, for `BlockProduct.multiply` and valid until the next call, with W a multiple of 32:

        int8       uint8 [T, 2 W + 64]
        bfloat16   bfloat16 [T, W + 32]

    `order`, int32 [W], names the column that becomes each one of the result; None: they stay.
    """

    def __init__(self) -> None:
        self._block = ArgumentBlock(_NUM_ARGUMENTS)
        self._arguments = self._block.values
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def address(self) -> int:
        """Of the memory; a larger batch moves it."""
        return self._memory.data_ptr()

    def quantize(
        self, rows: torch.Tensor, dtype: torch.dtype = torch.int8, order: torch.Tensor | None = None
    ) -> torch.Tensor:
        """float32 [T, W], last dimension contiguous."""
        return self._run(_NOTHING, rows, rows.shape[1], dtype, order)

    def norm(
        self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float, dtype: torch.dtype = torch.int8,
        order: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`weight * x / sqrt(mean(x ** 2) + epsilon)` of float32 [T, W]; weight float32 [W], contiguous."""
        self._arguments[WEIGHT], self._arguments[EPSILON] = weight.data_ptr(), float_bits(epsilon)
        return self._run(_NORM, rows, rows.shape[1], dtype, order)

    def gated(
        self, rows: torch.Tensor, dtype: torch.dtype = torch.int8, order: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`silu(gate) * up` of float32 [T, 2 W], the gates first."""
        return self._run(_GATE, rows, rows.shape[1] // 2, dtype, order)

    def _run(
        self, before: int, rows: torch.Tensor, width: int, dtype: torch.dtype, order: torch.Tensor | None
    ) -> torch.Tensor:
        count, stride = rows.shape[0], width // GROUP * GROUP_BYTES + _GAP
        if self._memory.numel() < count * stride + GROUP_BYTES:
            self._memory = torch.empty(count * stride + GROUP_BYTES, dtype=torch.uint8)
        skip = -self._memory.data_ptr() % GROUP_BYTES
        out = self._memory[skip : skip + count * stride].view(count, stride)
        a = self._arguments
        a[ROWS], a[WIDTH], a[INPUT], a[INPUT_STRIDE] = count, width, rows.data_ptr(), rows.stride(0)
        a[OUTPUT], a[OUTPUT_STRIDE] = out.data_ptr(), stride
        a[ORDER] = 0 if order is None else order.data_ptr()
        to_floats = dtype == torch.bfloat16
        self._block.run(_kernel(before, to_floats), on_all_threads=count * width >= _SMALL)
        return out.view(torch.bfloat16) if to_floats else out
