# SPDX-License-Identifier: Apache-2.0
"""Table of the architectures of GGUF files that are served.

llama.cpp names sizes and tensors alike in all architectures, so a row says little more than which model of
transformers it is. Sources: llama.cpp's conversion scripts, for the order of rows and for what they leave out
of a file, and the gguf package for names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from radixkv.model.loading import gguf_hybrids as hybrids
from radixkv.model.loading.gguf_file import GGUFFile

#: Key of a file and its metadata -> further fields of the configuration.
_More = Callable[[Callable[..., Any], GGUFFile], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Conversion of one architecture's files to a model of transformers.

    Attributes:
        model_type: transformers' name of it.
        interleaved: rows of queries and keys are in the order of llama.cpp's rotation.
        norms_plus_one: a one was added to the weights of norms, but for those of state layers.
        base: how the gguf package's names of parameters begin.
        tiled: heads of values are in another order, see `gguf_states`.
        merged_by_head: one product has queries, keys and values of a KV head, then of the next; in files all
            queries come first.
        transposed: ends of names of tensors whose rows are the model's columns.
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
    transposed: tuple[str, ...] = ()
    varied: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    more: _More | None = None


def _windows(of: Callable[..., Any], layers: int, every: int = 4) -> list[str]:
    """Kinds of layers by a file's pattern of windows, or else all but each `every`-th have one."""
    pattern = of("attention.sliding_window_pattern", None)
    if not isinstance(pattern, list):
        every = pattern or every
        pattern = [bool((layer + 1) % every) for layer in range(layers)]
    return ["sliding_attention" if windowed else "full_attention" for windowed in pattern]


def _with_windows(of: Callable[..., Any], _: GGUFFile) -> dict[str, Any]:
    if of("attention.sliding_window", None) is None:
        return {}
    return {"layer_types": _windows(of, of("block_count"))}


def _exaone4(of: Callable[..., Any], file: GGUFFile) -> dict[str, Any]:
    return _with_windows(of, file) or {"sliding_window": None, "layer_types": None}


def _olmo2(of: Callable[..., Any], file: GGUFFile) -> dict[str, Any]:
    windows = _with_windows(of, file)
    return {"model_type": "olmo3", **windows} if windows else {}


def _granitemoe(of: Callable[..., Any], _: GGUFFile) -> dict[str, Any]:
    shared = of("expert_shared_feed_forward_length", None)
    return {"model_type": "granitemoeshared"} if shared else {}


def _mistral3(of: Callable[..., Any], _: GGUFFile) -> dict[str, Any]:
    return {"rotary": _magnitudes(of, 1.0) | {"llama_4_scaling_beta": of("attention.temperature_scale", 0.0)}}


def _magnitudes(of: Callable[..., Any], unit: float) -> dict[str, Any]:
    """YaRN's factors of magnitudes, of which a file has one, in units of `unit`."""
    scale = of("rope.scaling.yarn_log_multiplier", None)
    return {} if scale is None else {"mscale": scale / unit, "mscale_all_dim": scale / unit}


def _deepseek2(of: Callable[..., Any], file: GGUFFile) -> dict[str, Any]:
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
    if any(name.endswith(".exp_probs_b.bias") for name in file.tensors):
        return {
            "model_type": "deepseek_v3",
            "norm_topk_prob": bool(of("expert_weights_norm", False)),
            **sizes,
        }
    groups = of("expert_group_count", 1)
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return {"topk_method": method, "n_group": groups, "topk_group": of("expert_group_used_count", 1), **sizes}


def _gptneox(of: Callable[..., Any], file: GGUFFile) -> dict[str, Any]:
    return {
        "use_parallel_residual": bool(of("use_parallel_residual", True)),
        "attention_bias": "blk.0.attn_qkv.bias" in file.tensors,
    }


def _minicpm3(of: Callable[..., Any], _: GGUFFile) -> dict[str, Any]:
    """Its multipliers have no keys: they are those of the one model, as in llama.cpp."""
    rope, hidden, heads = of("rope.dimension_count"), of("embedding_length"), of("attention.head_count")
    return {
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": of("attention.key_length") - rope,
        "v_head_dim": hidden // heads,
        "q_lora_rank": of("attention.q_lora_rank", None),
        "head_dim": rope,
    }


def _gemma4(of: Callable[..., Any], file: GGUFFile) -> dict[str, Any]:
    """Layers with windows have heads of their own; of others, the factors of a tensor say what rotates."""
    layers = of("block_count")
    kinds = _windows(of, layers, 6)
    full, shared = kinds.index("full_attention"), of("attention.shared_kv_layers", 0)
    size, windowed = of("attention.key_length"), of("attention.key_length_swa")
    heads = file.values["gemma4.attention.head_count_kv"]
    widths = file.values["gemma4.feed_forward_length"]
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
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": bool(shared) and widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": of("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": len(file.values.get("tokenizer.ggml.tokens", ())) or of("vocab_size"),
        "final_logit_softcapping": of("final_logit_softcapping", None),
        "enable_moe_block": bool(experts),
        "top_k_experts": of("expert_used_count", None),
    }


def _llama(of: Callable[..., Any], _: GGUFFile) -> dict[str, Any]:
    """Llama, Mistral and all that computes as they do; with experts it is Mixtral."""
    return {"model_type": "mixtral", "sliding_window": None} if of("expert_count", 0) else {}


def _qwen2moe(of: Callable[..., Any], _: GGUFFile) -> dict[str, Any]:
    """Older files state one width for all experts of a token together."""
    width = of("feed_forward_length")
    return {
        "moe_intermediate_size": of("expert_feed_forward_length", width // of("expert_used_count")),
        "shared_expert_intermediate_size": of("expert_shared_feed_forward_length", width),
    }


#: Architecture -> number of layers of its one model whose queries are scaled by width / heads, not by the
#: size of a head. No key says so; llama.cpp goes by the number of layers, too.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


def _gemma2(of: Callable[..., Any], file: GGUFFile) -> dict[str, Any]:
    width = of("embedding_length") // of("attention.head_count")
    by_width = of("block_count") == _SCALED_BY_WIDTH[file.architecture]
    return {"query_pre_attn_scalar": width if by_width else of("attention.key_length", width)}


def _gemma3(of: Callable[..., Any], file: GGUFFile) -> dict[str, Any]:
    """Layers with windows have frequencies of their own, which older files do not state."""
    theta = float(of("rope.freq_base_swa", 10_000.0))
    return {
        **_gemma2(of, file),
        "layer_types": _windows(of, of("block_count"), 6),
        "rotary": {"sliding_attention": {"rope_type": "default", "rope_theta": theta}},
    }


def _gpt_oss(of: Callable[..., Any], _: GGUFFile) -> dict[str, Any]:
    """Its factors of frequencies are those of the one model, as in llama.cpp."""
    scaled = of("rope.scaling.type", None) == "yarn"
    return {
        "intermediate_size": of("expert_feed_forward_length"),
        "rotary": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} if scaled else {},
    }


def _falcon(of: Callable[..., Any], file: GGUFFile) -> dict[str, Any]:
    """Falcon; of larger ones, attention and MLP have norms of their own."""
    return {
        "new_decoder_architecture": "blk.0.attn_norm_2.weight" in file.tensors,
        "num_kv_heads": of("attention.head_count_kv", 1),
        "ffn_hidden_size": of("feed_forward_length"),
        "bias": "blk.0.attn_qkv.bias" in file.tensors,
    }


def _stablelm(_: Callable[..., Any], file: GGUFFile) -> dict[str, Any]:
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors}


def _gpt2(of: Callable[..., Any], _: GGUFFile) -> dict[str, Any]:
    return {"n_inner": of("feed_forward_length")}


def _minimax_m2(of: Callable[..., Any], _: GGUFFile) -> dict[str, Any]:
    return {"intermediate_size": of("expert_feed_forward_length", of("feed_forward_length"))}


#: llama.cpp's architectures.
ARCHITECTURES: dict[str, Architecture] = {
    "arcee": Architecture("arcee", interleaved=True),
    "bloom": Architecture("bloom", merged_by_head=True),
    "cohere2": Architecture("cohere2", more=_with_windows),
    "command-r": Architecture("cohere"),
    "deepseek2": Architecture("deepseek_v2", more=_deepseek2),
    "dots1": Architecture("dots1"),
    "ernie4_5": Architecture("ernie4_5"),
    "ernie4_5-moe": Architecture("ernie4_5_moe"),
    "exaone": Architecture("llama"),
    "exaone4": Architecture("exaone4", more=_exaone4),
    "falcon": Architecture("falcon", merged_by_head=True, more=_falcon),
    "falcon-h1": Architecture("falcon_h1", more=hybrids.falcon_h1),
    "gemma": Architecture("gemma", norms_plus_one=True),
    "gemma2": Architecture("gemma2", norms_plus_one=True, more=_gemma2),
    "gemma3": Architecture("gemma3_text", norms_plus_one=True, more=_gemma3),
    "gemma4": Architecture(
        "gemma4_text", more=_gemma4, varied=("attention.head_count_kv", "feed_forward_length")
    ),
    "glm4": Architecture("glm4"),
    "glm4moe": Architecture("glm4_moe"),
    "gpt-oss": Architecture("gpt_oss", settings={"attention_bias": True}, more=_gpt_oss),
    "gpt2": Architecture(
        "gpt2",
        transposed=("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"),
        more=_gpt2,
    ),
    "gptneox": Architecture("gpt_neox", merged_by_head=True, more=_gptneox),
    "granite": Architecture("granite", interleaved=True),
    "granitehybrid": Architecture("granitemoehybrid", interleaved=True, more=hybrids.granite_hybrid),
    "granitemoe": Architecture("granitemoe", interleaved=True, more=_granitemoe),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "internlm2": Architecture("llama", interleaved=True),
    "jais2": Architecture("jais2"),
    "jamba": Architecture("jamba", more=hybrids.jamba),
    "kimi-linear": Architecture("kimi_linear", more=hybrids.kimi_linear),
    "lfm2": Architecture("lfm2", more=hybrids.lfm2),
    "lfm2moe": Architecture("lfm2_moe", more=hybrids.lfm2_moe),
    "llama": Architecture("llama", interleaved=True, more=_llama),
    "mamba": Architecture("mamba", more=hybrids.mamba),
    "mamba2": Architecture("mamba2", more=hybrids.mamba2),
    "minicpm3": Architecture("minicpm3", more=_minicpm3),
    "minimax-m2": Architecture("minimax_m2", more=_minimax_m2),
    "mistral3": Architecture("ministral3", interleaved=True, more=_mistral3),
    "nemotron": Architecture("nemotron", norms_plus_one=True),
    "nemotron_h": Architecture("nemotron_h", base="backbone.", more=hybrids.nemotron_h),
    "nemotron_h_moe": Architecture("nemotron_h", base="backbone.", more=hybrids.nemotron_h),
    "olmo": Architecture("olmo", interleaved=True),
    "olmo2": Architecture("olmo2", more=_olmo2),
    "olmoe": Architecture("olmoe"),
    "phi2": Architecture("phi", settings={"hidden_act": "gelu_new"}),
    # The windows that its files state are ignored, as llama.cpp does.
    "phi3": Architecture("phi3", settings={"sliding_window": None}),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", more=_qwen2moe),
    "qwen3": Architecture("qwen3"),
    "qwen35": Architecture("qwen3_5_text", norms_plus_one=True, tiled=True, more=hybrids.qwen35),
    "qwen35moe": Architecture("qwen3_5_moe_text", norms_plus_one=True, tiled=True, more=hybrids.qwen35),
    "qwen3moe": Architecture("qwen3_moe", settings={"norm_topk_prob": True}),
    "qwen3next": Architecture("qwen3_next", norms_plus_one=True, more=hybrids.qwen_next),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3", interleaved=True),
    "stablelm": Architecture("stablelm", more=_stablelm),
    "starcoder2": Architecture("starcoder2"),
    "xverse": Architecture("llama", interleaved=True),
}
