# SPDX-License-Identifier: Apache-2.0
"""Weights of ModelOpt, each layer's by its algorithm; inputs are not rounded.

    FP8      weight (float8)            weight_scale   a number, [out], or blocks (FP8_PB_WO)
    NVFP4    weight [out, in / 2]       weight_scale [out, in / 16]    weight_scale_2 []
    W8A16    weight (int8)              weight_scale [out]

A layer without scales has a plain weight, whatever lists of exceptions say: the tensors decide. Their types
must be those of the algorithms that the configuration names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from radixkv.errors import ModelLoadError
from radixkv.model.loading.checkpoint_formats import MODELOPT_ALGORITHMS, modelopt_algorithms
from radixkv.model.loading.stored_forms.found_weights import FoundWeights, damage_named
from radixkv.model.loading.stored_forms.fp8 import fp8_weight
from radixkv.model.loading.stored_forms.mapped_tensors import MappedTensors
from radixkv.model.loading.stored_forms.scale_grids import grid_of
from radixkv.model.stored_weights.fp4_weight import Fp4Weight
from radixkv.model.stored_weights.scaled_weight import Int8Weight
from radixkv.model.stored_weights.stored_weight import StackedWeights, StoredWeight

_TYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int8: "I8"}


def read_modelopt(tensors: MappedTensors, settings: Mapping[str, Any]) -> FoundWeights:
    """Weights of FP8, NVFP4 and W8A16.

    Raises:
        ModelLoadError: a weight without its scales, of another algorithm, or one that does not fit.
    """
    algorithms = modelopt_algorithms(settings)
    types = {MODELOPT_ALGORITHMS[each] for each in algorithms}
    found = FoundWeights()
    found.leave_out_activations(tensors)
    for name in tensors:
        kind = _TYPES.get(tensors[name].dtype)
        if kind is None or name.rpartition(".")[2] in ("weight_scale", "weight_scale_2"):
            continue
        with damage_named(name):
            if kind not in types:
                raise ValueError(f"it is {kind}, which no layer of {', '.join(sorted(algorithms))} is")
            found.weights[name] = _weight(tensors, name, kind)
        found.read |= {name, f"{name}_scale"} | ({f"{name}_scale_2"} if kind == "U8" else set())
    if not found.weights:
        raise ModelLoadError(
            "The folder is said to hold weights of ModelOpt, and has none: its config.json is another's."
        )
    return found


def _weight(tensors: MappedTensors, name: str, kind: str) -> StoredWeight | StackedWeights:
    if kind == "F8_E4M3":
        return fp8_weight(tensors, name, "_scale")
    codes, scales = tensors[name], tensors[f"{name}_scale"]
    if kind == "U8":
        return Fp4Weight(codes, scales, tensors[f"{name}_scale_2"])
    if codes.ndim != 2:
        raise ValueError(f"it has {codes.ndim} dimensions")
    return Int8Weight(codes, *grid_of(codes, scales, None))
