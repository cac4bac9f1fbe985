# SPDX-License-Identifier: Apache-2.0
"""Registry of transformers' modules with a state, and of the replacements for their forward."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from radixkv.model.state_layers.delta_net import KimiDeltaNet, OlmoDeltaNet, QwenDeltaNet, QwenNextDeltaNet
from radixkv.model.state_layers.linear import Lightning, RecurrentUnit
from radixkv.model.state_layers.mamba import Mamba, Mamba2, ZambaMamba
from radixkv.model.state_layers.mixer import Mixer
from radixkv.model.state_layers.short_conv import ShortConv

#: transformers' name of a model's module -> class of its state layers, and the mixer for their forward.
_FAMILIES: dict[str, tuple[str, type[Mixer]]] = {
    "lfm2": ("Lfm2ShortConv", ShortConv),
    "lfm2_moe": ("Lfm2MoeShortConv", ShortConv),
    "lfm3": ("Lfm3ShortConv", ShortConv),
    "qwen3_next": ("Qwen3NextGatedDeltaNet", QwenNextDeltaNet),
    "qwen3_5": ("Qwen3_5GatedDeltaNet", QwenDeltaNet),
    "qwen3_5_moe": ("Qwen3_5MoeGatedDeltaNet", QwenDeltaNet),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet", OlmoDeltaNet),
    "kimi_linear": ("KimiLinearDeltaAttention", KimiDeltaNet),
    "bailing_hybrid": ("BailingHybridDeltaAttention", KimiDeltaNet),
    "nemotron_h": ("NemotronHMamba2Mixer", Mamba2),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", Mamba2),
    "bamba": ("BambaMixer", Mamba2),
    "falcon_h1": ("FalconH1Mixer", Mamba2),
    "zamba2": ("Zamba2MambaMixer", Mamba2),
    "mamba2": ("Mamba2Mixer", Mamba2),
    "mamba": ("MambaMixer", Mamba),
    "falcon_mamba": ("FalconMambaMixer", Mamba),
    "jamba": ("JambaMambaMixer", Mamba),
    "zamba": ("ZambaMambaMixer", ZambaMamba),
    "minimax": ("MiniMaxLightningAttention", Lightning),
    "recurrent_gemma": ("RecurrentGemmaRecurrentBlock", RecurrentUnit),
}
#: Families with activations or norms of torch's own, whose bits depend on the number of rows.
_VARYING_BITS = {"lfm3", "zamba", "zamba2", "recurrent_gemma"}
_MIXERS = {
    (f"transformers.models.{name}.modeling_{name}", class_name): mixer
    for name, (class_name, mixer) in _FAMILIES.items()
}


#: Attention modules that several layers share, and that learn with each call which of them it is for.
_SHARED_ATTENTION = {
    (f"transformers.models.{name}.modeling_{name}", class_name)
    for name, class_name in (("zamba", "ZambaAttention"), ("zamba2", "Zamba2Attention"))
}


def keeps_states(config: Any) -> bool:
    """Return True if models of this transformers configuration have state layers that can be served."""
    return str(getattr(config, "model_type", "")).removesuffix("_text") in _FAMILIES


def has_fixed_bits(config: Any) -> bool:
    """Return False if a row's bits in a model with states depend on the rows beside it."""
    return str(getattr(config, "model_type", "")) not in _VARYING_BITS


def install_mixers(model: Any) -> int:
    """Replace the forward of a model's state layers, on each module; returns how many it has."""
    count = 0
    for name, module in model.named_modules():
        mixer = _MIXERS.get((type(module).__module__, type(module).__name__))
        if mixer is not None:
            module.forward = mixer(module, _layer_index(name, module))
            count += 1
        elif (type(module).__module__, type(module).__name__) in _SHARED_ATTENTION:
            module.register_forward_pre_hook(_note_layer, with_kwargs=True)
    return count


def _note_layer(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    module.layer_idx = keywords["layer_idx"]


def state_modules(model: Any) -> list[Any]:
    """The modules of a model whose forward `install_mixers` has replaced."""
    return [module for module in model.modules() if isinstance(module.__dict__.get("forward"), Mixer)]


@contextmanager
def own_forward(model: Any) -> Iterator[None]:
    """Let the state layers compute as transformers wrote them, inside the block."""
    taken = state_modules(model)
    mixers = [module.__dict__.pop("forward") for module in taken]
    try:
        yield
    finally:
        for module, mixer in zip(taken, mixers, strict=True):
            module.forward = mixer


def _layer_index(name: str, module: Any) -> int:
    """The module's layer; from its place in the list of layers where it does not know it."""
    index = getattr(module, "layer_idx", None)
    return int(re.findall(r"\.(\d+)\.", name)[0] if index is None else index)
