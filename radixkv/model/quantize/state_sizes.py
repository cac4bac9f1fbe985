# SPDX-License-Identifier: Apache-2.0
"""Sizes in GGUF of models with state layers, latents and experts of all kinds: `gguf_hybrids`, backwards.

Each function takes a configuration of transformers and gives keys without the architecture; None leaves one
out. They come on top of the fields that `gguf_architectures.FIELDS` names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _attends(config: Any) -> list[bool]:
    return [kind == "full_attention" for kind in config.layer_types]


def _few_heads(config: Any, attends: list[bool]) -> list[int]:
    """Heads of keys by layer: none where it does not attend."""
    return [config.num_key_value_heads * each for each in attends]


def _mamba2(config: Any) -> dict[str, Any]:
    """Of configurations whose fields begin with `mamba_`."""
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def _delta(config: Any) -> dict[str, Any]:
    """Delta nets of Qwen."""
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "attention.recurrent_layers": [not each for each in _attends(config)],
    }


def _qwen35(config: Any) -> dict[str, Any]:
    sections = list((config.rope_parameters or {}).get("mrope_section", (11, 11, 10)))
    return {**_delta(config), "rope.dimension_sections": [*sections, 0]}


def _minicpm3(config: Any) -> dict[str, Any]:
    return {
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": None,
        "rope.dimension_count": config.qk_rope_head_dim,
        "logit_scale": None,
    }


def _granite_hybrid(config: Any) -> dict[str, Any]:
    is_bamba = config.model_type == "bamba"
    rotates = is_bamba or config.position_embedding_type == "rope"
    found = {
        **_mamba2(config),
        "attention.head_count_kv": _few_heads(config, _attends(config)),
        "rope.scaling.finetuned": rotates,
    }
    if is_bamba:
        return found
    experts = config.num_local_experts or None
    shared = config.shared_intermediate_size
    return found | {
        "expert_count": experts,
        "expert_used_count": experts and config.num_experts_per_tok,
        "expert_shared_feed_forward_length": experts and shared,
        "feed_forward_length": config.intermediate_size if experts else shared,
    }


def _falcon_h1(config: Any) -> dict[str, Any]:
    sizes = _mamba2(config) | {"ssm.inner_size": config.mamba_d_ssm}
    return {**sizes, "attention.scale": None, "embedding_scale": None}  # multipliers are in the weights


def _nemotron_h(config: Any) -> dict[str, Any]:
    kinds = list(config.layer_types)
    has_experts = "moe" in kinds
    inner = config.moe_intermediate_size if has_experts else config.intermediate_size
    found = {
        "block_count": len(kinds),
        "attention.head_count_kv": _few_heads(config, _attends(config)),
        "feed_forward_length": [inner * (kind in ("mlp", "moe")) for kind in kinds],
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.mamba_num_heads,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "moe_latent_size": getattr(config, "moe_latent_size", None),
    }
    of_experts = (
        "expert_count", "expert_used_count", "expert_feed_forward_length",
        "expert_shared_feed_forward_length", "expert_shared_count", "expert_weights_scale",
        "expert_weights_norm", "expert_group_count", "expert_group_used_count", "moe_latent_size",
    )  # fmt: skip
    return found if has_experts else found | dict.fromkeys(of_experts)


def _mamba(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.intermediate_size,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": config.time_step_rank,
        "ssm.dt_b_c_rms": config.model_type == "falcon_mamba" or None,
        "feed_forward_length": 0,
        "attention.head_count_kv": 0,
        "context_length": 2**20,
    }


def _mamba2_pure(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.num_heads * config.head_dim,
        "ssm.state_size": config.state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.num_heads,
        "feed_forward_length": 0,
        "attention.head_count_kv": 0,
        "context_length": 2**20,
    }


def _jamba(config: Any) -> dict[str, Any]:
    experts = config.num_experts if config.num_experts > 1 else None
    return {
        "attention.head_count_kv": _few_heads(config, _attends(config)),
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_dt_rank,
        "expert_count": experts,
        "expert_used_count": experts and config.num_experts_per_tok,
    }


def _kimi_linear(config: Any) -> dict[str, Any]:
    rope, attends = config.qk_rope_head_dim, _attends(config)
    return {
        "attention.head_count_kv": [int(each) for each in attends],
        "attention.key_length": config.kv_lora_rank + rope,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rope,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rope,
        "kda.head_dim": config.linear_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "leading_dense_block_count": list(config.mlp_layer_types).count("dense"),
        "expert_shared_count": getattr(config, "num_shared_experts", None),
    }


def _lfm2(config: Any) -> dict[str, Any]:
    return {
        "attention.head_count_kv": _few_heads(config, _attends(config)),
        "shortconv.l_cache": config.conv_L_cache,
        "leading_dense_block_count": getattr(config, "num_dense_layers", None),
    }


def _deepseek2(config: Any) -> dict[str, Any]:
    rope, latent = config.qk_rope_head_dim, config.kv_lora_rank
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": latent + rope,
        "attention.value_length": latent,
        "attention.key_length_mla": config.qk_nope_head_dim + rope,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rope,
        **_magnitude(config, 0.1),
    }


def _mistral3(config: Any) -> dict[str, Any]:
    return _magnitude(config, 1.0) | {
        "attention.temperature_scale": config.rope_parameters.get("llama_4_scaling_beta")
    }


def _magnitude(config: Any, unit: float) -> dict[str, Any]:
    """YaRN's factor of magnitudes, in units of `unit`."""
    value = (config.rope_parameters or {}).get("mscale_all_dim")
    return {"rope.scaling.yarn_log_multiplier": None if value is None else value * unit}


def _of_state_layers_alone(config: Any) -> dict[str, Any]:
    unused = ("max_position_embeddings", "num_attention_heads", "num_key_value_heads", "head_dim")
    return dict.fromkeys(unused if config.model_type != "mamba2" else unused[:3])


def _without_multipliers(config: Any) -> dict[str, Any]:
    """Falcon-H1's, which are in its weights."""
    every = config.to_dict()
    return {name: None for name in every if name.endswith(("_multiplier", "_multipliers"))}


def _without_unused_experts(config: Any) -> dict[str, Any]:
    has_none = config.model_type == "bamba" or not config.num_local_experts
    return dict.fromkeys(("intermediate_size", "num_experts_per_tok")) if has_none else {}


def _by_tensors(config: Any) -> dict[str, Any]:
    """Jamba's kinds of layers are told by their tensors."""
    names = ("attn_layer_offset", "attn_layer_period", "expert_layer_offset", "expert_layer_period")
    return dict.fromkeys(names)


def _without_unused_mlp(config: Any) -> dict[str, Any]:
    return {} if "mlp" in config.layer_types else {"intermediate_size": None}


def _by_three_positions(config: Any) -> dict[str, Any]:
    rotary = {"mrope_section": [11, 11, 10], "mrope_interleaved": True} | config.rope_parameters
    return {"rope_parameters": rotary} | _experts_alone(config)


def _experts_alone(config: Any) -> dict[str, Any]:
    """No layer has an MLP without experts."""
    return {} if config.model_type == "qwen3_5_text" else {"intermediate_size": None}


#: Architecture -> settings as a reader's configuration may have them; None: not to be compared.
IMPLIED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "falcon-h1": _without_multipliers,
    "granitehybrid": _without_unused_experts,
    "jamba": _by_tensors,
    "mamba": _of_state_layers_alone,
    "mamba2": _of_state_layers_alone,
    "nemotron_h_moe": _without_unused_mlp,
    "qwen35": _by_three_positions,
    "qwen35moe": _by_three_positions,
    "qwen3next": _experts_alone,
}
#: Architecture -> keys beyond those of all decoders.
STATES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "deepseek2": _deepseek2,
    "falcon-h1": _falcon_h1,
    "granitehybrid": _granite_hybrid,
    "jamba": _jamba,
    "kimi-linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "mamba": _mamba,
    "mamba2": _mamba2_pure,
    "minicpm3": _minicpm3,
    "mistral3": _mistral3,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "qwen3next": _delta,
}
