# SPDX-License-Identifier: Apache-2.0
"""HeadParts: a state layer of heads, as kernels that compute all between its products see it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from radixkv_kernels.gated_heads import GatedHeads, GatedNorm

_TRIED_ROWS = 8


@dataclass(frozen=True)
class HeadParts:
    """Products of a layer of heads, and what is computed between them.

    Attributes:
        products: paths of linear layers within the module, whose outputs follow one another in a row.
        widths: part of a row, `mixed`, `gate`, `logits` or `betas` as in `StateBackend.mix_gated` -> its
            numbers, in the order of the row.
        output: path of the last linear layer.
        heads: all between them.
        order: outputs of the products in the order of the row; None: as they are.
        second: parts that another linear layer makes of what the row has, and its path.
        factors: of the layer's input and of the row.
    """

    products: tuple[str, ...]
    widths: dict[str, int]
    output: str
    heads: GatedHeads
    order: Tensor | None = None
    second: dict[str, str] = field(default_factory=dict)
    factors: tuple[float, Tensor] | None = None


@torch.no_grad()
def find_gated_norm(module: Any, width: int) -> GatedNorm | None:
    """Describe a norm with a gate by its results on random rows; None: it computes something else.

    Args:
        width: numbers of a row.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    size = int(getattr(module, "group_size", width // int(getattr(module, "n_groups", 1))))
    generator = torch.Generator().manual_seed(0)
    x, gate = (
        (3 * torch.randn(_TRIED_ROWS, width, generator=generator)).to(weight.device, weight.dtype)
        for _ in range(2)
    )
    wanted = module(x, gate)
    for silu, first, wide in itertools.product((True, False), (False, True), (False, True)):
        norm = GatedNorm(weight.detach(), eps, size, silu, first, wide)
        if wanted.dtype == x.dtype and torch.equal(_apply(norm, x, gate), wanted):
            return norm
    return None


def _apply(norm: GatedNorm, x: Tensor, gate: Tensor) -> Tensor:
    """The norm of rows [T, N], in torch's operators."""
    assert norm.weight is not None
    dtype, factor = x.dtype, (F.silu if norm.silu else torch.sigmoid)(gate.float())
    wide = x.float()
    if norm.gate_first:
        wide = wide * factor
    grouped = wide.unflatten(1, (-1, norm.width))
    normed = (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + norm.eps)).flatten(1)
    repeated = norm.weight.repeat(normed.shape[1] // len(norm.weight))
    out = normed * repeated.float() if norm.wide else normed.to(dtype) * repeated
    return (out if norm.gate_first else out * factor).to(dtype)
