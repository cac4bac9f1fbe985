# SPDX-License-Identifier: Apache-2.0
"""Configurations of GGUF files, as far as transformers does not read them.

Mixtral's files are of the architecture `llama`, of which transformers makes a model without experts; it can't
read a gpt-oss with scaled rotary frequencies; it leaves what it has no key for at the default of one model
(sizes of experts and heads, soft caps, scaled rotary frequencies); and it knows half of the architectures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from radixkv.errors import ModelLoadError
from radixkv.model.loading.gguf_architectures import ARCHITECTURES, make_config
from radixkv.model.loading.gguf_metadata import GGUFMetadata, known_metadata
from radixkv.model.loading.gguf_rotary import LONG_FACTORS, scaling, tensor_values

#: Keys of a file, without the architecture -> fields that transformers leaves at their default.
LEFT_OUT = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.key_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
#: Architecture -> number of layers of its one model whose queries are scaled by width / heads, not by the
#: size of a head. No key says so; llama.cpp goes by the number of layers, too.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
#: Names in transformers' list of what it reads that are none of a decoder it has.
_NO_DECODERS = {"deci", "general", "t5", "tokenizer", "umt5"}


def own_config(path: Path) -> Any | None:
    """The configuration of a file that transformers can't read, or reads as another model; None: it can.

    Raises:
        KeyError: the file lacks a size.
        ModelLoadError: its layers differ in a size, or neither reads it as a decoder.
    """
    known = known_metadata(path)
    architecture = str(known.values.get("general.architecture"))
    if architecture in _NO_DECODERS:
        raise unread(path, architecture)
    make = _OWN.get(architecture)
    if make is not None:
        return make(known)
    if architecture not in ARCHITECTURES:
        return None
    config = make_config(architecture, known)
    _set_long_factors(path, config, lambda key, *other: known.values.get(f"{architecture}.{key}", *other))
    return config


def unread(path: Path, name: str) -> ModelLoadError:
    """The error for a file of an architecture that neither transformers nor the table reads."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    names = {each.replace("_", "-") for each in GGUF_SUPPORTED_ARCHITECTURES} - _NO_DECODERS
    return ModelLoadError(
        f"{path} is a GGUF file of the architecture {name}, which can't be read from GGUF. These can: "
        f"{', '.join(sorted({*names, *ARCHITECTURES}))}. Serve the folder of safetensors that the file was "
        "made from instead: it works wherever transformers has the model."
    )


def complete_config(path: Path, hf_config: Any) -> None:
    """Set what a file states, or its architecture implies, and transformers leaves at a default."""
    values = known_metadata(path).values
    architecture = str(values.get("general.architecture"))

    def of(key: str, *default: Any) -> Any:
        return (
            values[f"{architecture}.{key}"] if not default else values.get(f"{architecture}.{key}", *default)
        )

    for key, name in LEFT_OUT.items():
        value = of(key, None)
        if isinstance(value, int | float) and hasattr(hf_config, name):
            setattr(hf_config, name, value)
    if hasattr(hf_config, "query_pre_attn_scalar"):
        by_width = hf_config.num_hidden_layers == _SCALED_BY_WIDTH.get(architecture)
        hf_config.query_pre_attn_scalar = (
            hf_config.hidden_size // hf_config.num_attention_heads if by_width else hf_config.head_dim
        )
    if architecture == "gpt2":
        hf_config.n_positions = of("context_length")
    vocab_size = getattr(hf_config, "vocab_size", 0)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(hf_config, name, None)
        if isinstance(token, int) and token >= vocab_size:
            setattr(hf_config, name, None)
    _scale_frequencies(hf_config, scaling(of))
    _set_long_factors(path, hf_config, of)


def _scale_frequencies(hf_config: Any, scaled: dict[str, Any]) -> None:
    parameters = getattr(hf_config, "rope_parameters", None)
    if not scaled or not isinstance(parameters, dict):
        return
    own = parameters.get("full_attention", parameters)
    if own.get("rope_type", "default") == "default":
        own.update(scaled)


def _set_long_factors(path: Path, hf_config: Any, of: Callable[..., Any]) -> None:
    """Set LongRoPE's two sets of factors of rotary frequencies, which are tensors of a file.

    Raises:
        ModelLoadError: another number of factors than of frequencies, or no positive numbers.
    """
    found = tensor_values(path, *LONG_FACTORS.values())
    parameters = getattr(hf_config, "rope_parameters", None)
    if not found or not isinstance(parameters, dict):
        return
    size = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    count = int(of("rope.dimension_count", size)) // 2
    for name in LONG_FACTORS.values():
        values = found.get(name, [])
        if len(values) != count or not all(0 < value < math.inf for value in values):
            raise ModelLoadError(
                f"The tensor {name} of {path} has {len(values)} values; LongRoPE divides {count} frequencies "
                "by positive numbers. The file is damaged, or of another model."
            )
    original = int(of("rope.scaling.original_context_length", None) or of("context_length"))
    parameters |= {name: found[tensor] for name, tensor in LONG_FACTORS.items()}
    parameters |= {"rope_type": "longrope", "original_max_position_embeddings": original}
    magnitude = of("rope.scaling.attn_factor", None)
    if magnitude is not None:
        parameters["attention_factor"] = float(magnitude)
    hf_config.original_max_position_embeddings = original


def _common(known: GGUFMetadata, of: Callable[[str], Any]) -> dict[str, Any]:
    """Fields of any decoder."""
    values = known.values
    tokens = values.get("tokenizer.ggml.tokens")
    ids = {name: values.get(f"tokenizer.ggml.{key}_token_id") for name, key in
           (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}  # fmt: skip
    return {
        "vocab_size": of("vocab_size") if tokens is None else len(tokens),
        "hidden_size": of("embedding_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "num_local_experts": of("expert_count"),
        "num_experts_per_tok": of("expert_used_count"),
        "tie_word_embeddings": "output.weight" not in known.tensors,
        **{f"{name}_token_id": number for name, number in ids.items()},
    }


def _mixtral(known: GGUFMetadata) -> Any | None:
    of = _reader(known.values, "llama")
    if not known.values.get("llama.expert_count"):
        return None
    from transformers import MixtralConfig

    return MixtralConfig(
        **_common(known, of),
        intermediate_size=of("feed_forward_length"),
        head_dim=known.values.get("llama.rope.dimension_count"),
        rope_parameters={"rope_type": "default", "rope_theta": of("rope.freq_base")},
        sliding_window=None,
    )


def _gpt_oss(known: GGUFMetadata) -> Any:
    of = _reader(known.values, "gpt-oss")
    from transformers import GptOssConfig

    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": of("rope.freq_base")}
    if known.values.get("gpt-oss.rope.scaling.type") == "yarn":
        rotary |= {
            "rope_type": "yarn",
            "factor": of("rope.scaling.factor"),
            "original_max_position_embeddings": of("rope.scaling.original_context_length"),
            # llama.cpp's and the model's own.
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        }
    return GptOssConfig(
        **_common(known, of),
        intermediate_size=of("expert_feed_forward_length"),
        head_dim=of("attention.key_length"),
        sliding_window=of("attention.sliding_window"),
        rope_parameters=rotary,
    )


def _reader(values: Mapping[str, Any], architecture: str) -> Callable[[str], Any]:
    return lambda key: values[f"{architecture}.{key}"]


_OWN: dict[str, Callable[[GGUFMetadata], Any]] = {"llama": _mixtral, "gpt-oss": _gpt_oss}
