# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings whose frequencies depend on the length of a sequence, fixed for one length.

transformers chooses the frequencies of `dynamic` and `longrope` by the longest sequence of a batch. Keys in a
cache were turned by the frequencies of their day, and would not fit a longer request. So a model has the
frequencies of one length, that of the longest sequence it may get: all requests have the same, hot equals
cold, and within the original length they are those of any transformers batch.
"""

from __future__ import annotations

from typing import Any

from torch import nn

#: Kinds whose frequencies depend on the length.
LENGTH_DEPENDENT = ("dynamic", "longrope")


def fix_frequencies(model: nn.Module, max_length: int) -> tuple[str, ...]:
    """Give every rotary embedding of these kinds the frequencies of a sequence of `max_length` tokens.

    Returns:
        A phrase about the frequencies for each embedding whose original length that exceeds.
    """
    changed: dict[str, None] = {}
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            if kinds in LENGTH_DEPENDENT:
                changed |= _fix(module, kinds, None, max_length)
                module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            for layer_type in [name for name, kind in kinds.items() if kind in LENGTH_DEPENDENT]:
                changed |= _fix(module, kinds[layer_type], layer_type, max_length)
                module.rope_type = {**module.rope_type, layer_type: "default"}  # type: ignore[assignment, dict-item]
    return tuple(changed)


def _fix(module: Any, kind: str, layer_type: str | None, max_length: int) -> dict[str, None]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = module.config
    settings = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    original = int(
        config.max_position_embeddings if kind == "dynamic" else settings["original_max_position_embeddings"]
    )
    if max_length <= original:  # those that it has
        return {}
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    device = getattr(module, name).device
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, device, seq_len=max_length, layer_type=layer_type)
    module.register_buffer(name, frequencies, persistent=False)
    # longrope has two sets of frequencies, dynamic one for each length.
    return {f"{kind} beyond {original}" if kind == "longrope" else f"{kind} at {max_length}": None}
