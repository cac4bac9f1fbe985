# SPDX-License-Identifier: Apache-2.0
"""Weights of torchao, as transformers saves them: tensors by their parts, described in the files' headers.

header    model.layers.0.mlp.up_proj.weight -> {"_type": "Int8Tensor", "_data": {"block_size": [1, 64]}}
tensors   model.layers.0.mlp.up_proj._weight_qdata   _weight_scale   _weight_zero_point
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from radixkv.model.loading.stored_forms.found_weights import FoundWeights, damage_named, damaged
from radixkv.model.loading.stored_forms.mapped_tensors import MappedTensors
from radixkv.model.loading.stored_forms.scale_grids import as_grid
from radixkv.model.stored_weights.affine_weight import AffineWeight
from radixkv.model.stored_weights.scaled_weight import Fp8Weight, Int8Weight
from radixkv.model.stored_weights.stored_weight import StoredWeight, check_floats

_PLAIN = "Tensor"
_KINDS = ("Float8Tensor", "Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")


def read_torchao(tensors: MappedTensors, settings: Mapping[str, Any]) -> FoundWeights:
    """Weights that the headers describe.

    Raises:
        ModelLoadError: a kind of tensor that is not known, a part that is missing, or one that does not fit.
    """
    found = FoundWeights()
    for name, text in tensors.metadata.items():
        if not text.startswith("{") or name in tensors:
            continue
        with damage_named(name):
            entry = json.loads(text)
            kind = entry.get("_type")
            if kind == _PLAIN:
                continue
            if kind not in _KINDS:
                raise damaged(name, f"it is a {kind} of torchao, expected one of {', '.join(_KINDS)}")
            parts = _parts(tensors, name)
            for part in entry.get("_tensor_data_names") or ():
                if part not in parts:
                    raise KeyError(part)
            found.weights[name] = _weight(
                kind, {part: tensors[parts[part]] for part in parts}, entry["_data"]
            )
        found.read |= set(parts.values())
    return found


def _parts(tensors: MappedTensors, name: str) -> dict[str, str]:
    """Part of a tensor -> its name in the files."""
    module, dot, leaf = name.rpartition(".")
    found = {}
    for each in tensors.leaves(module):
        for prefix in (f"_{leaf}_", f"{leaf}:"):
            if each.startswith(prefix):
                found[each.removeprefix(prefix)] = f"{module}{dot}{each}"
    return found


def _weight(kind: str, parts: Mapping[str, Tensor], data: Mapping[str, Any]) -> StoredWeight:
    codes, scales, zeros = parts["qdata"], parts["scale"], parts.get("zero_point")
    unknown = sorted(set(parts) - {"qdata", "scale", "zero_point"})
    if unknown:
        raise ValueError(f"it has parts that are not known: {', '.join(unknown)}")
    if codes.ndim != 2:
        raise ValueError(f"it has {codes.ndim} dimensions")
    size = data["block_size"]
    if kind == "Int4Tensor":
        return _int4(codes, scales, parts["zero_point"], int(size[1]))
    block = (max(1, min(int(size[0]), codes.shape[0])), max(1, min(int(size[1]), codes.shape[1])))
    grid = [-(-codes.shape[0] // block[0]), -(-codes.shape[1] // block[1])]
    scales = as_grid(scales, grid, "scales")
    if kind == "Float8Tensor":
        return Fp8Weight(codes, scales, block)
    if zeros is not None:
        zeros = as_grid(zeros, grid, "zero points")
        if not zeros.count_nonzero():
            zeros = None
    return Int8Weight(codes, scales, block, zeros)


def _int4(codes: Tensor, scales: Tensor, zeros: Tensor, size: int) -> AffineWeight:
    """number = code * scale + zero point, of codes from -8 to 7, two a byte, the first one in the low half.

    Args:
        scales, zeros: [groups, out].
    """
    check_floats(zeros, "zero points")
    scale = scales.t().to(torch.float32)
    biases = zeros.t().to(torch.float32) - 8 * scale
    weight = AffineWeight(codes.view(torch.uint8), scale, biases, 4, signed=True)
    if weight.group_size != size:
        raise ValueError(f"its groups are of {weight.group_size} inputs, not of {size}")
    return weight
