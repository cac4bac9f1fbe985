# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values between their product and attention: norms, rotary embedding.

In torch's operators, rounding where transformers' own layers round: the path of backends without a kernel
for it, and the reference of such kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """A norm of rows: `x / sqrt(mean(x ** 2) + eps) * weight`, in float32 except as stated here.

    Attributes:
        weight: [N], or [heads, N] where each head has its own; None: there is none.
        offset: one is added to the weight.
        wide: the product with the weight is in float32 too; otherwise the row is rounded to its dtype first.
        centered: the row's mean is subtracted before (a layer norm).
        bias: [N], added at the end; None: there is none.
    """

    weight: Tensor | None
    eps: float
    offset: bool = False
    wide: bool = False
    centered: bool = False
    bias: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N], in the dtype of `x`."""
        wide = x.to(torch.float32)
        if self.centered:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            weight = self.weight.to(torch.float32) + (1.0 if self.offset else 0.0)
            wide = weight * (wide if self.wide else wide.to(x.dtype))
        if self.bias is not None:
            wide = wide + self.bias.to(torch.float32)
        return wide.to(x.dtype)


class Pairs(Enum):
    """Pairing of a head's elements that turn together, and the places of the turned ones."""

    #: Element i with i + R / 2.
    HALVES = 0
    #: Element 2 i with 2 i + 1.
    NEIGHBOURS = 1
    #: Element 2 i with 2 i + 1, which become elements i and i + R / 2.
    GATHERED = 2


@dataclass(frozen=True)
class RotaryTurn:
    """A rotary embedding of T tokens: the first `size` elements of what is turned, in pairs.

    Attributes:
        cosines, sines: [T, at least size / 2], one for each pair, in any layout with equal strides.
        size: even; 0: nothing turns.
        pairs: see `Pairs`.
        wide: products are added before they are rounded.
    """

    cosines: Tensor
    sines: Tensor
    size: int
    pairs: Pairs = Pairs.HALVES
    wide: bool = False

    def apply(self, heads: Tensor) -> Tensor:
        """[T, heads, D] -> [T, heads, D], a copy."""
        if not self.size:
            return heads.clone()
        half = self.size // 2
        turned, rest = heads[..., : self.size], heads[..., self.size :]
        if self.pairs is Pairs.HALVES:
            x, y = turned[..., :half], turned[..., half:]
        else:
            x, y = turned[..., 0::2], turned[..., 1::2]
        cosines, sines = (each[:, None, :half] for each in (self.cosines, self.sines))
        if self.wide:
            x, y, cosines, sines = (each.to(torch.float32) for each in (x, y, cosines, sines))
        first, second = x * cosines - y * sines, y * cosines + x * sines
        if self.pairs is Pairs.NEIGHBOURS:
            both = torch.stack([first, second], dim=-1).flatten(-2)
        else:
            both = torch.cat([first, second], dim=-1)
        return torch.cat([both.to(heads.dtype), rest], dim=-1)


@dataclass(frozen=True)
class QueryGrowth:
    """Factor of queries by their position: `1 + scale * log(1 + floor((position + first) / length))`.

    Attributes:
        positions: [T], of any integer type.
        first: added to positions.
        rounded: the factor is rounded to the dtype of queries before it multiplies them.
    """

    positions: Tensor
    scale: float
    length: float
    first: float = 0.0
    rounded: bool = False

    def apply(self, query: Tensor) -> Tensor:
        """[T, ..] -> [T, ..]."""
        steps = torch.floor((self.positions.to(torch.float32) + self.first) / self.length)
        factors = torch.log1p(steps) * self.scale + 1.0
        factors = factors.view(-1, *(1 for _ in query.shape[1:]))
        return query * factors.to(query.dtype) if self.rounded else (query * factors).to(query.dtype)


@dataclass(frozen=True)
class Rotation:
    """Norms and rotation of T tokens' queries, keys and values, from one product to attention.

    One row of the product has queries, keys and values, one head after the other::

        | query 0 | gate 0 | query 1 | gate 1 | ..  | key 0 | ..  | value 0 | ..  |
                    gated                                         unless shared

    Attributes:
        turn: of queries and keys, after their norms.
        query_norm, key_norm, value_norm: over each head; over all heads at once where there is a weight for
            each of their elements.
        gated: each query is followed by a gate of its size, which is left alone.
        shared: values are keys, neither normed by `key_norm` nor turned.
        turns_first: norms of queries and keys, over each head, come after they turn.
        key_factor: of keys, first of all.
        growth: of queries, last of all; None: they don't grow.
    """

    turn: RotaryTurn
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    value_norm: Norm | None = None
    gated: bool = False
    shared: bool = False
    turns_first: bool = False
    key_factor: float = 1.0
    growth: QueryGrowth | None = None

    def width(self, num_heads: int, num_kv_heads: int, size: int) -> int:
        """Elements of a row of the product."""
        return (num_heads * (1 + self.gated) + num_kv_heads * (2 - self.shared)) * size

    def split(self, merged: Tensor, num_heads: int, num_kv_heads: int, size: int) -> tuple[Tensor, ...]:
        """[T, width] -> queries, keys and values, [T, heads, size], and the gates, or None, as views."""
        heads = merged.view(len(merged), -1, size)
        first = num_heads * (1 + self.gated)
        query, key = heads[:, :first], heads[:, first : first + num_kv_heads]
        value = key if self.shared else heads[:, first + num_kv_heads :]
        return query[:, :: 1 + self.gated], key, value

    def gates(self, merged: Tensor, num_heads: int, size: int) -> Tensor:
        """[T, width] -> the gates [T, heads, size], a view."""
        return merged.view(len(merged), -1, size)[:, 1 : 2 * num_heads : 2]

    def apply(
        self, merged: Tensor, num_heads: int, num_kv_heads: int, size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[T, width] -> queries, keys and values as attention takes them, [T, heads, size]."""
        query, key, value = self.split(merged, num_heads, num_kv_heads, size)
        if self.value_norm is not None:
            value = _normed(value, self.value_norm)
        if self.key_factor != 1.0:
            key = key * self.key_factor
        if self.turns_first:
            query, key = self.turn.apply(query), self.turn.apply(key)
        query, key = (
            heads if norm is None else _normed(heads, norm)
            for heads, norm in ((query, self.query_norm), (key, self.key_norm))
        )
        if not self.turns_first:
            query, key = self.turn.apply(query), self.turn.apply(key)
        return query if self.growth is None else self.growth.apply(query), key, value


@dataclass(frozen=True)
class LatentRotation:
    """Norms and rotation of T tokens' queries and latents, from products to absorbed attention (MLA).

    A row of queries has all heads; a row of latents has what they share, the stored key once it is normed
    and turned::

        | plain 0 | turned 0 | plain 1 | turned 1 | ..          | latent | turned |

    Attributes:
        turn: of the parts that turn, whole, or of none.
        norm: of the latent.
        latent, rest: elements of the latent and of a part that turns.
        growth: of queries, folded ones, too; None: they don't grow.
    """

    turn: RotaryTurn
    norm: Norm
    latent: int
    rest: int
    growth: QueryGrowth | None = None

    def key(self, latents: Tensor, size: int) -> Tensor:
        """[T, latent + rest] -> keys as they are stored, [T, 1, size], zeros at their ends."""
        latent = self.norm.apply(latents[:, : self.latent])[:, None]
        parts = [latent, self.turn.apply(latents[:, None, self.latent :])]
        return torch.nn.functional.pad(torch.cat(parts, -1), (0, size - self.latent - self.rest))

    def turned(self, query: Tensor) -> Tensor:
        """[T, heads, plain + rest] -> the turned parts, [T, heads, rest]."""
        turned = self.turn.apply(query[..., -self.rest :])
        return turned if self.growth is None else self.growth.apply(turned)


def _normed(heads: Tensor, norm: Norm) -> Tensor:
    """[T, heads, D], normed over each head or over all of them."""
    if norm.weight is not None and norm.weight.dim() == 1 and norm.weight.numel() > heads.shape[2]:
        return norm.apply(heads.flatten(1)).view_as(heads)
    return norm.apply(heads)
