# SPDX-License-Identifier: Apache-2.0
"""Tiny configurations of architectures whose attention is not one shape of plain heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import VOCAB_SIZE, byte_level_tokenizer, randomize, save_random_model
from transformers import AutoConfig, AutoModelForImageTextToText

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_GEMMA: dict[str, Any] = {
    "sliding_window": 10,
    "layer_types": _KINDS,
    "head_dim": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
}

#: Name -> (model type, what its configuration adds).
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": (
        "gemma4_text",
        {**_GEMMA, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ),
    "gemma4-shared": (
        "gemma4_text",
        {**_GEMMA, "global_head_dim": 32, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            **_GEMMA,
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [96] * 4,
        },
    ),
    "mimo": (
        "mimo_v2_flash",
        {
            **_EXPERTS,
            "head_dim": 24,
            "v_head_dim": 16,
            "num_key_value_heads": 2,
            "sliding_window": 10,
            "layer_types": _KINDS,
            "rope_parameters": None,
        },
    ),
    "laguna": (
        "laguna",
        {
            "head_dim": 16,
            "sliding_window": 10,
            "layer_types": _KINDS,
            "num_attention_heads_per_layer": [4, 8, 4, 8],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "deepseek-v2": ("deepseek_v2", {**_LATENT, **_EXPERTS}),
    "deepseek-v3": ("deepseek_v3", {**_LATENT, **_EXPERTS}),
    "deepseek-v32": (
        "deepseek_v32",
        {**_LATENT, **_EXPERTS, "index_topk": 256, "index_n_heads": 16, "index_head_dim": 16},
    ),
    "glm-dsa": (
        "glm_moe_dsa",
        {**_LATENT, **_EXPERTS, "index_topk": 256, "index_n_heads": 16, "index_head_dim": 16},
    ),
    "glm4-lite": ("glm4_moe_lite", {**_LATENT, **_EXPERTS, "kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "minicpm3": ("minicpm3", {**_LATENT, "kv_lora_rank": 28}),
    "longcat": (
        "longcat_flash",
        {
            **_LATENT,
            "num_layers": 2,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 48,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "head_dim": 8,
        },
    ),
    "mistral4": ("mistral4", {**_LATENT, **_EXPERTS}),
    "youtu": ("youtu", {**_LATENT}),
    "axk1": ("axk1", {**_LATENT, **_EXPERTS}),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 16,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "no_rope_layers": [1, 0, 1, 0],
        },
    ),
    "odd-heads": ("llama", {"head_dim": 12}),
    "stablelm": ("stablelm", {"num_key_value_heads": 2}),
    "nemotron": ("nemotron", {"num_key_value_heads": 2}),
    "phimoe": ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "hunyuan-moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "falcon-alibi": ("falcon", {"new_decoder_architecture": False, "multi_query": False, "alibi": True}),
    "gptj": ("gptj", {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 256}),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 256}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 3}),
}


def tiny_config(name: str, **changes: Any) -> Any:
    """The configuration of this name."""
    model_type, extra = SHAPES[name]
    common = dict(_COMMON)
    if model_type in ("gptj", "mpt", "bloom", "longcat_flash"):
        for own in ("num_hidden_layers", "intermediate_size", "num_key_value_heads"):
            del common[own]
    if model_type in ("gptj", "mpt", "bloom"):
        del common["max_position_embeddings"], common["num_attention_heads"]
    if model_type in ("gptj", "mpt"):
        del common["hidden_size"]
    both = {**common, **extra, **changes}
    both = {key: value for key, value in both.items() if value is not None}
    return AutoConfig.for_model(model_type, **both)


def save_shape(folder: Path, name: str, seed: int = 0, **changes: Any) -> Path:
    """Write a random model of this name, with a byte-level tokenizer, to `folder`."""
    config = tiny_config(name, **changes)
    if config.model_type != "mistral4":
        return save_random_model(folder, config, seed)
    model = AutoModelForImageTextToText.from_config(config)  # the list that it is in
    randomize(model, seed)
    model.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder
