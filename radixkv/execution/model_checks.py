"""What a model must fulfil to be served, checked before and after its weights are loaded.

Before: its configuration (decoder only, every layer plain attention, rotary embedding that does not depend
on the batch). After: a dry run on a few tokens, because some architectures ignore the attention setting
silently; one that the project does not test is also compared once with transformers' own eager attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.errors import ModelLoadError
from radixkv.execution.attention_hook import ATTENTION_NAME, PlainCausalStep, model_inputs

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
}

#: Rotary embeddings whose frequencies depend on the largest position of the whole batch.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
#: Layers that attend to what the paged cache holds: all of the context, or a window of it.
_ATTENTION_LAYERS = ("full_attention", "sliding_attention")
_DRY_RUN_TOKENS = 7


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the dry run saw of a model's attention."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int


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


def check_config(name: str, config: Any, max_model_len: int | None) -> int:
    """Refuse configurations that can't be served correctly.

    Args:
        name: the model, for messages.
        config: a transformers configuration.
        max_model_len: the limit that the user has set, or None.

    Returns:
        The most tokens the model is made for.

    Raises:
        ModelLoadError: encoder-decoder, layers without a plain KV cache, batch-dependent rotary embedding.
    """
    architecture = architecture_name(config)
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported(
            name, architecture, "it is an encoder-decoder model, and only decoders have one cache"
        )
    text_config = config.get_text_config(decoder=True)
    kinds = set(getattr(text_config, "layer_types", None) or ()) - set(_ATTENTION_LAYERS)
    if kinds:
        raise unsupported(
            name,
            architecture,
            f"some of its layers are of the kind {', '.join(sorted(kinds))}, not attention",
        )
    return _position_limit(name, text_config, max_model_len)


def _position_limit(name: str, config: Any, max_model_len: int | None) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    for rope in _rope_settings(config):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if kind in _BATCH_DEPENDENT_ROPE:
            # Up to the original length the frequencies are constant.
            short = int(original or limit or 0)
            if max_model_len is None or max_model_len > short:
                raise ModelLoadError(
                    f"{name} uses {kind} rotary embeddings, whose frequencies change with the longest "
                    "sequence of a whole batch beyond the length the model was first trained with, so cached "
                    f"keys would not fit other requests. Up to {short} tokens they are constant: pass "
                    f"--max-model-len {short} (or less) to serve it that way."
                )
            limit = short
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


@torch.inference_mode()
def check_model(name: str, model: Any) -> AttentionShape:
    """Run a few tokens through the hook and see that every layer came by, once, with what was expected.

    Raises:
        ModelLoadError: the architecture ignores the hook, or needs what the paged cache does not offer.
    """
    architecture = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    step = PlainCausalStep()
    inputs = _dry_run_inputs(model, config)
    try:
        logits = model(**model_inputs(*inputs, step)).logits
    except Exception as error:  # whatever an architecture does with an attention function it does not know
        detail = " ".join(str(error).split())[:200]
        raise unsupported(
            name,
            architecture,
            f"a trial run through the paged attention failed ({detail or type(error).__name__})",
        ) from error
    _check_calls(name, architecture, config, step)
    _check_windows(name, architecture, config, step)
    if not torch.isfinite(logits).all():
        raise ModelLoadError(
            f"{name} computes infinite or undefined logits in {str(model.dtype).removeprefix('torch.')} for "
            "a trial input; its weights may be damaged, or need --dtype float32."
        )
    if config.model_type not in TESTED_MODEL_TYPES:
        _compare_with_eager(name, model, architecture, inputs, logits)
    _, query_heads, kv_heads, head_size, _, _ = step.calls[0]
    return AttentionShape(len(step.calls), query_heads, kv_heads, head_size)


def _dry_run_inputs(model: Any, config: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    device = model.device
    ids = torch.arange(1, _DRY_RUN_TOKENS + 1, device=device) * 31 % int(config.vocab_size)
    return ids, torch.arange(_DRY_RUN_TOKENS, device=device), None


def _check_calls(name: str, architecture: str, config: Any, step: PlainCausalStep) -> None:
    expected = int(config.num_hidden_layers)
    if not step.calls:
        raise unsupported(name, architecture, "it ignores the attention setting, so its cache can't be paged")
    if sorted(call[0] for call in step.calls) != list(range(expected)):
        raise unsupported(
            name, architecture, f"{len(step.calls)} calls of its attention were seen for {expected} layers"
        )
    shapes = {call[1:] for call in step.calls}
    if len(shapes) > 1:
        raise unsupported(name, architecture, "its layers differ in the number or size of their heads")
    _, query_heads, kv_heads, *sizes = step.calls[0]
    if len(set(sizes)) > 1:
        raise unsupported(name, architecture, "its keys and values differ in size (latent attention)")
    if query_heads % kv_heads:
        raise unsupported(
            name, architecture, f"{query_heads} query heads do not share {kv_heads} KV heads evenly"
        )


def _check_windows(name: str, architecture: str, config: Any, step: PlainCausalStep) -> None:
    """A layer that is said to have a window must have passed it on, or it would see too much."""
    kinds = getattr(config, "layer_types", None) or []
    for layer, kind in enumerate(kinds[: len(step.calls)]):
        expected = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
        if step.windows[layer] != expected:
            raise unsupported(
                name,
                architecture,
                f"layer {layer} attends with a window of {step.windows[layer]}, its configuration says {expected}",
            )


def _compare_with_eager(name: str, model: Any, architecture: str, inputs: Any, logits: torch.Tensor) -> None:
    """For architectures without tests of their own: do the logits agree with transformers' attention?"""
    ids, positions, _ = inputs
    model.set_attn_implementation("eager")
    try:
        reference = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    similarity = torch.nn.functional.cosine_similarity(reference.float(), logits.float(), dim=-1).min().item()
    # Rounding in 16 bits moves this by about 1e-3; a missing mask or bias by far more.
    if not similarity > 0.98:
        raise unsupported(
            name,
            architecture,
            f"its logits differ from transformers' own (cosine similarity {similarity:.3f})",
        )
