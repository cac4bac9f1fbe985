# SPDX-License-Identifier: Apache-2.0
"""Selective state spaces: Mamba 2 (one decay a head) and Mamba (a decay for each channel and state)."""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv.model.state_layers.head_parts import HeadParts, find_gated_norm
from radixkv.model.state_layers.mixer import (
    SILU,
    Mixer,
    filter_of,
    negative_exp,
    wide_silu,
    wide_softplus,
)
from radixkv.model.state_layers.steps import mix
from radixkv_kernels.gated_heads import GatedHeads, GatedNorm


class Mamba2(Mixer):
    """Nemotron-H, Granite 4, Bamba, Falcon-H1, Zamba 2 and Mamba 2 itself."""

    def rows(self, x: Tensor) -> Tensor:
        m = self.module
        if hasattr(m, "ssm_in_multiplier"):  # Falcon-H1
            projected = m.in_proj(x * m.ssm_in_multiplier) * m.mup_vector[0]
        else:
            projected = m.in_proj(x)
        inner = m.num_heads * m.head_dim
        shared = m.n_groups * m.ssm_state_size
        gate, mixed, dt = projected.split([inner, inner + 2 * shared, m.num_heads], dim=-1)
        mixed = self.convolve(m.conv1d, mixed, m.activation)
        values, b, c = mixed.split([inner, shared, shared], dim=-1)
        values = values.reshape(len(x), m.num_heads, m.head_dim)
        b, c = (each.reshape(len(x), m.n_groups, m.ssm_state_size) for each in (b, c))
        step = wide_softplus(dt, m.dt_bias).clamp(*m.time_step_limit)
        decay = step * negative_exp(m.A_log)
        out = mix(self.layer, "ssd", c, b, values * step[..., None].to(values.dtype), decay)
        out = (out + m.D[:, None] * values).reshape(1, len(x), inner)
        if getattr(m, "mamba_rms_norm", True):
            out = m.norm(out, gate[None])
        else:
            out = out * wide_silu(gate)
        result: Tensor = m.out_proj(out[0].to(x.dtype))
        return result

    def parts(self) -> HeadParts | None:
        m = self.module
        inner, shared = m.num_heads * m.head_dim, m.n_groups * m.ssm_state_size
        has_norm = getattr(m, "mamba_rms_norm", True)
        norm = find_gated_norm(m.norm, inner) if has_norm else GatedNorm(None, 0.0, m.head_dim)
        if norm is None or m.activation not in SILU:
            return None
        heads = GatedHeads(
            kind="ssd",
            groups=m.n_groups,
            heads=m.num_heads,
            key_size=m.ssm_state_size,
            value_size=m.head_dim,
            filter=filter_of(m.conv1d),
            bias=m.conv1d.bias,
            rate=negative_exp(m.A_log.detach()),
            logit_bias=m.dt_bias.detach().float(),
            norm=norm,
            limits=m.time_step_limit,
            skip=m.D.detach().float(),
        )
        widths = {"gate": inner, "mixed": inner + 2 * shared, "logits": m.num_heads}
        is_scaled = hasattr(m, "ssm_in_multiplier")  # Falcon-H1
        factors = (m.ssm_in_multiplier, m.mup_vector[0, 0]) if is_scaled else None
        return HeadParts(("in_proj",), widths, "out_proj", heads, factors=factors)


class Mamba(Mixer):
    """Mamba, Falcon Mamba (norms without weights) and Jamba (norms)."""

    def rows(self, x: Tensor) -> Tensor:
        m = self.module
        mixed, gate = m.in_proj(x).chunk(2, dim=-1)
        mixed = self.convolve(m.conv1d, mixed, m.activation)
        size = m.ssm_state_size
        step, b, c = m.x_proj(mixed).split([m.time_step_rank, size, size], dim=-1)
        if hasattr(m, "dt_layernorm"):
            step, b, c = m.dt_layernorm(step), m.b_layernorm(b), m.c_layernorm(c)
        dt = wide_softplus(m.dt_proj(step), None)
        rate = negative_exp(m.A_log)
        out = mix(self.layer, "scan", mixed, dt, b[:, None], c[:, None], constants=(rate,))
        out = (out + mixed * m.D) * wide_silu(gate)
        result: Tensor = m.out_proj(out.to(x.dtype))
        return result


class ZambaMamba(Mixer):
    """Zamba: heads with products of their own; values and gates alternate in the first product."""

    def rows(self, x: Tensor) -> Tensor:
        m, count = self.module, len(x)
        mixed, gate = m.in_proj(x).view(count, -1, 2).unbind(-1)
        mixed = self.convolve(m.conv1d, mixed.contiguous(), m.activation)
        heads = mixed.view(count, m.n_mamba_heads, m.mamba_head_dim)
        parts = torch.einsum("thd,hpd->thp", heads, m.x_proj_weight)
        step, b, c = parts.split([m.time_step_rank, m.ssm_state_size, m.ssm_state_size], dim=-1)
        step = torch.einsum("thr,hdr->thd", step, m.dt_proj_weight).reshape(count, -1)
        dt = wide_softplus(step, m.dt_proj_bias.reshape(-1))
        rate = negative_exp(m.A_log).reshape(-1, m.ssm_state_size)
        out = mix(self.layer, "scan", mixed, dt, b, c, constants=(rate,))
        out = (out + mixed * m.D.reshape(-1)) * wide_silu(gate)
        result: Tensor = m.out_proj(out.to(x.dtype))
        return result
