# SPDX-License-Identifier: Apache-2.0
"""Architectures of GGUF files that transformers does not read from them, though it has the model.

llama.cpp names sizes and tensors alike in all architectures, so a row of the table says little more than
which model of transformers it is. Sources: llama.cpp's conversion scripts, for the order of rows and for
what they leave out of a file, and the gguf package for names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from radixkv.errors import ModelLoadError
from radixkv.model.loading import gguf_hybrids as hybrids
from radixkv.model.loading.gguf_metadata import GGUFMetadata
from radixkv.model.loading.gguf_rotary import rotary_parameters

#: Keys of a file, without the architecture -> fields of configurations: those that a model's has are set.
FIELDS: dict[str, tuple[str, ...]] = {
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "context_length": ("max_position_embeddings",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k"),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        "shared_intermediate_size",
        "shared_expert_intermediate_size",
    ),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
}
#: Fields that tell whether a tensor of the first layer, or of all, is there.
_PRESENT: dict[str, str] = {
    "attention_bias": "blk.0.attn_q.bias",
    "mlp_bias": "blk.0.ffn_up.bias",
    "use_bias": "blk.0.attn_q.bias",
    "use_qk_norm": "blk.0.attn_q_norm.weight",
}
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
#: Key of a file and its metadata -> further fields of the configuration.
_More = Callable[[Callable[..., Any], GGUFMetadata], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a file becomes a model of transformers.

    Attributes:
        model_type: transformers' name of it.
        interleaved: rows of queries and keys are in the order of llama.cpp's rotation.
        norms_plus_one: a one was added to the weights of norms, but for those of state layers.
        base: how the gguf package's names of parameters begin.
        tiled: heads of values are in another order, see `gguf_states`.
        merged_by_head: one product has queries, keys and values of a head, then of the next; in files all
            queries come first.
        varied: keys with a number for each layer; the first is taken where `more` does not say otherwise.
        settings: fields of the configuration that no key states.
        more: computes further ones; a `model_type` among them replaces this one, `rotary` is added to the
            rotary parameters.
    """

    model_type: str
    interleaved: bool = False
    norms_plus_one: bool = False
    base: str = "model."
    tiled: bool = False
    merged_by_head: bool = False
    varied: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    more: _More | None = None


def make_config(architecture: str, known: GGUFMetadata) -> Any:
    """The transformers configuration of a file whose architecture is in the table.

    Raises:
        KeyError: it lacks a size.
        ModelLoadError: its layers differ in a size.
    """
    from transformers import AutoConfig

    row = ARCHITECTURES[architecture]

    def of(key: str, *default: Any) -> Any:
        name = f"{architecture}.{key}"
        found = known.values.get(name, *default) if default else known.values[name]
        if isinstance(found, list) and found and not isinstance(found[0], bool):
            found = [each for each in found if each] or found  # layers of other kinds have none
            if len(set(found)) > 1 and key not in row.varied:
                raise ModelLoadError(
                    f"The layers of this {architecture} file differ in {key}, which can't be read. Serve the "
                    "model's folder of safetensors instead."
                )
            found = found[0]
        return found

    more = dict(row.settings) | (row.more(of, known) if row.more is not None else {})
    model_type = more.pop("model_type", row.model_type)
    default = AutoConfig.for_model(model_type)
    heads, hidden = of("attention.head_count"), of("embedding_length")
    head_size = of("attention.key_length", hidden // (heads or 1))  # pure state models have no heads
    fields: dict[str, Any] = {
        "num_hidden_layers": of("block_count") - of("nextn_predict_layers", 0),
        "num_key_value_heads": of("attention.head_count_kv", heads),
        "head_dim": head_size,
        "tie_word_embeddings": "output.weight" not in known.tensors,
    }
    for key, names in FIELDS.items():
        value = of(key, None)
        if value is not None:
            fields |= {name: value for name in names if _is_field(default, name)}
    tokens = known.values.get("tokenizer.ggml.tokens")
    fields["vocab_size"] = of("vocab_size") if tokens is None else len(tokens)
    for name, key in _TOKENS.items():
        token = known.values.get(f"tokenizer.ggml.{key}_token_id")
        fields[name] = token if token is not None and token < fields["vocab_size"] else None
    fields |= {name: tensor in known.tensors for name, tensor in _PRESENT.items()}
    rotary = rotary_parameters(
        of, more.get("head_dim", head_size), getattr(default, "rope_parameters", None) or {}
    )
    fields["rope_parameters"] = rotary | more.pop("rotary", {})
    kept = {name: value for name, value in fields.items() if _is_field(default, name)}
    if heads and head_size != hidden // heads:  # some models take one that their configuration does not list
        kept["head_dim"] = head_size
    return AutoConfig.for_model(model_type, **kept | more)


def _is_field(config: Any, name: str) -> bool:
    """Return True if a configuration has a field of this name, not a value that it computes."""
    try:
        return hasattr(config, name) and not isinstance(getattr(type(config), name, None), property)
    except RuntimeError:  # its layers have one each
        return True


def _windows(of: Callable[..., Any], layers: int, every: int = 4) -> list[str]:
    """Kinds of layers by a file's pattern of windows, or else all but each `every`-th have one."""
    pattern = of("attention.sliding_window_pattern", None)
    if not isinstance(pattern, list):
        every = pattern or every
        pattern = [bool((layer + 1) % every) for layer in range(layers)]
    return ["sliding_attention" if windowed else "full_attention" for windowed in pattern]


def _with_windows(of: Callable[..., Any], _: GGUFMetadata) -> dict[str, Any]:
    if of("attention.sliding_window", None) is None:
        return {}
    return {"layer_types": _windows(of, of("block_count"))}


def _exaone4(of: Callable[..., Any], known: GGUFMetadata) -> dict[str, Any]:
    return _with_windows(of, known) or {"sliding_window": None, "layer_types": None}


def _olmo2(of: Callable[..., Any], known: GGUFMetadata) -> dict[str, Any]:
    windows = _with_windows(of, known)
    return {"model_type": "olmo3", **windows} if windows else {}


def _granitemoe(of: Callable[..., Any], _: GGUFMetadata) -> dict[str, Any]:
    shared = of("expert_shared_feed_forward_length", None)
    return {"model_type": "granitemoeshared"} if shared else {}


def _mistral3(of: Callable[..., Any], _: GGUFMetadata) -> dict[str, Any]:
    return {"rotary": _magnitudes(of, 1.0) | {"llama_4_scaling_beta": of("attention.temperature_scale", 0.0)}}


def _magnitudes(of: Callable[..., Any], unit: float) -> dict[str, Any]:
    """YaRN's factors of magnitudes, of which a file has one, in units of `unit`."""
    scale = of("rope.scaling.yarn_log_multiplier", None)
    return {} if scale is None else {"mscale": scale / unit, "mscale_all_dim": scale / unit}


def _deepseek2(of: Callable[..., Any], known: GGUFMetadata) -> dict[str, Any]:
    rope = of("rope.dimension_count")
    key, value = of("attention.key_length_mla", None), of("attention.value_length_mla", None)
    sizes = {
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": (key or of("attention.key_length")) - rope,
        "v_head_dim": value or of("attention.value_length"),
        "num_key_value_heads": of("attention.head_count"),
        "q_lora_rank": of("attention.q_lora_rank", None),
        "head_dim": rope,
        "rotary": _magnitudes(of, 0.1),
    }
    if any(name.endswith(".exp_probs_b.bias") for name in known.tensors):
        return {
            "model_type": "deepseek_v3",
            "norm_topk_prob": bool(of("expert_weights_norm", False)),
            **sizes,
        }
    groups = of("expert_group_count", 1)
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return {"topk_method": method, "n_group": groups, "topk_group": of("expert_group_used_count", 1), **sizes}


def _gptneox(of: Callable[..., Any], known: GGUFMetadata) -> dict[str, Any]:
    return {
        "use_parallel_residual": bool(of("use_parallel_residual", True)),
        "attention_bias": "blk.0.attn_qkv.bias" in known.tensors,
    }


def _minicpm3(of: Callable[..., Any], _: GGUFMetadata) -> dict[str, Any]:
    """Its multipliers have no keys: they are those of the one model, as in llama.cpp."""
    rope, hidden, heads = of("rope.dimension_count"), of("embedding_length"), of("attention.head_count")
    return {
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": of("attention.key_length") - rope,
        "v_head_dim": hidden // heads,
        "q_lora_rank": of("attention.q_lora_rank", None),
        "head_dim": rope,
    }


def _gemma4(of: Callable[..., Any], known: GGUFMetadata) -> dict[str, Any]:
    """Layers with windows have heads of their own; of others, the factors of a tensor say what rotates."""
    layers = of("block_count")
    kinds = _windows(of, layers, 6)
    full, shared = kinds.index("full_attention"), of("attention.shared_kv_layers", 0)
    size, windowed = of("attention.key_length"), of("attention.key_length_swa")
    heads = known.values["gemma4.attention.head_count_kv"]
    widths = known.values["gemma4.feed_forward_length"]
    heads, widths = (each if isinstance(each, list) else [each] * layers for each in (heads, widths))
    with_window = kinds.index("sliding_attention") if "sliding_attention" in kinds else full
    experts, theta = of("expert_count", None), float(of("rope.freq_base"))
    rotary = {"full_attention": theta, "sliding_attention": float(of("rope.freq_base_swa", theta))}
    return {
        "rotary": {kind: {"rope_type": "default", "rope_theta": own} for kind, own in rotary.items()},
        "layer_types": kinds,
        "head_dim": windowed,
        "global_head_dim": size,
        "num_key_value_heads": heads[with_window],
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in known.tensors,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": bool(shared) and widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": of("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": len(known.values.get("tokenizer.ggml.tokens", ())) or of("vocab_size"),
        "final_logit_softcapping": of("final_logit_softcapping", None),
        "enable_moe_block": bool(experts),
        "top_k_experts": of("expert_used_count", None),
    }


#: llama.cpp's architectures.
ARCHITECTURES: dict[str, Architecture] = {
    "arcee": Architecture("arcee", interleaved=True),
    "cohere2": Architecture("cohere2", more=_with_windows),
    "command-r": Architecture("cohere"),
    "deepseek2": Architecture("deepseek_v2", more=_deepseek2),
    "dots1": Architecture("dots1"),
    "ernie4_5": Architecture("ernie4_5"),
    "ernie4_5-moe": Architecture("ernie4_5_moe"),
    "exaone": Architecture("llama"),
    "exaone4": Architecture("exaone4", more=_exaone4),
    "falcon-h1": Architecture("falcon_h1", more=hybrids.falcon_h1),
    "gemma": Architecture("gemma", norms_plus_one=True),
    "gemma4": Architecture(
        "gemma4_text", more=_gemma4, varied=("attention.head_count_kv", "feed_forward_length")
    ),
    "glm4": Architecture("glm4"),
    "glm4moe": Architecture("glm4_moe"),
    "gptneox": Architecture("gpt_neox", merged_by_head=True, more=_gptneox),
    "granite": Architecture("granite", interleaved=True),
    "granitehybrid": Architecture("granitemoehybrid", interleaved=True, more=hybrids.granite_hybrid),
    "granitemoe": Architecture("granitemoe", interleaved=True, more=_granitemoe),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "internlm2": Architecture("llama", interleaved=True),
    "jais2": Architecture("jais2"),
    "jamba": Architecture("jamba", more=hybrids.jamba),
    "kimi-linear": Architecture("kimi_linear", more=hybrids.kimi_linear),
    "lfm2moe": Architecture("lfm2_moe", more=hybrids.lfm2_moe),
    "mamba": Architecture("mamba", more=hybrids.mamba),
    "mamba2": Architecture("mamba2", more=hybrids.mamba2),
    "minicpm3": Architecture("minicpm3", more=_minicpm3),
    "mistral3": Architecture("ministral3", interleaved=True, more=_mistral3),
    "nemotron_h": Architecture("nemotron_h", base="backbone.", more=hybrids.nemotron_h),
    "nemotron_h_moe": Architecture("nemotron_h", base="backbone.", more=hybrids.nemotron_h),
    "olmo": Architecture("olmo", interleaved=True),
    "olmo2": Architecture("olmo2", more=_olmo2),
    "olmoe": Architecture("olmoe"),
    "phi2": Architecture("phi", settings={"hidden_act": "gelu_new"}),
    "qwen35": Architecture("qwen3_5_text", norms_plus_one=True, tiled=True, more=hybrids.qwen35),
    "qwen35moe": Architecture("qwen3_5_moe_text", norms_plus_one=True, tiled=True, more=hybrids.qwen35),
    "qwen3next": Architecture("qwen3_next", norms_plus_one=True, more=hybrids.qwen_next),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3", interleaved=True),
    "xverse": Architecture("llama", interleaved=True),
}
