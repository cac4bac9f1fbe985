# SPDX-License-Identifier: Apache-2.0
"""Codes and scales of checkpoints to rows of blocks, which `BlockPanels` takes. No code or scale is rounded.

A scale of many inputs is repeated for each block of 32. Where a GGUF format says the same (no zero points
and scales that are float16), it is taken: its kernels are warm in more processes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv_kernels.cpu.linear.block_formats import (
    A4_BFLOAT,
    A4_HALF,
    A4_SINGLE,
    A8_BFLOAT,
    A8_HALF,
    A8_SINGLE,
    ALL_FORMATS,
    C4_BFLOAT,
    GROUP,
    I8_SINGLE,
    NVFP4,
    Q4_0,
    Q8_0,
    U4_BFLOAT,
    U4_HALF,
    U4_SINGLE,
    U8_HALF,
    U8_SINGLE,
)

#: A code of 4 bits without a zero point of its own is 8 too large, in all formats.
_MIDDLE = 8
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def format_of_codes(bits: int, scales: Tensor, zeros: Tensor | None) -> int:
    """The narrowest format that holds whole numbers with these scales exactly.

    Args:
        bits: 4: codes are unsigned; 8: signed.
        scales: any floats.
        zeros: whole numbers; None: 8 for 4 bits, 0 for 8.
    """
    half = _is_exact(scales, torch.float16)
    if bits == 8:
        if zeros is None or not zeros.any():
            return Q8_0 if half else I8_SINGLE
        return U8_HALF if half else U8_SINGLE
    if half:
        return Q4_0 if zeros is None or bool((zeros == _MIDDLE).all()) else U4_HALF
    return U4_BFLOAT if _is_exact(scales, torch.bfloat16) else U4_SINGLE


def format_of_affine(bits: int, scales: Tensor, leasts: Tensor) -> int:
    """The narrowest format that holds unsigned codes with these scales and least values exactly.

    Args:
        bits: 4 or 8.
        scales, leasts: any floats.
    """
    found = (A4_HALF, A4_BFLOAT, A4_SINGLE) if bits == 4 else (A8_HALF, A8_BFLOAT, A8_SINGLE)
    for number, dtype in zip(found, (torch.float16, torch.bfloat16), strict=False):
        if _is_exact(scales, dtype) and _is_exact(leasts, dtype):
            return number
    if bits == 4 and _is_exact(scales, torch.bfloat16):
        middle = least_of_middle(scales, leasts)
        if _is_exact(middle, torch.bfloat16) and torch.equal(
            middle - _MIDDLE * scales.float(), leasts.float()
        ):
            return C4_BFLOAT
    return found[-1]


def least_of_middle(scales: Tensor, leasts: Tensor) -> Tensor:
    """Least values for codes of 4 bits from which 8 is subtracted, in float32."""
    return leasts.float() + _MIDDLE * scales.float()


def block_rows(
    number: int,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    leasts: Tensor | None = None,
) -> np.ndarray[Any, Any]:
    """Rows of blocks, uint8 [out, bytes of a row].

    Args:
        number: of the format.
        codes: [out, in]: uint8 for 4 bits, int8, or floats of 8 bits.
        scales: [out, groups]; for MXFP4 exponents and for NVFP4 floats in E4M3, uint8 both.
        zeros: whole numbers [out, groups], for formats that have them.
        leasts: [out, groups], for formats that have least values.

    Raises:
        ValueError: inputs that are no whole blocks, or groups that cut one.
    """
    form = ALL_FORMATS[number]
    count, width = codes.shape
    units, rest = divmod(width, form.inputs)
    groups = scales.shape[1]
    shared = 2 if number == NVFP4 else 1
    if rest or not groups or units * shared % groups:
        raise ValueError(f"{width} inputs in {groups} groups are not whole blocks of {form.inputs}")
    repeat = units * shared // groups
    rows = torch.empty(count, units, form.file_bytes, dtype=torch.uint8)
    dtype = _DTYPES.get(form.scale)
    begin = 0
    for values in (scales,) if leasts is None else (scales, leasts):
        own = values.to(dtype) if dtype is not None else values
        own = own.reshape(-1).contiguous().view(torch.uint8).view(count, groups, -1)
        spread = own.repeat_interleave(repeat, 1).view(count, units, form.scale_bytes)
        rows[..., begin : begin + form.scale_bytes] = spread
        begin += form.scale_bytes
    if form.has_zero:
        found = torch.full(scales.shape, _MIDDLE) if zeros is None else zeros
        narrow = found.to(torch.int16).to(torch.uint8)
        rows[..., begin] = narrow.repeat_interleave(repeat, 1)
        begin += 1
    rows[..., begin:] = _quants(form.bits, number, codes).view(count, units, -1)
    return rows.view(count, -1).numpy()


def _quants(bits: int, number: int, codes: Tensor) -> Tensor:
    count = len(codes)
    if bits == 8:
        return codes.contiguous().view(torch.uint8)
    if number == NVFP4:  # halves of 16 inputs: words of 4 and 4
        pairs = codes.reshape(count, -1, 2, 4)
    else:
        pairs = codes.reshape(count, -1, 2, GROUP // 2)
    return pairs[:, :, 0] | (pairs[:, :, 1] << 4)


def _is_exact(scales: Tensor, dtype: torch.dtype) -> bool:
    """True if scales are numbers of a dtype."""
    if scales.dtype == dtype:
        return True
    return bool((scales.to(dtype).to(torch.float32) == scales.to(torch.float32)).all())
