# SPDX-License-Identifier: Apache-2.0
"""Decoder layers with fewer, larger kernels, for a GPU.

A transformers layer launches about forty kernels. These launch, on the same weights::

    norm                            | q, k and v as one product
    head norms, rotary, cache write | attention (one to three)  | output product
    add to the residual, norm       | gate and up as one product
    activation times up             | down product              | add to the residual

Kernels between products work row by row and round where transformers' operators round.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from radixkv.model.adapters.attachment import AdaptedLinear, SlotOf
from radixkv.model.decoder_layers import (
    DecoderParts,
    LatentParts,
    describe_layer,
    find_norm,
    pack_whole_weights,
    replace_layers,
)
from radixkv.model.gpu_layers.experts import replace_experts
from radixkv.model.gpu_layers.fused_attention import FusedAttention, FusedLatentAttention
from radixkv.model.gpu_layers.gated_mlp import replace_gated
from radixkv.model.gpu_layers.products import group_of, merged_linear
from radixkv.model.gpu_layers.state_layers import FusedStateLayer, fuse_state_layers
from radixkv.model.parallel.over_ranks import SummedOverRanks
from radixkv.model.traced_layers import LayerTrace, confirms, describe_traced, trace_layers
from radixkv_kernels import Norm
from radixkv_kernels.triton.gated import gate_rows
from radixkv_kernels.triton.residual_norm import add_and_norm_rows, add_rows, norm_rows

logger = logging.getLogger("radixkv")


@torch.no_grad()
def fuse_layers(model: Any) -> int:
    """Replace decoder layers, with states or without, and norms that the kernels know, one after the other.

    So no more than one layer has its weights twice. Layers replaced earlier stay.
    Routed experts are replaced in layers of any family.

    Returns:
        Number of replaced decoder layers that attend alone.
    """
    pack_whole_weights(model)
    dtype = model.get_input_embeddings().weight.dtype
    failures: list[Exception] = []
    try:
        traces = _traces_of_others(model)
    except Exception as error:
        failures, traces = [error], {}
    fuse_state_layers(model, traces)  # a trace has states for transformers' layers alone
    family = str(model.config.get_text_config(decoder=True).model_type)

    def fused(parts: DecoderParts) -> nn.Module | None:
        return FusedGpuLayer(parts) if can_fuse(parts) else None

    ranks = next((each.communicator for each in model.modules() if isinstance(each, SummedOverRanks)), None)

    def agreed(holds: bool) -> bool:
        """True if it holds on all ranks, which compute a trial together."""
        holds_everywhere = holds if ranks is None else bool(ranks.smallest(int(holds)))
        if holds and not holds_everywhere:
            logger.warning("A layer of %s is not fused: another rank's trace shows something else", family)
        return holds_everywhere

    def attempted(step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:
            failures.append(error)
            return None

    def described(layer: nn.Module) -> nn.Module | None:
        trace = traces.get(layer)
        parts = None if trace is None else describe_traced(trace, family)
        return None if parts is None else fused(parts)

    def fused_by_trace(layer: nn.Module) -> nn.Module | None:
        made = attempted(lambda: described(layer))
        trace = traces.pop(layer, None)
        if not agreed(made is not None):
            return None
        assert trace is not None
        return made if agreed(bool(attempted(lambda: confirms(trace, made)))) else None

    known = set(traces)
    count = replace_layers(model, fused, fused_by_trace)
    if failures:
        reason = f"{type(failures[0]).__name__}: {failures[0]}"
        logger.warning("Layers of %s are not fused: tracing them failed (%s)", family, reason)
    replace_experts(model)  # a trial of a layer would interpret kernels of experts, where there is no GPU
    for layers in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
        if any(isinstance(layer, FusedGpuLayer | FusedStateLayer) or layer in known for layer in layers):
            replace_gated(layers, model.get_input_embeddings().weight.device)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            norm = find_norm(child, dtype)
            if norm is not None and norm.weight is not None and norm.weight.dim() == 1:
                setattr(parent, name, FusedNorm(norm))
    return count


def _traces_of_others(model: nn.Module) -> dict[nn.Module, LayerTrace]:
    """What layers of classes that are not known by name compute."""
    layers = (each for each in model.modules() if isinstance(each, nn.ModuleList))
    others = {
        layer
        for layer in itertools.chain.from_iterable(layers)
        if not isinstance(layer, FusedGpuLayer | FusedStateLayer) and describe_layer(layer) is None
    }
    # Traces of layers that are known would keep their weights.
    return {layer: trace for layer, trace in trace_layers(model).items() if layer in others} if others else {}


class FusedGpuLayer(nn.Module):
    """A layer that stands for a transformers layer, for which `can_fuse` holds.

    It takes what transformers passes to its own and returns the same: [1, T, H] -> [1, T, H], in a tuple
    where transformers returns more. The residual is added in place: the input's memory holds the result.
    """

    def __init__(self, parts: DecoderParts) -> None:
        super().__init__()
        attention: FusedAttention | FusedLatentAttention
        if isinstance(parts.attention, LatentParts):
            attention = FusedLatentAttention(parts.attention)
            if parts.attention.indexer is not None:  # where adapters look for its products
                self.add_module(parts.names[0], nn.ModuleDict({"indexer": parts.attention.indexer}))
        else:
            attention = FusedAttention(parts.attention)
        self.attention = attention
        self.gated = None if parts.gated is None else parts.gated.without_products()
        if parts.gated is None:
            self.add_module(parts.names[1], parts.mlp)
        else:
            self.gate_up: nn.Module = merged_linear(parts.gated.gate_up)
            self.down: nn.Module = parts.gated.down
        self.norms = (parts.before_attention, parts.before_mlp)
        self.norms_after = (parts.after_attention, parts.after_mlp)
        self.multiplier = parts.multiplier
        self.communicator = parts.communicator
        self.is_parallel = parts.is_parallel
        self.factor = parts.factor
        self.beside = None if parts.beside is None else parts.beside.without_modules()
        if parts.beside is not None:
            self.router, self.experts = parts.beside.router, parts.beside.experts
        self.per_layer = parts.per_layer
        if parts.per_layer is not None:
            self.per_layer_input_gate = parts.per_layer.gate
            self.per_layer_projection = parts.per_layer.projection
        self._names, self._besides = parts.names, parts.besides

    def adapt(self, slot_of: SlotOf) -> None:
        """See `radixkv.model.adapters.attachment`."""
        own, mlp = self._names
        self.attention.adapt_products(slot_of, own)
        if self.gated is not None:
            *gates, down = self.gated.names
            self.gate_up = AdaptedLinear(self.gate_up, slot_of([f"{mlp}.{name}" for name in gates]))
            self.down = AdaptedLinear(self.down, slot_of([f"{mlp}.{down}"]))

    def forward(
        self,
        hidden_states: torch.Tensor,
        per_layer_input: torch.Tensor | None = None,
        *,
        position_embeddings: Any = None,
        **_: Any,
    ) -> Any:
        """The layer, in the signature that transformers calls."""
        self._add(hidden_states, per_layer_input, position_embeddings)
        return hidden_states if self._besides is None else (hidden_states, *self._besides)

    def _add(
        self, hidden_states: torch.Tensor, per_layer_input: torch.Tensor | None, position_embeddings: Any
    ) -> None:
        states, factor = hidden_states[0], self.factor if self.per_layer is None else None
        # Other modules than products take no rounded rows.
        group, mlp_group = self.attention.group, 0 if self.gated is None else group_of(self.gate_up)
        if self.is_parallel and group != mlp_group:
            group = 0
        first: Any = states if self.norms[0] is None else norm_rows(states, self.norms[0], group=group)
        added = self._sum(self.attention(first, position_embeddings))
        if self.is_parallel:
            add_rows(states, added, multiplier=self.multiplier, other=self._mlp(first), factor=factor)
            return
        options: Any = {"multiplier": self.multiplier, "after": self.norms_after[0]}
        second: Any = states
        if self.norms[1] is None:
            add_rows(states, added, **options)
        else:
            second = add_and_norm_rows(states, added, self.norms[1], group=mlp_group, **options)
        options = {"multiplier": self.multiplier, "after": self.norms_after[1], "factor": factor}
        added = self._mlp(second)
        if self.beside is not None:
            added = norm_rows(added, self.beside.after_mlp)
            _, weights, ids = self.router(states)
            rows = norm_rows(states, self.beside.before)
            add_rows(added, self.experts(rows, ids, weights), after=self.beside.after)
        add_rows(states, added, **options)
        if self.per_layer is not None:
            assert per_layer_input is not None
            gates = self.per_layer.activation(self.per_layer_input_gate(states)) * per_layer_input[0]
            added = self.per_layer_projection(gates)
            add_rows(states, added, after=self.per_layer.norm, factor=self.factor)

    def _mlp(self, normed: Any) -> torch.Tensor:
        if self.gated is None:
            added = getattr(self, self._names[1])(normed[None])
            if isinstance(added, tuple):  # the scores of a router come second
                added = added[0]
            added = added.reshape(normed.shape)
        else:
            options: Any = {"group": group_of(self.down), "factor": self.gated.gate_factor}
            gates = gate_rows(self.gate_up(normed), self.gated.activation, **options)
            added = self._sum(self.down(gates))
            if self.gated.factor != 1.0:
                added = added * self.gated.factor
        return added

    def _sum(self, added: torch.Tensor) -> torch.Tensor:
        return added if self.communicator is None else self.communicator.add_up(added)


class FusedNorm(nn.Module):
    """An RMSNorm as one kernel: [..., N] -> [..., N]."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norm = norm

    @property
    def weight(self) -> torch.Tensor | None:
        """The norm's: some layers convert their input to its dtype."""
        return self.norm.weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return norm_rows(states.reshape(-1, states.shape[-1]), self.norm).view_as(states)


def can_fuse(parts: DecoderParts) -> bool:
    """Return True if all products share a floating-point dtype and the kernels support all between them."""
    attention = parts.attention
    groups = [attention.inputs, () if parts.gated is None else parts.gated.gate_up]
    linears = [*attention.inputs, *attention.others, *groups[1]]
    if parts.gated is not None:
        linears.append(parts.gated.down)
    biases = [{linear.bias is None for linear in group} for group in groups]
    return len({linear.weight.dtype for linear in linears}) == 1 and all(len(kinds) <= 1 for kinds in biases)
