# SPDX-License-Identifier: Apache-2.0
"""State layers with few launches, for a GPU: at most 14 with a gated MLP::

norm                     residual_norm.py             1
first products           one, joined at load          1
convolution, decays      state/conv.py                1
heads                    state/chunks.py, ring.py     1 - 4    decodes: 1; chunks: 3; both, or in a graph: 4
norm, gate, rings        state/keep.py                1
last product                                          1
add to the residual, norm                             1
gate and up product, activation, down product         3
add to the residual                                   1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from radixkv.model.adapters.attachment import AdaptedLinear, SlotOf
from radixkv.model.decoder_layers import find_norm
from radixkv.model.gpu_layers.fused_attention import FusedAttention
from radixkv.model.gpu_layers.gated_mlp import fused_gated
from radixkv.model.gpu_layers.products import TiledProduct, can_merge, merged_linear
from radixkv.model.state_layers.head_parts import HeadParts
from radixkv.model.state_layers.mixer import Mixer, filter_of
from radixkv.model.state_layers.short_conv import ShortConv
from radixkv.model.step_context import current_step
from radixkv.model.traced_layers import LayerTrace, describe_heads
from radixkv_kernels import Norm
from radixkv_kernels.triton.residual_norm import add_and_norm_rows, add_rows, norm_rows


class _Names(NamedTuple):
    """Attributes of a decoder layer.

    Attributes:
        mixer: the module with a state; `mlps`: modules whose results are added up.
        norms: of the inputs of both; `norms_after`: of their results.
        attention: the module of heads that attend to what the mixer is given, too; empty: there is none.
        in_tuple: transformers' layer returns a tuple.
    """

    mixer: str
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    mlps: tuple[str, ...] = ("mlp",)
    norms_after: tuple[str, ...] = ()
    attention: str = ""
    in_tuple: bool = False


_LFM = _Names("conv", ("operator_norm", "ffn_norm"), ("feed_forward",))
#: Class of a decoder layer -> its attributes.
_LAYERS = {
    "Qwen3NextDecoderLayer": _Names("linear_attn"),
    "Qwen3_5DecoderLayer": _Names("linear_attn"),
    "Qwen3_5MoeDecoderLayer": _Names("linear_attn"),
    "OlmoHybridLinearAttentionDecoderLayer": _Names("linear_attn"),
    "KimiLinearDecoderLayer": _Names("self_attn"),
    "BailingHybridDecoderLayer": _Names("self_attn"),
    "BambaDecoderLayer": _Names(
        "mamba", ("input_layernorm", "pre_ff_layernorm"), ("feed_forward",), in_tuple=True
    ),
    "GraniteMoeHybridDecoderLayer": _Names("mamba", mlps=("block_sparse_moe", "shared_mlp")),
    "FalconH1DecoderLayer": _Names(
        "mamba",
        ("input_layernorm", "pre_ff_layernorm"),
        ("feed_forward",),
        attention="self_attn",
        in_tuple=True,
    ),
    "Zamba2MambaDecoderLayer": _Names("mamba", ("input_layernorm",), ()),
    "NemotronHBlock": _Names("mixer", ("norm",), ()),
    "Lfm2DecoderLayer": _LFM,
    "Lfm2MoeDecoderLayer": _LFM,
    "Lfm3DecoderLayer": _LFM._replace(norms_after=("post_operator_norm", "post_ffn_norm")),
}


@torch.no_grad()
def fuse_state_layers(model: Any, traces: Mapping[nn.Module, LayerTrace] | None = None) -> int:
    """Replace state layers, and the decoder layers that they are in; returns how many of the latter.

    Call it before norms are replaced by others.

    Args:
        traces: of layers that attend, too.
    """
    fuse_mixers(model)
    dtype = model.get_input_embeddings().weight.dtype
    count = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            names = _LAYERS.get(type(layer).__name__)
            mixer = None if names is None else getattr(layer, names.mixer, None)
            if names is None or not isinstance(mixer, FusedHeads | FusedShortConv):
                continue
            attention = None
            if names.attention:
                attention = _described_attention(layer, names.attention, traces or {})
                if attention is None:
                    continue
            before = [find_norm(getattr(layer, name), dtype) for name in names.norms]
            after = [_norm_after(getattr(layer, name), dtype) for name in names.norms_after]
            if None not in before and False not in after:
                setattr(parent, name, FusedStateLayer(layer, names, before, after, attention))
                count += 1
    return count


def _described_attention(layer: Any, name: str, traces: Mapping[nn.Module, LayerTrace]) -> Any:
    """Attention of heads beside a state layer, fused; None: it can't be described or has shares of ranks."""
    trace = traces.get(layer)
    parts = None if trace is None else describe_heads(trace, name)
    if parts is None or parts.joined is not None or getattr(layer, name).o_proj is not parts.output:
        return None
    return FusedAttention(parts) if len(parts.merged) == 1 or can_merge(parts.merged) else None


def _norm_after(module: nn.Module, dtype: torch.dtype) -> Any:
    """Describe the norm of a result; None: it is added as it is, False: it can't be described."""
    return None if isinstance(module, nn.Identity) else find_norm(module, dtype) or False


@torch.no_grad()
def fuse_mixers(model: Any) -> int:
    """Replace state layers of heads and short convolutions, one after the other; returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            mixer = child.__dict__.get("forward")
            if isinstance(mixer, ShortConv):
                setattr(parent, name, FusedShortConv(mixer))
                count += 1
            parts = mixer.parts() if isinstance(mixer, Mixer) else None
            if parts is not None:
                setattr(parent, name, FusedHeads(mixer, parts))
                count += 1
    return count


class FusedStateLayer(nn.Module):
    """A decoder layer: [1, T, W] -> [1, T, W]. The input's memory holds the result.

    Args:
        layer: transformers' layer, whose state layer has been replaced.
        before: norms of the state layer's input and of the MLPs', if it has some.
        after: norms of their results, or None for each.
        attention: fused, of heads beside the state layer; None: there is none.
    """

    def __init__(
        self,
        layer: Any,
        names: _Names,
        before: list[Any],
        after: list[Any],
        attention: FusedAttention | None = None,
    ) -> None:
        super().__init__()
        self._names, self._mixer, self._mlps = names, names.mixer, []
        self.norms: list[Norm] = before
        self.norms_after: list[Norm | None] = after or [None, None]
        self.multiplier = float(getattr(layer, "residual_multiplier", 1.0))
        self.block_type = getattr(layer, "block_type", None)
        self.attention = attention
        if attention is not None:
            self.attention_factors = (
                float(layer.attention_in_multiplier), float(layer.attn_out_multiplier)
            )  # fmt: skip
            self.mixer_factor = float(layer.ssm_out_multiplier)
        self.mlp_factor = 1.0
        # Modules keep their names, by which adapters find them.
        setattr(self, names.mixer, getattr(layer, names.mixer))
        for name in names.mlps:
            mlp = getattr(layer, name, None)
            if mlp is not None:
                made = fused_gated(mlp)
                setattr(self, name, made or mlp)
                self._mlps.append(name)
                if made is not None and len(names.mlps) == 1:
                    self.mlp_factor = made.take_factor()

    def adapt(self, slot_of: SlotOf) -> None:
        """See `radixkv.model.adapters.attachment`; modules within take care of themselves."""
        if self.attention is not None:
            self.attention.adapt_products(slot_of, self._names.attention)

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        transformer_hidden_states: Tensor | None = None,
        position_embeddings: Any = None,
        **__: Any,
    ) -> Any:
        """The layer, in the signature that transformers calls.

        `transformer_hidden_states` are Zamba 2's, added to the mixer's input alone.
        """
        states = hidden_states[0]
        given = states if transformer_hidden_states is None else states + transformer_hidden_states[0]
        first = norm_rows(given, self.norms[0])
        added = getattr(self, self._mixer)(first[None])[0]
        beside: Any = {"multiplier": self.multiplier}
        if self.attention is not None:
            factor, own = self.attention_factors
            attended = self.attention(first if factor == 1.0 else first * factor, position_embeddings)
            beside = {"multiplier": self.mixer_factor, "other": attended, "other_multiplier": own}
        if self._mlps:
            normed = add_and_norm_rows(states, added, self.norms[1], after=self.norms_after[0], **beside)
            parts = [getattr(self, name)(normed[None]) for name in self._mlps]
            # The scores of a router come second.
            added, *others = (part[0][0] if isinstance(part, tuple) else part[0] for part in parts)
            for other in others:
                added = added + other
            beside = {"multiplier": self.multiplier * self.mlp_factor}
        add_rows(states, added, after=self.norms_after[1], **beside)
        return (hidden_states, None) if self._names.in_tuple else hidden_states


class FusedHeads(nn.Module):
    """A module that stands for a transformers module of heads with a state: [1, T, W] -> [1, T, W].

    Args:
        mixer: its replacement so far; products stay its module's, where they can't be joined.
    """

    def __init__(self, mixer: Mixer, parts: HeadParts) -> None:
        super().__init__()
        module = mixer.module
        self.layer, self.parts, self.besides = mixer.layer, parts, mixer.besides
        products = [module.get_submodule(path) for path in parts.products]
        self._order = parts.order
        self._factors: tuple[float, Tensor] | None = parts.factors
        if parts.factors is not None and all(product.bias is None for product in products):
            self._factors = (1.0, parts.factors[1] * parts.factors[0])  # products are linear
        if can_merge(products):
            merged = merged_linear(products)
            ordered = _in_order(merged, parts.order)
            products = [merged if ordered is None else ordered]
            self._order = parts.order if ordered is None else None
        self.products = nn.ModuleList(products)
        self.second = nn.ModuleDict({name: module.get_submodule(path) for name, path in parts.second.items()})
        self.output: nn.Module = module.get_submodule(parts.output)

    def adapt(self, slot_of: SlotOf) -> None:
        """See `radixkv.model.adapters.attachment`."""
        parts = self.parts
        assert self._order is parts.order, "adapters change outputs in the order of the checkpoint"
        if len(self.products) == 1:
            self.products[0] = AdaptedLinear(self.products[0], slot_of(parts.products))
        else:
            for index, path in enumerate(parts.products):
                self.products[index] = AdaptedLinear(self.products[index], slot_of([path]))
        for name, path in parts.second.items():
            self.second[name] = AdaptedLinear(self.second[name], slot_of([path]))
        self.output = AdaptedLinear(self.output, slot_of([parts.output]))

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """The layer, in the signature that transformers calls."""
        x, parts = hidden_states[0], self.parts
        if self._factors is not None and self._factors[0] != 1.0:
            x = x * self._factors[0]
        rows = [product(x) for product in self.products]
        row = rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)
        if self._order is not None:
            row = row.index_select(-1, self._order)
        if self._factors is not None:
            row = row * self._factors[1]
        found = dict(zip(parts.widths, row.split(list(parts.widths.values()), dim=-1), strict=True))
        for name, product in self.second.items():
            found[name] = product(found[name])
        inputs = found["mixed"], found["gate"], found["logits"], found.get("betas")
        out = self.output(current_step().states.mix_gated(self.layer, parts.heads, *inputs))[None]
        return out if self.besides is None else (out, *self.besides)


class FusedShortConv(nn.Module):
    """A module that stands for LFM2's gated short convolution: [1, T, W] -> [1, T, W]."""

    def __init__(self, mixer: ShortConv) -> None:
        super().__init__()
        module = mixer.module
        self.layer = mixer.layer
        self.in_proj: nn.Module = module.in_proj
        self.out_proj: nn.Module = module.out_proj
        self.filter, self.bias = filter_of(module.conv), module.conv.bias

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The layer, in the signature that transformers calls."""
        row = self.in_proj(hidden_states[0])
        mixed = current_step().states.mix_factored(self.layer, self.filter, self.bias, row)
        out: Tensor = self.out_proj(mixed)
        return out[None]


def _in_order(product: Any, order: Tensor | None) -> nn.Module | None:
    """A product with its outputs in another order; None: its weights are of several forms."""
    if order is None:
        return cast(nn.Module, product)
    if isinstance(product, TiledProduct):
        return None if len(product.weights) > 1 else product.in_order(order)
    product.weight = nn.Parameter(product.weight[order], requires_grad=False)
    if product.bias is not None:
        product.bias = nn.Parameter(product.bias[order], requires_grad=False)
    return cast(nn.Module, product)
