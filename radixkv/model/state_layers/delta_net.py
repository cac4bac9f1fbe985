# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets: Qwen3-Next, Qwen3.5 and OLMo hybrid, and Kimi's with a decay for each channel."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from radixkv.model.state_layers.head_parts import HeadParts, find_gated_norm
from radixkv.model.state_layers.mixer import (
    SILU,
    Mixer,
    filter_of,
    negative_exp,
    wide_sigmoid,
    wide_softplus,
)
from radixkv.model.state_layers.steps import mix
from radixkv_kernels.gated_heads import GatedHeads


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
    """A decay for each head; families differ in their products.

    Attributes:
        product_names: paths of the first products, whose outputs are queries, keys, values, the gate, and the
            logits of beta and of the decay.
        norm_name, output_name: of the norm with a gate and the last product.
    """

    product_names: tuple[str, ...]
    norm_name, output_name = "norm", "out_proj"

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
        normed = getattr(self.module, self.norm_name)(out, gate)
        result: Tensor = getattr(self.module, self.output_name)(normed.reshape(count, -1))
        return result

    def order(self) -> Tensor | None:
        """Outputs of the products in their order in a row; None: as they are."""
        return None

    def parts(self) -> HeadParts | None:
        m = self.module
        norm = find_gated_norm(getattr(m, self.norm_name), m.head_v_dim)
        if norm is None or m.activation not in SILU:
            return None
        heads = GatedHeads(
            kind="delta",
            groups=m.num_k_heads,
            heads=m.num_v_heads,
            key_size=m.head_k_dim,
            value_size=m.head_v_dim,
            filter=filter_of(m.conv1d),
            bias=m.conv1d.bias,
            rate=negative_exp(m.A_log.detach()),
            logit_bias=m.dt_bias.detach().float(),
            norm=norm,
            beta_scale=2.0 if getattr(m, "allow_neg_eigval", False) else 1.0,
        )
        widths = {"mixed": m.conv_dim, "gate": m.value_dim, "betas": m.num_v_heads, "logits": m.num_v_heads}
        return HeadParts(self.product_names, widths, self.output_name, heads, self.order())


class QwenNextDeltaNet(GatedDeltaNet):
    """Products whose columns are grouped by key head."""

    product_names = ("in_proj_qkvz", "in_proj_ba")

    def order(self) -> Tensor:
        m = self.module
        width = m.in_proj_qkvz.out_features
        columns = torch.arange(width + m.in_proj_ba.out_features, device=m.A_log.device)[None, None]
        parts = m.fix_query_key_value_ordering(columns[..., :width], columns[..., width:])
        return torch.cat([part.reshape(-1) for part in parts])

    def products(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        m = self.module
        parts = m.fix_query_key_value_ordering(m.in_proj_qkvz(x)[None], m.in_proj_ba(x)[None])
        q, k, v, gate, b, a = (part[0].reshape(len(x), -1) for part in parts)
        return torch.cat((q, k, v), dim=-1), gate, b, a


class QwenDeltaNet(GatedDeltaNet):
    """A product for each part."""

    product_names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    def products(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        m = self.module
        return m.in_proj_qkv(x), m.in_proj_z(x), m.in_proj_b(x), m.in_proj_a(x)


class OlmoDeltaNet(GatedDeltaNet):
    """Separate products of queries, keys and values."""

    product_names = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
    norm_name, output_name = "o_norm", "o_proj"

    def products(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        m = self.module
        mixed = torch.cat((m.q_proj(x), m.k_proj(x), m.v_proj(x)), dim=-1)
        return mixed, m.g_proj(x), m.b_proj(x), m.a_proj(x)


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

    def parts(self) -> HeadParts | None:
        m, gate = self.module, self.module.forget_gate
        norm = find_gated_norm(m.o_norm, m.head_dim)
        if norm is None or m.activation not in SILU:
            return None
        is_bounded = getattr(gate, "safe_gate", False)
        heads = GatedHeads(
            kind="kda",
            groups=m.num_heads,
            heads=m.num_heads,
            key_size=m.head_dim,
            value_size=m.head_dim,
            filter=filter_of(m.conv1d),
            bias=m.conv1d.bias,
            rate=negative_exp(gate.A_log.detach().reshape(-1)),
            logit_bias=gate.dt_bias.detach().float(),
            norm=norm,
            bound=float(gate.lower_bound) if is_bounded else 0.0,
        )
        # Low ranks: the first of two products has its place in the row.
        first = {
            "logits": ("forget_gate.f_proj", "forget_gate.f_a_proj", "forget_gate.f_b_proj"),
            "gate": ("g_proj", "g_a_proj", "g_b_proj"),
        }
        second = {name: paths[2] for name, paths in first.items() if _find(m, paths[0]) is None}
        paths = {name: each[1 if name in second else 0] for name, each in first.items()}
        widths = {"mixed": m.conv_dim, "betas": m.num_heads}
        widths |= {name: m.get_submodule(path).out_features for name, path in paths.items()}
        products = ("q_proj", "k_proj", "v_proj", "b_proj", *paths.values())
        return HeadParts(products, widths, "o_proj", heads, second=second)


def _find(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
