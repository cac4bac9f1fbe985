# SPDX-License-Identifier: Apache-2.0
"""Checks of settings by a model's configuration file and the machine, made before torch is imported.

They take a second, where loading takes minutes. Facts that a file does not state for certain are left to the
checks of the loaded model: `size_kv_cache` and `check_split` refuse the same mistakes in the same words.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv.model.loading.checkpoint_formats import read_json
from radixkv.model.loading.gguf_file import read_values
from radixkv.model.loading.model_source import ModelSource
from radixkv.model.parallel.split_families import SPLIT_MODEL_TYPES, check_family, check_num_ranks

#: Fewer tokens of K/V hold no chat: a system prompt, a question and an answer.
MIN_KV_TOKENS = 128
#: Devices of GPUs: of NVIDIA, of a Windows host, of AMD.
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
#: Architectures whose layers all keep K/V of every token, in as many heads as the configuration says.
_WHOLE_KV = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "olmo2"),
        *("granite", "smollm3", "starcoder2", "phi3"),
    }
)
#: Scalings of rotary frequencies that leave `max_position_embeddings` the limit.
_PLAIN_ROPE = (None, "default", "none", "linear", "llama3")
_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes in a model's configuration file; None: unknown, or not certain.

    Attributes:
        kind: `model_type`.
        positions: the most tokens it is made for.
        kv_heads: the most ranks that its attention can be split over.
        kv_elements: elements of the keys and values of one token, all layers together.
    """

    kind: str | None = None
    positions: int | None = None
    kv_heads: int | None = None
    kv_elements: int | None = None


def facts_of(source: ModelSource) -> ModelFacts:
    """Read a model's config.json, or the header of its GGUF file."""
    if source.gguf_file is not None:
        return _facts_of_gguf(source.path)
    return _facts_of_config(read_json(source.folder / "config.json"))


def _facts_of_config(config: Mapping[str, Any]) -> ModelFacts:
    text = config.get("text_config")
    own = text if isinstance(text, dict) else config
    kind = own.get("model_type")
    is_plain = all(_is_plain(own.get(name)) for name in ("rope_scaling", "rope_parameters"))
    heads = _number(own, "num_attention_heads")
    latents = own.get("kv_lora_rank") is not None
    kv_heads = heads if latents else _number(own, "num_key_value_heads")
    if kv_heads is None and own.get("num_key_value_heads") is None:
        kv_heads = heads
    size = _number(own, "head_dim")
    if size is None and heads:
        size = (_number(own, "hidden_size") or 0) // heads
    layers = _number(own, "num_hidden_layers")
    kinds = own.get("layer_types") or ()
    is_whole = kind in _WHOLE_KV and not own.get("sliding_window") and "sliding_attention" not in kinds
    elements = 2 * layers * kv_heads * size if is_whole and layers and kv_heads and size else None
    # Code that comes with a model, and parts of a larger one, may go by another type.
    is_known = isinstance(kind, str) and own is config and "auto_map" not in config
    return ModelFacts(
        kind=str(kind) if is_known else None,
        positions=_number(own, "max_position_embeddings") if is_plain else None,
        kv_heads=kv_heads if kind in SPLIT_MODEL_TYPES else None,
        kv_elements=elements,
    )


def _is_plain(rope: Any) -> bool:
    """Return True for rotary settings, or some for each kind of layers, that leave the limit as it is."""
    if not isinstance(rope, dict):
        return not rope
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    return all(part.get("rope_type", part.get("type")) in _PLAIN_ROPE for part in parts)


def _facts_of_gguf(path: Path) -> ModelFacts:
    try:
        values = read_values(path)
    except (OSError, ValueError, KeyError, struct.error):  # its reader says what is wrong
        return ModelFacts()
    kind = values.get("general.architecture")
    is_plain = values.get(f"{kind}.rope.scaling.type") in _PLAIN_ROPE
    heads = _number(values, f"{kind}.attention.head_count")
    kv_heads = _number(values, f"{kind}.attention.head_count_kv")
    size = _number(values, f"{kind}.attention.key_length")
    if size is None and heads:
        size = (_number(values, f"{kind}.embedding_length") or 0) // heads
    layers = _number(values, f"{kind}.block_count")
    is_whole = kind in ("llama", "qwen2", "qwen3") and f"{kind}.attention.sliding_window" not in values
    elements = 2 * layers * kv_heads * size if is_whole and layers and kv_heads and size else None
    return ModelFacts(
        positions=_number(values, f"{kind}.context_length") if is_plain else None,
        kv_heads=kv_heads if is_whole else None,
        kv_elements=elements,
    )


def _number(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    return value if type(value) is int and value > 0 else None


def check_settings(config: EngineConfig, source: ModelSource) -> None:
    """Refuse settings that the model, or the memory of a machine without a GPU, can't have.

    Raises:
        ConfigError: names the setting, the limit and what to change.
    """
    facts = facts_of(source)
    if config.num_blocks is not None and config.max_model_len is not None:
        needed = -(-config.max_model_len // config.block_size)
        if needed > config.num_blocks:
            raise ConfigError(
                f"--max-model-len {config.max_model_len} needs {needed} blocks of {config.block_size} "
                f"tokens, but --num-blocks is {config.num_blocks}; lower the one, or raise the other"
            )
    if config.max_model_len is not None and facts.positions is not None:
        check_context(config.max_model_len, facts.positions)
    if config.tensor_parallel > 1:
        if facts.kind is not None:
            check_family(source.name, facts.kind)
        if facts.kv_heads is not None:
            check_num_ranks(source.name, config.tensor_parallel, facts.kv_heads)
    if may_have_gpu(config):
        return
    for name in ("kv_cache_memory", "state_memory", "window_memory"):
        size = getattr(config, name)
        if size is not None:
            check_available("--" + name.replace("_", "-"), size, available_cpu_memory())
    if facts.kv_elements is None:
        return
    width = 1 if config.kv_cache_dtype != "auto" else 4 if config.dtype in ("auto", "float32") else 2
    token_bytes = facts.kv_elements * width
    if config.kv_cache_memory is not None:
        check_holds_a_chat(config, config.kv_cache_memory, token_bytes, facts.positions)
    if config.num_blocks is not None:
        check_num_blocks(config.num_blocks, token_bytes * config.block_size, available_cpu_memory())


def check_context(wanted: int, limit: int) -> None:
    """Refuse a longer context than the model is made for.

    Raises:
        ConfigError: gives the limit.
    """
    if wanted > limit:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the {limit} positions this model was made for; use at "
            f"most {limit}"
        )


def check_available(flag: str, wanted: int, available: int) -> None:
    """Refuse more bytes than there are.

    Raises:
        ConfigError: gives both numbers.
    """
    if wanted > available:
        raise ConfigError(
            f"{flag} asks for {wanted / _GIB:.2f} GiB, but only {available / _GIB:.2f} GiB are free; use a "
            "smaller size, or let the engine choose by leaving the flag out"
        )


def check_holds_a_chat(config: EngineConfig, memory: int, token_bytes: int, limit: int | None) -> None:
    """Refuse a size of the KV cache in bytes that holds no chat; one in blocks is taken as it is.

    Args:
        token_bytes: keys and values of one token.
        limit: the most tokens of a request, where the model or the user has one.

    Raises:
        ConfigError: gives the tokens that it holds and a size that is enough.
    """
    needed = config.max_model_len or min(limit or MIN_KV_TOKENS, MIN_KV_TOKENS)
    tokens = memory // (token_bytes * config.block_size) * config.block_size
    if tokens < needed:
        enough = -(-(config.max_model_len or 2048) * token_bytes // 2**20) + 1
        too_few = "too few for any chat" if config.max_model_len is None else "fewer than --max-model-len"
        raise ConfigError(
            f"--kv-cache-memory of {memory:,} bytes holds {tokens} tokens ({token_bytes:,} bytes each), "
            f"{too_few}: give at least {enough}m, or leave the flag out"
        )


def check_num_blocks(num_blocks: int, block_bytes: int, available: int) -> None:
    """Refuse more blocks than there is memory for.

    Raises:
        ConfigError: gives both sizes, and the most blocks.
    """
    if num_blocks * block_bytes > available:
        raise ConfigError(
            f"--num-blocks {num_blocks} needs {num_blocks * block_bytes / _GIB:.2f} GiB for K/V, but only "
            f"{available / _GIB:.2f} GiB are free; use at most {available // block_bytes} blocks, or let the "
            "engine choose by leaving the flag out"
        )


def may_have_gpu(config: EngineConfig) -> bool:
    """Return False if the engine runs on the CPU for certain; torch, which knows, is not asked."""
    return config.device != "cpu" and any(Path(device).exists() for device in _GPU_DEVICES)


def available_cpu_memory() -> int:
    """Bytes of RAM that can be had without swapping: the machine's, or the container's limit if lower."""
    available = int(psutil.virtual_memory().available)
    try:  # cgroup v2; absent on other systems, "max" without a limit
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return available
