# SPDX-License-Identifier: Apache-2.0
"""Mixer: the replacement of the forward of a transformers module that keeps a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from radixkv.errors import ModelLoadError
from radixkv.model.state_layers.head_parts import HeadParts
from radixkv.model.state_layers.steps import mix

#: Names of silu.
SILU = ("silu", "swish")


class Mixer(ABC):
    """The forward of one module; called as transformers calls the module.

    Args:
        module: the transformers module, whose weights are used.
        layer: number of its layer in the model.

    Raises:
        ModelLoadError: the module has a setting that the kernels do not know.
    """

    #: Values that the module's own forward returns besides the output; None: the output alone.
    besides: tuple[None, ...] | None = None

    def __init__(self, module: Any, layer: int) -> None:
        self.module, self.layer = module, layer
        self._filter: Tensor | None = None

    def __call__(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Any:
        out = self.rows(hidden_states[0])[None]
        return out if self.besides is None else (out, *self.besides)

    @abstractmethod
    def rows(self, x: Tensor) -> Tensor:
        """Output rows [T, W] of a step's input rows [T, W]."""

    def parts(self) -> HeadParts | None:
        """Describe the layer for kernels that compute all between its products; None: they don't know it."""
        return None

    def convolve(self, conv: Any, x: Tensor, activation: str | None) -> Tensor:
        """The layer's causal convolution of rows [T, C]."""
        if activation not in (None, *SILU):
            raise ModelLoadError(
                f"layer {self.layer} has a convolution with the activation {activation}; radixkv knows silu"
            )
        if self._filter is None or self._filter.dtype != conv.weight.dtype:
            self._filter = filter_of(conv)
        constants = (self._filter, conv.bias, None if activation is None else "silu")
        return mix(self.layer, "conv", x, constants=constants)


def filter_of(conv: Any) -> Tensor:
    """The weights [taps, C] of a causal convolution."""
    filter: Tensor = conv.weight[:, 0].detach().t().contiguous()
    return filter


def wide_softplus(x: Tensor, bias: Tensor | None) -> Tensor:
    """softplus(x + bias), rounded once.

    In float32, torch computes whole vectors and the remainder with different functions, so that a value would
    depend on its place in the batch.
    """
    x = x.double()
    return F.softplus(x if bias is None else x + bias.double()).float()


def wide_sigmoid(x: Tensor) -> Tensor:
    """sigmoid(x), rounded once; see `wide_softplus`."""
    return torch.sigmoid(x.double()).float()


def wide_silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) in the dtype of x, rounded once; see `wide_softplus`."""
    return F.silu(x.double()).to(x.dtype)


def negative_exp(log: Tensor) -> Tensor:
    """-exp(log), float32."""
    return -log.double().exp().float()
