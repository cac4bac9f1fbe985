# SPDX-License-Identifier: Apache-2.0
"""FP8 weights as they are: floats of 8 bits in a tensor's own place, their scales beside them.

    DeepSeek, Qwen, GLM, MiniMax (`fp8`)   weight  weight_scale_inv [out / 128, in / 128]
    FBGEMM                                 weight  weight_scale     [out, 1]
    Quark                                  weight  weight_scale     a number

Experts that transformers saved stand one by one, each with its part of their layer's scales:

    experts.7.w1.weight   experts.gate_up_proj_scale_inv [experts, grid of gate above that of up]

A layer without scales has a plain weight, whatever lists of exceptions say: the tensors decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from radixkv.errors import ModelLoadError
from radixkv.model.loading.checkpoint_formats import EXPERT, scale_of
from radixkv.model.loading.stored_forms.found_weights import FoundWeights, damage_named
from radixkv.model.loading.stored_forms.mapped_tensors import MappedTensors
from radixkv.model.loading.stored_forms.scale_grids import grid_of
from radixkv.model.stored_weights.scaled_weight import Fp8Weight
from radixkv.model.stored_weights.stored_weight import StackedWeights, StoredWeight

_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
_INPUT_SCALES = ("activation_scale", "input_scale")
_BLOCK = (128, 128)


def read_block_fp8(tensors: MappedTensors, settings: Mapping[str, Any]) -> FoundWeights:
    """Weights of `quant_method: fp8`: blocks of `weight_block_size`, or one scale for each weight.

    Raises:
        ModelLoadError: a weight without its scale, or one that does not fit.
    """
    size = settings.get("weight_block_size")
    block = None if size is None else (int(size[0]), int(size[1]))
    return _read(tensors, "_scale_inv", block, only=block is not None)


def read_scaled_fp8(tensors: MappedTensors, settings: Mapping[str, Any]) -> FoundWeights:
    """Weights of FBGEMM and Quark.

    Raises:
        ModelLoadError: a weight without its scale, or one that does not fit.
    """
    return _read(tensors, "_scale", _BLOCK)


def _read(
    tensors: MappedTensors, suffix: str, block: tuple[int, int] | None, *, only: bool = False
) -> FoundWeights:
    found = FoundWeights()
    found.leave_out_activations(tensors)
    for name in tensors:
        codes = tensors[name]
        if codes.dtype not in _FLOATS or name.endswith(suffix):
            continue
        with damage_named(name):
            found.weights[name] = fp8_weight(tensors, name, suffix, block, only=only)
        found.read |= {name, scale_of(name, suffix, tensors)}
    if not found.weights:
        raise ModelLoadError(
            "The folder is said to hold FP8 weights, and has none: its config.json is another's."
        )
    return found


def fp8_weight(
    tensors: MappedTensors,
    name: str,
    suffix: str,
    block: tuple[int, int] | None = _BLOCK,
    *,
    only: bool = False,
) -> StoredWeight | StackedWeights:
    """The weight of one layer, or of several experts.

    Args:
        suffix: what follows its name in that of its scales.
        block, only: see `grid_of`.

    Raises:
        ValueError: scales that do not fit.
        KeyError: there are none.
    """
    codes, scales = tensors[name], _scales(tensors, name, suffix)
    if codes.ndim != 3:
        return _weight(codes, scales, block, only, _input_scale(tensors, name))
    if len(scales) != len(codes):
        raise ValueError(f"{len(codes)} experts have scales for {len(scales)}")
    return StackedWeights([_weight(*each, block, only, None) for each in zip(codes, scales, strict=True)])


def _scales(tensors: MappedTensors, name: str, suffix: str) -> Tensor:
    """A weight's scales, or an expert's among those of its layer.

    Raises:
        KeyError: there are none.
        ValueError: blocks that gate and up would share.
    """
    found = scale_of(name, suffix, tensors)
    scales = tensors[f"{name}{suffix}" if found not in tensors else found]
    expert = EXPERT.fullmatch(name)
    if expert is None or found == f"{name}{suffix}":
        return scales
    number = int(expert["number"])
    if scales.ndim != 3 or number >= len(scales):
        raise ValueError(f"it is expert {number}, and its layer has {list(scales.shape)} scales")
    own = scales[number]
    if "gate_up" not in found:
        return own
    if len(own) % 2:
        raise ValueError(f"gate and up share blocks of their {list(own.shape)} scales")
    return own.chunk(2)[expert["product"] in ("w3", "up_proj")]


def _weight(
    codes: Tensor, scales: Tensor, block: tuple[int, int] | None, only: bool, inputs: Tensor | None
) -> Fp8Weight:
    if codes.ndim != 2:
        raise ValueError(f"it has {codes.ndim} dimensions")
    return Fp8Weight(codes, *grid_of(codes, scales, block, only=only), input_scale=inputs)


def _input_scale(tensors: MappedTensors, name: str) -> Tensor | None:
    """The scale of a static form's inputs; None: there is none, or it is not one number."""
    stem = name.removesuffix("weight")
    for each in _INPUT_SCALES:
        if f"{stem}{each}" in tensors and tensors[f"{stem}{each}"].numel() == 1:
            return tensors[f"{stem}{each}"]
    return None
