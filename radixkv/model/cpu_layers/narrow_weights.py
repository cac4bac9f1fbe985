# SPDX-License-Identifier: Apache-2.0
"""Models whose weights have 16 bits, computed in float32: every other parameter is widened.

The products read bfloat16 or float16 weights as they are (`float_product`) and everything between them is
float32: closer to the exact result than transformers, which rounds each operator's output to the narrow type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

#: Of a model's weights, at most this part may have to be widened: they take twice the memory.
_MAX_WIDENED = 0.1


def mostly_linear(model: nn.Module) -> bool:
    """Return True if nearly all weights belong to linear layers and embeddings, none to fused experts."""
    rest = sum(tensor.numel() for _, _, tensor in _others(model))
    return rest <= _MAX_WIDENED * sum(parameter.numel() for parameter in model.parameters())


def widen_the_rest(model: nn.Module) -> None:
    """Make every other parameter and buffer float32, and embeddings return float32."""
    for owner, name, tensor in list(_others(model)):
        if isinstance(tensor, nn.Parameter):
            tensor.data = tensor.data.to(torch.float32)
        else:
            setattr(owner, name, tensor.to(torch.float32))
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_widened)


def _widened(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.to(torch.float32)


def _others(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Parameters and buffers of 16 bits that are neither a linear layer's nor an embedding's."""
    for module in model.modules():
        if type(module) is nn.Linear:
            continue
        own = [] if isinstance(module, nn.Embedding) else list(module.named_parameters(recurse=False))
        for name, tensor in [*own, *module.named_buffers(recurse=False)]:
            if tensor.dtype in (torch.bfloat16, torch.float16):
                yield module, name, tensor
