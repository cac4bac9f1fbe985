# SPDX-License-Identifier: Apache-2.0
"""Attention of modules that compute it themselves instead of calling transformers' interface.

On each instance, the attention function is replaced by one that calls the hook while the model is set to
radixkv's attention. Linear biases (ALiBi) become two elements more of each head::

    q . k * scale + slope * position
        = (q, 256 slope / scale, slope / scale) . (k, position // 256, position % 256) * scale

since a softmax ignores a constant added to a whole row. Both elements of a key are exact in 16 bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.model.attention.attention_hook import ATTENTION_NAME, paged_attention_hook
from radixkv.model.step_context import current_positions

_STEP = 256
#: Architectures whose attention is replaced.
MODEL_TYPES: tuple[str, ...] = ("falcon", "gptj", "codegen", "bloom", "mpt")
#: A method's name and its replacement.
_Replacement = tuple[str, Callable[..., Any]]


def has_own_attention(model_type: str) -> bool:
    """Return True for the architectures that this file knows."""
    return model_type in MODEL_TYPES


def has_linear_biases(config: Any) -> bool:
    """Return True if a model's keys hold their positions, for linear biases."""
    return config.model_type in ("bloom", "mpt") or (
        config.model_type == "falcon" and bool(getattr(config, "alibi", False))
    )


def call_hook_from_own_attention(model: Any) -> None:
    """Let the attention of a model of these architectures go through the hook."""
    for module in list(model.modules()):
        replace = _REPLACEMENTS.get(type(module).__name__)
        if replace is not None:
            name, paged = replace(module)
            _switch(module, name, paged, model.config)
    select_attention(model, ATTENTION_NAME)


def select_attention(model: Any, name: str) -> None:
    """Let a model attend by the implementation of this name, `ATTENTION_NAME` or transformers' `eager`."""
    if not has_own_attention(model.config.model_type):
        model.set_attn_implementation(name)
        return
    # Such classes refuse any name they do not know.
    model.config._attn_implementation = name
    if name == ATTENTION_NAME and model.config.model_type == "mpt":
        model.config._attn_implementation = _register_mask()


def _register_mask() -> str:
    """Register an unused mask for models that require one, and return its name."""
    from transformers import AttentionMaskInterface  # slow to import: loaded models have paid for it

    def no_mask(*args: Any, **keywords: Any) -> Tensor:
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool)

    name = f"{ATTENTION_NAME}_masked"
    AttentionMaskInterface.register(name, no_mask)
    return name


def _switch(module: Any, name: str, paged: Callable[..., Any], config: Any) -> None:
    """Put `paged` in place of a method, for radixkv's attention only."""
    own = getattr(module, name)

    def chosen(*args: Any, **keywords: Any) -> Any:
        ours = config._attn_implementation.startswith(ATTENTION_NAME)
        return paged(*args, **keywords) if ours else own(*args, **keywords)

    setattr(module, name, chosen)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, slopes: Tensor | None = None
) -> Tensor:
    """Heads [1, H, T, D] -> [1, T, H, D]; `slopes` [H] are of the biases, in units of the scores."""
    if slopes is not None:
        position = current_positions().to(key.dtype)
        near = position % _STEP
        places = torch.stack(((position - near) / _STEP, near), -1)  # [T, 2]
        key = torch.cat((key, places.expand(*key.shape[:2], -1, -1)), -1)
        slope = (slopes / scale).to(query.dtype)
        factors = torch.stack((slope * _STEP, slope), -1)[:, None]  # [H, 1, 2]
        query = torch.cat((query, factors.expand(1, -1, query.shape[2], -1)), -1)
    return paged_attention_hook(module, query, key, value, None, scaling=scale)[0]


def _falcon(module: Any) -> _Replacement:
    slopes = _slopes(module, "build_alibi_tensor", module.num_heads) * module.inv_norm_factor

    def forward(
        hidden_states: Tensor,
        alibi: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        merged = module.query_key_value(hidden_states)
        rows = merged.shape[1]
        if module.new_decoder_architecture:
            # Keys and values as they are stored: not repeated for each query head of their group.
            grouped = merged.view(1, rows, module.num_kv_heads, -1, module.head_dim)
            query, key, value = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
        else:
            query, key, value = module._split_heads(merged)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        if alibi is None:
            rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
            query, key = rotate(query, key, *position_embeddings)  # type: ignore[misc]
        out = _attend(module, query, key, value, module.inv_norm_factor, None if alibi is None else slopes)
        return module.dense(out.reshape(1, rows, -1)), None

    return "forward", forward


def _gptj(module: Any) -> _Replacement:
    def attend(query: Tensor, key: Tensor, value: Tensor, *masks: Any) -> tuple[Tensor, None]:
        scale = 1.0 / float(module.scale_attn)
        query, key = query.to(value.dtype), key.to(value.dtype)
        return _attend(module, query, key, value, scale).transpose(1, 2), None

    return "_attn", attend


def _bloom(module: Any) -> _Replacement:
    slopes = _slopes(module, "build_alibi_tensor", module.num_heads)

    def forward(hidden_states: Tensor, residual: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, None]:
        query, key, value = module._reshape(module.query_key_value(hidden_states))
        out = _attend(module, query, key, value, module.inv_norm_factor, slopes)
        return module.dense(out.reshape(*hidden_states.shape)) + residual, None

    return "forward", forward


def _mpt(module: Any) -> _Replacement:
    build = sys.modules[type(module).__module__].build_mpt_alibi_tensor
    slopes = _beside(module, -build(module.n_heads, 2)[:, 0, 0])

    def forward(hidden_states: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, None]:
        merged = module.Wqkv(hidden_states)
        if module.clip_qkv:
            merged = merged.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        query, key, value = (
            part.view(1, part.shape[1], module.n_heads, -1).transpose(1, 2) for part in merged.chunk(3, dim=2)
        )
        out = _attend(module, query, key, value, module.softmax_scale, slopes)
        return module.out_proj(out.reshape(*hidden_states.shape)), None

    return "forward", forward


def _slopes(module: Any, name: str, num_heads: int) -> Tensor:
    """Return float32 [H] from the biases that the module's file computes for two positions."""
    build = getattr(sys.modules[type(module).__module__], name)
    biases: Tensor = build(torch.ones(1, 2), num_heads, torch.float32)
    return _beside(module, biases.view(num_heads, 2)[:, 1])


def _beside(module: Any, slopes: Tensor) -> Tensor:
    """Return a tensor in the memory of a module's weights: a step can't be recorded with copies in it."""
    parameter = next(module.parameters(), None)  # none where weights stay blocks, which a CPU has
    return slopes if parameter is None else slopes.to(parameter.device)


_REPLACEMENTS: dict[str, Callable[[Any], _Replacement]] = {
    "FalconAttention": _falcon,
    "GPTJAttention": _gptj,
    "CodeGenAttention": _gptj,
    "BloomAttention": _bloom,
    "MptAttention": _mpt,
}
