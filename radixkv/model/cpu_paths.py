"""The one place that knows the folder `cpu`: without it, models run on a CPU as transformers wrote them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from radixkv.errors import ConfigError


def rewrite_layers(model: nn.Module, quantization: str | None) -> None:
    """Replace layers of a model by faster or narrower ones, where this machine has them.

    Args:
        quantization: None (float32 weights are packed, on a CPU), or `int8`.

    Raises:
        ConfigError: int8 weights are asked for and can't be had.
    """
    try:
        from radixkv.model.cpu.rewrite import pack_layers, quantize_layers
    except ImportError as error:
        if quantization is not None:
            raise ConfigError(
                f"--quantization {quantization} needs radixkv.model.cpu, which is missing"
            ) from error
        return
    if quantization is not None:
        quantize_layers(model)
    else:
        pack_layers(model)


def make_thread_control() -> Callable[[], None] | None:
    """What to call before each step, so that fewer threads compute while other programs need the cores."""
    try:
        from radixkv.model.cpu.thread_control import ThreadControl
    except ImportError:
        return None
    return ThreadControl(torch.get_num_threads()).before_step
