# SPDX-License-Identifier: Apache-2.0
"""Weights of 4-bit floats: MXFP4 of gpt-oss, NVFP4 of ModelOpt.

gpt-oss    gate_up_proj_blocks [experts, out, groups, 16]   gate_up_proj_scales [experts, out, groups]
ModelOpt   weight [out, in / 2]    weight_scale [out, in / 16]    weight_scale_2 []
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from radixkv.errors import ModelLoadError
from radixkv.model.loading.stored_forms.found_weights import FoundWeights, damage_named
from radixkv.model.loading.stored_forms.mapped_tensors import MappedTensors
from radixkv.model.stored_weights.fp4_weight import Fp4Weight
from radixkv.model.stored_weights.stored_weight import StackedWeights

_BLOCKS = "_blocks"


def read_mxfp4(tensors: MappedTensors, settings: Mapping[str, Any]) -> FoundWeights:
    """Experts of gpt-oss, which its model has with the inputs first.

    Raises:
        ModelLoadError: blocks without scales, or ones that do not fit.
    """
    found = FoundWeights()
    for name in tensors:
        if not name.endswith(_BLOCKS):
            continue
        stem = name.removesuffix(_BLOCKS)
        with damage_named(stem):
            blocks, scales = tensors[name], tensors[f"{stem}_scales"]
            if blocks.ndim != 4 or scales.dtype != torch.uint8 or len(scales) != len(blocks):
                raise ValueError(f"blocks are {list(blocks.shape)}, scales {list(scales.shape)}")
            exponents = scales.view(torch.float8_e8m0fnu)
            experts = [Fp4Weight(own.flatten(1), each) for own, each in zip(blocks, exponents, strict=True)]
            found.weights[stem] = StackedWeights(experts, inputs_first=True)
        found.read |= {name, f"{stem}_scales"}
    if not found.weights:
        raise ModelLoadError(
            "The folder is said to hold weights of MXFP4, and has none: its config.json is another's."
        )
    return found


def read_nvfp4(tensors: MappedTensors, settings: Mapping[str, Any]) -> FoundWeights:
    """Weights of ModelOpt's NVFP4; inputs are not rounded.

    Raises:
        ModelLoadError: a weight without its scales, or one that does not fit.
    """
    found = FoundWeights()
    found.leave_out_activations(tensors)
    for name in tensors:
        if not name.endswith("weight") or tensors[name].dtype != torch.uint8:
            continue
        scale, whole = f"{name}_scale", f"{name}_scale_2"
        with damage_named(name):
            found.weights[name] = Fp4Weight(tensors[name], tensors[scale], tensors[whole])
        found.read |= {name, scale, whole}
    if not found.weights:
        raise ModelLoadError(
            "The folder is said to hold weights of NVFP4, and has none: its config.json is another's."
        )
    return found
