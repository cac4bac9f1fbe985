# SPDX-License-Identifier: Apache-2.0
"""Which tensor of a GGUF file is which parameter of a model, and what its values and rows become."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from radixkv.model.loading.gguf_architectures import ARCHITECTURES, Architecture

#: Modules whose weights stay float32: what transforms them needs their numbers.
STAY_PLAIN = (".kv_b_proj",)
_BIAS = re.compile(r"\be_score_correction_bias$")
_BLOCK = re.compile(r"(blk\.\d+\.)(.+)")
#: Products that transformers has as one, and the tensors that files have.
_JOINED = {
    "ffn_gate_up_shexp.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    "attn_kv_b.weight": ("attn_k_b.weight", "attn_v_b.weight"),
}
#: Ends of parameters' names that the gguf package does not know, and names of their tensors.
_ENDINGS = {
    ".shared_mlp.input_linear.weight": "ffn_gate_up_shexp.weight",
    ".shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    ".block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    ".moe_statics.e_score_correction_bias": "exp_probs_b.bias",
}


def tensor_names(model: Any, architecture: str) -> tuple[dict[str, str], Any]:
    """Names of tensors -> of parameters and buffers, and what processes values, as transformers has it.

    Args:
        architecture: the file's.
    """
    from transformers import modeling_gguf_pytorch_utils as reading

    row = ARCHITECTURES.get(architecture)
    config = model.config.get_text_config(decoder=True).to_dict()
    processor: Any
    if row is None:
        kind = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)
        processor = kind(config=config)
    else:
        processor = _Processor(row, config, reading)
    names = reading.get_gguf_hf_weights_map(model, processor, model_type=architecture)
    for name, parameter in list(names.items()):
        if not name.endswith((".weight", ".bias", "_exps")):  # the file has a suffix, the model none
            names[f"{name}.weight"] = parameter
        elif parameter.endswith(".e_score_correction.bias"):
            names[name] = parameter.replace("correction.bias", "correction_bias")
    for parameter in model.state_dict():
        layer = re.search(r"\.layers\.(\d+)\.", parameter)
        if layer is None:
            continue
        for ending, tensor in _ENDINGS.items():
            if parameter.endswith(ending):
                names[f"blk.{layer[1]}.{tensor}"] = parameter
    return names, processor


def join_tensors(tensors: list[Any], names: Mapping[str, str]) -> list[Any]:
    """Tensors of a file with those that transformers has as one put together, where the model needs them."""
    by_name = {tensor.name: tensor for tensor in tensors}
    for tensor in tensors:
        found = _BLOCK.fullmatch(tensor.name)
        if found is None:
            continue
        for whole, parts in _JOINED.items():
            name = f"{found[1]}{whole}"
            if found[2] == parts[0] and name in names and name not in by_name:
                own = [by_name.get(f"{found[1]}{part}") for part in parts]
                if None not in own:
                    by_name[name] = _join(name, own)
    return list(by_name.values())


def _join(name: str, parts: list[Any]) -> Any:
    """One above the other; latents' keys and values head by head."""
    import gguf

    first, second = parts
    if len(first.shape) == 2 and first.tensor_type == second.tensor_type:
        data, kind = np.concatenate([first.data, second.data]), first.tensor_type
    else:
        plain = [gguf.quants.dequantize(part.data, part.tensor_type) for part in parts]
        if len(first.shape) == 3:  # [heads, latent, nope] and [heads, value, latent]
            keys, values = plain
            data = np.concatenate([keys.transpose(0, 2, 1), values], 1).reshape(-1, values.shape[-1])
        else:
            data = np.concatenate(plain)
        kind = gguf.GGMLQuantizationType.F32
    rows = len(data)
    columns = int(second.shape[0])
    return SimpleNamespace(name=name, data=data, tensor_type=kind, shape=(columns, rows), n_bytes=data.nbytes)


class _Processor:
    """Undoes what llama.cpp's conversion does, by a row of the table; with transformers' interface for it."""

    def __init__(self, row: Architecture, config: dict[str, Any], reading: Any) -> None:
        self._row = row
        self._rotary = reading.LlamaTensorProcessor(config=config)

    def preprocess_name(self, hf_name: str) -> str:
        """The name that the gguf package knows."""
        return _BIAS.sub("e_score_correction.bias", hf_name)

    def perform_fallback_tensor_mapping(self, *_: Any) -> None:
        """Experts are found by the names of the file."""

    def process(self, weights: Any, name: str, **_: Any) -> Any:
        """The values or rows of a tensor as the model has them, in `weights`."""
        if self._row.norms_plus_one and name.endswith("norm.weight"):
            weights = weights - 1
        if self._row.interleaved and ".attn_q_norm." not in name and ".attn_k_norm." not in name:
            return self._rotary.process(weights, name)
        return SimpleNamespace(weights=weights)
