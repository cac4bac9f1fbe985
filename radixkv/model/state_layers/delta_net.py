# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets: Qwen3-Next, Qwen3.5 and OLMo hybrid, and Kimi's with a decay for each channel."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from radixkv.model.state_layers.mixer import Mixer, negative_exp, wide_sigmoid, wide_softplus
from radixkv.model.state_layers.steps import mix


class _DeltaNet(Mixer):
    """Convolution of queries, keys and values, the delta rule, a gated norm."""

    def heads(self, mixed: Tensor, key_size: int, key_width: int, value_size: int) -> list[Tensor]:
        """Queries, keys and values [T, heads, size] of the convolved rows [T, C]."""
        m = self.module
        mixed = self.convolve(m.conv1d, mixed, m.activation)
        widths = [key_width, key_width, mixed.shape[-1] - 2 * key_width]
        sizes = [key_size, key_size, value_size]
        parts = zip(mixed.split(widths, dim=-1), sizes, strict=True)
        return [part.reshape(len(mixed), -1, size) for part, size in parts]


class GatedDeltaNet(_DeltaNet):
    """A decay for each head; families differ in their products."""

    @abstractmethod
    def products(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values in one row, the gate, the logits of beta and of the decay, all [T, _]."""

    def rows(self, x: Tensor) -> Tensor:
        m = self.module
        mixed, gate, b, a = self.products(x)
        q, k, v = self.heads(mixed, m.head_k_dim, m.key_dim, m.head_v_dim)
        decay = negative_exp(m.A_log) * wide_softplus(a, m.dt_bias)
        beta = wide_sigmoid(b)
        if getattr(m, "allow_neg_eigval", False):
            beta = beta * 2.0
        out = mix(self.layer, "delta", q, k, v, decay, beta)
        return self.leave(out.reshape(-1, m.head_v_dim), gate.reshape(-1, m.head_v_dim), len(x))

    def leave(self, out: Tensor, gate: Tensor, count: int) -> Tensor:
        """Norm and last product, of [T * heads, size]."""
        result: Tensor = self.module.out_proj(self.module.norm(out, gate).reshape(count, -1))
        return result


class QwenNextDeltaNet(GatedDeltaNet):
    """Products whose columns are grouped by key head."""

    def products(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        m = self.module
        parts = m.fix_query_key_value_ordering(m.in_proj_qkvz(x)[None], m.in_proj_ba(x)[None])
        q, k, v, gate, b, a = (part[0].reshape(len(x), -1) for part in parts)
        return torch.cat((q, k, v), dim=-1), gate, b, a


class QwenDeltaNet(GatedDeltaNet):
    """A product for each part."""

    def products(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        m = self.module
        return m.in_proj_qkv(x), m.in_proj_z(x), m.in_proj_b(x), m.in_proj_a(x)


class OlmoDeltaNet(GatedDeltaNet):
    """Separate products of queries, keys and values."""

    def products(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        m = self.module
        mixed = torch.cat((m.q_proj(x), m.k_proj(x), m.v_proj(x)), dim=-1)
        return mixed, m.g_proj(x), m.b_proj(x), m.a_proj(x)

    def leave(self, out: Tensor, gate: Tensor, count: int) -> Tensor:
        result: Tensor = self.module.o_proj(self.module.o_norm(out, gate).reshape(count, -1))
        return result


class KimiDeltaNet(_DeltaNet):
    """A decay for each channel, by a forget gate; the gate's product may have a low rank."""

    def rows(self, x: Tensor) -> Tensor:
        m = self.module
        mixed = torch.cat((m.q_proj(x), m.k_proj(x), m.v_proj(x)), dim=-1)
        q, k, v = self.heads(mixed, m.head_dim, m.qkv_dim, m.head_dim)
        decay = m.forget_gate(x[None])[0].float()
        out = mix(self.layer, "kda", q, k, v, decay, wide_sigmoid(m.b_proj(x)))
        gate = m.g_proj(x) if hasattr(m, "g_proj") else m.g_b_proj(m.g_a_proj(x))
        normed = m.o_norm(out, gate.view(out.shape))
        result: Tensor = m.o_proj(normed.reshape(len(x), -1))
        return result
