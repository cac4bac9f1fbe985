# SPDX-License-Identifier: Apache-2.0
"""Which tensor of a GGUF file is which parameter of a model, and what its values and rows become."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from radixkv.model.loading.gguf_architectures import ARCHITECTURES, Architecture
from radixkv.model.loading.gguf_states import JOINED_INPUT, StateOrders, by_head, leaf_of

#: Modules whose weights stay float32: what transforms them, or a model's own forward, needs their numbers.
STAY_PLAIN = (".kv_b_proj", ".dt_proj")
_BIAS = re.compile(r"\be_score_correction_bias$")
_BLOCK = re.compile(r"(blk\.\d+\.)(.+)")
#: Parameters that transformers has as one, and the tensors that files have.
_JOINED = {
    "ffn_gate_up_shexp.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    "ffn_gate_up.weight": ("ffn_gate.weight", "ffn_up.weight"),
    "attn_kv_b.weight": ("attn_k_b.weight", "attn_v_b.weight"),
    "ssm_conv1d.weight": ("ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight"),
    JOINED_INPUT: ("attn_qkv.weight", "attn_gate.weight"),
}
#: Ends of parameters' names that the gguf package does not know, and names that their tensors may have.
_ENDINGS = {
    ".shared_mlp.input_linear.weight": ("ffn_gate_up_shexp.weight", "ffn_gate_up.weight"),
    ".shared_mlp.output_linear.weight": ("ffn_down_shexp.weight", "ffn_down.weight"),
    ".block_sparse_moe.router.weight": ("ffn_gate_inp.weight",),
    ".moe_statics.e_score_correction_bias": ("exp_probs_b.bias",),
    ".feed_forward.expert_bias": ("exp_probs_b.bias",),
    ".dt_bias": ("ssm_dt.bias",),
    ".pre_ff_layernorm.weight": ("ffn_norm.weight", "ffn_norm"),
    ".linear_attn.in_proj_qkvz.weight": (JOINED_INPUT,),
    ".self_attn.conv1d.weight": ("ssm_conv1d.weight",),
    ".router.scale": ("ffn_gate_inp.scale",),
    ".router.per_expert_scale": ("ffn_down_exps.scale",),
    ".forget_gate.A_log": ("ssm_a",),
    ".forget_gate.f_a_proj.weight": ("ssm_f_a.weight",),
    ".forget_gate.f_b_proj.weight": ("ssm_f_b.weight",),
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
        if row is not None and row.base != "model.":
            names[name] = parameter = parameter.replace(row.base, "model.", 1)
        if not name.endswith((".weight", ".bias", "_exps")):  # the file has a suffix, the model none
            names[f"{name}.weight"] = parameter
        elif parameter.endswith(".e_score_correction.bias"):
            names[name] = parameter.replace("correction.bias", "correction_bias")
    for parameter in model.state_dict():
        layer = re.search(r"\.layers\.(\d+)\.", parameter)
        if layer is None:
            continue
        for ending, tensors in _ENDINGS.items():
            if parameter.endswith(ending):
                names |= {f"blk.{layer[1]}.{tensor}": parameter for tensor in tensors}
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
                    by_name[name] = JoinedTensor(name, own)
    return list(by_name.values())


@dataclass(frozen=True)
class JoinedTensor:
    """Tensors of a file that are one parameter, one above the other; latents' keys and values head by head.

    Attributes:
        name: of the whole, which the file does not have.
        parts: its tensors.
    """

    name: str
    parts: list[Any]

    @property
    def is_stack(self) -> bool:
        """Whether the parts' rows follow each other."""
        return all(len(part.shape) == 2 for part in self.parts)

    @property
    def tensor_type(self) -> Any:
        """The format of `data`."""
        import gguf

        kinds = {part.tensor_type for part in self.parts}
        return kinds.pop() if self.is_stack and len(kinds) == 1 else gguf.GGMLQuantizationType.F32

    @property
    def shape(self) -> tuple[int, ...]:
        """Columns and rows, as the gguf package tells them."""
        columns = int(self.parts[-1].shape[0])
        return columns, sum(int(part.n_elements) for part in self.parts) // columns

    @property
    def n_bytes(self) -> int:
        return sum(int(part.n_bytes) for part in self.parts)

    @property
    def data(self) -> Any:
        """The blocks, or float32 where the parts' formats differ; made anew each time."""
        import gguf

        if self.is_stack and len({part.tensor_type for part in self.parts}) == 1:
            return np.concatenate([part.data for part in self.parts])
        plain = [gguf.quants.dequantize(part.data, part.tensor_type) for part in self.parts]
        if len(self.parts) == 2 and not self.is_stack:  # [heads, latent, nope] and [heads, value, latent]
            keys, values = plain
            plain = [np.concatenate([keys.transpose(0, 2, 1), values], 1)]
        return np.concatenate([part.reshape(-1, part.shape[-1]) for part in plain])


class _Processor:
    """Undoes what llama.cpp's conversion does, by a row of the table; with transformers' interface for it."""

    def __init__(self, row: Architecture, config: dict[str, Any], reading: Any) -> None:
        self._row, self._orders = row, StateOrders(config, tiled=row.tiled)
        self._rotary = reading.LlamaTensorProcessor(config=config)
        self._merged: Any = None
        if row.merged_by_head:
            heads = config["num_attention_heads"]
            self._merged = by_head(heads, [config["hidden_size"] // heads] * 3)

    def preprocess_name(self, hf_name: str) -> str:
        """The name that the gguf package knows."""
        if self._row.base != "model.":
            hf_name = hf_name.replace("model.", self._row.base, 1)
        return _BIAS.sub("e_score_correction.bias", hf_name)

    def input_order(self, name: str) -> Any:
        """For each column of a tensor, the input of the model that it belongs to; None: the same."""
        return self._orders.inputs.get(leaf_of(name))

    def perform_fallback_tensor_mapping(self, *_: Any) -> None:
        """Experts are found by the names of the file."""

    def process(self, weights: Any, name: str, **_: Any) -> Any:
        """The values or rows of a tensor as the model has them, in `weights`."""
        if self._has_ones(name):
            weights = weights - 1
        weights = self._orders.restore(name, weights)
        if self._merged is not None and ".attn_qkv." in name:
            weights = weights[self._merged]
        if self._is_interleaved(name):
            return self._rotary.process(weights, name)
        return SimpleNamespace(weights=weights)

    def store(self, weights: Any, name: str) -> Any:
        """Undo `process`."""
        if self._is_interleaved(name):
            numbers = np.arange(len(weights))
            weights = weights[np.argsort(self._rotary.process(numbers, name).weights)]
        if self._merged is not None and ".attn_qkv." in name:
            weights = weights[np.argsort(self._merged)]
        weights = self._orders.store(name, weights)
        return weights + 1 if self._has_ones(name) else weights

    def _has_ones(self, name: str) -> bool:
        return self._row.norms_plus_one and name.endswith("norm.weight") and ".ssm_norm." not in name

    def _is_interleaved(self, name: str) -> bool:
        return self._row.interleaved and ".attn_q_norm." not in name and ".attn_k_norm." not in name
