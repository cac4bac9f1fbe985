# SPDX-License-Identifier: Apache-2.0
"""Weights of compressed-tensors (llm-compressor): which layers are in which scheme, and what a scheme stores.

    float-quantized, int-quantized, naive-quantized   weight  weight_scale  [weight_zero_point]
    mxfp8-quantized   weight  weight_scale (exponents, a byte each)
    pack-quantized   weight_packed (codes of 2 to 8 bits in int32)  weight_shape  weight_scale
                     [weight_zero_point, packed along the outputs]  [weight_g_idx]
    nvfp4-, mxfp4-pack-quantized   weight_packed (two codes a byte)  weight_scale  [weight_global_scale]

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
from radixkv.model.loading.stored_forms.scale_grids import as_grid
from radixkv.model.stored_weights.fp4_weight import Fp4Weight
from radixkv.model.stored_weights.group_weight import GroupWeight
from radixkv.model.stored_weights.packed_codes import PackedCodes
from radixkv.model.stored_weights.scaled_weight import Fp8Weight, Int8Weight
from radixkv.model.stored_weights.stored_weight import StoredWeight, check_whole

_PACKED = "weight_packed"
#: Activation orders whose weights name the group of each input.
_ORDERS = ("group", "dynamic")


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
    if _PACKED in parts:
        is_float = scheme.get("type") == "float"
        return _fp4(parts) if is_float else _grouped(parts, scheme)
    codes, is_float = parts["weight"], scheme.get("type") == "float"
    if codes.ndim != 2:
        raise ValueError(f"it has {codes.ndim} dimensions")
    zeros = _zeros(parts, scheme)
    block = _block((codes.shape[0], codes.shape[1]), scheme)
    grid = [-(-size // each) for size, each in zip(codes.shape, block, strict=True)]
    scales = as_grid(parts["weight_scale"], grid, f"scales ({scheme.get('strategy')})")
    if scheme.get("format") == "mxfp8-quantized" and scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    if is_float:
        return Fp8Weight(codes, scales, block, input_scale=inputs if _is_number(inputs) else None)
    return Int8Weight(codes, scales, block, None if zeros is None else as_grid(zeros, grid, "zero points"))


def _grouped(parts: Mapping[str, Tensor], scheme: Mapping[str, Any]) -> GroupWeight:
    """Packed whole numbers; words and zero points are those of unsigned codes."""
    bits = int(scheme.get("num_bits", 8))
    rows, columns = parts["weight_shape"].tolist()
    packed, scales = parts[_PACKED], parts["weight_scale"]
    if packed.dtype != torch.int32 or packed.shape != (rows, -(-columns * bits // 32)):
        raise ValueError(
            f"{rows} x {columns} numbers of {bits} bits need {[rows, -(-columns * bits // 32)]} words, not "
            f"{list(packed.shape)} of {packed.dtype}"
        )
    height, width = _block((rows, columns), scheme)
    grid = [-(-rows // height), -(-columns // width)]
    scales = as_grid(scales, grid, f"scales ({scheme.get('strategy')})")
    zeros = _zeros(parts, scheme)
    if zeros is not None:
        zeros = _unpacked_zeros(zeros, bits, grid).repeat_interleave(height, 0)[:rows]
    scales = scales.repeat_interleave(height, 0)[:rows] if height > 1 else scales
    group_of = parts.get("weight_g_idx")
    if group_of is None and scheme.get("actorder") in _ORDERS:
        raise KeyError("weight_g_idx")
    if group_of is not None and (group_of.lt(0).any() or torch.equal(group_of, group_of.sort().values)):
        group_of = None
    return GroupWeight(
        PackedCodes(packed, bits, "rows", columns),
        scales,
        zeros,
        None if group_of is None else group_of.long(),
    )


def _fp4(parts: Mapping[str, Tensor]) -> Fp4Weight:
    scales = parts["weight_scale"]
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    # MXFP4 has none.
    whole = parts["weight_global_scale"] if scales.dtype == torch.float8_e4m3fn else None
    return Fp4Weight(parts[_PACKED], scales, whole, divides=True)


def _is_number(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.numel() == 1


def _block(shape: tuple[int, int], scheme: Mapping[str, Any]) -> tuple[int, int]:
    rows, columns = max(1, shape[0]), max(1, shape[1])
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


def _unpacked_zeros(zeros: Tensor, bits: int, grid: list[int]) -> Tensor:
    """Zero points of unsigned codes: packed along the outputs as these are, or signed and one by one."""
    if zeros.dtype != torch.int32 or zeros.numel() == grid[0] * grid[1]:
        check_whole(zeros, "zero points")
        return as_grid(zeros, grid, "zero points").long() + (1 << (bits - 1))
    words = PackedCodes(zeros.t().contiguous(), bits, "rows", grid[0])
    return words.rows(range(words.out_features)).t()


def _zeros(parts: Mapping[str, Tensor], scheme: Mapping[str, Any]) -> Tensor | None:
    """Zero points as they are stored, which a scheme without symmetry must have."""
    if scheme.get("symmetric", True):
        return parts.get("weight_zero_point")
    return parts["weight_zero_point"]
