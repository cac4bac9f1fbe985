# SPDX-License-Identifier: Apache-2.0
"""Experts of a GGUF file: which tensors belong to which module, and their blocks into panels.

llama.cpp stores a layer's experts as three tensors [experts, out, in] (gates and ups may be one), with their
biases where the architecture has some (and two, where no gate is applied); transformers has one module for
all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from radixkv.model.loading.gguf_file import FileTensor, GGUFFile

_Array = np.ndarray[Any, Any]
_TENSOR = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def expert_tensors(file: GGUFFile) -> dict[int, dict[str, FileTensor]]:
    """Tensors of experts by layer and then by name, `gate.weight` for instance."""
    found: dict[int, dict[str, FileTensor]] = {}
    for name, tensor in file.tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is not None:
            found.setdefault(int(match[1]), {})[f"{match[2]}.{match[3]}"] = tensor
    return found


def expert_modules(model: nn.Module) -> Iterator[tuple[str, int, Any]]:
    """Path, number of the layer and module of each layer's experts, as transformers stacks them."""
    for path, module in list(model.named_modules()):
        match = _LAYER.search(path)
        if match is not None and hasattr(module, "has_gate") and hasattr(module, "num_experts"):
            yield path, int(match[1]), module


def expected_shapes(module: Any, tensors: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a file must have for a module of experts.

    Args:
        tensors: those that it has: gates and ups are expected to be merged where `gate_up` is among them.
    """
    experts, first, second = (module.gate_up_proj if module.has_gate else module.up_proj).shape
    both, width = (second, first) if module.is_transposed else (first, second)
    inner = both // 2 if module.has_gate else both
    sizes = {"gate": inner, "up": inner} if module.has_gate else {"up": inner}
    if "gate_up.weight" in tensors:
        sizes = {"gate_up": both}
    shapes: dict[str, tuple[int, ...]] = {"down.weight": (experts, width, inner)}
    if module.has_bias:
        shapes["down.bias"] = experts, width
    for name, size in sizes.items():
        shapes[f"{name}.weight"] = experts, size, width
        if module.has_bias:
            shapes[f"{name}.bias"] = experts, size
    return shapes


def rounded_formats(module: Any, tensors: dict[str, Any]) -> list[str]:
    """Names of the formats that `pack_experts` rounds to bfloat16."""
    from radixkv_kernels.cpu.linear.block_formats import FORMATS  # needs numba, which is optional

    kinds = [tensors[f"{name}.weight"].tensor_type for name in (*_first(module, tensors), "down")]
    if all(kind in FORMATS for kind in kinds):
        return []
    return [kind.name for kind in kinds if kind.name not in ("F32", "F16", "BF16")]


def _first(module: Any, tensors: dict[str, Any]) -> list[str]:
    """Tensors of the experts' first product."""
    if "gate_up.weight" in tensors:
        return ["gate_up"]
    return ["gate", "up"] if module.has_gate else ["up"]


def pack_experts(module: Any, tensors: dict[str, Any], rows: Any, own: range) -> Any:
    """Make the module that takes the place of transformers' experts.

    Args:
        tensors: as `expected_shapes` names them; `gate_up` may stand for `gate` and `up`.
        rows: the `BlockRows` of the model.
        own: the experts that it answers for.
    """
    # needs numba, which is optional
    from radixkv.model.cpu_layers.block_experts import BlockExperts, PackedExperts
    from radixkv_kernels.cpu.linear.block_experts import ExpertPanels, ExpertProduct
    from radixkv_kernels.cpu.linear.block_formats import FORMATS

    first = _first(module, tensors)
    kinds = {name: tensors[f"{name}.weight"].tensor_type for name in (*first, "down")}

    def bias(name: str) -> torch.Tensor | None:
        found = tensors.get(f"{name}.bias")
        if found is None:
            return None
        return torch.from_numpy(_dequantised(found.data[own.start : own.stop], found.tensor_type))

    def product(names: list[str]) -> ExpertProduct:
        panels = []
        for name in names:
            data = np.ascontiguousarray(tensors[f"{name}.weight"].data[own.start : own.stop]).view(np.uint8)
            panels.append(ExpertPanels(int(kinds[name]), data.reshape(*data.shape[:2], -1)))
        return ExpertProduct(panels, [bias(name) for name in names])

    def packed(names: list[str]) -> list[Any]:
        biases = [bias(name) for name in names]
        whole = [tensors[f"{name}.weight"] for name in names]
        kept = [each.tensor_type for each in whole]
        return [
            _packed([each.data[e] for each in whole], kept, [each[i] for each in biases if each is not None])
            for i, e in enumerate(own)
        ]

    if all(kind in FORMATS for kind in kinds.values()):
        return BlockExperts(module, own, product(first), product(["down"]), rows)
    return PackedExperts(module, own, packed(first), packed(["down"]))


def stacked_experts(module: Any, tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Dequantise a layer's experts into the parameters of transformers' module, by their names; float32."""
    found: dict[str, torch.Tensor] = {}
    for leaf, suffix in (("weight", ""), ("bias", "_bias")):
        if f"down.{leaf}" not in tensors:
            continue
        plain = {
            name: torch.from_numpy(_dequantised(each.data, each.tensor_type))
            for name, each in tensors.items()
            if name.endswith(leaf)
        }
        down, both = plain[f"down.{leaf}"], plain.get(f"gate_up.{leaf}")
        if not module.has_gate:
            found |= {f"up_proj{suffix}": plain[f"up.{leaf}"], f"down_proj{suffix}": down}
            continue
        if both is None:
            both = torch.cat([plain[f"gate.{leaf}"], plain[f"up.{leaf}"]], 1)
        if not module.is_concatenated:
            both = torch.stack(both.chunk(2, 1), 2).flatten(1, 2)
        if module.is_transposed and leaf == "weight":
            both, down = both.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        found |= {f"gate_up_proj{suffix}": both, f"down_proj{suffix}": down}
    return found


def _packed(data: list[_Array], kinds: list[Any], biases: list[torch.Tensor]) -> nn.Module:
    """Return one product with an expert's weights, one above the other."""
    from radixkv.model.cpu_layers.packed_linear import PackedLinear  # needs numba, which is optional

    weight = torch.cat(
        [torch.from_numpy(_dequantised(each, kind)) for each, kind in zip(data, kinds, strict=True)]
    )
    if any(kind.name not in ("F32", "F16") for kind in kinds):
        weight = weight.to(torch.bfloat16)
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        plain.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return PackedLinear(plain)


def _dequantised(data: _Array, kind: Any) -> _Array:
    import gguf  # slow to import

    return np.array(gguf.quants.dequantize(data, kind), dtype=np.float32)
