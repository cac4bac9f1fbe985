# SPDX-License-Identifier: Apache-2.0
"""Weights of AWQ, GPTQ and AutoRound: codes in words of 32 bits, scales and zero points of groups of inputs.

    AWQ    qweight [in, out / 8]         qzeros [groups, out / 8]           scales [groups, out]
    GPTQ   qweight [in * bits / 32, out] qzeros [groups, out * bits / 32]   scales [groups, out]  g_idx [in]

GPTQ's first version stores zero points less one (`checkpoint_format` is not `gptq_v2`). With activation order
(`desc_act`), `g_idx` names each input's group. AutoRound writes one of the two, and floats in the layouts of
compressed-tensors and FP8. Layers may have settings of their own (`dynamic` of GPTQ, `extra_config` of
AutoRound).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from radixkv.errors import ModelLoadError
from radixkv.model.loading.checkpoint_formats import settings_of_layer
from radixkv.model.loading.stored_forms.compressed_tensors import read_compressed_tensors
from radixkv.model.loading.stored_forms.found_weights import FoundWeights, damage_named
from radixkv.model.loading.stored_forms.fp8 import read_block_fp8, read_scaled_fp8
from radixkv.model.loading.stored_forms.mapped_tensors import MappedTensors
from radixkv.model.stored_weights.group_weight import GroupWeight
from radixkv.model.stored_weights.packed_codes import PackedCodes
from radixkv.model.stored_weights.stored_weight import check_whole

#: What GPTQ's first version subtracts from words of zero points: one from each code, with its borrow.
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
_LEAVES = ("qweight", "qzeros", "scales", "g_idx")


def read_awq(tensors: MappedTensors, settings: Mapping[str, Any]) -> FoundWeights:
    """Weights of AWQ in the layout of GEMM.

    Raises:
        ModelLoadError: a weight without its scales, or one that does not fit.
    """
    return _read(tensors, settings, _awq)


def read_gptq(tensors: MappedTensors, settings: Mapping[str, Any]) -> FoundWeights:
    """Weights of GPTQ, of both versions.

    Raises:
        ModelLoadError: a weight without its scales, or one that does not fit.
    """
    is_second = str(settings.get("checkpoint_format", "gptq")) == "gptq_v2"
    return _read(tensors, settings, _gptq_second if is_second else _gptq_first)


def read_auto_round(tensors: MappedTensors, settings: Mapping[str, Any]) -> FoundWeights:
    """Weights of AutoRound, which packs them as AWQ, GPTQ, compressed-tensors or FP8 checkpoints do.

    Raises:
        ModelLoadError: another packing; or see `read_gptq`.
    """
    packing = str(settings.get("packing_format", "auto_round:auto_gptq"))
    if packing.endswith("llm_compressor"):
        weights = {"type": "float", "num_bits": settings["bits"], "strategy": "group"}
        form = "mxfp8-quantized" if settings["bits"] == 8 else None
        group = {"weights": {**weights, "group_size": settings.get("group_size", 32)}, "format": form}
        return read_compressed_tensors(tensors, {"config_groups": {"": group}})
    if packing.endswith("fp8"):
        return (read_block_fp8 if settings.get("weight_block_size") else read_scaled_fp8)(tensors, settings)
    return read_awq(tensors, settings) if "awq" in packing else read_gptq(tensors, settings)


def _read(tensors: MappedTensors, settings: Mapping[str, Any], make: Any) -> FoundWeights:
    found = FoundWeights()
    for name in tensors:
        stem, _, leaf = name.rpartition(".")
        if leaf != "qweight":
            continue
        with damage_named(f"{stem}.weight"):
            scheme = {**settings, **settings_of_layer(stem, settings)}
            bits = int(scheme.get("bits", scheme.get("w_bit", 4)))
            size = int(scheme.get("group_size", scheme.get("q_group_size", 128)))
            own = {each: tensors[f"{stem}.{each}"] for each in _LEAVES if f"{stem}.{each}" in tensors}
            for each in _needed(scheme, make is _awq, size):
                if each not in own or not own[each].numel():
                    raise KeyError(f"{stem}.{each}")
            weight = make(own, bits)
            if size > 0 and weight.scales.shape[1] != -(-weight.in_features // size):
                raise ValueError(
                    f"{weight.in_features} inputs in groups of {size} have {weight.scales.shape[1]} scales"
                )
            found.weights[f"{stem}.weight"] = weight
        found.read |= {f"{stem}.{each}" for each in own}
    if not found.weights:
        raise ModelLoadError(
            "The folder is said to hold weights of AWQ or GPTQ, and has none: its config.json is another's."
        )
    return found


def _needed(scheme: Mapping[str, Any], is_awq: bool, size: int) -> list[str]:
    """Tensors that a layer must have beside its codes."""
    if is_awq:
        return ["scales"] if scheme.get("zero_point") is False else ["scales", "qzeros"]
    needed = ["scales"] if scheme.get("sym") is True else ["scales", "qzeros"]
    return [*needed, "g_idx"] if scheme.get("desc_act") is True and size > 0 else needed


def _awq(own: Mapping[str, Tensor], bits: int) -> GroupWeight:
    codes = PackedCodes(own["qweight"], bits, "outputs")
    zeros = None
    if "qzeros" in own:
        packed = PackedCodes(own["qzeros"], bits, "outputs")
        zeros = packed.rows(range(packed.out_features))
    return GroupWeight(codes, own["scales"].t(), zeros)


def _gptq_first(own: Mapping[str, Tensor], bits: int) -> GroupWeight:
    return _gptq(own, bits, is_first=True)


def _gptq_second(own: Mapping[str, Tensor], bits: int) -> GroupWeight:
    return _gptq(own, bits, is_first=False)


def _gptq(own: Mapping[str, Tensor], bits: int, *, is_first: bool) -> GroupWeight:
    codes = PackedCodes(own["qweight"], bits, "columns")
    scales = own["scales"].t()
    zeros = None
    if "qzeros" in own:
        zeros = _gptq_zeros(own["qzeros"], bits, len(scales), is_first=is_first)
    group_of = own.get("g_idx")
    if group_of is not None and not group_of.numel():
        group_of = None
    if group_of is not None:
        check_whole(group_of, "inputs' groups")
        size = max(1, codes.in_features // max(1, scales.shape[1]))
        in_order = torch.arange(codes.in_features) // size
        group_of = group_of.long()
        if torch.equal(group_of, in_order):
            group_of = None
    return GroupWeight(codes, scales, zeros, group_of)


def _gptq_zeros(words: Tensor, bits: int, outputs: int, *, is_first: bool) -> Tensor:
    """Zero points [out, groups]."""
    if words.dtype != torch.int32:
        raise ValueError(f"its zero points are {words.dtype}, expected torch.int32")
    if is_first and bits in _ONES:
        words = ((words.long() + _ONES[bits]) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
    packed = PackedCodes(words, bits, "rows", outputs)
    zeros = packed.rows(range(packed.out_features)).t()
    if is_first and bits not in _ONES:  # codes of 3 bits go on from word to word
        zeros = (zeros + 1) & ((1 << bits) - 1)
    return zeros
