# SPDX-License-Identifier: Apache-2.0
"""Weights of compressed-tensors (llm-compressor): which layers are in which scheme, and what a scheme stores.

    float-quantized, int-quantized, naive-quantized   weight  weight_scale  [weight_zero_point]
    pack-quantized, 8 bits                            weight_packed (4 codes in an int32)  weight_shape

A group of the configuration names its layers by name, by pattern (`re:`) or by class; a scheme says what
shares a scale (`strategy`): the tensor, a channel, a group of inputs or a block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from radixkv.model.loading.stored_forms.found_weights import FoundWeights, damage_named, damaged
from radixkv.model.loading.stored_forms.mapped_tensors import MappedTensors
from radixkv.model.stored_weights.scaled_weight import Fp8Weight, Int8Weight
from radixkv.model.stored_weights.stored_weight import StoredWeight

_PACKED = "weight_packed"


def read_compressed_tensors(tensors: MappedTensors, settings: Mapping[str, Any]) -> FoundWeights:
    """Weights of all layers that have scales, each by the scheme of its group.

    Raises:
        ModelLoadError: a layer without a scheme or its scales, or tensors that do not fit.
    """
    found = FoundWeights()
    found.leave_out_activations(tensors)
    for stem in _stems(tensors):
        name = f"{stem}weight"
        parts = {leaf: f"{stem}{leaf}" for leaf in tensors.leaves(stem[:-1]) if leaf.startswith("weight")}
        scheme = _scheme(name, stem[:-1], settings)
        with damage_named(name):
            own = {leaf: tensors[full] for leaf, full in parts.items()}
            inputs = tensors.get(f"{stem}input_scale")
            found.weights[name] = _weight(own, scheme, inputs)
        found.read |= set(parts.values())
    return found


def _stems(tensors: MappedTensors) -> Iterator[str]:
    """Names of layers with quantised weights, each with its last dot."""
    for name in tensors:
        stem, dot, leaf = name.rpartition(".")
        narrow = leaf == "weight" and tensors[name].dtype in (torch.int8, torch.float8_e4m3fn)
        if leaf == _PACKED or narrow:
            yield stem + dot


def _scheme(name: str, module: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Weights' scheme of a layer, with its `format`: of the group that names it best."""
    groups = [group for group in settings["config_groups"].values() if group.get("weights")]
    best: tuple[int, Mapping[str, Any]] | None = None
    for group in groups:
        for target in group.get("targets") or ():
            if target == module:
                rank = 0
            elif target.startswith("re:") and re.match(target[3:], module):
                rank = 1
            elif "." not in target and not target.startswith("re:"):
                rank = 2  # a class
            else:
                continue
            if best is None or rank < best[0]:
                best = rank, group
    if best is None and len(groups) != 1:
        raise damaged(name, "no group of its configuration names it")
    group = groups[0] if best is None else best[1]
    return {"format": group.get("format") or settings.get("format"), **group["weights"]}


def _weight(parts: dict[str, Tensor], scheme: Mapping[str, Any], inputs: Tensor | None) -> StoredWeight:
    if "weight_g_idx" in parts:
        raise ValueError("its inputs are reordered (weight_g_idx)")
    bits, is_float = int(scheme.get("num_bits", 8)), scheme.get("type") == "float"
    if bits != 8:
        raise ValueError(f"its numbers are of {bits} bits")
    codes = _unpacked(parts) if _PACKED in parts else parts["weight"]
    if codes.ndim != 2:
        raise ValueError(f"it has {codes.ndim} dimensions")
    scales = parts["weight_scale"]
    zeros = parts.get("weight_zero_point")
    block = _block(codes, scheme)
    grid = [-(-size // each) for size, each in zip(codes.shape, block, strict=True)]
    if scales.numel() != grid[0] * grid[1]:
        raise ValueError(
            f"{list(codes.shape)} numbers in blocks of {list(block)} ({scheme.get('strategy')}) need {grid} "
            f"scales, not {list(scales.shape)}"
        )
    scales = scales.reshape(grid)
    if is_float:
        return Fp8Weight(codes, scales, block, input_scale=inputs if _is_number(inputs) else None)
    if _PACKED in parts:
        offset = torch.full(grid, 128.0)
        zeros = offset if zeros is None else offset + _unpacked_zeros(zeros, grid)
    elif zeros is not None:
        zeros = zeros.reshape(grid)
    return Int8Weight(codes, scales, block, zeros)


def _is_number(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.numel() == 1


def _block(codes: Tensor, scheme: Mapping[str, Any]) -> tuple[int, int]:
    rows, columns = max(1, codes.shape[0]), max(1, codes.shape[1])
    strategy = scheme.get("strategy")
    size = scheme.get("group_size")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "tensor":
        return rows, columns
    if strategy == "channel":
        return 1, columns
    if strategy == "group" and isinstance(size, int) and size > 0 and columns % size == 0:
        return 1, size
    structure = scheme.get("block_structure")
    if isinstance(structure, str):  # as older versions wrote it: 128x128
        structure = [int(each) for each in structure.split("x")]
    if strategy == "block" and structure and len(structure) == 2:
        return int(structure[0]), int(structure[1])
    raise ValueError(f"{columns} inputs do not go into the strategy {strategy!r} (group_size {size})")


def _unpacked(parts: Mapping[str, Tensor]) -> Tensor:
    """Codes of 8 bits, 128 too large, from words of four: bytes in the order of their numbers."""
    packed, (rows, columns) = parts[_PACKED], parts["weight_shape"].tolist()
    if packed.dtype != torch.int32 or packed.shape != (rows, -(-columns // 4)):
        raise ValueError(
            f"{rows} x {columns} numbers of 8 bits need {[rows, -(-columns // 4)]} words, not "
            f"{list(packed.shape)} of {packed.dtype}"
        )
    return packed.view(torch.uint8)[:, :columns]


def _unpacked_zeros(zeros: Tensor, grid: list[int]) -> Tensor:
    """Zero points, 128 too large as codes are where they are packed, along the outputs; else as they are."""
    if zeros.dtype != torch.int32 or zeros.numel() == grid[0] * grid[1]:
        return zeros.reshape(grid).float()
    words = zeros.t().contiguous().view(torch.uint8)
    return words[:, : grid[0]].t().float() - 128
