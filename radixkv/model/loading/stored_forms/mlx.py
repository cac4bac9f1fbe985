# SPDX-License-Identifier: Apache-2.0
"""Weights of MLX: `weight` (words of 32 bits), and scales of groups of inputs.

    affine               scales, biases (floats)
    mxfp4, nvfp4, mxfp8  scales (a byte each: exponents, floats of 8 bits, exponents)

The configuration has `group_size`, `bits` and `mode`, and the same for single layers under their names. A
layer's experts are one tensor, `switch_mlp`, and become tensors of each expert as transformers names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from radixkv.errors import ModelLoadError
from radixkv.model.loading.checkpoint_formats import MLX_MODES
from radixkv.model.loading.stored_forms.found_weights import FoundWeights, damage_named
from radixkv.model.loading.stored_forms.mapped_tensors import MappedTensors
from radixkv.model.stored_weights.affine_weight import AffineWeight
from radixkv.model.stored_weights.fp4_weight import Fp4Weight
from radixkv.model.stored_weights.scaled_weight import Fp8Weight
from radixkv.model.stored_weights.stored_weight import StoredWeight

_WORDS = (torch.uint32, torch.int32)
_EXPERTS = "switch_mlp"
_PRODUCTS = ("gate_proj", "down_proj", "up_proj")


def read_mlx(tensors: MappedTensors, settings: Mapping[str, Any]) -> FoundWeights:
    """Weights of all layers that have scales.

    Raises:
        ModelLoadError: a weight without its scales or biases, or one that does not fit.
    """
    found = FoundWeights()
    for name in tensors:
        if not name.endswith(".weight"):
            continue
        if tensors[name].dtype not in _WORDS:
            if f".{_EXPERTS}." in name:  # whose groups would not fit
                with damage_named(name):
                    found.renamed |= zip(
                        _names_of_experts(name, len(tensors[name])), tensors[name], strict=True
                    )
                found.read.add(name)
            continue
        stem = name.removesuffix("weight")
        own = settings.get(stem[:-1])
        own = {**settings, **own} if isinstance(own, Mapping) else settings
        leaves = ["scales", "biases"] if own.get("mode", "affine") == "affine" else ["scales"]
        with damage_named(name):
            codes, *beside = tensors[name].view(torch.uint8), *(tensors[stem + leaf] for leaf in leaves)
            if codes.ndim == 2:
                found.weights[name] = _weight(codes, beside, own)
            else:
                for expert, *parts in zip(_names_of_experts(name, len(codes)), codes, *beside, strict=True):
                    found.weights[expert] = _weight(parts[0], parts[1:], own)
        found.read |= {name, *(stem + leaf for leaf in leaves)}
    return found


def _names_of_experts(name: str, count: int) -> Iterator[str]:
    layer, dot, product = name.removesuffix(".weight").rpartition(f".{_EXPERTS}.")
    if not dot or product not in _PRODUCTS:
        raise ModelLoadError(
            f"MLX has {name} in a form of its own, several matrices in one tensor, which is not read: give "
            "the model's folder as its authors wrote it, or a GGUF file of it."
        )
    return (f"{layer}.experts.{number}.{product}.weight" for number in range(count))


def _weight(codes: Tensor, beside: list[Tensor], settings: Mapping[str, Any]) -> StoredWeight:
    mode, bits, size = settings.get("mode", "affine"), int(settings["bits"]), int(settings["group_size"])
    if mode not in MLX_MODES:
        raise ValueError(f"its mode is {mode!r}, expected one of {', '.join(MLX_MODES)}")
    if mode == "affine":
        scales, biases = beside
        weight = AffineWeight(codes, scales, biases, bits)
        if weight.group_size != size:
            raise ValueError(f"its groups are of {weight.group_size} inputs, not of {size}")
        return weight
    if (bits, size) != MLX_MODES[mode]:
        raise ValueError(f"{bits} bits in groups of {size} are not {mode}")
    kind = torch.float8_e4m3fn if mode == "nvfp4" else torch.float8_e8m0fnu
    (scales,) = beside
    scales = scales.view(kind)
    return (
        Fp8Weight(codes.view(torch.float8_e4m3fn), scales, (1, size))
        if bits == 8
        else Fp4Weight(codes, scales)
    )
