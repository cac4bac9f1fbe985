# SPDX-License-Identifier: Apache-2.0
"""Random blocks of GGUF formats, and tiny GGUF models whose weights mix them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tiny_models import add_llama_tensors, finish_gguf, llama_gguf_writer

from radixkv.model.loading.gguf_configs import config_of
from radixkv.model.loading.gguf_experts import expected_shapes, expert_modules, expert_tensors
from radixkv.model.loading.gguf_file import open_gguf
from radixkv.model.loading.gguf_tensors import Conversion, tensor_names
from radixkv_kernels.cpu.linear.block_formats import FORMATS

Array = np.ndarray[Any, Any]


def random_blocks(number: int, rows: int, width: int, seed: int) -> Array:
    """uint8 [rows, bytes]: any quants, with scales that give weights of about 1 / sqrt(width)."""
    form, random = FORMATS[number], np.random.default_rng(seed)
    units = width // form.inputs
    blocks = random.integers(0, 256, (rows, units, form.file_bytes), dtype=np.uint8)
    steps = 2 ** (form.bits - 2) * (32 if form.is_super else 1)
    unit = width**-0.5 / steps

    def halves(low: float, high: float) -> Array:
        drawn = random.uniform(low * unit, high * unit, (rows, units)).astype(np.float16)
        return drawn.view(np.uint8).reshape(rows, units, 2)

    if form.name == "Q6_K":
        blocks[:, :, 208:] = halves(0.5, 1.5)
        return blocks.reshape(rows, -1)
    if form.name == "MXFP4":
        blocks[:, :, 0] = random.integers(125, 129, (rows, units)) + round(math.log2(unit))
        return blocks.reshape(rows, -1)
    blocks[:, :, :2] = halves(0.5, 1.5)
    if form.has_least:
        # Weights around zero.
        most = 2 ** (form.bits - 1)
        blocks[:, :, 2:4] = (
            halves(0.8 * most, 1.2 * most) if form.is_super else halves(-1.2 * most, -0.8 * most)
        )
    return blocks.reshape(rows, -1)


def write_llama_gguf(
    path: Path, kinds: Mapping[str, str], *, hidden: int = 256, layers: int = 2, tied: bool = True,
    split: int = 0, factors: Array | None = None, experts: int = 0,
) -> Path:  # fmt: skip
    """A random Llama with a byte-level tokenizer.

    Args:
        kinds: name of a tensor without its layer (`attn_q`, `token_embd`) -> format; `rest` for all others.
        split: the most tensors of a part; 0 for one file.
        factors: of rotary frequencies.
        experts: of each layer, of which a token takes two (a Mixtral); 0 for none.
    """
    inner = 2 * hidden
    writer, vocab = llama_gguf_writer(
        path, hidden=hidden, inner=inner, layers=layers, context=256, split=split
    )
    write = add = tensor_writer(writer, kinds)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(min(2, experts))

        def add(name: str, *shape: int) -> None:
            expert = name.endswith(("ffn_gate", "ffn_up", "ffn_down"))
            write(f"{name}_exps", experts, *shape) if expert else write(name, *shape)
            if name.endswith("ffn_norm"):
                write(name.replace("ffn_norm", "ffn_gate_inp"), experts, hidden)

    add_llama_tensors(add, vocab=vocab, hidden=hidden, inner=inner, layers=layers, tied=tied)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    finish_gguf(writer)
    return path


def tensor_writer(writer: Any, kinds: Mapping[str, str]) -> Callable[..., None]:
    """A function that adds a random tensor by its name without suffix; vectors are norms' weights."""
    random = np.random.default_rng(0)

    def add(name: str, *shape: int, suffix: str = ".weight") -> None:
        data = random.standard_normal(shape).astype(np.float32) / np.float32(shape[-1] ** 0.5)
        if len(shape) == 1 or suffix == ".bias":
            writer.add_tensor(name + suffix, (1 if "norm" in name else 0) + data)
            return
        kind = gguf.GGMLQuantizationType[kinds.get(name.rpartition(".")[2], kinds["rest"])]
        seed = int(random.integers(2**32))
        if kind in FORMATS:
            stored = random_blocks(int(kind), math.prod(shape[:-1]), shape[-1], seed)
            stored = stored.reshape(*shape[:-1], -1)
        else:
            stored = gguf.quantize(data, kind)
        writer.add_tensor(name + suffix, stored, raw_dtype=kind)

    return add


#: Architectures -> metadata beside the common ones, as (method of the writer, value).
ARCHITECTURES: dict[str, tuple[tuple[str, Any], ...]] = {
    "llama": (),
    "qwen2": (),
    "qwen3": (("add_key_length", 64), ("add_value_length", 64)),
    "gemma2": (("add_key_length", 64), ("add_value_length", 64), ("add_sliding_window", 8)),
    "gemma3": (("add_key_length", 64), ("add_value_length", 64), ("add_sliding_window", 8)),
    "phi3": (("add_rope_dimension_count", 64),),
    "starcoder2": (),
}
_EXPERTS = (("add_expert_count", 6), ("add_expert_used_count", 2), ("add_expert_feed_forward_length", 256))
#: The same of architectures with experts; `llama` is Mixtral then.
EXPERT_ARCHITECTURES: dict[str, tuple[tuple[str, Any], ...]] = {
    "llama": _EXPERTS[:2],
    "qwen2moe": (*_EXPERTS, ("add_expert_shared_feed_forward_length", 512)),
    "qwen3moe": (*_EXPERTS, ("add_key_length", 64), ("add_value_length", 64)),
    "gpt-oss": (
        *_EXPERTS, ("add_key_length", 64), ("add_value_length", 64), ("add_sliding_window", 8),
        ("add_rope_scaling_type", gguf.RopeScalingType.YARN), ("add_rope_scaling_factor", 32.0),
        ("add_rope_scaling_orig_ctx_len", 128),
    ),
}  # fmt: skip


def read_model(path: Path, dtype: torch.dtype | None = None) -> Any:
    """The model of a GGUF file, with the attention of the engine; dequantised to `dtype`, or in blocks."""
    from radixkv.model.loading.model_source import ModelSource
    from radixkv.model.loading.pretrained import Pretrained

    files = Pretrained(ModelSource(path.stem, path.parent, path.name))
    if dtype is None:
        return files.block_model(files.config(), False)
    return files.model(files.config(), dtype, torch.device("cpu"), False)


def write_family_gguf(
    path: Path, architecture: str, kinds: Mapping[str, str], extra: tuple[tuple[str, Any], ...] | None = None
) -> Path:
    """A random model of an architecture without a tokenizer, its tensors named by the gguf package.

    Args:
        extra: metadata beside the common ones, as in `ARCHITECTURES`, where it is by default.
    """
    from transformers import AutoModelForCausalLM

    def metadata() -> Any:
        writer = gguf.GGUFWriter(str(path), architecture)
        writer.add_context_length(256)
        writer.add_embedding_length(256)
        writer.add_block_count(2)
        writer.add_feed_forward_length(512)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_layer_norm_eps(1e-5)
        writer.add_rope_freq_base(10_000.0)
        writer.add_vocab_size(320)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        for method, value in ARCHITECTURES[architecture] if extra is None else extra:
            getattr(writer, method)(value)
        return writer

    finish_gguf(metadata())
    config = config_of(open_gguf(path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = tensor_names(model, architecture)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    writer = metadata()
    add = tensor_writer(writer, kinds)
    for name, parameter in sorted(names.items()):
        if parameter in shapes and not name.rpartition(".")[0].endswith("_exps"):
            shape = shapes[parameter]
            if name.endswith("_gate_inp_shexp.weight"):
                shape = shape[1:]
            stem, _, suffix = name.rpartition(".")
            add(stem, *shape, suffix=f".{suffix}")
    for _, layer, module in expert_modules(model):
        for name, shape in expected_shapes(module, {}).items():
            stem, _, suffix = name.partition(".")
            add(f"blk.{layer}.ffn_{stem}_exps", *shape, suffix=f".{suffix}")
    finish_gguf(writer)
    return path


def expert_state(path: Path, model: Any, architecture: str) -> dict[str, torch.Tensor]:
    """The parameters of a model with experts, dequantised from its file."""

    def plain(tensor: Any) -> Array:
        return np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    file = open_gguf(path)
    names, conversion = tensor_names(model, architecture), Conversion(architecture, model.config)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in file.tensors.items():
        if name in names and "_exps" not in name:
            value = torch.from_numpy(np.array(conversion.restore(plain(tensor), name)))
            state[names[name]] = value[None] if name.endswith("_shexp.weight") and value.dim() == 1 else value
    tensors = expert_tensors(file)
    for name, layer, module in expert_modules(model):
        for leaf, suffix in (("weight", ""), ("bias", "_bias")):
            if f"down.{leaf}" not in tensors[layer]:
                continue
            gate, up, down = (
                torch.from_numpy(plain(tensors[layer][f"{each}.{leaf}"])) for each in ("gate", "up", "down")
            )
            both = (
                torch.cat([gate, up], 1)
                if module.is_concatenated
                else torch.stack([gate, up], 2).flatten(1, 2)
            )
            if module.is_transposed and leaf == "weight":
                both, down = both.transpose(1, 2), down.transpose(1, 2)
            state[f"{name}.gate_up_proj{suffix}"], state[f"{name}.down_proj{suffix}"] = both, down
    return state


#: Sizes of the models of `CONVERTED`, by transformers' names.
_TINY: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
_TWO_OF_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}
_CHOSEN = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
_GROUPS = {"n_group": 2, "topk_group": 1}
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16,
           "qk_rope_head_dim": 8, "v_head_dim": 24, "head_dim": 8}  # fmt: skip
_KINDS = ["sliding_attention", "full_attention"]
_GEMMA4 = {
    "num_hidden_layers": 4, "layer_types": _KINDS * 2, "global_head_dim": 32, "sliding_window": 8,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 128, "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0
        },
    },
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
#: Architecture of a file -> transformers' model type, settings of its configuration.
CONVERTED: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("arcee", {}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "cohere2": ("cohere2", {"sliding_window": 8, "num_hidden_layers": 4, "logit_scale": 0.3}),
    "command-r": ("cohere", {"logit_scale": 0.3}),
    "deepseek2": ("deepseek_v2", {**_LATENT, **_CHOSEN, **_GROUPS, "topk_method": "group_limited_greedy"}),
    "deepseek2 with biases": ("deepseek_v3", {**_LATENT, **_CHOSEN, **_GROUPS, "q_lora_rank": 32}),
    "dots1": ("dots1", {**_CHOSEN, "n_group": 1, "topk_group": 1}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5-moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
                                      "moe_layer_start_index": 1, "moe_num_shared_experts": 1}),
    "exaone": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}}),
    "exaone4": ("exaone4", {"sliding_window": 8, "layer_types": _KINDS}),
    "falcon": ("falcon", {"num_kv_heads": 1}),
    "falcon with groups": ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": True}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 16, **_CAPS}),
    "gemma3": ("gemma3_text", {
        "sliding_window": 8, "query_pre_attn_scalar": 16, "num_hidden_layers": 6, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0}}}),
    "gemma4": ("gemma4_text", {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4 with shared keys": ("gemma4_text", {
        **_GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32,
        "use_double_wide_mlp": True}),
    "gemma4 with experts": ("gemma4_text", {
        **_GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 32}),
    "glm4": ("glm4", _HALF),
    "glm4moe": ("glm4_moe", {**_CHOSEN, **_HALF, "n_group": 1, "topk_group": 1, "use_qk_norm": True}),
    "gptneox": ("gpt_neox", {"rope_parameters": {**_HALF["rope_parameters"], "partial_rotary_factor": 0.25}}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 96}),
    "granite": ("granite", _GRANITE),
    "granitemoe": ("granitemoe", {**_GRANITE, **_TWO_OF_FOUR}),
    "granitemoe with one for all": (
        "granitemoeshared", {**_GRANITE, **_TWO_OF_FOUR, "shared_intermediate_size": 32}
    ),
    "hunyuan-dense": ("hunyuan_v1_dense", {}),
    "internlm2": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "jais2": ("jais2", {}),
    "llama": ("llama", {"attention_bias": True}),
    "llama with experts": ("mixtral", _TWO_OF_FOUR),
    "minimax-m2": ("minimax_m2", {**_TWO_OF_FOUR, **_HALF}),
    "minicpm3": ("minicpm3", {**_LATENT, "q_lora_rank": 32, "v_head_dim": 16}),
    "mistral3": ("ministral3", {"rope_parameters": _YARN}),
    "nemotron": ("nemotron", _HALF),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo2 with windows": ("olmo3", {"sliding_window": 8, "layer_types": _KINDS, "rope_parameters": None}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "phi2": ("phi", {**_HALF, "num_key_value_heads": 4}),
    "phi3": ("phi3", {}),
    "qwen2": ("qwen2", {}),
    "qwen2moe": ("qwen2_moe", {**_FEW_EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3_moe", {**_FEW_EXPERTS, "norm_topk_prob": True}),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "stablelm": ("stablelm", {**_HALF, "use_qkv_bias": True}),
    "stablelm in parallel": ("stablelm", {**_HALF, "use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {}),
    "xverse": ("llama", {}),
}  # fmt: skip
_GEMMA4_LEAVES = {
    "gate_up_proj": "blk.{}.ffn_gate_up_exps.weight", "down_proj": "blk.{}.ffn_down_exps.weight",
    "scale": "blk.{}.ffn_gate_inp.scale", "per_expert_scale": "blk.{}.ffn_down_exps.scale",
}  # fmt: skip
#: Methods of a GGUF writer -> fields of configurations that it states.
_STATED: dict[str, tuple[str, ...]] = {
    "add_context_length": ("max_position_embeddings",),
    "add_embedding_length": ("hidden_size",),
    "add_block_count": ("num_hidden_layers",),
    "add_feed_forward_length": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "add_head_count": ("num_attention_heads",),
    "add_head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "add_vocab_size": ("vocab_size",),
    "add_layer_norm_rms_eps": ("rms_norm_eps",),
    "add_layer_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "add_attn_logit_softcapping": ("attn_logit_softcapping",),
    "add_final_logit_softcapping": ("final_logit_softcapping",),
    "add_sliding_window": ("sliding_window",),
    "add_attention_scale": ("attention_multiplier",),
    "add_embedding_scale": ("embedding_multiplier",),
    "add_residual_scale": ("residual_multiplier",),
    "add_logit_scale": ("logits_scaling", "logit_scale"),
    "add_expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "add_expert_used_count": ("num_experts_per_tok", "moe_k"),
    "add_expert_feed_forward_length": ("moe_intermediate_size",),
    "add_expert_shared_feed_forward_length": ("shared_intermediate_size", "shared_expert_intermediate_size"),
    "add_expert_shared_count": ("n_shared_experts", "moe_num_shared_experts"),
    "add_expert_weights_scale": ("routed_scaling_factor",),
    "add_expert_weights_norm": ("norm_topk_prob",),
    "add_expert_group_count": ("n_group",),
    "add_expert_group_used_count": ("topk_group",),
    "add_leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
    "add_q_lora_rank": ("q_lora_rank",),
    "add_kv_lora_rank": ("kv_lora_rank",),
}
#: Architectures whose files do not say which layers have windows.
_NO_PATTERN = ("cohere2", "gemma2", "gemma3")
_INTERLEAVED = ("arcee", "granite", "internlm2", "llama", "mistral3", "olmo", "smollm3", "xverse")


def write_converted(path: Path, case: str) -> Any:
    """A random model of transformers as a GGUF file of Q8_0, as llama.cpp's conversion writes it.

    Args:
        case: of `CONVERTED`.

    Returns:
        The model, with the values that the file's blocks stand for.
    """
    from tiny_models import randomize
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture, kind, changes = case.split()[0], *CONVERTED[case]
    default = AutoConfig.for_model(kind)
    sizes = {name: value for name, value in _TINY.items() if name in default.to_dict()} | changes
    if sizes.get("rope_parameters", 0) is None:
        del sizes["rope_parameters"]
    config = AutoConfig.for_model(kind, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomize(model, 0)
    writer = gguf.GGUFWriter(str(path), architecture)
    _state_sizes(writer, architecture, config)
    names = {parameter: name for name, parameter in tensor_names(model, architecture).items()}
    for parameter, value in model.state_dict().items():
        if architecture == "gemma4" and (".experts." in parameter or parameter.endswith("scale")):
            parts = [(_GEMMA4_LEAVES[parameter.rpartition(".")[2]].format(parameter.split(".")[2]), value)]
        elif "experts." in parameter and "shared" not in parameter:
            parts = _expert_parts(parameter, value)
        elif architecture == "deepseek2" and parameter.endswith("kv_b_proj.weight"):
            heads = value.view(config.num_attention_heads, -1, value.shape[-1])
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            layer = names[parameter].rpartition("attn")[0]
            writer.add_tensor(f"{layer}attn_k_b.weight", keys.transpose(1, 2).contiguous().numpy())
            writer.add_tensor(f"{layer}attn_v_b.weight", values.contiguous().numpy())
            continue
        elif "input_linear" in parameter:
            layer = names[parameter].rpartition("ffn")[0]
            parts = [
                (f"{layer}ffn_{each}_shexp.weight", half)
                for each, half in zip(("gate", "up"), value.chunk(2), strict=True)
            ]
        elif parameter in names and not (parameter == "lm_head.weight" and config.tie_word_embeddings):
            parts = [(names[parameter], value)]
        else:
            continue
        for name, part in parts:
            _add_rounded(writer, name, part, config, architecture)
    finish_gguf(writer)
    return model.eval()


def _state_sizes(writer: Any, architecture: str, config: Any) -> None:
    values = config.to_dict()
    for method, fields in _STATED.items():
        found = (values.get(config.attribute_map.get(field, field)) for field in fields)
        value = next((each for each in found if each is not None), None)
        if value is not None:
            getattr(writer, method)(value)
    size = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    rotary = getattr(config, "rope_parameters", None)
    if rotary is None:
        return
    rotary = rotary.get("full_attention", rotary)
    writer.add_rope_freq_base(rotary["rope_theta"])
    if architecture == "deepseek2":
        rope, latent = config.qk_rope_head_dim, config.kv_lora_rank
        writer.add_head_count_kv(1)
        writer.add_key_length(latent + rope)
        writer.add_value_length(latent)
        writer.add_key_length_mla(config.qk_nope_head_dim + rope)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_rope_dimension_count(rope)
    else:
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_rope_dimension_count(int(size * rotary.get("partial_rotary_factor", 1)))
    if architecture == "gemma4":
        _gemma4_sizes(writer, config)
    if architecture == "minicpm3":
        writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if getattr(config, "sliding_window", None) and architecture not in _NO_PATTERN:
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in config.layer_types])
    if "factor" in rotary:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rotary["rope_type"]))
        writer.add_rope_scaling_factor(rotary["factor"])
    if rotary["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rotary["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rotary["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rotary["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(rotary["mscale_all_dim"])
        writer.add_attn_temperature_scale(rotary["llama_4_scaling_beta"])


def _gemma4_sizes(writer: Any, config: Any) -> None:
    full, layers = config.per_layer_config[1].head_dim, range(config.num_hidden_layers)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(config.to_dict()["head_dim"])
    writer.add_value_length_swa(config.to_dict()["head_dim"])
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(config.to_dict()["head_dim"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.top_k_experts:
        writer.add_expert_used_count(config.top_k_experts)
    writer.add_head_count_kv([config.per_layer_config[layer].num_key_value_heads for layer in layers])
    if config.use_double_wide_mlp:
        first, wide = config.num_hidden_layers - config.num_kv_shared_layers, config.intermediate_size
        writer.add_feed_forward_length([wide * (1 + (layer >= first)) for layer in layers])
    factors = np.full(full // 2, 1e30, np.float32)
    factors[: full // 8] = 1
    writer.add_tensor("rope_freqs.weight", factors)


def _expert_parts(parameter: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    layer = parameter.partition("layers.")[2].partition(".")[0]
    if parameter.endswith("down_proj"):
        return [(f"blk.{layer}.ffn_down_exps.weight", value)]
    gate, up = value.chunk(2, 1)
    return [(f"blk.{layer}.ffn_gate_exps.weight", gate), (f"blk.{layer}.ffn_up_exps.weight", up)]


def _add_rounded(writer: Any, name: str, value: torch.Tensor, config: Any, architecture: str) -> None:
    """Add a tensor in its order of rows, and round it in place."""
    kind = gguf.GGMLQuantizationType.Q8_0
    if architecture == "gpt2" and name.split(".")[-2] in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
        value = value.T if value.dim() == 2 else value
    plain = value.dim() == 1 or name.endswith(".bias") or "_inp." in name
    stored = value.numpy() if plain else gguf.quantize(value.contiguous().numpy(), kind)
    if not plain:
        value.copy_(torch.from_numpy(np.array(gguf.dequantize(stored, kind))))
    if architecture.startswith(_INTERLEAVED) and architecture != "olmo2" and architecture != "olmoe":
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        count = heads.get(name.split(".")[-2])
        if count is not None:  # first halves and second halves of a head -> pairs
            stored = (
                stored.reshape(count, 2, len(stored) // count // 2, -1).swapaxes(1, 2).reshape(stored.shape)
            )
    if architecture in ("bloom", "falcon", "gptneox") and "attn_qkv" in name:
        heads = config.num_attention_heads
        groups, size = getattr(config, "num_kv_heads", heads), config.hidden_size // heads
        parts = stored.reshape(groups, heads // groups + 2, size, *stored.shape[1:])
        split = parts[:, :-2], parts[:, -2], parts[:, -1]
        stored = np.concatenate([part.reshape(-1, *stored.shape[1:]) for part in split])
    if architecture in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        stored = stored + 1
    writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=None if plain else kind)
