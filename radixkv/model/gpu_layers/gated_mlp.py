# SPDX-License-Identifier: Apache-2.0
"""Gated MLPs in three launches, wherever they are: gate and up as one product, activation, down product."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.model.adapters.attachment import AdaptedLinear, SlotOf
from radixkv.model.decoder_layers import GatedParts, describe_gated
from radixkv.model.gpu_layers.products import can_merge, group_of, merged_linear
from radixkv_kernels.triton.gated import gate_rows

_TRIED_ROWS = 4
#: Largest distance of a trial's rows, over their size, that rounding explains.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}


class FusedGated(nn.Module):
    """A gated MLP: [.., W] -> [.., W]."""

    def __init__(self, parts: GatedParts) -> None:
        super().__init__()
        self.parts = parts.without_products()
        self.gate_up: nn.Module = merged_linear(parts.gate_up)
        self.down: nn.Module = parts.down

    def adapt(self, slot_of: SlotOf) -> None:
        """See `radixkv.model.adapters.attachment`."""
        *gate_up, down = self.parts.names
        self.gate_up = AdaptedLinear(self.gate_up, slot_of(gate_up))
        self.down = AdaptedLinear(self.down, slot_of([down]))

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        parts, group = self.parts, group_of(self.down)
        gates = gate_rows(self.gate_up(rows), parts.activation, group=group, factor=parts.gate_factor)
        added: Tensor = self.down(gates)
        if parts.factor != 1.0:
            added = added * parts.factor
        return added.view(hidden_states.shape)

    def take_factor(self) -> float:
        """The factor of the result, which the caller will apply."""
        factor, self.parts = self.parts.factor, replace(self.parts, factor=1.0)
        return factor


def fused_gated(mlp: nn.Module) -> FusedGated | None:
    """A gated MLP of transformers, fused; None: it is none, or its products are not all here as they are."""
    parts = describe_gated(mlp)
    if parts is None or getattr(mlp, parts.names[-1]) is not parts.down:  # shared with other ranks
        return None
    return FusedGated(parts) if len(parts.gate_up) == 1 or can_merge(parts.gate_up) else None


@torch.no_grad()
def replace_gated(layers: nn.Module, device: torch.device) -> int:
    """Replace gated MLPs anywhere in layers on a device, where a trial agrees; returns how many."""
    count = 0
    for parent in list(layers.modules()):
        for name, child in list(parent.named_children()):
            made = fused_gated(child) if _takes_rows_alone(child) else None
            if made is not None and _computes_the_same(made, child, device):
                setattr(parent, name, made)
                count += 1
    return count


def _takes_rows_alone(mlp: nn.Module) -> bool:
    """Return False for a module that is told more than its rows, such as its layer (Zamba 2)."""
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(mlp.forward).parameters.values()
    return not isinstance(mlp, FusedGated) and sum(each.kind in named for each in parameters) == 1


def _computes_the_same(made: FusedGated, mlp: Any, device: torch.device) -> bool:
    product: Any = made.gate_up
    rows = torch.randn(1, _TRIED_ROWS, product.in_features, generator=torch.Generator().manual_seed(0))
    rows = rows.to(device, product.weight.dtype)
    wanted, found = mlp(rows), made(rows)
    if not isinstance(wanted, Tensor) or wanted.shape != found.shape:
        return False
    distance = (found.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-9)
    return bool(distance <= _TOLERANCES.get(rows.dtype, 1e-4))
