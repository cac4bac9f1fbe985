# SPDX-License-Identifier: Apache-2.0
"""Reduce a loaded model to one rank's share: its KV groups, its columns of each MLP.

                            on a CPU                            on a GPU
    queries, keys, values   the rows of its heads               the same
    output of attention     some rows, of all ranks' heads      the columns of its heads; added up
    gate and up             the rows of its columns             the same
    down                    some rows, of all ranks' columns    its columns; added up
    products of a layer     some rows; the states themselves    the same
      with states             are whole on every rank
    latents                 whole; the rows of its query heads  the same

A CPU's ranks compute each sum as one rank does: logits are the same, bit for bit. Sums that are added up over
ranks are not: in float32 they are as near to the exact result, but differ by 0.002 at worst, where logits
reach 40. Experts are added up everywhere: each by its columns, or with weights in blocks of a file, which a
column does not end, whole experts each on one rank.

A KV head and the query heads that share it stay together; latents are one KV head that every rank keeps.
Layers that differ in heads are each split by their own. Rank 0 adds the biases of summed products.
Norms, embeddings and routers are whole on every rank; the output layer and the tower of a model that sees are
rank 0's alone. All this comes before weights are packed, quantised or fused, so that these see nothing but
smaller layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from radixkv.errors import ConfigError
from radixkv.model.attention.attention_hook import PlainCausalStep
from radixkv.model.attention.latent_attention import Latents
from radixkv.model.decoder_layers import WholeExperts, WholeProduct
from radixkv.model.loading.file_pages import address_ranges, release_file_pages
from radixkv.model.loading.model_checks import architecture_name
from radixkv.model.parallel.communicator import Communicator
from radixkv.model.parallel.over_ranks import (
    GatheredOverRanks,
    JoinedOverRanks,
    NoLogits,
    NormedOverRanks,
    SummedOverRanks,
)
from radixkv.model.parallel.split_families import (
    SPLIT_MODEL_TYPES,
    ProductNames,
    check_family,
    check_num_ranks,
)
from radixkv.model.state_layers.registry import state_modules
from radixkv.model.step_context import call_model
from radixkv_kernels import KVGroup

if TYPE_CHECKING:
    from radixkv.model.loading.loader import LoadedModel


_DRY_RUN_TOKENS = 7
#: Columns of a state layer's product that are worth a message from each rank.
_MIN_COLUMNS = 64
#: Columns of an MLP are given out in bundles of this size, if there are enough: widths that kernels like.
_BUNDLE = 16


@dataclass(frozen=True, slots=True)
class Share:
    """Part of rank `rank` of `size` ranks. An uneven split makes the first ranks' parts larger.

    >>> [Share(rank, 2).heads(3) for rank in range(2)]
    [range(0, 2), range(2, 3)]
    >>> [Share(rank, 3).columns(100) for rank in range(3)]
    [range(0, 36), range(36, 68), range(68, 100)]
    """

    rank: int
    size: int

    def heads(self, count: int) -> range:
        """Its KV heads, of `count` of them."""
        least, more = divmod(count, self.size)
        start = self.rank * least + min(self.rank, more)
        return range(start, start + least + (self.rank < more))

    def all_heads(self, count: int) -> list[range]:
        """Each rank's KV heads."""
        return [Share(rank, self.size).heads(count) for rank in range(self.size)]

    def all_columns(self, count: int) -> list[range]:
        """Each rank's columns."""
        return [Share(rank, self.size).columns(count) for rank in range(self.size)]

    def columns(self, count: int) -> range:
        """Its columns of an MLP that is `count` wide."""
        bundle = _BUNDLE if count >= _BUNDLE * self.size else 1
        own = self.heads(count // bundle)
        # The incomplete bundle goes to the first rank.
        rest = count % bundle
        return range(own.start * bundle + (rest if self.rank else 0), own.stop * bundle + rest)


@torch.no_grad()
def shard_model(loaded: LoadedModel, communicator: Communicator) -> LoadedModel:
    """Change a model into one rank's share of it; all ranks call it. The model itself is changed.

    The joint outputs of the ranks are compared with each rank's outputs alone before.

    Raises:
        ConfigError: the architecture can't be split, or not over this many ranks.
    """
    share = Share(communicator.rank, communicator.size)
    check_split(loaded, share.size)
    positions = torch.arange(_DRY_RUN_TOKENS, device=loaded.device)
    tokens = (positions + 1) * 31 % loaded.vocab_size
    expected = _logits(loaded.model, tokens, positions)
    before = address_ranges(loaded.model.parameters())
    names = SPLIT_MODEL_TYPES[loaded.hf_config.model_type]
    whole = loaded.attention
    groups = {layer: group for group in whole.groups for layer in group.layers}
    groups |= {layer: groups[source] for layer, source in whole.aliases.items()}
    states = state_modules(loaded.model)
    decoder = loaded.model.get_decoder()
    if not hasattr(decoder, "layers"):  # Llama 4's decoder has a head of its own
        decoder = decoder.model
    for layer in decoder.layers:
        attention: Any = getattr(layer, names.attention, None)
        if isinstance(getattr(attention, "kv_b_proj", None), Latents):
            _split_latents(attention, share, communicator)
        elif hasattr(attention, names.merged[0]) and attention not in states:
            _split_attention(attention, names, groups[attention.layer_idx], share, communicator)
        if hasattr(layer, "experts"):  # beside the MLP
            _split_mlp(layer, names, share, communicator)
        for mlp in (getattr(layer, name, None) for name in names.mlps):
            if hasattr(mlp, "experts") or hasattr(mlp, names.last):
                _split_mlp(mlp, names, share, communicator)
    for module in states:
        _split_products(module, share, communicator)
    release_file_pages(before)
    found = _logits(loaded.model, tokens, positions)
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    deviation = float(((found - expected).norm(dim=-1) / spread.clamp_min(1e-9)).median())
    if not deviation <= (0.01 if loaded.dtype == torch.float32 else 0.2):
        raise ConfigError(
            f"{loaded.name} ({architecture_name(loaded.model.config)}) computes other logits on "
            f"{share.size} ranks than on one: they differ by {deviation:.1%} of their spread; leave "
            "--tensor-parallel out"
        )
    if share.rank:
        loaded.model.set_output_embeddings(NoLogits())
        if loaded.vision is not None:
            loaded.vision.drop_tower()
    return replace(loaded, attention=whole.with_heads([_own_heads(group, share) for group in whole.groups]))


def check_split(loaded: LoadedModel, size: int) -> None:
    """Refuse models that can't be split over this many ranks.

    Raises:
        ConfigError: names the requested and the possible numbers.
    """
    check_family(loaded.name, loaded.hf_config.model_type)
    groups = loaded.attention.groups
    kind = "query heads" if groups[0].value_in_key else "KV heads"
    check_num_ranks(loaded.name, size, min(_heads_to_split(group) for group in groups), kind)
    experts = [each.num_experts for each in loaded.model.modules() if isinstance(each, WholeExperts)]
    if experts and size > min(experts):
        raise ConfigError(
            f"--tensor-parallel {size} is more than the {min(experts)} experts of a layer of {loaded.name}, "
            f"which --gguf packed gives to ranks whole; use at most {min(experts)}, or --gguf float32"
        )


def _heads_to_split(group: KVGroup) -> int:
    """KV heads; query heads where they share one latent."""
    return group.num_query_heads if group.value_in_key else group.num_kv_heads


def _own_heads(group: KVGroup, share: Share) -> tuple[int, int]:
    """A rank's numbers of query heads and KV heads."""
    own = len(share.heads(_heads_to_split(group)))
    return (own, 1) if group.value_in_key else (own * group.num_query_heads // group.num_kv_heads, own)


def _logits(model: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    step = PlainCausalStep(positions)
    return call_model(model, tokens, positions, None, step).float()


def _split_attention(
    attention: Any, names: ProductNames, whole: KVGroup, share: Share, communicator: Communicator
) -> None:
    count = whole.num_kv_heads
    heads, group = share.heads(count), whole.num_query_heads // count
    merged: list[tuple[str, Any]] = [(name, getattr(attention, name, None)) for name in names.merged]
    if len(merged) > 1:
        # Where each query has a gate behind it, its width is of both. A layer that reads another's keys and
        # values has no products for them.
        for name, product in merged:
            if product is not None:
                rows = [_span(heads, product.out_features // count)]
                setattr(attention, name, _part(product, rows=rows))
    else:
        ((name, product),) = merged
        size = product.out_features // (whole.num_query_heads + 2 * count)
        if names.order == "heads":
            rows = [_span(heads, 3 * size)]
        else:
            keys, all_queries = _span(heads, size), whole.num_query_heads * size
            after = all_queries, all_queries + count * size
            rows = [_span(heads, group * size), *(_moved(keys, by) for by in after)]
        setattr(attention, name, _part(product, rows=rows))
    for name in ("g_proj", "gate_proj"):  # gates of the output, by head or by element
        if (gate := getattr(attention, name, None)) is not None:
            setattr(attention, name, _part(gate, rows=[_span(heads, gate.out_features // count)]))
    for name, num_heads in (("q_norm", whole.num_query_heads), ("k_norm", count)):
        weight = getattr(getattr(attention, name, None), "weight", None)
        if weight is not None and weight.dim() == 1 and len(weight) == num_heads * whole.key_size:
            widths = [len(own) * num_heads // count * whole.key_size for own in share.all_heads(count)]
            setattr(attention, name, NormedOverRanks(getattr(attention, name), communicator, widths))
    # Some modules split queries, keys and values by sizes in their configuration.
    attention.config = config = copy.copy(attention.config)
    config.num_attention_heads, config.num_key_value_heads = len(heads) * group, len(heads)
    for name, own_heads in (("num_heads", len(heads) * group), ("num_key_value_heads", len(heads))):
        if hasattr(attention, name):
            setattr(attention, name, own_heads)
    if getattr(attention, "sinks", None) is not None:
        attention.sinks = _kept(attention.sinks[heads.start * group : heads.stop * group])
    width = getattr(attention, names.output).in_features // count
    spans = [_span(own, width) for own in share.all_heads(count)]
    _split_output(attention, names.output, spans, share, communicator)


def _split_latents(attention: Any, share: Share, communicator: Communicator) -> None:
    """Latent attention by its query heads: each rank computes and keeps all latents."""
    latents = attention.kv_b_proj
    count = len(latents.weight) // (latents.nope + latents.value)
    heads = share.heads(count)
    name = "q_proj" if getattr(attention, "q_b_proj", None) is None else "q_b_proj"
    setattr(
        attention, name, _part(getattr(attention, name), rows=[_span(heads, latents.nope + latents.rope)])
    )
    latents.weight = _kept(_rows(latents.weight, [_span(heads, latents.nope + latents.value)]))
    spans = [_span(own, latents.value) for own in share.all_heads(count)]
    _split_output(attention, "o_proj", spans, share, communicator)


def _split_mlp(mlp: Any, names: ProductNames, share: Share, communicator: Communicator) -> None:
    experts = getattr(mlp, "experts", None)
    if experts is not None:
        if isinstance(experts, WholeExperts):
            own = experts.of_experts(share.heads(experts.num_experts))
        else:
            _split_experts(experts, share)
            own = experts
        mlp.experts = SummedOverRanks(own, communicator)
        for name in ("shared_expert", "shared_experts", "shared_mlp"):
            if getattr(mlp, name, None) is not None:
                _split_mlp(getattr(mlp, name), names, share, communicator)
        return
    last = getattr(mlp, names.last)
    width = last.in_features
    columns = share.columns(width)
    rows = [columns, _moved(columns, width)] if names.halves else [columns]
    for name in names.first:
        setattr(mlp, name, _part(getattr(mlp, name), rows=rows))
    _split_output(mlp, names.last, share.all_columns(width), share, communicator)


def _split_products(module: Any, share: Share, communicator: Communicator) -> None:
    """The large products of a layer with states, each by its outputs, which every rank then has."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear | WholeProduct) and child.out_features >= _MIN_COLUMNS * share.size:
            outputs = share.all_columns(child.out_features)
            own = _part(child, rows=[outputs[share.rank]])
            setattr(module, name, GatheredOverRanks(own, communicator, [len(each) for each in outputs]))


def _split_output(
    parent: Any, name: str, inputs: Sequence[range], share: Share, communicator: Communicator
) -> None:
    """A product whose inputs the ranks have computed apart.

    Args:
        inputs: the inputs that each rank has.
    """
    whole = getattr(parent, name)
    if communicator.device.type == "cpu":
        outputs = share.all_columns(whole.out_features)
        own = _part(whole, rows=[outputs[share.rank]])
        widths = [len(each) for each in inputs], [len(each) for each in outputs]
        setattr(parent, name, JoinedOverRanks(own, communicator, *widths))
    else:
        own = _part(whole, columns=inputs[share.rank], has_bias=share.rank == 0)
        setattr(parent, name, SummedOverRanks(own, communicator))


def _split_experts(experts: Any, share: Share) -> None:
    """All experts, each by its columns: weights [E, 2 W, H] and [E, H, W], or [E, H, 2 W] and [E, W, H]."""
    down, gate_up = experts.down_proj, experts.gate_up_proj
    outputs, inputs = (2, 1) if gate_up.shape[2] == 2 * down.shape[1] else (1, 2)
    width = down.shape[inputs]
    own = share.columns(width)
    both = [own, _moved(own, width)]
    if hasattr(experts, "down_proj_bias"):  # gate and up alternate
        both = [_span(own, 2)]
        experts.gate_up_proj_bias = _kept(_rows(experts.gate_up_proj_bias, both, dim=1))
        if share.rank:
            experts.down_proj_bias = _kept(torch.zeros_like(experts.down_proj_bias))
    experts.gate_up_proj = _kept(_rows(gate_up, both, dim=outputs))
    experts.down_proj = _kept(_rows(down, [own], dim=inputs))
    for name in ("intermediate_dim", "intermediate_size", "expert_dim"):
        if hasattr(experts, name):
            setattr(experts, name, len(own))


def _part(
    linear: nn.Linear | WholeProduct,
    *,
    rows: Sequence[range] | None = None,
    columns: range | None = None,
    has_bias: bool = True,
) -> nn.Module:
    """Rows (outputs) or columns (inputs) of a layer, in memory of their own."""
    if isinstance(linear, WholeProduct):
        part: WholeProduct = linear if rows is None else linear.of_outputs(rows)
        return part if columns is None else part.of_inputs(columns, has_bias=has_bias)
    weight: torch.Tensor = linear.weight
    bias: torch.Tensor | None = linear.bias if has_bias else None
    if rows is not None:
        weight = _rows(weight, rows)
        bias = None if bias is None else _rows(bias, rows)
    if columns is not None:
        weight = weight[:, columns.start : columns.stop]
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    plain.weight = _kept(weight)
    if bias is not None:
        plain.bias = _kept(bias)
    return plain.eval()


def _rows(tensor: torch.Tensor, spans: Iterable[range], dim: int = 0) -> torch.Tensor:
    parts = [tensor.narrow(dim, span.start, len(span)) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _span(items: range, size: int) -> range:
    return range(items.start * size, items.stop * size)


def _moved(span: range, by: int) -> range:
    return range(span.start + by, span.stop + by)


def _kept(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
