# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: C408
"""Tiny configurations of every family, as keyword arguments of transformers' own classes."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 320
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=2,
)  # fmt: skip
_ATTENDS = ["sliding_attention", "full_attention"] * 2
_MIXES = ["linear_attention", "full_attention", "linear_attention"]
_ROPE = dict(rope_type="default", rope_theta=10_000.0)
_TWO_OF_FOUR = dict(num_local_experts=4, num_experts_per_tok=2)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
_ROUTED = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=1,
    first_k_dense_replace=1, n_group=1, topk_group=1,
)  # fmt: skip
_LATENT = dict(
    num_hidden_layers=3, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=16,
)  # fmt: skip
_INDEX = dict(index_topk=256, index_n_heads=16, index_head_dim=16)
_GEMMA = dict(
    sliding_window=10, layer_types=_ATTENDS, head_dim=16, vocab_size_per_layer_input=VOCAB_SIZE,
    hidden_size_per_layer_input=8,
)  # fmt: skip
_DELTA = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    linear_conv_kernel_dim=4, layer_types=_MIXES,
)  # fmt: skip
_LINEAR = dict(
    _EXPERTS, layer_types=_MIXES, linear_num_heads=4, linear_head_dim=16, linear_conv_kernel_dim=4,
    num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8,
    v_head_dim=16, num_shared_experts=1, moe_intermediate_size=32,
)  # fmt: skip
_MAMBA2 = dict(
    mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=2, mamba_d_conv=4, mamba_expand=2,
    mamba_chunk_size=32,
)  # fmt: skip
_NARROW = dict(_EXPERTS, moe_intermediate_size=32)
_CONV = dict(layer_types=["conv", "full_attention", "conv"])
_PURE = dict(state_size=16, conv_kernel=4, expand=2)

# fmt: off
#: Name -> (model type, what its configuration adds): attention of plain heads.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", dict(tie_word_embeddings=True)),
    "llama-one-kv-head": ("llama", dict(num_key_value_heads=1, head_dim=24)),
    "llama-rope-scaled": ("llama", dict(rope_parameters=dict(
        rope_type="llama3", rope_theta=10_000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=128))),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", dict(use_sliding_window=True, sliding_window=9, max_window_layers=1)),
    "qwen3": ("qwen3", dict(head_dim=32)),
    "mistral-window": ("mistral", dict(sliding_window=11)),
    "mistral": ("mistral", dict(sliding_window=None)),
    "gemma2": ("gemma2", dict(
        head_dim=32, query_pre_attn_scalar=24, sliding_window=10, attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0, layer_types=_ATTENDS[:3])),
    "gemma3": ("gemma3_text", dict(
        head_dim=32, query_pre_attn_scalar=24, sliding_window=10, layer_types=_ATTENDS[:3])),
    "gpt-oss": ("gpt_oss", dict(
        _TWO_OF_FOUR, head_dim=16, sliding_window=8, layer_types=_ATTENDS[:3], rope_parameters=_ROPE)),
    "phi": ("phi", dict(partial_rotary_factor=0.5, num_key_value_heads=4)),
    "phi3": ("phi3", dict(sliding_window=None)),
    "phi3-window": ("phi3", dict(sliding_window=12)),
    "mixtral": ("mixtral", dict(_TWO_OF_FOUR, sliding_window=None)),
    "qwen3-moe": ("qwen3_moe", dict(_EXPERTS, head_dim=32)),
    "qwen2-moe-window": ("qwen2_moe", dict(
        _EXPERTS, shared_expert_intermediate_size=48, use_sliding_window=True, sliding_window=9,
        max_window_layers=3)),
    "gemma": ("gemma", dict(head_dim=32)),
    "olmo2": ("olmo2", {}),
    "seed-oss": ("seed_oss", dict(head_dim=16)),
    "ministral": ("ministral", dict(sliding_window=10, layer_types=_ATTENDS[:3], head_dim=16)),
    "cwm": ("cwm", dict(sliding_window=10, layer_types=_ATTENDS[:3], head_dim=16, rope_parameters=_ROPE)),
    "arcee": ("arcee", dict(head_dim=16)),
    "dots1": ("dots1", dict(_ROUTED, head_dim=16, sliding_window=None)),
    "granite": ("granite", dict(attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=2.0)),
    "smollm3": ("smollm3", dict(no_rope_layer_interval=3)),
    "starcoder2": ("starcoder2", dict(sliding_window=14)),
    "cohere2": ("cohere2", dict(sliding_window=9, layer_types=_ATTENDS[:3])),
    "gpt-neox": ("gpt_neox", dict(rotary_pct=0.5, num_key_value_heads=4)),
}
#: The same of architectures whose attention is not one shape of plain heads.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("gemma4_text", dict(
        _GEMMA, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True)),
    "gemma4-shared": ("gemma4_text", dict(_GEMMA, global_head_dim=32, num_kv_shared_layers=2)),
    "gemma3n": ("gemma3n_text", dict(
        _GEMMA, num_kv_shared_layers=2, laurel_rank=8, altup_num_inputs=2, intermediate_size=[96] * 4,
        activation_sparsity_pattern=[0.0] * 4)),
    "mimo": ("mimo_v2_flash", dict(
        _ROUTED, head_dim=24, v_head_dim=16, sliding_window=10, layer_types=_ATTENDS)),
    "laguna": ("laguna", dict(
        _EXPERTS, head_dim=16, sliding_window=10, layer_types=_ATTENDS, shared_expert_intermediate_size=48,
        num_attention_heads_per_layer=[4, 8, 4, 8])),
    "deepseek-v2": ("deepseek_v2", dict(_LATENT, **_ROUTED)),
    "deepseek-v3": ("deepseek_v3", dict(_LATENT, **_ROUTED)),
    "deepseek-v32": ("deepseek_v32", dict(_LATENT, **_ROUTED, **_INDEX)),
    "glm-dsa": ("glm_moe_dsa", dict(_LATENT, **_ROUTED, **_INDEX)),
    "glm4-lite": ("glm4_moe_lite", dict(_LATENT, **_ROUTED) | dict(kv_lora_rank=512, qk_rope_head_dim=64)),
    "minicpm3": ("minicpm3", dict(_LATENT, kv_lora_rank=28)),
    "longcat": ("longcat_flash", dict(
        _LATENT, num_layers=2, ffn_hidden_size=96, expert_ffn_hidden_size=48, n_routed_experts=4,
        zero_expert_num=2, moe_topk=2, head_dim=8)),
    "mistral4": ("mistral4", dict(_LATENT, **_ROUTED)),
    "youtu": ("youtu", _LATENT),
    "axk1": ("axk1", dict(_LATENT, **_ROUTED)),
    "llama4": ("llama4_text", dict(
        head_dim=16, intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=1,
        attention_chunk_size=16, layer_types=["chunked_attention", "full_attention"] * 2,
        no_rope_layers=[1, 0, 1, 0], floor_scale=9, attn_scale=0.7)),
    "odd-heads": ("llama", dict(head_dim=12)),
    "stablelm": ("stablelm", {}),
    "nemotron": ("nemotron", {}),
    "phimoe": ("phimoe", dict(_TWO_OF_FOUR, sliding_window=None)),
    "hunyuan": ("hunyuan_v1_dense", dict(head_dim=16)),
    "ministral3": ("ministral3", dict(head_dim=16, sliding_window=None)),
    "gemma4-moe": ("gemma4_text", dict(
        _GEMMA, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
        enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=40,
    ) | dict(hidden_size_per_layer_input=0)),
    "hunyuan-moe": ("hunyuan_v1_moe", dict(num_experts=4, moe_topk=2, head_dim=16)),
    "falcon": ("falcon", dict(new_decoder_architecture=True, num_kv_heads=2, alibi=False)),
    "falcon-alibi": ("falcon", dict(new_decoder_architecture=False, multi_query=False, alibi=True)),
    "gptj": ("gptj", dict(n_embd=64, n_layer=3, n_head=4, rotary_dim=8, n_positions=256)),
    "mpt": ("mpt", dict(d_model=64, n_heads=4, n_layers=3, max_seq_len=256)),
    "bloom": ("bloom", dict(n_head=4, n_layer=3)),
}
#: What further architectures that ranks share add to their configuration, by their model types.
SHARED_FAMILIES: dict[str, dict[str, Any]] = {
    **{kind: dict(head_dim=16) for kind in (
        "glm4", "ernie4_5", "hunyuan_v1_dense", "ministral3", "hyperclovax", "jais2", "helium",
        "vaultgemma")},
    **{kind: {} for kind in ("olmo", "olmo3", "cohere", "apertus", "granite_swa", "kolibri1", "persimmon")},
    **dict.fromkeys(("granitemoe", "granitemoe_swa"), _TWO_OF_FOUR),
    **dict.fromkeys(("olmoe", "flex_olmo"), _EXPERTS),
    "glm": dict(head_dim=16, partial_rotary_factor=0.5),
    "nanochat": dict(rope_parameters=_ROPE),
    "glm4_moe": dict(_ROUTED, head_dim=16, use_qk_norm=True),
    "solar_open": dict(_ROUTED, head_dim=16),
    "ernie4_5_moe": dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=48, moe_num_shared_experts=1),
    "exaone4": dict(sliding_window=10, layer_types=_ATTENDS[:3]),
    "exaone_moe": dict(_ROUTED, num_experts=4, num_shared_experts=1, sliding_window=10),
    "hy_v3": dict(_EXPERTS, head_dim=16, num_shared_experts=1, first_k_dense_replace=1),
    "minimax_m2": dict(_TWO_OF_FOUR, head_dim=16),
    "granitemoeshared": dict(_TWO_OF_FOUR, shared_intermediate_size=48),
    "cohere2_moe": dict(_EXPERTS, sliding_window=9),
    "afmoe": dict(_EXPERTS, head_dim=16, num_dense_layers=1, sliding_window=10),
    "mellum": dict(_EXPERTS, head_dim=16),
    "aria_text": dict(moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
}
#: The same of families with state layers, by their model types.
HYBRID_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", dict(_CONV, conv_L_cache=3, block_auto_adjust_ff_dim=False)),
    "lfm2_moe": ("lfm2_moe", dict(_CONV, **_NARROW, num_dense_layers=1)),
    "lfm3": ("lfm3", dict(
        num_hidden_layers=4, conv_L_cache=7, head_dim=16, sliding_window=24,
        layer_types=["conv", "full_attention", "sliding_attention", "conv"])),
    "qwen3_next": ("qwen3_next", dict(_DELTA, **_NARROW, shared_expert_intermediate_size=32, head_dim=16)),
    "qwen3_5_text": ("qwen3_5_text", dict(_DELTA, head_dim=16)),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", dict(
        _DELTA, **_NARROW, shared_expert_intermediate_size=32, head_dim=16)),
    "olmo_hybrid": ("olmo_hybrid", _DELTA),
    "nemotron_h": ("nemotron_h", dict(
        num_hidden_layers=4, head_dim=16,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=2, chunk_size=32)),
    "granitemoehybrid": ("granitemoehybrid", dict(
        _MAMBA2, **_TWO_OF_FOUR, layer_types=_MIXES, shared_intermediate_size=48)),
    "bamba": ("bamba", dict(_MAMBA2, attn_layer_indices=[1])),
    "falcon_h1": ("falcon_h1", dict(_MAMBA2, head_dim=16, mamba_d_ssm=128, mamba_rms_norm=True)),
    "zamba2": ("zamba2", dict(
        num_hidden_layers=4, num_key_value_heads=4, layers_block_type=["linear_attention", "hybrid"] * 2,
        n_mamba_heads=8, mamba_headdim=16, mamba_d_state=16, mamba_ngroups=2, mamba_expand=2, chunk_size=32,
        num_mem_blocks=1, use_shared_attention_adapter=False)),
    "mamba2": ("mamba2", dict(_PURE, num_heads=8, head_dim=16, n_groups=2, chunk_size=32)),
    "mamba": ("mamba", _PURE),
    "falcon_mamba": ("falcon_mamba", _PURE),
    "jamba": ("jamba", dict(
        num_experts=4, num_experts_per_tok=2, attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=8,
        use_mamba_kernels=False)),
    "minimax": ("minimax", dict(_TWO_OF_FOUR, layer_types=_MIXES, head_dim=16, block_size=32)),
    "recurrent_gemma": ("recurrent_gemma", dict(
        lru_width=64, head_dim=16, attention_window_size=1024, conv1d_width=4,
        block_types=["recurrent", "attention", "recurrent"])),
    "zamba": ("zamba", dict(
        num_hidden_layers=4, num_key_value_heads=4, layers_block_type=["mamba", "hybrid"] * 2,
        n_mamba_heads=2, mamba_d_state=16, mamba_expand=2, mamba_dt_rank=8, attn_layer_period=2,
        attn_layer_offset=1, use_mamba_kernels=False)),
    "kimi_linear": ("kimi_linear", _LINEAR),
    "bailing_hybrid": ("bailing_hybrid", dict(_LINEAR, head_dim=16, n_group=2, topk_group=1)),
}
# fmt: on


def tiny_config(name: str, **changes: Any) -> Any:
    """The configuration of this name in one of the tables, with changes."""
    from transformers import AutoConfig  # takes seconds, and a generator of docs reads the tables alone

    if name in FAMILIES:
        model_type, own = FAMILIES[name]
        common = _COMMON
    elif name in SHAPES:
        model_type, own = SHAPES[name]
        known = AutoConfig.for_model(model_type).to_dict()
        common = _COMMON | dict(num_hidden_layers=4, max_position_embeddings=256)
        common = {key: value for key, value in common.items() if key in known}
    elif name in SHARED_FAMILIES:
        model_type, own = name, SHARED_FAMILIES[name]
        common = _COMMON
    else:
        model_type, own = HYBRID_FAMILIES[name]
        common = _COMMON | dict(max_position_embeddings=1024, pad_token_id=0)
    return AutoConfig.for_model(model_type, **common | own | changes)
