# SPDX-License-Identifier: Apache-2.0
"""Models built without memory for their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_INITIALISERS = frozenset(name for name in vars(nn.init) if name.endswith("_") and name[0] != "_")


class _EmptyOnMeta(TorchFunctionMode):
    """`torch.empty` makes tensors on the meta device, which initialisers of `torch.nn.init` leave alone."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and given.get("device") is None:
            given["device"] = "meta"
        elif getattr(func, "__name__", None) in _INITIALISERS:  # transformers puts its own in their place
            tensor = given["tensor"] if "tensor" in given else args[0]
            if tensor.is_meta:
                return tensor
        return func(*args, **given)


def build_without_memory(build: Callable[[], nn.Module]) -> nn.Module:
    """Call `build`, and return its model with all parameters on the meta device.

    Buffers get their values. With all of a model on the meta device, rotary frequencies would be computed
    there, for which torch imports sympy: a twentieth of a start.
    """
    with _EmptyOnMeta():
        model = build()
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                moved.setdefault(id(parameter), nn.Parameter(parameter.to("meta"), requires_grad=False))
                setattr(module, name, moved[id(parameter)])
    return model
