# SPDX-License-Identifier: Apache-2.0
"""Tiny random models with state layers as GGUF files, as llama.cpp's conversion scripts write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from tiny_models import add_byte_level_tokenizer, finish_gguf, randomize
from torch import Tensor
from transformers import AutoModelForCausalLM

from radixkv.model.loading.gguf_tensors import tensor_names
from tests.support.tiny_configs import tiny_config

_DELTA = {"hidden_size": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
_MULTIPLIED = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
#: Architecture of a file -> model type, changes of its configuration.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-h1": ("falcon_h1", {
        "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.9, "mlp_multipliers": [0.6, 1.4],
        "ssm_multipliers": [0.5, 0.8, 1.2, 1.5, 0.9], "mamba_norm_before_gate": False}),
    "granitehybrid": ("granitemoehybrid", {**_MULTIPLIED, "logits_scaling": 2.0, "intermediate_size": 32,
                                           "shared_intermediate_size": 64, "num_experts_per_tok": 4}),
    "granitehybrid without experts": ("granitemoehybrid", {
        **_MULTIPLIED, "num_local_experts": 0, "shared_intermediate_size": 64,
        "position_embedding_type": "rope"}),
    "granitehybrid of Bamba": ("bamba", {}),
    "jamba": ("jamba", {}),
    "kimi-linear": ("kimi_linear", {}),
    "lfm2": ("lfm2", {}),
    "lfm2moe": ("lfm2_moe", {}),
    "mamba": ("mamba", {"intermediate_size": 128}),
    "mamba with norms": ("falcon_mamba", {"intermediate_size": 128}),
    "mamba2": ("mamba2", {"intermediate_size": 128}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h_moe": ("nemotron_h", {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "n_routed_experts": 4,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64,
        "routed_scaling_factor": 1.5}),
    "qwen35": ("qwen3_5_text", _DELTA),
    "qwen35moe": ("qwen3_5_moe_text", _DELTA),
    "qwen3next": ("qwen3_next", _DELTA),
}  # fmt: skip
#: Ends of parameters' names -> tensors, where the conversion changes values or the gguf package knows none.
_LEAVES = {
    "A_log": "ssm_a", ".D": "ssm_d", "dt_bias": "ssm_dt.bias", "conv1d.weight": "ssm_conv1d.weight",
    "pre_ff_layernorm.weight": "ffn_norm.weight", "expert_bias": "exp_probs_b.bias",
    "router.weight": "ffn_gate_inp.weight", "f_a_proj.weight": "ssm_f_a.weight",
    "f_b_proj.weight": "ssm_f_b.weight", "mixer.norm.weight": "ssm_norm.weight",
}  # fmt: skip


def make_hybrid(case: str, **changes: Any) -> Any:
    """The random model of a case of `HYBRIDS`, with transformers' attention."""
    kind, own = HYBRIDS[case]
    config = tiny_config(kind, **own, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomize(model, 0)
    return model.eval()


def write_hybrid(
    path: Path, case: str, model: Any, kinds: tuple[str, ...] = ("F32",), *, with_tokenizer: bool = False
) -> None:
    """Write a model as a GGUF file.

    Args:
        kinds: formats of the matrices, which take turns.
        with_tokenizer: so that it can be served.
    """
    architecture, config = case.split()[0], model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    _state_sizes(writer, architecture, config)
    if with_tokenizer:
        add_byte_level_tokenizer(writer)
    names = {parameter: name for name, parameter in tensor_names(model, architecture).items()}
    turn = 0
    for parameter, value in model.state_dict().items():
        if parameter == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer = next((part for part in parameter.split(".") if part.isdigit()), None)
        leaf = next((each for end, each in _LEAVES.items() if parameter.endswith(end)), None)
        if leaf is not None and not (leaf == "ssm_norm.weight" and architecture == "mamba"):
            name = leaf
        elif parameter in names:
            name = names[parameter].split(".", 2)[2] if layer is not None else names[parameter]
        else:
            name = parameter
        for stored, tensor in _converted(name, parameter, value, architecture, config):
            full = stored if layer is None else f"blk.{layer}.{stored}"
            plain = tensor.dim() == 1 or any(each in stored for each in ("ssm_", "_inp.", "conv."))
            plain = plain and not stored.startswith(("ssm_in.", "ssm_out.", "ssm_x."))
            kind = gguf.GGMLQuantizationType[kinds[turn % len(kinds)]]
            turn += not plain
            array = tensor.contiguous().numpy()
            if plain or kind.name == "F32" or tensor.shape[-1] % 32:
                writer.add_tensor(full, array)
            else:
                writer.add_tensor(full, gguf.quantize(array, kind), raw_dtype=kind)
    finish_gguf(writer)


def _converted(
    name: str, parameter: str, value: Tensor, architecture: str, config: Any
) -> list[tuple[str, Tensor]]:
    """Tensors of a parameter by their names without a layer."""
    heads = getattr(config, "num_attention_heads", 0)
    groups = getattr(config, "mamba_n_groups", None) or getattr(config, "n_groups", None)
    if name == "ssm_a":
        value = -value.exp()
    if name in ("ssm_a", "ssm_d") and groups:
        value = value[:, None]
    elif name == "ssm_norm.weight" and groups:
        value = value.view(groups, -1)
    elif name in ("ssm_conv1d.weight", "shortconv.conv.weight"):
        value = value.squeeze(1)
        if architecture == "kimi-linear":
            parts = zip("qkv", value.chunk(3), strict=True)
            return [(f"ssm_conv1d_{each}.weight", part[None, :, None]) for each, part in parts]
    elif name == "attn_kv_b.weight":
        keys, values = value.view(heads, -1, value.shape[-1]).split(
            [config.qk_nope_head_dim, config.v_head_dim], 1
        )
        return [("attn_k_b.weight", keys.transpose(1, 2)), ("attn_v_b.weight", values)]
    elif "experts" in parameter and "shared" not in parameter:
        if parameter.endswith("gate_up_proj"):
            gate, up = value.chunk(2, 1)
            return [("ffn_gate_exps.weight", gate), ("ffn_up_exps.weight", up)]
        return [(f"ffn_{'down' if parameter.endswith('down_proj') else 'up'}_exps.weight", value)]
    elif "shared_mlp" in parameter:
        suffix = "_shexp" if config.num_local_experts else ""
        if "output" in parameter:
            return [(f"ffn_down{suffix}.weight", value)]
        gate, up = value.chunk(2)
        return [(f"ffn_gate{suffix}.weight", gate), (f"ffn_up{suffix}.weight", up)]
    if architecture == "granitehybrid" and name in ("attn_q.weight", "attn_k.weight"):
        count = heads if name == "attn_q.weight" else config.num_key_value_heads
        value = value.view(count, 2, -1, value.shape[-1]).transpose(1, 2).reshape(value.shape)
    if architecture.startswith("qwen3"):
        return _with_delta_heads(name, parameter, value, architecture, config)
    return [(name, value * _factor(name, value, config) if architecture == "falcon-h1" else value)]


def _with_delta_heads(
    name: str, parameter: str, value: Tensor, architecture: str, config: Any
) -> list[tuple[str, Tensor]]:
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    per_key, before = config.linear_num_value_heads // keys, 2 * keys * config.linear_key_head_dim

    def tiled(rows: Tensor, width: int) -> Tensor:
        return rows.unflatten(0, (keys, per_key, width)).transpose(0, 1).flatten(0, 2)

    if parameter.endswith("norm.weight") and "linear_attn" not in parameter:
        return [(name, value + 1)]
    if "in_proj_qkvz" in parameter:
        sizes = [config.linear_key_head_dim] * 2 + [per_key * size] * 2
        parts = [part.flatten(0, 1) for part in value.unflatten(0, (keys, -1)).split(sizes, 1)]
        return [("attn_qkv.weight", torch.cat(parts[:3])), ("attn_gate.weight", parts[3])]
    if architecture != "qwen3next" and "linear_attn" in parameter:
        if name in ("ssm_a", "ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight"):
            value = tiled(value, 1)
        elif name in ("attn_qkv.weight", "ssm_conv1d.weight"):
            value = torch.cat([value[:before], tiled(value[before:], size)])
        elif name == "attn_gate.weight":
            value = tiled(value, size)
        elif name == "ssm_out.weight":
            value = tiled(value.t(), size).t()
    return [(name, value)]


def _factor(name: str, value: Tensor, config: Any) -> Any:
    into, out = config.attention_in_multiplier, config.attention_out_multiplier
    if name == "ssm_in.weight":
        shared = config.mamba_n_groups * config.mamba_d_state
        sizes = [config.mamba_d_ssm] * 2 + [shared] * 2 + [config.mamba_n_heads]
        parts = zip(config.ssm_multipliers, sizes, strict=True)
        return torch.cat([torch.full((size, 1), each) for each, size in parts]) * config.ssm_in_multiplier
    return {
        "attn_q.weight": into, "attn_k.weight": into * config.key_multiplier, "attn_v.weight": into,
        "attn_output.weight": out, "ssm_out.weight": config.ssm_out_multiplier,
        "ffn_gate.weight": config.mlp_multipliers[0], "ffn_down.weight": config.mlp_multipliers[1],
        "output.weight": config.lm_head_multiplier, "token_embd.weight": config.embedding_multiplier,
    }.get(name, 1.0)  # fmt: skip


def _state_sizes(writer: Any, architecture: str, config: Any) -> None:
    def first(*names: str) -> Any:
        return next((each for name in names if (each := getattr(config, name, None)) is not None), None)

    hidden, heads = config.hidden_size, getattr(config, "num_attention_heads", 0)
    layers, attends = config.num_hidden_layers, [each == "full_attention" for each in config.layer_types]
    if architecture.startswith("nemotron"):
        layers = len(attends)
    kv = getattr(config, "num_key_value_heads", 0)
    latent = getattr(config, "kv_lora_rank", None)
    delta = hasattr(config, "linear_num_value_heads")
    mamba_heads = first("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads")
    if architecture == "mamba2":
        mamba_heads = config.num_heads
    inner = first("mamba_d_ssm") or 2 * hidden
    if delta:
        inner = config.linear_value_head_dim * mamba_heads
    head = first("head_dim") or (hidden // heads if heads else 0)
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size, "context_length": 1024, "embedding_length": hidden,
        "block_count": layers, "feed_forward_length": getattr(config, "intermediate_size", 0) if heads else 0,
        "attention.head_count": heads,
        "attention.head_count_kv": [(1 if latent else kv) * each for each in attends],
        "attention.layer_norm_rms_epsilon": float(first("rms_norm_eps", "norm_eps", "layer_norm_epsilon")),
        "ssm.conv_kernel": first("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim"),
        "ssm.inner_size": inner,
        "ssm.state_size": first("mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim"),
        "ssm.group_count": first("mamba_n_groups", "n_groups", "linear_num_key_heads"),
        "ssm.time_step_rank": first("mamba_dt_rank") or mamba_heads or first("time_step_rank"),
        "expert_count": first("num_local_experts", "n_routed_experts", "num_experts"),
        "expert_used_count": first("num_experts_per_tok"),
        "expert_feed_forward_length": first("moe_intermediate_size"),
        "expert_shared_feed_forward_length": first(
            "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size",
            *(["shared_intermediate_size"] if getattr(config, "num_local_experts", 0) else [])),
        "leading_dense_block_count": first("num_dense_layers"),
        "shortconv.l_cache": first("conv_L_cache"),
        "attention.scale": first("attention_multiplier"), "embedding_scale": first("embedding_multiplier"),
        "residual_scale": first("residual_multiplier"), "logit_scale": first("logits_scaling"),
    }  # fmt: skip
    if architecture == "granitehybrid" and not getattr(config, "num_local_experts", 0):
        values["feed_forward_length"] = first("shared_intermediate_size", "intermediate_size")
    if delta or not heads or architecture == "falcon-h1":
        values["attention.head_count_kv"] = kv
    if architecture == "falcon-h1":
        for name in ("attention.scale", "embedding_scale"):
            del values[name]
    if architecture.startswith("nemotron"):
        mlp = first("moe_intermediate_size") if architecture.endswith("moe") else config.intermediate_size
        values["feed_forward_length"] = [mlp * (each in ("mlp", "moe")) for each in config.layer_types]
        values["expert_weights_scale"] = float(config.routed_scaling_factor)
        values["expert_weights_norm"] = config.norm_topk_prob
        if not architecture.endswith("moe"):
            values = {key: each for key, each in values.items() if "expert" not in key}
    if latent:
        rope = config.qk_rope_head_dim
        values |= {
            "attention.kv_lora_rank": latent, "rope.dimension_count": rope, "kda.head_dim": 16,
            "attention.key_length_mla": config.qk_nope_head_dim + rope, "leading_dense_block_count": 1,
            "attention.value_length_mla": config.v_head_dim, "expert_shared_count": 1,
            "expert_weights_scale": config.routed_scaling_factor,
        }  # fmt: skip
    rotary = getattr(config, "rope_parameters", None)
    if rotary:
        values["rope.freq_base"] = float(rotary["rope_theta"])
        values.setdefault("rope.dimension_count", int(head * rotary.get("partial_rotary_factor", 1)))
        values["rope.dimension_sections"] = rotary.get("mrope_section", [11, 11, 10, 0])
        values["rope.scaling.finetuned"] = architecture == "granitehybrid" and (
            config.model_type == "bamba" or config.position_embedding_type == "rope"
        )
    if heads and not latent:
        values["attention.key_length"] = head
    if delta:
        values["attention.recurrent_layers"] = [not each for each in attends]
    if config.model_type == "falcon_mamba":
        values["ssm.dt_b_c_rms"] = True
    for key, value in values.items():
        full = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif value is not None:
            writer.add_uint32(full, int(value))
