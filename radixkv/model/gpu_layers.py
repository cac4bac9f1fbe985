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

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from radixkv.model.adapters.attachment import AdaptedLinear, SlotOf
from radixkv.model.decoder_layers import DecoderParts, find_norm, pack_whole_weights, replace_layers
from radixkv.model.gpu_experts import replace_experts
from radixkv.model.gpu_products import TiledProduct, group_of
from radixkv.model.step_context import current_step
from radixkv_kernels import Norm, Rotation
from radixkv_kernels.triton.gated import gate_rows
from radixkv_kernels.triton.residual_norm import add_and_norm_rows, add_rows, norm_rows


@torch.no_grad()
def fuse_layers(model: Any) -> int:
    """Replace decoder layers and norms that the kernels know, one after the other.

    So no more than one layer has its weights twice. Layers replaced earlier stay.
    Routed experts are replaced in layers of any family.

    Returns:
        Number of replaced decoder layers.
    """
    pack_whole_weights(model)
    replace_experts(model)
    dtype = model.get_input_embeddings().weight.dtype
    count = replace_layers(model, lambda parts: FusedGpuLayer(parts) if can_fuse(parts) else None)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            norm = find_norm(child, dtype)
            if norm is not None:
                setattr(parent, name, FusedNorm(norm))
    return count


class FusedGpuLayer(nn.Module):
    """A layer that stands for a transformers layer, for which `can_fuse` holds.

    It takes what transformers passes to its own and returns the same: [1, T, H] -> [1, T, H]. The residual is
    added in place: the input's memory holds the result.
    """

    def __init__(self, parts: DecoderParts) -> None:
        super().__init__()
        self.attention = parts.attention
        self.merged: nn.Module = merged_linear(parts.attention.merged)
        self.output: nn.Module = parts.attention.output
        self.gated = parts.gated
        if parts.gated is None:
            self.mlp = parts.mlp
        else:
            self.gate_up: nn.Module = merged_linear(parts.gated.gate_up)
            self.down: nn.Module = parts.gated.down
        self.norms = (parts.before_attention, parts.before_mlp)
        self.norms_after = (parts.after_attention, parts.after_mlp)
        self.multiplier = parts.multiplier
        self.communicator = parts.communicator

    def adapt(self, slot_of: SlotOf) -> None:
        """See `radixkv.model.adapters.attachment`."""
        is_one = len(self.attention.merged) == 1
        inputs = ["self_attn.qkv_proj"] if is_one else [f"self_attn.{name}_proj" for name in "qkv"]
        self.merged = AdaptedLinear(self.merged, slot_of(inputs))
        self.output = AdaptedLinear(self.output, slot_of(["self_attn.o_proj"]))
        if self.gated is not None:
            is_one = len(self.gated.gate_up) == 1
            gates = ["mlp.gate_up_proj"] if is_one else ["mlp.gate_proj", "mlp.up_proj"]
            self.gate_up = AdaptedLinear(self.gate_up, slot_of(gates))
            self.down = AdaptedLinear(self.down, slot_of(["mlp.down_proj"]))

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """The layer, in the signature that transformers calls."""
        states = hidden_states[0]
        merged = self.merged(norm_rows(states, self.norms[0], group=group_of(self.merged)))
        added = self._sum(self.output(self._attend(merged, position_embeddings, current_step())))
        normed = add_and_norm_rows(
            states,
            added,
            self.norms[1],
            multiplier=self.multiplier,
            after=self.norms_after[0],
            group=0 if self.gated is None else group_of(self.gate_up),
        )
        add_rows(states, self._mlp(normed), multiplier=self.multiplier, after=self.norms_after[1])
        return hidden_states

    def _attend(
        self, merged: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None, step: Any
    ) -> torch.Tensor:
        """[T, (Hq + 2 Hkv) D] -> [T, Hq D]."""
        parts = self.attention
        scoring = {
            "scale": parts.scale, "window": parts.window, "softcap": parts.softcap, "sinks": parts.sinks
        }  # fmt: skip
        if parts.rotates:
            assert position_embeddings is not None
            cosines, sines = (each[0] for each in position_embeddings)
            if parts.half_angles:
                cosines, sines = (torch.cat([each, each], dim=1) for each in (cosines, sines))
            rotation = Rotation(cosines, sines, parts.query_norm, parts.key_norm)
            attended: torch.Tensor = step.attend_merged(parts.layer_index, merged, rotation, **scoring)
        else:
            heads = merged.view(len(merged), -1, parts.head_size)
            query, key, value = heads.split([parts.num_heads, parts.num_kv_heads, parts.num_kv_heads], dim=1)
            attended = step.attend(parts.layer_index, query, key, value, **scoring)
        return attended.reshape(len(merged), -1)

    def _mlp(self, normed: Any) -> torch.Tensor:
        if self.gated is None:
            added = self.mlp(normed[None])
            if isinstance(added, tuple):  # the scores of a router come second
                added = added[0]
            added = added[0]
        else:
            gates = gate_rows(self.gate_up(normed), self.gated.activation, group=group_of(self.down))
            added = self._sum(self.down(gates))
        return added

    def _sum(self, added: torch.Tensor) -> torch.Tensor:
        return added if self.communicator is None else self.communicator.add_up(added)


class FusedNorm(nn.Module):
    """An RMSNorm as one kernel: [..., N] -> [..., N]."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norm = norm

    @property
    def weight(self) -> torch.Tensor:
        """The norm's: some layers convert their input to its dtype."""
        return self.norm.weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return norm_rows(states.reshape(-1, states.shape[-1]), self.norm).view_as(states)


def merged_linear(parts: Sequence[nn.Linear]) -> nn.Module:
    """Layers with the same input as one, their outputs one after the other."""
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, TiledProduct) for part in parts):
        return TiledProduct.merged(parts, parts[0].weight.dtype)
    first, width = parts[0], sum(part.out_features for part in parts)
    has_bias = first.bias is not None
    merged = nn.Linear(first.in_features, width, bias=has_bias, device="meta")
    merged.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]), requires_grad=False)
    if has_bias:
        merged.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]), requires_grad=False)
    return merged


def can_fuse(parts: DecoderParts) -> bool:
    """Return True if all products share a floating-point dtype and the kernels support all between them."""
    linears = [*parts.attention.merged, parts.attention.output]
    if parts.gated is not None:
        linears += [*parts.gated.gate_up, parts.gated.down]
    biases = [
        {linear.bias is None for linear in group}
        for group in (parts.attention.merged, () if parts.gated is None else parts.gated.gate_up)
    ]
    return (
        len({linear.weight.dtype for linear in linears}) == 1
        and all(len(kinds) <= 1 for kinds in biases)
        and (parts.attention.rotates or parts.attention.query_norm is None)
    )
