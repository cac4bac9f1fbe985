# SPDX-License-Identifier: Apache-2.0
"""Conditions that a model must meet to be served, checked before and after its weights are loaded.

Before: its configuration (decoder only, every layer attention or one of the states served). After: a dry run
on a few tokens, because some architectures ignore the attention setting silently. It runs twice, in order and
with its rows shuffled: the logits must not change, or the model counts positions itself, or mixes tokens
outside its attention. An architecture that the project does not test is also compared once with
transformers' own eager attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from radixkv.errors import ModelLoadError
from radixkv.model.attention.attention_hook import ATTENTION_NAME, PlainCausalStep
from radixkv.model.attention.attention_shape import AttentionShape, shape_of_calls
from radixkv.model.attention.length_frequencies import LENGTH_DEPENDENT
from radixkv.model.attention.own_attention import select_attention
from radixkv.model.state_layers.registry import install_mixers, keeps_states, own_forward
from radixkv.model.step_context import call_model
from radixkv_kernels.kv_cache import LARGEST_HEAD

#: `model_type` of the architectures that the tests hold to transformers' eager attention, hot and cold.
TESTED_MODEL_TYPES: Mapping[str, str] = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "gpt_oss": "GPT-OSS",
    "phi": "Phi",
    "phi3": "Phi-3",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2 MoE",
    "qwen3_moe": "Qwen3 MoE",
    "gemma": "Gemma",
    "olmo2": "OLMo 2",
    "granite": "Granite",
    "smollm3": "SmolLM3",
    "starcoder2": "StarCoder2",
    "cohere2": "Command R7B",
    "gpt_neox": "GPT-NeoX",
}

#: Layers that attend to the contents of the paged cache: all of the context, or a window of it.
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention")
_SHUFFLED_ROWS = (4, 0, 6, 1, 5, 3, 2)
_DRY_RUN_TOKENS = len(_SHUFFLED_ROWS)


def supported_architectures() -> str:
    """The tested architectures as a phrase for messages and documents."""
    return ", ".join(f"{name} ({model_type})" for model_type, name in TESTED_MODEL_TYPES.items())


def unsupported(name: str, architecture: str, reason: str) -> ModelLoadError:
    """The error for a model whose architecture can't be served."""
    return ModelLoadError(
        f"{name} has the architecture {architecture}, which radixkv can't serve: {reason}. These work: "
        f"{supported_architectures()}; other decoder-only models do if transformers runs them through its "
        "attention interface."
    )


def architecture_name(config: Any) -> str:
    """`LlamaForCausalLM`, or the model type where the configuration names no class."""
    classes = getattr(config, "architectures", None)
    return str(classes[0]) if classes else str(getattr(config, "model_type", "unknown"))


#: More layers than any model has: beyond it, the number is damaged.
MAX_LAYERS = 4096


def _refuse_fetched_attention(name: str, *configs: Any) -> None:
    """Refuse a config.json that names attention code of a repository: transformers would fetch and run it."""
    for config in configs:
        chosen = getattr(config, "_attn_implementation", None)
        if isinstance(chosen, str) and "/" in chosen:
            raise ModelLoadError(
                f"The config.json of {name} names attention code of a repository ({chosen!r}), which "
                "would be fetched and run. radixkv brings its own: take attn_implementation out of the file."
            )


def check_config(name: str, config: Any, max_model_len: int | None) -> int:
    """Refuse configurations that can't be served correctly.

    Args:
        name: the model, for messages.
        config: a transformers configuration.
        max_model_len: the limit that the user has set, or None.

    Returns:
        The most tokens the model is made for.

    Raises:
        ModelLoadError: encoder-decoder, layers without a plain KV cache.
    """
    architecture = architecture_name(config)
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported(
            name, architecture, "it is an encoder-decoder model, and only decoders have one cache"
        )
    if getattr(config, "transformers_weights", None) is not None:
        raise ModelLoadError(
            f"The config.json of {name} names a weight file of its own (transformers_weights), which radixkv "
            "does not read: name the file model.safetensors and take the setting out."
        )
    text_config = config.get_text_config(decoder=True)
    _refuse_fetched_attention(name, config, text_config)
    num_layers = getattr(text_config, "num_hidden_layers", 1)
    if not 1 <= num_layers <= MAX_LAYERS:  # they would be made before the weights are looked at
        raise ModelLoadError(
            f"The config.json of {name} has num_hidden_layers {num_layers}; from 1 to {MAX_LAYERS} can be "
            "loaded. Correct it, or fetch the file again."
        )
    kinds = set(getattr(text_config, "layer_types", None) or ()) - set(_ATTENTION_LAYERS)
    if kinds and not keeps_states(text_config):
        raise unsupported(
            name,
            architecture,
            f"some of its layers are of the kind {', '.join(sorted(kinds))}, not attention",
        )
    limit = position_limit(text_config, max_model_len)
    chosen = getattr(text_config, "index_topk", None)
    if "indexed_attention" not in (getattr(text_config, "layer_types", None) or ()) or not chosen:
        return limit
    if min(limit, max_model_len or limit) > chosen:
        raise ModelLoadError(
            f"{name} ({architecture}) attends to {chosen} chosen tokens of a longer context (sparse "
            f"attention), which radixkv does not choose. Up to {chosen} tokens all are chosen: pass "
            f"--max-model-len {chosen} (or less) to serve it that way."
        )
    return min(limit, int(chosen))


def position_limit(config: Any, max_model_len: int | None) -> int:
    """Return the most tokens a model is made for; where its frequencies would depend on the length, and the
    user's limit is within its original one, that."""
    limit = getattr(config, "max_position_embeddings", None)
    for rope in _rope_settings(config):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if kind in LENGTH_DEPENDENT:
            # Up to the original length the frequencies are constant.
            short = int((original if kind == "longrope" else None) or limit or 0)
            if max_model_len is not None and max_model_len <= short:
                limit = short
            elif kind == "dynamic":
                limit = int(short * float(rope.get("factor") or 1.0))
        elif kind == "yarn" and original and rope.get("factor"):
            limit = max(int(limit or 0), int(original * float(rope["factor"])))
    return int(limit) if limit else 2048


def _rope_settings(config: Any) -> Iterator[Mapping[str, Any]]:
    """Each rotary embedding's settings; some models have one per kind of layer."""
    for attribute in ("rope_parameters", "rope_scaling"):
        settings = getattr(config, attribute, None)
        if isinstance(settings, Mapping):
            nested = [value for value in settings.values() if isinstance(value, Mapping)]
            yield from nested or [settings]
            return


def _device(model: Any) -> torch.device:
    """Device of a model; weights in blocks, which no parameter may be left beside, are on a CPU."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


@torch.inference_mode()
def check_model(name: str, model: Any, max_model_len: int) -> AttentionShape:
    """Run a few tokens through the hook; check that every layer called it once, with the expected arguments.

    Args:
        name: the model, for messages.
        model: loaded, with the hook as its attention.
        max_model_len: the most tokens of a sequence; a window of that size or more is none.

    Raises:
        ModelLoadError: the architecture ignores the hook, or needs something that the paged cache lacks.
    """
    architecture = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    positions = torch.arange(_DRY_RUN_TOKENS, device=_device(model))
    ids = (positions + 1) * 31 % int(config.vocab_size)
    num_mixers = install_mixers(model)
    step = PlainCausalStep(positions)
    try:
        logits = call_model(model, ids, positions, None, step)
    except Exception as error:  # whatever an architecture does with an attention function it does not know
        detail = " ".join(str(error).split())[:200]
        raise unsupported(
            name,
            architecture,
            f"a trial run through the paged attention failed ({detail or type(error).__name__})",
        ) from error
    reason = _wrong_calls(config, step, num_mixers) or _wrong_windows(config, step, max_model_len)
    if reason is not None:
        raise unsupported(name, architecture, reason)
    if not torch.isfinite(logits).all():
        raise ModelLoadError(
            f"{name} computes infinite or undefined logits in {str(model.dtype).removeprefix('torch.')} for "
            "a trial input; its weights may be damaged, or need --dtype float32."
        )
    rows = torch.tensor(_SHUFFLED_ROWS, device=_device(model))
    shuffled_step = PlainCausalStep(positions[rows])
    shuffled = call_model(model, ids[rows], positions[rows], None, shuffled_step)
    if _deviation(shuffled, logits[rows]) > _tolerance(logits.dtype):
        reason = "its tokens are not independent of each other but for attention"
    elif config.model_type not in TESTED_MODEL_TYPES:
        deviation = _deviation(logits, _eager_logits(model, ids, positions))
        if not deviation <= _tolerance(logits.dtype):
            reason = f"its logits differ from transformers' own by {deviation:.1%} of their spread"
    if reason is not None:
        raise unsupported(name, architecture, reason)
    return shape_of_calls(step.calls, _chunks(config, max_model_len), step.states.shapes, step.windows)


def _chunks(config: Any, max_model_len: int) -> dict[int, int | None]:
    """Layer -> positions of the chunks within which it attends, where sequences have several."""
    chunk = getattr(config, "attention_chunk_size", None)
    if not chunk or chunk >= max_model_len:
        return {}
    kinds = getattr(config, "layer_types", None) or ()
    return {layer: int(chunk) for layer, kind in enumerate(kinds) if kind == "chunked_attention"}


def _wrong_calls(config: Any, step: PlainCausalStep, num_mixers: int) -> str | None:
    """Return the first feature requested by the layers that the paged cache lacks; None: it has all."""
    expected = int(config.num_hidden_layers)
    layers = sorted(call.layer for call in step.calls)
    if num_mixers:
        called = {shape.layer for shape in step.states.shapes}
        if len(called) != num_mixers or len(set(layers)) != len(layers):
            return f"{len(called)} of its {num_mixers} state layers were seen, and attention in {layers}"
    elif not step.calls:
        return "it ignores the attention setting, so its cache can't be paged"
    elif layers != list(range(expected)):
        return f"{len(step.calls)} calls of its attention were seen for {expected} layers"
    for call in step.calls:
        query_heads, kv_heads = call.heads
        for size in call.sizes:
            if size > LARGEST_HEAD or size % 8:
                return f"its head size {size} is not a multiple of 8 up to {LARGEST_HEAD}"
        if query_heads % kv_heads:
            return f"{query_heads} query heads do not share {kv_heads} KV heads evenly"
    return None


def _wrong_windows(config: Any, step: PlainCausalStep, max_model_len: int) -> str | None:
    """A layer that is said to have a window must have passed it on, or it would see too much."""
    window = getattr(config, "sliding_window", None)
    if window is not None and window >= max_model_len:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * int(config.num_hidden_layers)
    for layer in sorted(step.windows):
        expected = window if kinds[layer] == "sliding_attention" else None
        if step.windows[layer] != expected:
            return (
                f"layer {layer} asks for a window of {step.windows[layer]}, its configuration for {expected}"
            )
    return None


def _eager_logits(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[T, V] logits with transformers' own attention and masks."""
    # transformers' eager attention adds Falcon's linear biases twice.
    adds_twice = model.config.model_type == "falcon" and model.config.alibi
    select_attention(model, "sdpa" if adds_twice else "eager")
    try:
        with own_forward(model):
            logits: torch.Tensor = model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False
            ).logits[0]
    finally:
        select_attention(model, ATTENTION_NAME)
    return logits


def _deviation(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the distance of logits [T, V] from the reference over its spread; the median over the tokens.

    The median, because rounding may send single tokens of a mixture of experts another way.
    """
    reference = reference.float()
    spread = (reference - reference.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return float(((logits.float() - reference).norm(dim=-1) / spread.clamp_min(1e-9)).median())


def _tolerance(dtype: torch.dtype) -> float:
    """Largest error explained by rounding: 1e-5 in float32, a few percent in 16 bits, through all layers."""
    return 0.01 if dtype == torch.float32 else 0.2
