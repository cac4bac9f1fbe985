# SPDX-License-Identifier: Apache-2.0
"""Configuration of a GGUF file's model: a row of the table of architectures with the file's sizes."""

from __future__ import annotations

import math
from typing import Any

from radixkv.errors import ModelLoadError
from radixkv.model.loading.gguf_architectures import ARCHITECTURES
from radixkv.model.loading.gguf_file import GGUFFile
from radixkv.model.loading.gguf_rotary import LONG_FACTORS, rotary_parameters

#: Keys of a file, without the architecture -> fields of configurations; only fields that a model has are set.
FIELDS: dict[str, tuple[str, ...]] = {
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "context_length": ("max_position_embeddings",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
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
    "use_qkv_bias": "blk.0.attn_q.bias",
    "use_qk_norm": "blk.0.attn_q_norm.weight",
    "qk_layernorm": "blk.0.attn_q_norm.weight",
}
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def config_of(file: GGUFFile) -> Any:
    """The transformers configuration of a file.

    Raises:
        KeyError: it lacks a size.
        ModelLoadError: an architecture that is not in the table, layers that differ in a size, or factors
            that do not fit the model's rotary frequencies.
    """
    from transformers import AutoConfig  # heavy

    architecture = file.architecture
    row = ARCHITECTURES.get(architecture)
    if row is None:
        raise ModelLoadError(
            f"{file.path} is a GGUF file of the architecture {architecture}, which can't be read from GGUF. "
            f"These can: {', '.join(sorted(ARCHITECTURES))}. Serve the folder of safetensors that the file "
            "was made from instead: it works wherever transformers has the model."
        )

    def of(key: str, *default: Any) -> Any:
        name = f"{architecture}.{key}"
        found = file.values.get(name, *default) if default else file.values[name]
        if isinstance(found, list) and found and not isinstance(found[0], bool):
            found = [each for each in found if each] or found  # layers of other kinds have none
            if len(set(found)) > 1 and key not in row.varied:
                raise ModelLoadError(
                    f"The layers of this {architecture} file differ in {key}, which can't be read. Serve the "
                    "model's folder of safetensors instead."
                )
            found = found[0]
        return found

    more = dict(row.settings) | (row.more(of, file) if row.more is not None else {})
    model_type = more.pop("model_type", row.model_type)
    default = AutoConfig.for_model(model_type)
    heads, hidden = of("attention.head_count"), of("embedding_length")
    head_size = of("attention.key_length", hidden // (heads or 1))  # pure state models have no heads
    fields: dict[str, Any] = {
        "num_hidden_layers": of("block_count") - of("nextn_predict_layers", 0),
        "num_key_value_heads": of("attention.head_count_kv", heads),
        "head_dim": head_size,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for key, names in FIELDS.items():
        value = of(key, None)
        if value is not None:
            fields |= {name: value for name in names if _is_field(default, name)}
    tokens = file.values.get("tokenizer.ggml.tokens")
    fields["vocab_size"] = of("vocab_size") if tokens is None else len(tokens)
    for name, key in _TOKENS.items():
        token = file.values.get(f"tokenizer.ggml.{key}_token_id")
        fields[name] = token if token is not None and token < fields["vocab_size"] else None
    fields |= {name: tensor in file.tensors for name, tensor in _PRESENT.items()}
    rotary = rotary_parameters(
        of, more.get("head_dim", head_size), getattr(default, "rope_parameters", None) or {}
    )
    fields["rope_parameters"] = rotary | more.pop("rotary", {})
    kept = {name: value for name, value in fields.items() if _is_field(default, name)}
    if heads and head_size != hidden // heads:  # some models take one that their configuration does not list
        kept["head_dim"] = head_size
    config = AutoConfig.for_model(model_type, **kept | more)
    _set_long_factors(file, config)
    return config


def _is_field(config: Any, name: str) -> bool:
    """Return True if a configuration has a field of this name, not a value that it computes."""
    try:
        return hasattr(config, name) and not isinstance(getattr(type(config), name, None), property)
    except RuntimeError:  # its layers have one each
        return True


def _set_long_factors(file: GGUFFile, config: Any) -> None:
    """Set LongRoPE's two sets of factors of rotary frequencies, which are tensors of a file.

    Raises:
        ModelLoadError: another number of factors than of frequencies, or no positive numbers.
    """
    if not file.tensors.keys() & set(LONG_FACTORS.values()):
        return
    values, prefix = file.values, file.architecture
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    count = int(values.get(f"{prefix}.rope.dimension_count", size)) // 2
    factors: dict[str, list[float]] = {}
    for name, tensor in LONG_FACTORS.items():
        found = file.dequantised(tensor).reshape(-1).tolist() if tensor in file.tensors else []
        if len(found) != count or not all(0 < value < math.inf for value in found):
            raise ModelLoadError(
                f"The tensor {tensor} of {file.path} has {len(found)} values; LongRoPE divides {count} "
                "frequencies by positive numbers. The file is damaged, or of another model."
            )
        factors[name] = found
    length = values.get(f"{prefix}.rope.scaling.original_context_length")
    original = int(length or values[f"{prefix}.context_length"])
    parameters = config.rope_parameters
    parameters |= factors | {"rope_type": "longrope", "original_max_position_embeddings": original}
    magnitude = values.get(f"{prefix}.rope.scaling.attn_factor")
    if magnitude is not None:
        parameters["attention_factor"] = float(magnitude)
    config.original_max_position_embeddings = original
