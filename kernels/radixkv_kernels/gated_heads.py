# SPDX-License-Identifier: Apache-2.0
"""GatedHeads: a layer of heads with states, from its first product to the input of its last one.

::

    first product -> C channels -> convolution, silu -> queries, keys, values ┐
                  -> logits     -> decays, betas or steps                     ┤-> heads, skip -> norm, gate
                  -> gate       ----------------------------------------------┘

Gated delta nets, KDA and Mamba 2 differ in what the logits mean, and in the norm. A backend that computes all
of it (`StateBackend.mix_gated`) needs three to eight launches where torch's operators need thirty.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GatedNorm:
    """RMSNorm and gate of the heads' outputs, of each `width` numbers of a row.

    Attributes:
        weight: [width] or one for each number of a row; None: there is no norm, only the gate.
        silu: the gate is silu(gate), else sigmoid(gate).
        gate_first: the gate comes before the norm.
        wide: the product with the weight is in float32; otherwise normed numbers are rounded first.
    """

    weight: Tensor | None
    eps: float
    width: int
    silu: bool = True
    gate_first: bool = False
    wide: bool = False


@dataclass(frozen=True)
class GatedHeads:
    """Sizes and constants of a layer.

    Attributes:
        kind: `delta`, `kda` or `ssd`, see `radixkv_kernels.states`.
        groups, heads, key_size, value_size: of the state; `kda` has as many groups as heads.
        filter: [taps, C], of the convolution; `bias` [C], or None. Channels are queries, keys and values
            (`ssd`: values, keys and queries) of all heads.
        rate: float32 [heads], negative: factor of the decay's logits after softplus.
        logit_bias: float32, added to the decay's logits; [heads], `kda`: [heads * key_size].
        limits: smallest and largest softplus (`ssd`, where it is the step that values are multiplied by).
        bound: the decay is bound * sigmoid(-rate * logit) instead, if it is not zero.
        beta_scale: factor of sigmoid(beta's logit).
        skip: float32 [heads], the share of its value that a head's output gets; None: none.
    """

    kind: str
    groups: int
    heads: int
    key_size: int
    value_size: int
    filter: Tensor
    bias: Tensor | None
    rate: Tensor
    logit_bias: Tensor
    norm: GatedNorm
    limits: tuple[float, float] = (0.0, float("inf"))
    bound: float = 0.0
    beta_scale: float = 1.0
    skip: Tensor | None = None

    @property
    def key_width(self) -> int:
        """Channels of all keys."""
        return self.groups * self.key_size

    @property
    def value_width(self) -> int:
        """Channels of all values, and numbers of an output row."""
        return self.heads * self.value_size

    @property
    def num_logits(self) -> int:
        """Logits of the decay in a row."""
        return self.heads * (self.key_size if self.kind == "kda" else 1)
