# SPDX-License-Identifier: Apache-2.0
"""Tensors of 16 bits that no packed layer has, and layers that are not packed: their weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def widen_the_rest(model: nn.Module) -> None:
    """Make every other parameter and buffer float32, and embeddings return float32."""
    for owner, name, tensor in list(narrow_tensors(model)):
        if isinstance(tensor, nn.Parameter):
            tensor.data = tensor.data.to(torch.float32)
        else:
            setattr(owner, name, tensor.to(torch.float32))
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_widened)


def _widened(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.to(torch.float32)


def narrow_tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Parameters and buffers of 16 bits that are neither a linear layer's nor an embedding's."""
    for module in model.modules():
        if type(module) is nn.Linear:
            continue
        own = [] if isinstance(module, nn.Embedding) else list(module.named_parameters(recurse=False))
        for name, tensor in [*own, *module.named_buffers(recurse=False)]:
            if tensor.dtype in (torch.bfloat16, torch.float16):
                yield module, name, tensor
