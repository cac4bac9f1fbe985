# SPDX-License-Identifier: Apache-2.0
"""Weights of bitsandbytes, read as weights: what it computes depends on a batch's outliers, what it stores
does not.

    4 bits   weight (uint8, flat)  weight.absmax  weight.quant_map  weight.quant_state.bitsandbytes__nf4
             scales in 8 bits themselves: absmax (uint8)  nested_absmax  nested_quant_map, and an offset
    8 bits   weight (int8)  SCB [out]: number = code * SCB / 127
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from radixkv.model.loading.stored_forms.found_weights import FoundWeights, damage_named, damaged
from radixkv.model.loading.stored_forms.mapped_tensors import MappedTensors
from radixkv.model.stored_weights.codebook_weight import CodebookWeight
from radixkv.model.stored_weights.scaled_weight import Int8Weight
from radixkv.model.stored_weights.stored_weight import check_floats

_STATE = ".quant_state.bitsandbytes__"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_BY_ROWS = 0  # of `weight_format`


def read_bitsandbytes(tensors: MappedTensors, settings: Mapping[str, Any]) -> FoundWeights:
    """Weights of 4 and of 8 bits.

    Raises:
        ModelLoadError: a weight without its scales, or one that does not fit.
    """
    found = FoundWeights()
    for name in tensors:
        weight, _, kind = name.partition(_STATE)
        if kind:
            found.weights[weight] = _of_4_bits(tensors, weight, name)
            found.read |= {name, weight, *(f"{weight}.{part}" for part in _PARTS)}
        elif name.endswith(".SCB"):
            stem = name.removesuffix("SCB")
            weight = f"{stem}weight"
            with damage_named(weight):
                found.weights[weight] = _of_8_bits(tensors, stem)
            found.read |= {name, weight, f"{stem}weight_format"}
    for name in tensors:
        if name not in found.read and tensors[name].dtype in (torch.int8, torch.uint8):
            raise damaged(name, "its scales are missing")
    return found


def _of_8_bits(tensors: MappedTensors, stem: str) -> Int8Weight:
    codes, scales = tensors[f"{stem}weight"], tensors[f"{stem}SCB"]
    form = tensors.get(f"{stem}weight_format")
    if form is not None and int(form) != _BY_ROWS:
        raise ValueError(f"its numbers are in the order of an old GPU (weight_format {int(form)})")
    check_floats(scales, "scales")
    if codes.dtype != torch.int8 or scales.shape != codes.shape[:1]:
        raise ValueError(f"{list(codes.shape)} of {codes.dtype} have {list(scales.shape)} scales")
    return Int8Weight(codes, (scales.float() / 127)[:, None], (1, codes.shape[1]))


def _of_4_bits(tensors: MappedTensors, name: str, state_name: str) -> CodebookWeight:
    with damage_named(name):
        state = json.loads(tensors.text(state_name))
        shape = state["shape"]
        if len(shape) != 2:
            raise ValueError(f"its shape is {shape}")
        codes = tensors[name]
        scales = tensors[f"{name}.absmax"]
        if "nested_blocksize" in state:
            scales = _nested(tensors, name, scales, state)
        table = tensors[f"{name}.quant_map"]
        check_floats(scales, "scales")
        check_floats(table, "numbers of the table")
        return CodebookWeight(
            codes.view(torch.uint8).flatten(),
            scales.float().flatten(),
            table.float(),
            int(shape[0]),
            int(shape[1]),
            int(state["blocksize"]),
        )


def _nested(tensors: MappedTensors, name: str, codes: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Scales of codes of 8 bits, whose own scales are of blocks of codes."""
    size = int(state["nested_blocksize"])
    table, own = tensors[f"{name}.nested_quant_map"], tensors[f"{name}.nested_absmax"]
    for each in (table, own):
        check_floats(each, "scales of scales")
    if codes.dtype != torch.uint8 or table.shape != (256,) or len(own) != -(-codes.numel() // size):
        raise ValueError(f"{codes.numel()} scales in blocks of {size} have {len(own)} scales themselves")
    scales = table[codes.flatten().int()] * own.repeat_interleave(size)[: codes.numel()]
    return scales + float(state["nested_offset"])
