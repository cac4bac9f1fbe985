# SPDX-License-Identifier: Apache-2.0
"""Weights of ModelOpt, each layer's by its algorithm; inputs are not rounded.

    FP8      weight (float8)            weight_scale   a number, [out], or blocks (FP8_PB_WO)
    NVFP4    weight [out, in / 2]       weight_scale [out, in / 16]    weight_scale_2 []
    MXFP4    weight [out, in / 2]       weight_scale [out, in / 32] (exponents, a byte each)
    MXFP8    weight (float8)            weight_scale [out, in / 32] (exponents, a byte each)
    INT4     weight [out / 2, in]       weight_scale [out, groups] (floats)
    INT8     weight (int8)              weight_scale [out]

A smoothed layer (AWQ, SmoothQuant) multiplies its inputs by `pre_quant_scale` [in] first, unless that went
into what comes before it. `weight_scale_2` of INT4 (W4A8_AWQ) is of a rounding on the way to a
product, and is left out.

A layer without scales has a plain weight, whatever lists of exceptions say: the tensors decide. Their types
must be those of the algorithms that the configuration names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from radixkv.errors import ModelLoadError
from radixkv.model.loading.checkpoint_formats import MODELOPT_ALGORITHMS, modelopt_algorithms
from radixkv.model.loading.stored_forms.found_weights import FoundWeights, damage_named, damaged
from radixkv.model.loading.stored_forms.fp8 import fp8_weight
from radixkv.model.loading.stored_forms.mapped_tensors import MappedTensors
from radixkv.model.loading.stored_forms.scale_grids import grid_of
from radixkv.model.stored_weights.fp4_weight import Fp4Weight
from radixkv.model.stored_weights.group_weight import GroupWeight
from radixkv.model.stored_weights.packed_codes import PackedCodes
from radixkv.model.stored_weights.scaled_inputs import ScaledInputs
from radixkv.model.stored_weights.scaled_weight import Fp8Weight, Int8Weight
from radixkv.model.stored_weights.stored_weight import StackedWeights, StoredWeight

_CODES = (torch.float8_e4m3fn, torch.uint8, torch.int8)
_EXPONENTS = torch.float8_e8m0fnu
_MX = (1, 32)


def read_modelopt(tensors: MappedTensors, settings: Mapping[str, Any]) -> FoundWeights:
    """Weights of all algorithms that `MODELOPT_ALGORITHMS` names.

    Raises:
        ModelLoadError: a weight without its scales, of another algorithm, or one that does not fit.
    """
    algorithms = modelopt_algorithms(settings)
    kinds = {MODELOPT_ALGORITHMS[each] for each in algorithms}
    found = FoundWeights()
    found.leave_out_activations(tensors)
    for name in tensors:
        if tensors[name].dtype not in _CODES or name.rpartition(".")[2] in ("weight_scale", "weight_scale_2"):
            continue
        beside = {f"{name}_scale", f"{name}_scale_2"} & set(tensors)
        with damage_named(name):
            if f"{name}_scale" not in tensors and tensors[name].dtype != torch.float8_e4m3fn:
                raise KeyError(f"{name}_scale")
            kind = _kind(tensors, name)
            if kind not in kinds:
                raise ValueError(f"it is {kind}, which no layer of {', '.join(sorted(algorithms))} is")
            weight = _weight(tensors, name, kind)
            smoothing = f"{name.removesuffix('weight')}pre_quant_scale"
            if smoothing in tensors:
                weight = _smoothed(weight, tensors[smoothing])
                beside.add(smoothing)
            found.weights[name] = weight
        found.read |= {name, *beside}
    for name in tensors:
        if name.endswith(".pre_quant_scale") and name not in found.read:
            raise damaged(name, "its layer's weight is not quantised")
    if not found.weights:
        raise ModelLoadError(
            "The folder is said to hold weights of ModelOpt, and has none: its config.json is another's."
        )
    return found


def _kind(tensors: MappedTensors, name: str) -> str:
    """How a weight is stored, by its type and that of its scales."""
    codes, scales = tensors[name].dtype, tensors.get(f"{name}_scale")
    exponents = scales is not None and scales.dtype == torch.uint8
    if codes == torch.float8_e4m3fn:
        return "MXFP8" if exponents else "F8_E4M3"
    if codes == torch.int8:
        return "I8"
    if exponents:
        return "MXFP4"
    return "NVFP4" if scales is not None and scales.dtype == torch.float8_e4m3fn else "INT4"


def _weight(tensors: MappedTensors, name: str, kind: str) -> StoredWeight | StackedWeights:
    if kind == "F8_E4M3":
        return fp8_weight(tensors, name, "_scale")
    codes, scales = tensors[name], tensors[f"{name}_scale"]
    if codes.ndim != 2:
        raise ValueError(f"it has {codes.ndim} dimensions")
    if kind == "NVFP4":
        return Fp4Weight(codes, scales, tensors[f"{name}_scale_2"])
    if kind == "MXFP4":
        return Fp4Weight(codes, scales.view(_EXPONENTS))
    if kind == "MXFP8":
        return Fp8Weight(codes, scales.view(_EXPONENTS), _MX)
    if kind == "INT4":
        return _int4(codes, scales)
    return Int8Weight(codes, *grid_of(codes, scales, None))


def _int4(codes: Tensor, scales: Tensor) -> GroupWeight:
    """number = code * scale, of codes from -8 to 7; a byte has two outputs', the first in its low half."""
    if codes.shape[1] % 8:
        raise ValueError(f"{codes.shape[1]} inputs are not whole words of 8")
    apart = torch.stack((codes & 15, codes >> 4), dim=1).flatten(0, 1) ^ 8  # codes from 0 to 15
    words = (apart[:, ::2] | (apart[:, 1::2] << 4)).contiguous().view(torch.int32)
    return GroupWeight(PackedCodes(words, 4, "rows"), scales)


def _smoothed(weight: StoredWeight | StackedWeights, scales: Tensor) -> ScaledInputs:
    if isinstance(weight, StackedWeights):
        raise ValueError("experts in one tensor have scales of their inputs")
    return ScaledInputs(weight, scales)
