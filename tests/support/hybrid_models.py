# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family with state layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.support.tiny_models import VOCAB_SIZE, byte_level_tokenizer, randomize, save_random_model

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED: dict[str, Any] = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
_CONV = {"layer_types": ["conv", "full_attention", "conv"]}
_PURE = {"state_size": 16, "conv_kernel": 4, "expand": 2}

#: Model type -> what its configuration adds.
HYBRID_FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {**_CONV, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_CONV, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": {**_CONV, "conv_L_cache": 7},
    "qwen3_next": {**_DELTA, **_SHARED, "head_dim": 16},
    "qwen3_5_text": {**_DELTA, "head_dim": 16},
    "qwen3_5_moe_text": {**_DELTA, **_SHARED, "head_dim": 16},
    "olmo_hybrid": _DELTA,
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
    },
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA2, "head_dim": 16, "mamba_d_ssm": 128, "mamba_rms_norm": True},
    "zamba2": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "mamba_expand": 2,
        "chunk_size": 32,
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": False,
    },
    "mamba2": {**_PURE, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 32},
    "mamba": _PURE,
    "falcon_mamba": _PURE,
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "minimax": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 32,
    },
    "recurrent_gemma": {
        "lru_width": 64,
        "head_dim": 16,
        "attention_window_size": 1024,
        "conv1d_width": 4,
        "block_types": ["recurrent", "attention", "recurrent"],
    },
    "zamba": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 2,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_dt_rank": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {
        **_EXPERTS,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_shared_experts": 1,
    },
    "bailing_hybrid": {
        **_EXPERTS,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "head_dim": 16,
        "n_group": 2,
        "topk_group": 1,
        "linear_conv_kernel_dim": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_shared_experts": 1,
    },
}


def tiny_hybrid(model_type: str, **changes: Any) -> Any:
    """The configuration of a family."""
    return AutoConfig.for_model(model_type, **{**_COMMON, **HYBRID_FAMILIES[model_type], **changes})


def save_hybrid_model(folder: Path, model_type: str, seed: int = 0, **changes: Any) -> Path:
    """Write a random model of a family with state layers, with a byte-level tokenizer, to `folder`."""
    return save_random_model(folder, tiny_hybrid(model_type, **changes), seed)


def save_seeing_model(folder: Path) -> None:
    """Write a random Qwen3.5 with its vision tower, as checkpoints are published, to `folder`."""
    config = AutoConfig.for_model(
        "qwen3_5",
        text_config={**_COMMON, **HYBRID_FAMILIES["qwen3_5_text"]},
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
        },
        **{f"{name}_token_id": at for at, name in enumerate(("image", "video", "vision_start"), 10)},
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomize(model, 0)
    model.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
