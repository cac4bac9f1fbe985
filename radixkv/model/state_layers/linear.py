# SPDX-License-Identifier: Apache-2.0
"""Lightning attention (MiniMax) and the real-gated linear recurrent unit (RecurrentGemma)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixkv.model.state_layers.mixer import Mixer, wide_sigmoid, wide_softplus
from radixkv.model.state_layers.steps import mix


class Lightning(Mixer):
    """Linear attention with a constant decay for each head."""

    besides = (None,)

    def rows(self, x: Tensor) -> Tensor:
        m = self.module
        mixed = m.act_fn(m.qkv_proj(x)).reshape(len(x), m.num_attention_heads, 3 * m.head_dim)
        q, k, v = mixed.split(m.head_dim, dim=-1)
        decay = -m.slope_rate.float().reshape(1, -1).expand(len(x), -1)
        out = mix(self.layer, "ssd", q, k, v, decay).reshape(1, len(x), -1)
        out = m.norm(out)[0] * wide_sigmoid(m.output_gate(x)).to(out.dtype)
        result: Tensor = m.out_proj(out)
        return result


class RecurrentUnit(Mixer):
    """Convolution and gated recurrence, beside a branch that gates its output."""

    besides = (None,)

    def __call__(self, hidden_states: Tensor, position_ids: Tensor, *arguments: Any, **keywords: Any) -> Any:
        self._first = position_ids[0] == 0
        return super().__call__(hidden_states)

    def rows(self, x: Tensor) -> Tensor:
        m, unit = self.module, self.module.rg_lru
        gate = m.act_fn(m.linear_y(x))
        mixed = self.convolve(m.conv_1d, m.linear_x(x), None)
        heads = mixed.reshape(len(x), unit.num_attention_heads, unit.block_width)

        def gates(weight: Tensor, bias: Tensor) -> Tensor:
            return wide_sigmoid((torch.einsum("thi,hij->thj", heads, weight) + bias).reshape(len(x), -1))

        entered = gates(unit.input_gate_weight, unit.input_gate_bias)
        kept = gates(unit.recurrent_gate_weight, unit.recurrent_gate_bias)
        log = (-8.0 * kept * wide_softplus(unit.recurrent_param, None)).double()
        first = self._first[:, None]
        # The state before a sequence's first token counts for nothing.
        a = torch.where(first, 0.0, log.exp())
        share = torch.where(first, 1.0, (1 - (2 * log).exp()).sqrt())
        out = mix(self.layer, "lru", a.float(), (mixed * entered * share).float()).to(x.dtype)
        result: Tensor = m.linear_out(out * gate)
        return result
