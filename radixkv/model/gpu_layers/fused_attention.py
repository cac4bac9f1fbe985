# SPDX-License-Identifier: Apache-2.0
"""Attention of a fused layer: products and the kernels between them, for heads and for latents (MLA)::

heads      q, k and v as one product | norms, rotary, cache write | attention | output product

latents    q (or its down product) and kv down as one product | norm | q up
           fold queries into the latent | rotary, norm of latents, cache write | attention
           unfold outputs | output product
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from radixkv.model.adapters.attachment import AdaptedLinear, SlotOf
from radixkv.model.attention.query_scale import QueryScale
from radixkv.model.decoder_layers import AttentionParts, LatentParts
from radixkv.model.gpu_layers.products import group_of, merged_linear
from radixkv.model.step_context import current_positions, current_step
from radixkv_kernels import LatentRotation, QueryGrowth, Rotation
from radixkv_kernels.triton.gated import gate_heads
from radixkv_kernels.triton.residual_norm import norm_rows


class FusedAttention(nn.Module):
    """Attention of heads: [T, H] or rows in 8 bits -> [T, H], before any sum over ranks."""

    def __init__(self, parts: AttentionParts) -> None:
        super().__init__()
        self.parts = parts.without_products()
        self.merged: nn.Module = merged_linear(parts.merged)
        self.output: nn.Module = parts.output

    @property
    def group(self) -> int:
        """See `group_of`."""
        return group_of(self.merged)

    def adapt_products(self, slot_of: SlotOf, name: str) -> None:
        """See `radixkv.model.adapters.attachment`; `name` is that of transformers' module."""
        inputs, output = self.parts.names
        self.merged = AdaptedLinear(self.merged, slot_of([f"{name}.{each}" for each in inputs]))
        self.output = AdaptedLinear(self.output, slot_of([f"{name}.{output}"]))

    def forward(self, rows: Any, angles: Any) -> torch.Tensor:
        """`angles` are what transformers hands to a layer for its rotary embedding."""
        parts, merged = self.parts, self.merged(rows)
        scoring = {
            "scale": parts.scale, "window": parts.window, "softcap": parts.softcap, "sinks": parts.sinks
        }  # fmt: skip
        turn = parts.turning.turn(angles, merged, parts.head_size)
        rotation = Rotation(
            *(turn, parts.query_norm, parts.key_norm, parts.value_norm),
            gated=parts.gated,
            shared=parts.shared,
            turns_first=parts.turns_first,
            key_factor=parts.key_factor,
            growth=growth_of(parts.query_scale),
        )
        heads = (parts.num_heads, parts.num_kv_heads, parts.head_size)
        attended: torch.Tensor = current_step().attend_merged(
            parts.layer_index, merged, rotation, heads, **scoring
        )
        if parts.gated:
            gate_heads(attended, rotation.gates(merged, parts.num_heads, parts.head_size))
        out: torch.Tensor = self.output(attended.reshape(len(merged), -1))
        return out


def growth_of(scale: QueryScale | None) -> QueryGrowth | None:
    """How queries of the running step grow; None: they don't."""
    return None if scale is None else scale.at(current_positions())


class FusedLatentAttention(nn.Module):
    """Absorbed attention of latents: [T, H] or rows in 8 bits -> [T, H], before any sum over ranks."""

    def __init__(self, parts: LatentParts) -> None:
        super().__init__()
        self.parts = parts.without_products()
        self.merged: nn.Module = merged_linear(parts.inputs)
        self.query_up: nn.Module | None = parts.query_up
        self.latents = parts.latents
        self.output: nn.Module = parts.output
        self._widths = [each.out_features for each in parts.inputs]

    @property
    def group(self) -> int:
        """See `group_of`."""
        return group_of(self.merged)

    def adapt_products(self, slot_of: SlotOf, name: str) -> None:
        """See `radixkv.model.adapters.attachment`; `name` is that of transformers' module."""
        inputs, up, output = self.parts.names
        self.merged = AdaptedLinear(self.merged, slot_of([f"{name}.{each}" for each in inputs]))
        if self.query_up is not None:
            self.query_up = AdaptedLinear(self.query_up, slot_of([f"{name}.{up}"]))
        self.output = AdaptedLinear(self.output, slot_of([f"{name}.{output}"]))

    def forward(self, rows: Any, angles: Any) -> torch.Tensor:
        """`angles` are what transformers hands to a layer for its rotary embedding."""
        parts, latents, step = self.parts, self.latents, current_step()
        query, down, *gates = self.merged(rows).split(self._widths, dim=-1)
        if self.query_up is not None:
            assert parts.query_norm is not None
            query = self.query_up(norm_rows(query, parts.query_norm, group=group_of(self.query_up)))
        query = query.unflatten(1, (-1, latents.nope + latents.rope))
        turn = parts.turning.turn(angles, down, latents.rope)
        growth = growth_of(parts.query_scale)
        rotation = LatentRotation(turn, parts.latent_norm, latents.latent, latents.rope, growth)
        if step.long_chunks is not None:
            attended = self._attend_long(query, down, rotation, step)
        else:
            folded = query.new_empty(*query.shape[:2], latents.key_size)
            latents.fold_into(query, folded)
            out = step.attend_latents(parts.layer_index, query, folded, down, rotation, scale=parts.scale)
            attended = latents.fold_output(out)
        if gates:
            attended = attended.contiguous()
            gate_heads(attended, gates[0].unsqueeze(-1).expand_as(attended))
        result: torch.Tensor = self.output(attended.reshape(len(query), -1))
        return result

    def _attend_long(
        self, query: torch.Tensor, down: torch.Tensor, rotation: LatentRotation, step: Any
    ) -> torch.Tensor:
        """A step with chunks whose latents are expanded, see `LongChunks`."""
        plain = query[..., : self.latents.nope]
        if rotation.growth is not None:
            plain = rotation.growth.apply(plain)
        turned = torch.cat([plain, rotation.turned(query)], -1)
        key = rotation.key(down, self.latents.key_size)
        value = key[..., : self.latents.value_size]
        out: torch.Tensor = step.long_chunks.attend(
            step, self.parts.layer_index, self.latents, turned, key, value, scale=self.parts.scale
        )
        return out
