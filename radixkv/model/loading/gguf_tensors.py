# SPDX-License-Identifier: Apache-2.0
"""Tables from tensors of a GGUF file to parameters of a model, with the changes to values and rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from radixkv.model.loading.gguf_architectures import ARCHITECTURES
from radixkv.model.loading.gguf_file import FileTensor
from radixkv.model.loading.gguf_states import JOINED_INPUT, StateOrders, by_head, leaf_of

_Array = np.ndarray[Any, Any]
#: Modules whose weights stay float32: what transforms them, or a model's own forward, needs their numbers.
STAY_PLAIN = (".kv_b_proj", ".dt_proj")
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
    ".e_score_correction_bias": ("exp_probs_b.bias",),
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


def tensor_names(model: Any, architecture: str) -> dict[str, str]:
    """Names of tensors -> of parameters and buffers, but for those of experts.

    Args:
        architecture: the file's.
    """
    import gguf  # slow to import

    base = ARCHITECTURES[architecture].base
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(kind, model.config.get_text_config(decoder=True).num_hidden_layers)
    names: dict[str, str] = {}
    without_base: dict[str, str] = {}  # some parameters have names without their model's class alone
    for parameter in model.state_dict():
        stem, _, suffix = parameter.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, suffix = parameter, ""
        stem = stem.replace("model.", base, 1)
        for found, own in ((names, stem), (without_base, stem.partition(".")[2])):
            name = known.get_name(own)
            if name is None or name.endswith("_exps"):
                continue
            found[f"{name}.{suffix}" if suffix else name] = parameter
            if not suffix:  # the file may have one
                found[f"{name}.weight"] = parameter
        layer = re.search(r"\.layers\.(\d+)\.", parameter)
        for ending, tensors in _ENDINGS.items():
            if layer is not None and parameter.endswith(ending):
                names |= {f"blk.{layer[1]}.{tensor}": parameter for tensor in tensors}
    return without_base | names


def join_tensors(tensors: Mapping[str, FileTensor], names: Mapping[str, str]) -> list[Any]:
    """Tensors of a file with those that transformers has as one put together, where the model needs them."""
    by_name: dict[str, Any] = dict(tensors)
    for each in tensors:
        found = _BLOCK.fullmatch(each)
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
        """True if the parts' rows follow each other."""
        return all(len(part.shape) == 2 for part in self.parts)

    @property
    def tensor_type(self) -> Any:
        """The format of `data`."""
        import gguf  # slow to import

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
        import gguf  # slow to import

        if self.is_stack and len({part.tensor_type for part in self.parts}) == 1:
            return np.concatenate([part.data for part in self.parts])
        plain = [gguf.quants.dequantize(part.data, part.tensor_type) for part in self.parts]
        if len(self.parts) == 2 and not self.is_stack:  # [heads, latent, nope] and [heads, value, latent]
            keys, values = plain
            plain = [np.concatenate([keys.transpose(0, 2, 1), values], 1)]
        return np.concatenate([part.reshape(-1, part.shape[-1]) for part in plain])


class Conversion:
    """Row of the table: the change that llama.cpp's conversion makes to a tensor's values and rows.

    Args:
        config: of the model, for text.
    """

    def __init__(self, architecture: str, config: Any) -> None:
        self._row = ARCHITECTURES[architecture]
        self._orders = StateOrders(config.to_dict(), tiled=self._row.tiled)
        #: Heads of products whose rows llama.cpp rotates in pairs.
        self._heads: dict[str, int] = {}
        if self._row.interleaved and getattr(config, "num_key_value_heads", None):
            self._heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
        self._merged: _Array | None = None
        if self._row.merged_by_head:
            heads = config.num_attention_heads
            size, groups = config.hidden_size // heads, getattr(config, "num_kv_heads", heads)
            self._merged = by_head(groups, [heads // groups * size, size, size])

    def input_order(self, name: str) -> _Array | None:
        """For each column of a tensor, the input of the model that it belongs to; None: the same."""
        return self._orders.inputs.get(leaf_of(name))

    def restore(self, weights: _Array, name: str) -> _Array:
        """The values or rows of a tensor as the model has them."""
        if self._has_ones(name):
            weights = weights - 1
        weights = self._orders.restore(name, weights)
        if self._merged is not None and ".attn_qkv." in name:
            weights = weights[self._merged]
        if leaf_of(name) in self._row.transposed:
            weights = weights.T
        return self._unpaired(weights, name)

    def _has_ones(self, name: str) -> bool:
        return self._row.norms_plus_one and name.endswith("norm.weight") and ".ssm_norm." not in name

    def _unpaired(self, weights: _Array, name: str) -> _Array:
        """Rows of each head in the model's order: first halves of the rotated pairs, then second halves."""
        heads = next((count for part, count in self._heads.items() if part in name), None)
        if heads is None:
            return weights
        pairs = weights.reshape(heads, len(weights) // heads // 2, 2, *weights.shape[1:])
        return pairs.swapaxes(2, 1).reshape(weights.shape)
