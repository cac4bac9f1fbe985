# SPDX-License-Identifier: Apache-2.0
"""Queries and keys between their product and attention: norms per head, rotary embedding.

In torch's operators, rounding where transformers' own layers round: the path of backends without a kernel
for it, and the reference of such kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: `x / sqrt(mean(x ** 2) + eps) * weight`, in float32 except as stated here.

    Attributes:
        weight: [N]. offset: one is added to it.
        wide: the product with the weight is in float32 too; otherwise the row is rounded to its dtype first.
    """

    weight: torch.Tensor
    eps: float
    offset: bool = False
    wide: bool = False

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N] -> [..., N], in the dtype of `x`."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        weight = self.weight.to(torch.float32) + (1.0 if self.offset else 0.0)
        return (weight * (wide if self.wide else wide.to(x.dtype))).to(x.dtype)


@dataclass(frozen=True)
class Rotation:
    """Norms and rotary embedding of T tokens' queries and keys, before they are attended and stored.

    Attributes:
        cosines, sines: [T, R]; the first R elements of a head turn, in pairs R / 2 apart. Both halves of a
            row are the same.
        query_norm, key_norm: over each head, before it turns.
    """

    cosines: torch.Tensor
    sines: torch.Tensor
    query_norm: Norm | None = None
    key_norm: Norm | None = None

    def apply(self, heads: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """[T, heads, D] -> [T, heads, D], a copy."""
        if norm is not None:
            heads = norm.apply(heads)
        turned, rest = heads.split([self.cosines.shape[1], heads.shape[2] - self.cosines.shape[1]], dim=-1)
        first, second = turned.chunk(2, dim=-1)
        across = torch.cat([-second, first], dim=-1)
        turned = turned * self.cosines[:, None] + across * self.sines[:, None]
        return torch.cat([turned, rest], dim=-1)
