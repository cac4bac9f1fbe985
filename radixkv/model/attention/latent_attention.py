# SPDX-License-Identifier: Apache-2.0
"""Latent attention (MLA), absorbed: the cache holds a token's latent, not the heads made from it.

transformers' modules expand the latent to every head's key and value before they call attention::

    key_h = [W_uk,h latent | rotated]     value_h = W_uv,h latent        h = 1 .. H

Since q . (W_uk latent) = (W_uk^T q) . latent, and a weighted sum of W_uv latents is W_uv of the sum, the two
products can be taken on the side of the query and of the output. This leaves attention with one KV head,
whose key is (latent, rotated) and whose value is the key's first elements::

    query_h -> [W_uk,h^T nope_h | rotated_h]     attend     output_h -> W_uv,h output_h
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Stored heads are padded to a multiple of this.
_MULTIPLE = 8
#: Rows of a product in deterministic mode: its algorithm may depend on their number.
_FIXED_ROWS = 64


class Latents(nn.Module):
    """Stands for the product that expands latents (`kv_b_proj`), and takes it apart.

    Args:
        attention: the module, with the sizes that transformers gives them.

    Attributes:
        weight: [H * (nope + value), latent].
        key_size, value_size: of a stored key, and of the part of it that is the value.
        fixed_rows: compute in tiles of one height, so that no row depends on how many there are.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = attention.kv_b_proj.weight
        self.nope, self.rope = int(attention.qk_nope_head_dim), int(attention.qk_rope_head_dim)
        self.value, self.latent = int(attention.v_head_dim), int(attention.kv_lora_rank)
        self.fixed_rows = False
        self.value_size = -(-self.latent // _MULTIPLE) * _MULTIPLE
        self.key_size = -(-max(self.latent + self.rope, self.value_size) // _MULTIPLE) * _MULTIPLE
        self._padding = self.key_size - self.latent - self.rope

    def forward(self, latent: Tensor) -> Tensor:
        """All heads' keys and values, as the product that this stands for computes them."""
        return F.linear(latent, self.weight)

    def join(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """[1, 1, T, latent] and [1, 1, T, rope] -> the stored key [1, 1, T, K], and the value, part of it."""
        key = F.pad(torch.cat((latent, rotated), -1), (0, self._padding))
        return key, key[..., : self.value_size]

    def fold_query(self, query: Tensor) -> Tensor:
        """[T, H, nope + rope] -> [T, H, K]."""
        up, _ = self.weights()
        plain = self._product(query[..., : self.nope], up)
        return F.pad(torch.cat((plain, query[..., self.nope :]), -1), (0, self._padding))

    def fold_into(self, query: Tensor, folded: Tensor) -> None:
        """[T, H, nope + rope] -> the first elements of `folded` [T, H, K]; the others stay as they are."""
        up, _ = self.weights()
        self._product(query[..., : self.nope], up, folded[..., : self.latent])

    def fold_output(self, output: Tensor) -> Tensor:
        """[T, H, V] of attention -> [T, H, value]."""
        _, up = self.weights()
        return self._product(output[..., : self.latent], up.transpose(1, 2))

    def weights(self) -> tuple[Tensor, Tensor]:
        """Views [H, nope, latent] and [H, value, latent]."""
        both = self.weight.view(-1, self.nope + self.value, self.latent)
        return both[:, : self.nope], both[:, self.nope :]

    def _product(self, rows: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, H, n] and [H, n, m] -> [T, H, m]."""
        if out is None:
            out = rows.new_empty(*rows.shape[:2], weight.shape[2])
        if not self.fixed_rows:
            torch.bmm(rows.transpose(0, 1), weight, out=out.transpose(0, 1))
            return out
        count = len(rows)
        tiles = F.pad(rows, (0, 0, 0, 0, 0, -count % _FIXED_ROWS)).split(_FIXED_ROWS)
        whole = torch.cat([torch.bmm(t.transpose(0, 1), weight).transpose(0, 1) for t in tiles])
        return out.copy_(whole[:count])


def absorb_latents(model: nn.Module, attention_name: str) -> int:
    """Make every latent attention of a model hand latents to the attention of this name.

    Returns:
        How many there are.
    """
    count = 0
    for module in list(model.modules()):
        if hasattr(module, "expand_kv") and type(getattr(module, "kv_b_proj", None)) is nn.Linear:
            _absorb(module, attention_name)
            count += 1
    return count


def _absorb(attention: Any, attention_name: str) -> None:
    latents = Latents(attention)
    expand = attention.expand_kv

    def join(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        if attention.config._attn_implementation == attention_name:
            return latents.join(latent, rotated)
        result: tuple[Tensor, Tensor] = expand(latent, rotated)
        return result

    attention.kv_b_proj = latents
    attention.expand_kv = join
    if getattr(attention, "indexer", None) is not None or hasattr(attention, "skip_topk"):
        _attend_densely(attention, attention_name)


def _attend_densely(attention: Any, attention_name: str) -> None:
    """Leave out the choice of keys of a sparse attention: within its top-k, all keys are chosen.

    A module without an indexer of its own uses the choice of the layer before.
    """
    chooses = attention.indexer

    def before(module: Any, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        dense = module.config._attn_implementation == attention_name
        if chooses is not None:
            module.indexer = _NoChoice() if dense else chooses
        # It is cut to the form that an indexer takes before anything looks at it.
        mask = torch.zeros(1, 1, 1, 1) if dense else keywords.get("attention_mask")
        return args, keywords | {"attention_mask": mask}

    attention.register_forward_pre_hook(before, with_kwargs=True)


class _NoChoice(nn.Module):
    """An indexer whose choice is not used."""

    def forward(self, *args: Any, **keywords: Any) -> Tensor:
        return torch.zeros(1, 1, 1, dtype=torch.int64)
