# SPDX-License-Identifier: Apache-2.0
"""Stored weights of checkpoints to rows of blocks, from which panels are made. No code or scale is rounded.

    GroupWeight   2 to 4 bits as 4, others as 8; inputs in activation order are sorted by their groups
    Fp4Weight     MXFP4, NVFP4
    Fp8Weight     floats of 8 bits; Int8Weight: whole numbers of 8
    AffineWeight  2 to 4 bits as 4, others as 8
    CodebookWeight  NF4 and FP4, by their own tables

Weights whose groups are no multiples of 32 inputs, and the forms that are not named, have no blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.model.stored_weights.affine_weight import AffineWeight
from radixkv.model.stored_weights.codebook_weight import CodebookWeight
from radixkv.model.stored_weights.fp4_weight import Fp4Weight
from radixkv.model.stored_weights.group_weight import GroupWeight
from radixkv.model.stored_weights.scaled_weight import Fp8Weight, Int8Weight, ScaledWeight
from radixkv.model.stored_weights.stored_weight import StoredWeight
from radixkv_kernels.cpu.linear.block_formats import (
    ALL_FORMATS,
    E4M3,
    E5M2,
    FLOAT_TABLES,
    GROUP,
    MXFP4,
    NVFP4,
    WIDE_FORMATS,
)
from radixkv_kernels.cpu.linear.checkpoint_rows import (
    block_rows,
    format_of_affine,
    format_of_codes,
    least_of_middle,
)

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class WeightBlocks:
    """A weight in blocks.

    Attributes:
        number: of their format.
        rows: uint8 [out, bytes of a row].
        factor: by which all of it is multiplied.
        inputs: for each column of the blocks, the input; None: the same.
    """

    number: int
    rows: _Array
    factor: float = 1.0
    inputs: _Array | None = None


def has_blocks(weight: StoredWeight) -> bool:
    """Return True if a weight has a form that `blocks_of` knows."""
    if not weight.out_features or not weight.in_features or weight.in_features % GROUP:
        return False
    if isinstance(weight, Fp8Weight) and weight.zeros is not None:
        return False
    if isinstance(weight, CodebookWeight) and (
        weight.in_features % weight.block_size or _table_of(weight) is None
    ):
        return False
    size = _group_inputs(weight)
    return size is not None and size % GROUP == 0


def _group_inputs(weight: StoredWeight) -> int | None:
    """Neighbouring inputs of an output that share a scale, in the order of the groups; None: no such form."""
    if isinstance(weight, GroupWeight) and weight.group_of is not None:
        return math.gcd(*weight.group_of.bincount().tolist())
    if isinstance(weight, Fp4Weight):
        return GROUP  # or half of it, which the format knows
    if isinstance(weight, GroupWeight | AffineWeight):
        return weight.group_size
    if isinstance(weight, ScaledWeight):
        if weight.scales.shape[1] == 1:
            return weight.in_features
        return math.gcd(weight.block[1], weight.in_features)  # the last block may be smaller
    return weight.block_size if isinstance(weight, CodebookWeight) else None


def _table_of(weight: CodebookWeight) -> int | None:
    """Number of the format whose table a weight has; None: it is another one."""
    values = tuple(weight.table.tolist())
    return next((number for number, table in FLOAT_TABLES.items() if table == values), None)


def common_format(weights: list[StoredWeight]) -> int:
    """The narrowest format that holds all of some weights of one class exactly."""
    narrow = _common_format(weights)
    wide = WIDE_FORMATS.get(narrow)
    if wide is None or any((_group_inputs(each) or 1) % ALL_FORMATS[wide].inputs for each in weights):
        return narrow
    return wide


def _common_format(weights: list[StoredWeight]) -> int:
    first = weights[0]
    if isinstance(first, Fp8Weight):
        return E4M3 if first.codes.dtype == torch.float8_e4m3fn else E5M2
    if isinstance(first, Fp4Weight):
        return MXFP4 if first.group_size == GROUP else NVFP4
    if isinstance(first, CodebookWeight):
        number = _table_of(first)
        assert number is not None
        return number
    if isinstance(first, AffineWeight):
        parts = [each for each in weights if isinstance(each, AffineWeight)]
        scales = torch.cat([each.scales.flatten() for each in parts])
        return format_of_affine(
            4 if first.bits <= 4 else 8, scales, torch.cat([each.biases.flatten() for each in parts])
        )
    scales = torch.cat([_scales(each).flatten() for each in weights])
    found = [_zeros(each) for each in weights]
    zeros = (
        torch.cat([each.flatten() for each in found if each is not None]) if found[0] is not None else None
    )
    return format_of_codes(_bits(first), scales, zeros)


def blocks_of(weight: StoredWeight, number: int | None = None) -> WeightBlocks:
    """A weight's blocks.

    Args:
        weight: one that `has_blocks`.
        number: of the format; None: the narrowest one.
    """
    number = common_format([weight]) if number is None else number
    if isinstance(weight, Fp4Weight):
        codes = weight.code_rows(range(weight.out_features))
        scales = weight.scales.view(torch.uint8)
        factor = 1.0
        if number == NVFP4:
            own = 1.0 if weight.factor is None else float(weight.factor)
            factor = 128 / own if weight.divides else 128 * own
        return WeightBlocks(number, block_rows(number, codes, scales), factor)
    if isinstance(weight, Fp8Weight):
        scales = _scales(weight).to(torch.float32)
        return WeightBlocks(number, block_rows(number, weight.codes, scales))
    if isinstance(weight, CodebookWeight):
        codes = weight.code_rows(range(weight.out_features))
        scales = weight.scales.view(weight.out_features, -1)
        return WeightBlocks(number, block_rows(number, codes, scales))
    if isinstance(weight, AffineWeight):
        codes = weight.code_rows(range(weight.out_features))
        if weight.bits > 4:
            codes = (codes ^ 128).view(torch.int8)
        leasts = weight.biases
        if ALL_FORMATS[number].bits == 4 and ALL_FORMATS[number].offset:
            leasts = least_of_middle(weight.scales, leasts)
        return WeightBlocks(number, block_rows(number, codes, weight.scales, leasts=leasts))
    if isinstance(weight, Int8Weight):
        codes = weight.codes
        if codes.dtype == torch.uint8:
            codes = (codes ^ 128).view(torch.int8)
        return WeightBlocks(number, block_rows(number, codes, _scales(weight), _zeros(weight)))
    assert isinstance(weight, GroupWeight)
    codes = weight.codes.rows(range(weight.out_features))
    inputs = None
    scales, zeros = _scales(weight), _zeros(weight)
    if weight.group_of is not None:
        order = weight.group_of.argsort(stable=True)
        codes, inputs = codes[:, order], order.numpy()
        groups = weight.group_of[order][:: ALL_FORMATS[number].inputs]
        scales, zeros = scales[:, groups], None if zeros is None else zeros[:, groups]
    if _bits(weight) == 8:
        codes = (codes ^ 128).view(torch.int8)
    return WeightBlocks(number, block_rows(number, codes, scales, zeros), inputs=inputs)


def _bits(weight: StoredWeight) -> int:
    return 4 if isinstance(weight, GroupWeight) and weight.bits <= 4 else 8


def _scales(weight: StoredWeight) -> Tensor:
    """Scales, [out, groups] with groups of one size."""
    assert isinstance(weight, GroupWeight | ScaledWeight)
    return weight.scales if isinstance(weight, GroupWeight) else _spread(weight, weight.scales)


def _zeros(weight: StoredWeight) -> Tensor | None:
    """Zero points as the format's codes have them; None: those that are theirs without any."""
    if isinstance(weight, GroupWeight):
        middle = 128 if _bits(weight) == 8 else 0
        if weight.zeros is None:
            usual = 128 if _bits(weight) == 8 else 8
            return None if weight.middle == usual else torch.full(weight.scales.shape, weight.middle - middle)
        return weight.zeros.long() - middle
    assert isinstance(weight, ScaledWeight)
    middle = 128 if weight.codes.dtype == torch.uint8 else 0
    if weight.zeros is None:
        return torch.full(_scales(weight).shape, -middle) if middle else None
    return _spread(weight, weight.zeros).long() - middle


def _spread(weight: ScaledWeight, grid: Tensor) -> Tensor:
    height, width = weight.block
    found = grid.to(torch.float32) if grid.dtype.itemsize == 1 else grid
    if len(found) != weight.out_features:
        found = found.repeat_interleave(height, dim=0)[: weight.out_features]
    if found.shape[1] > 1 and weight.in_features % width:  # the last block is smaller
        size = math.gcd(width, weight.in_features)
        found = found.repeat_interleave(width // size, dim=1)[:, : weight.in_features // size]
    return found
