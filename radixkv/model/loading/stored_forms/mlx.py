# SPDX-License-Identifier: Apache-2.0
"""Weights of MLX in its affine form: `weight` (words of 32 bits), `scales` and `biases` of groups of inputs.

The configuration has `group_size` and `bits`, and the same for single layers under their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from radixkv.model.loading.stored_forms.found_weights import FoundWeights, damage_named, damaged
from radixkv.model.loading.stored_forms.mapped_tensors import MappedTensors
from radixkv.model.stored_weights.affine_weight import AffineWeight

_WORDS = (torch.uint32, torch.int32)


def read_mlx(tensors: MappedTensors, settings: Mapping[str, Any]) -> FoundWeights:
    """Weights of all layers that have scales.

    Raises:
        ModelLoadError: a weight without its scales or biases, or one that does not fit.
    """
    found = FoundWeights()
    for name in tensors:
        if not name.endswith(".weight") or tensors[name].dtype not in _WORDS:
            continue
        stem = name.removesuffix("weight")
        own = settings.get(stem[:-1])
        own = {**settings, **own} if isinstance(own, Mapping) else settings
        with damage_named(name):
            if own.get("mode", "affine") != "affine":
                raise damaged(name, f"it is of the mode {own['mode']!r}, expected 'affine'")
            if tensors[name].ndim != 2:
                raise ValueError("it is of several experts, and MLX's names of experts are not known")
            weight = AffineWeight(
                tensors[name].view(torch.uint8),
                tensors[f"{stem}scales"],
                tensors[f"{stem}biases"],
                int(own["bits"]),
            )
            if weight.group_size != int(own["group_size"]):
                raise ValueError(f"its groups are of {weight.group_size} inputs, not of {own['group_size']}")
        found.weights[name] = weight
        found.read |= {name, f"{stem}scales", f"{stem}biases"}
    return found
