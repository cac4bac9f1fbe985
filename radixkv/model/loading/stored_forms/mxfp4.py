# SPDX-License-Identifier: Apache-2.0
"""Experts of gpt-oss in 4-bit floats (MXFP4).

gate_up_proj_blocks [experts, out, groups, 16]   gate_up_proj_scales [experts, out, groups]
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
