# SPDX-License-Identifier: Apache-2.0
"""Sizes of models with state layers as GGUF files state them: configurations beyond what all decoders share.

Keys `ssm.*` mean something else in each family: `ssm.time_step_rank` is a rank in Mamba, and the number of
heads in Mamba 2 and in delta nets. What a layer is, its tensors tell. Sources: llama.cpp's conversion
scripts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixkv.errors import ModelLoadError
from radixkv.model.loading.gguf_file import GGUFFile

_Of = Callable[..., Any]


def qwen_next(of: _Of, file: GGUFFile) -> dict[str, Any]:
    """Qwen3-Next: delta nets, and experts with one for all tokens."""
    heads = of("ssm.time_step_rank")
    layers = of("block_count") - of("nextn_predict_layers", 0)
    recurrent, every = of("attention.recurrent_layers", None), of("full_attention_interval", 4)
    if not isinstance(recurrent, list):
        recurrent = [bool((layer + 1) % every) for layer in range(layers)]
    return {
        "linear_conv_kernel_dim": of("ssm.conv_kernel"),
        "linear_key_head_dim": of("ssm.state_size"),
        "linear_num_key_heads": of("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": of("ssm.inner_size") // heads,
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent[:layers]],
    }


def qwen35(of: _Of, file: GGUFFile) -> dict[str, Any]:
    """Qwen 3.5 and its mixtures, which rotate by three positions."""
    sections = [each for each in file.values[_key(file, "rope.dimension_sections")] if each]
    rotary = {"mrope_section": sections, "mrope_interleaved": True}
    return {**qwen_next(of, file), "rotary": rotary}


def granite_hybrid(of: _Of, file: GGUFFile) -> dict[str, Any]:
    """Granite 4, and Bamba, which has none of Granite's multipliers."""
    attends = _attends(of, file)
    expand = of("ssm.inner_size") // of("embedding_length")
    sizes = {"mamba_expand": expand, **_mamba2_with_prefix(of, file)}
    if of("attention.scale", None) is None:
        indices = [layer for layer, each in enumerate(attends) if each]
        return {"model_type": "bamba", "attn_layer_indices": indices, **sizes}
    shared = of("expert_shared_feed_forward_length", None)
    return {
        "layer_types": ["full_attention" if each else "linear_attention" for each in attends],
        "num_local_experts": of("expert_count", 0),
        "num_experts_per_tok": of("expert_used_count", 0),
        "shared_intermediate_size": shared or of("feed_forward_length"),
        "position_embedding_type": "rope" if of("rope.scaling.finetuned", False) else None,
        **sizes,
    }


def falcon_h1(of: _Of, file: GGUFFile) -> dict[str, Any]:
    """Falcon-H1, whose multipliers are in its weights."""
    ones = ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")
    return {
        "mamba_d_ssm": of("ssm.inner_size"),
        "mamba_norm_before_gate": False,  # no key says so; llama.cpp's order
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        **_mamba2_with_prefix(of, file),
        **{f"{name}_multiplier": 1.0 for name in ones},
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }


def nemotron_h(of: _Of, file: GGUFFile) -> dict[str, Any]:
    """Nemotron-H: each layer is one of attention, a state layer, an MLP and, in mixtures, experts."""
    tensors = {"full_attention": "attn_k.weight", "linear_attention": "ssm_a", "moe": "ffn_gate_inp.weight"}
    having = {kind: _layers_with(of, file, name) for kind, name in tensors.items()}
    kinds = [
        next((kind for kind, layers in having.items() if layers[layer]), "mlp")
        for layer in range(len(having["moe"]))
    ]
    heads = of("ssm.time_step_rank")
    found = {
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": of("ssm.inner_size") // heads,
        "ssm_state_size": of("ssm.state_size"),
        "n_groups": of("ssm.group_count"),
        "conv_kernel": of("ssm.conv_kernel"),
        "use_conv_bias": _has(file, ".ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, ".ssm_in.bias"),
        "mlp_bias": _has(file, ".ffn_up.bias"),
        "attention_bias": _has(file, ".attn_q.bias"),
    }
    if "moe" in kinds:
        found["moe_shared_expert_intermediate_size"] = of("expert_shared_feed_forward_length")
        found["moe_latent_size"] = of("moe_latent_size", None)
    return found


def mamba(of: _Of, file: GGUFFile) -> dict[str, Any]:
    """Mamba, and Falcon Mamba, which norms what its steps are made of."""
    found = {**_pure(of, file), "time_step_rank": of("ssm.time_step_rank")}
    return {"model_type": "falcon_mamba", **found} if of("ssm.dt_b_c_rms", False) else found


def mamba2(of: _Of, file: GGUFFile) -> dict[str, Any]:
    """Mamba 2."""
    heads = of("ssm.time_step_rank")
    sizes = {
        "num_heads": heads,
        "head_dim": of("ssm.inner_size") // heads,
        "n_groups": of("ssm.group_count"),
    }
    return {**_pure(of, file), **sizes}


def jamba(of: _Of, file: GGUFFile) -> dict[str, Any]:
    """Jamba, which has attention in some layers and experts in some others."""
    count = of("block_count")
    attends = [layer for layer, each in enumerate(_attends(of, file)) if each]
    mixtures = [layer for layer, each in enumerate(_layers_with(of, file, "ffn_gate_inp.weight")) if each]
    experts = of("expert_count", 0) if mixtures else 1
    return {
        **_period("attn_layer", attends, count),
        **_period("expert_layer", mixtures or list(range(count)), count),
        "num_experts": experts,
        "num_experts_per_tok": of("expert_used_count", 0) if mixtures else 1,
        "mamba_d_state": of("ssm.state_size"),
        "mamba_d_conv": of("ssm.conv_kernel"),
        "mamba_expand": of("ssm.inner_size") // of("embedding_length"),
        "mamba_dt_rank": of("ssm.time_step_rank"),
        "mamba_conv_bias": _has(file, ".ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, ".ssm_in.bias"),
    }


def kimi_linear(of: _Of, file: GGUFFile) -> dict[str, Any]:
    """Kimi-Linear: delta nets with a decay for each channel, and latents."""
    rope, heads = of("rope.dimension_count"), of("attention.head_count")
    attends = _layers_with(of, file, "attn_kv_a_mqa.weight")
    dense = of("leading_dense_block_count", 0)
    return {
        "layer_types": ["full_attention" if each else "linear_attention" for each in attends],
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(len(attends))],
        "linear_num_heads": heads,
        "linear_head_dim": of("kda.head_dim"),
        "linear_conv_kernel_dim": of("ssm.conv_kernel"),
        "num_key_value_heads": heads,
        "q_lora_rank": of("attention.q_lora_rank", None),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": of("attention.key_length_mla") - rope,
        "v_head_dim": of("attention.value_length_mla"),
        "head_dim": rope,
    }


def lfm2(of: _Of, file: GGUFFile) -> dict[str, Any]:
    """LFM2: short convolutions, and attention in some layers."""
    return {**_lfm2_layers(of, file), "block_auto_adjust_ff_dim": False}


def lfm2_moe(of: _Of, file: GGUFFile) -> dict[str, Any]:
    """LFM2 with experts."""
    return {
        **_lfm2_layers(of, file),
        "num_dense_layers": of("leading_dense_block_count"),
        "use_expert_bias": _has(file, ".exp_probs_b.bias"),
    }


def _lfm2_layers(of: _Of, file: GGUFFile) -> dict[str, Any]:
    return {
        "layer_types": ["full_attention" if each else "conv" for each in _attends(of, file)],
        "conv_L_cache": of("shortconv.l_cache"),
        "conv_bias": _has(file, ".shortconv.in_proj.bias"),
    }


def _pure(of: _Of, file: GGUFFile) -> dict[str, Any]:
    """Sizes of models that have state layers alone."""
    return {
        "state_size": of("ssm.state_size"),
        "conv_kernel": of("ssm.conv_kernel"),
        "expand": of("ssm.inner_size") // of("embedding_length"),
        "intermediate_size": of("ssm.inner_size"),
        "use_conv_bias": _has(file, ".ssm_conv1d.bias"),
        "use_bias": _has(file, ".ssm_in.bias"),
    }


def _mamba2_with_prefix(of: _Of, file: GGUFFile) -> dict[str, Any]:
    heads = of("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": of("ssm.inner_size") // heads,
        "mamba_d_state": of("ssm.state_size"),
        "mamba_n_groups": of("ssm.group_count"),
        "mamba_d_conv": of("ssm.conv_kernel"),
        "mamba_conv_bias": _has(file, ".ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, ".ssm_in.bias"),
    }


def _layers_with(of: _Of, file: GGUFFile, tensor: str) -> list[bool]:
    """Return for each layer whether it has a tensor."""
    names = set(file.tensors)
    count = of("block_count") - of("nextn_predict_layers", 0)
    return [f"blk.{layer}.{tensor}" in names for layer in range(count)]


def _attends(of: _Of, file: GGUFFile) -> list[bool]:
    """Return for each layer whether it has attention."""
    return _layers_with(of, file, "attn_k.weight")


def _period(name: str, layers: list[int], count: int) -> dict[str, Any]:
    """The first of the layers and their distance, which must be even.

    Raises:
        ModelLoadError: it is not.
    """
    first = layers[0] if layers else count
    period = layers[1] - first if len(layers) > 1 else count
    if layers != list(range(first, count, period)):
        raise ModelLoadError(
            f"The layers {layers} of this file are not at even distances, and transformers has no model "
            "with such layers. The file is damaged, or of another model."
        )
    return {f"{name}_offset": first, f"{name}_period": period}


def _key(file: GGUFFile, name: str) -> str:
    return f"{file.values['general.architecture']}.{name}"


def _has(file: GGUFFile, ending: str) -> bool:
    return any(name.endswith(ending) for name in file.tensors)
