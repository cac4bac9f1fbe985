# SPDX-License-Identifier: Apache-2.0
"""What a GGUF file says of a model's sizes, and a check that a reader gets all of them back.

Sizes are named by the tables that the reader has, read backwards: transformers' own for the architectures
that it reads, and `gguf_architectures` for all others. `lost_settings` reads them again as a server will, so
that a model with a setting that GGUF has no name for is refused and not changed silently.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from radixkv.model.loading.gguf_architectures import ARCHITECTURES, FIELDS
from radixkv.model.loading.gguf_configs import LEFT_OUT, complete_config, own_config
from radixkv.model.loading.gguf_extras import FACTORS
from radixkv.model.loading.gguf_metadata import known_metadata
from radixkv.model.loading.gguf_rotary import rotary_sizes, scaling_sizes
from radixkv.model.quantize.state_sizes import IMPLIED, STATES

#: transformers' model_type -> the architecture's name in GGUF, where the name of a model is not its row's.
_NAMES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "starcoder2": "starcoder2",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "lfm2": "lfm2",
    "bamba": "granitehybrid", "deepseek_v3": "deepseek2", "falcon_mamba": "mamba",
    "granitemoeshared": "granitemoe", "olmo3": "olmo2",
}  # fmt: skip
#: Model types -> architectures. Gemma 4, whose layers differ in their heads, is read and not written.
KNOWN = {row.model_type: name for name, row in ARCHITECTURES.items() if name != "gemma4"} | _NAMES
#: Settings that change no logits, or that come from the tensors and the tokenizer.
_IRRELEVANT = {
    "_experts_implementation", "_model_name_or_path", "_name_or_path", "architectures", "attention_dropout",
    "attn_implementation", "aux_loss_alpha", "bos_token_id", "chunk_size", "chunk_size_feed_forward",
    "classifier_dropout", "dtype", "embd_pdrop", "embedding_dropout", "eos_token_id", "hidden_dropout",
    "id2label", "initializer_range", "keys_to_ignore_at_inference", "label2id", "mamba_chunk_size",
    "max_window_layers", "model_type", "num_logits_to_keep", "output_router_logits", "pad_token_id",
    "pretraining_tp", "problem_type", "rescale_prenorm_residual", "resid_pdrop", "residual_dropout",
    "residual_in_fp32", "router_aux_loss_coef", "router_jitter_noise", "seq_aux", "sep_token_id",
    "time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_scale",
    "torch_dtype", "transformers_version", "unk_token_id", "use_cache", "use_mamba_kernels", "vocab_size",
    "z_loss_coefficient",
}  # fmt: skip


def architecture_of(config: Any) -> str | None:
    """The architecture's name in GGUF of a configuration; None: it has none here."""
    if config.model_type == "nemotron_h":
        return "nemotron_h_moe" if "moe" in config.layer_types else "nemotron_h"
    return KNOWN.get(config.model_type)


def sizes_of(config: Any) -> dict[str, Any]:
    """Keys without the architecture -> numbers, or a list of one for each layer."""
    architecture = architecture_of(config)
    found = _by_transformers(config) if architecture not in ARCHITECTURES else _by_table(config)
    if architecture in STATES:
        found |= STATES[architecture](config)
    return {key: value for key, value in found.items() if value is not None}


def _by_transformers(config: Any) -> dict[str, Any]:
    from transformers import modeling_gguf_pytorch_utils as reading

    rope = getattr(config, "rope_parameters", None) or {}
    mapping: dict[str, Any] = reading.GGUF_TO_TRANSFORMERS_MAPPING
    tables = mapping["config"]
    names = {**tables.get(config.model_type, tables.get(KNOWN[config.model_type], {})), **LEFT_OUT}
    found: dict[str, Any] = {
        suffix: getattr(config, name, rope.get(name))
        for suffix, name in names.items()
        if isinstance(name, str)
    }
    found |= scaling_sizes(rope)
    if config.model_type in ("mixtral", "gpt_oss", "lfm2"):  # read by `gguf_configs` or by newer tables
        found |= _by_table(config)
        if config.model_type == "gpt_oss":
            found["expert_feed_forward_length"] = config.intermediate_size
    return found


def _by_table(config: Any) -> dict[str, Any]:
    heads, size = getattr(config, "num_attention_heads", 0), _head_size(config)
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", heads),
        "attention.key_length": size,
        "attention.value_length": size,
        **rotary_sizes(config, size),
    }
    for key, names in FIELDS.items():
        values = (getattr(config, name, None) for name in names)
        found[key] = next((value for value in values if value is not None), found.get(key))
    kinds = getattr(config, "layer_types", None) or []
    if "sliding_attention" in kinds and config.sliding_window:
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    return found


def _head_size(config: Any) -> int | None:
    heads = getattr(config, "num_attention_heads", 0)
    return getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)


def add_sizes(writer: Any, config: Any) -> None:
    """Write a configuration's sizes to a GGUFWriter of its architecture."""
    writer.add_name(str(getattr(config, "_name_or_path", "") or "model").rstrip("/").rpartition("/")[2])
    for suffix, value in sizes_of(config).items():
        key = f"{architecture_of(config)}.{suffix}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float) or suffix.endswith(_FLOATS):
            writer.add_float32(key, float(value))
        else:
            writer.add_uint32(key, value)


#: Ends of keys with float32 numbers, which configurations may have as whole ones.
_FLOATS = ("freq_base", "freq_base_swa", "epsilon", "scale", "scaling.factor", "softcapping", "multiplier")


def lost_settings(config: Any, tensors: Collection[str]) -> list[str]:
    """Settings of a configuration that a reader of the GGUF file would not get back, as `name (value)`.

    Args:
        tensors: names of all that the file will have.
    """
    import gguf
    import numpy as np
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sizes.gguf"
        writer = gguf.GGUFWriter(str(path), str(architecture_of(config)))
        add_sizes(writer, config)
        writer.add_token_list(["a"])
        for name in tensors:
            writer.add_tensor(name, np.zeros(1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        try:
            read = own_config(path)
            if read is None:
                read = AutoConfig.from_pretrained(folder, gguf_file=path.name)
                complete_config(path, read)
        finally:
            known_metadata.cache_clear()
        found = read.to_dict()
    wanted = config.to_dict()
    heads = getattr(config, "num_attention_heads", 0)
    if "head_dim" not in found and heads and _head_size(config) == config.hidden_size // heads:
        wanted["head_dim"] = None
    rope = dict(wanted.get("rope_parameters") or {})
    if FACTORS in tensors:
        wanted["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    implied = IMPLIED.get(str(architecture_of(config)))
    wanted |= {} if implied is None else implied(config)
    return [
        f"{name} ({value!r:.80})"
        for name, value in sorted(wanted.items())
        if name not in _IRRELEVANT and value is not None and not _same(value, found.get(name))
    ]


#: Of rotary parameters.
_DEFAULTS = {"partial_rotary_factor": 1.0, "rope_type": "default"}


def _same(one: Any, other: Any) -> bool:
    """Equal, with numbers as float32 has them."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(
            _same(one.get(key, _DEFAULTS.get(key)), other.get(key, _DEFAULTS.get(key)))
            for key in one.keys() | other.keys()
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=1e-6) if numbers else bool(one == other)
