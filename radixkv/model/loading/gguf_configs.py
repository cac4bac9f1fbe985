# SPDX-License-Identifier: Apache-2.0
"""Configurations of GGUF files with experts, as far as transformers does not read them.

Mixtral's files are of the architecture `llama`, of which transformers makes a model without experts; it can't
read a gpt-oss with scaled rotary frequencies; and it leaves experts' sizes at a default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from radixkv.model.loading.gguf_metadata import GGUFMetadata, known_metadata

#: Keys of a file, without the architecture -> fields of transformers' configurations.
_SIZES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


def own_config(path: Path) -> Any | None:
    """The configuration of a file that transformers can't read, or reads as another model; None: it can.

    Raises:
        KeyError: the file lacks a size.
    """
    known = known_metadata(path)
    make = _OWN.get(str(known.values.get("general.architecture")))
    return None if make is None else make(known)


def set_expert_sizes(path: Path, hf_config: Any) -> None:
    """Set the sizes of experts that a file states and transformers leaves out."""
    values = known_metadata(path).values
    architecture = values.get("general.architecture")
    for key, name in _SIZES.items():
        size = values.get(f"{architecture}.{key}")
        if isinstance(size, int) and hasattr(hf_config, name):
            setattr(hf_config, name, size)


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
