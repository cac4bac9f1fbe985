# SPDX-License-Identifier: Apache-2.0
"""Heads and sizes of a model's attention layers, found by a dry run; K/V memory is laid out by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from radixkv_kernels import KVGroup, KVLayout
from radixkv_kernels.states import StateShape


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Arguments with which a layer called attention.

    Attributes:
        heads: numbers of query heads and KV heads.
        sizes: elements of a head of the query, key and value.
        value_in_key: True if values are the first elements of the keys, in memory, too.
        source: the layer that owns these keys and values.
    """

    layer: int
    heads: tuple[int, int]
    sizes: tuple[int, int, int]
    value_in_key: bool
    source: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Layers grouped by shape, and layers that read another layer's keys and values.

    Attributes:
        groups: groups of layers with keys and values of their own, in the order of their first layers.
        aliases: layer -> the layer whose keys and values it reads.
        states: states that layers keep instead of, or besides, keys and values.
        windows: layer -> most positions that a token sees in it; layers that see all are absent.
    """

    groups: tuple[KVGroup, ...]
    aliases: Mapping[int, int]
    states: tuple[StateShape, ...] = ()
    windows: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Number of attention layers, including layers without keys and values of their own."""
        return sum(len(group.layers) for group in self.groups) + len(self.aliases)

    def layout(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
    ) -> KVLayout:
        """The K/V memory of these layers; arguments as in `KVSpec`."""
        return KVLayout(num_blocks, block_size, self.groups, dtype, device, quantization, self.aliases)

    def with_heads(self, counts: Sequence[tuple[int, int]]) -> AttentionShape:
        """The same with other numbers of query heads and KV heads, group by group."""
        groups = tuple(
            replace(group, num_query_heads=queries, num_kv_heads=stored)
            for group, (queries, stored) in zip(self.groups, counts, strict=True)
        )
        return replace(self, groups=groups)

    def freeing_windows(self) -> AttentionShape:
        """The same with layers that have a window in groups of their own, for the pool of windows."""
        groups = []
        for group in self.groups:
            inside = tuple(layer for layer in group.layers if layer in self.windows)
            outside = tuple(layer for layer in group.layers if layer not in self.windows)
            if outside:
                groups.append(replace(group, layers=outside))
            if inside:
                window = max(self.windows[layer] for layer in inside)
                groups.append(replace(group, layers=inside, window=window))
        return replace(self, groups=tuple(groups))


#: Stands for attention in a model without any: the cache counts tokens by blocks all the same.
_PLACEHOLDER = KVGroup((0,), 1, 1, 8, 8)


def shape_of_calls(
    calls: Sequence[AttentionCall],
    chunks: Mapping[int, int | None] | None = None,
    states: Sequence[StateShape] = (),
    windows: Mapping[int, int | None] | None = None,
) -> AttentionShape:
    """Group the layers of a dry run, one call each.

    Args:
        chunks: layer -> positions of its attention's chunks; None, or absent: all.
        states: of the layers that keep some.
        windows: layer -> most positions that a token sees; None, or absent: all.
    """
    chunks = chunks or {}
    layers: dict[tuple[int, int, int, int, bool, int | None], list[int]] = {}
    aliases = {call.layer: call.source for call in calls if call.source != call.layer}
    for call in sorted(calls, key=lambda call: call.layer):
        if call.layer not in aliases:
            shape = (*call.heads, *call.sizes[1:], call.value_in_key, chunks.get(call.layer))
            layers.setdefault(shape, []).append(call.layer)
    groups = tuple(KVGroup(tuple(own), *shape) for shape, own in layers.items())
    seen = {layer: window for layer, window in (windows or {}).items() if window is not None}
    return AttentionShape(groups or (_PLACEHOLDER,), aliases, tuple(states), seen)
