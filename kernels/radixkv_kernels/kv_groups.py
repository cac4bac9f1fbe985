# SPDX-License-Identifier: Apache-2.0
"""Storage of a model whose attention layers differ in shape: one `PagedKV` per group of like layers.

A block id means the same slots in every group, so that block tables, sharing and eviction see one pool::

    layer 0 (local)  -> group 0, index 0        layer 2 (local)        -> group 0, index 1
    layer 1 (global) -> group 1, index 0        layer 3 (reads 1's)    -> group 1, index 0

Layers with a sliding window may have blocks of a pool of their own, whose tables are given beside the others.

Layers without attention are in no group. A layer that reads another layer's keys and values is stored as
that one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from radixkv_kernels.kv_cache import Bytes, KVSpec, PagedKV, saved_rows


@dataclass(frozen=True)
class KVGroup:
    """Layers of one shape.

    Args:
        layers: their numbers in the model, ascending.
        num_query_heads: a multiple of `num_kv_heads`.
        key_size, value_size: elements of a head.
        value_in_key: values are the first elements of the keys.
        chunk: a token sees the positions from the last multiple of this on; None: all before it.
        window: most positions that a token sees, where blocks are from the pool of windows; None: they are
            from the pool of all layers.
    """

    layers: tuple[int, ...]
    num_query_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    value_in_key: bool = False
    chunk: int | None = None
    window: int | None = None


@dataclass(frozen=True)
class KVLayout:
    """Shapes and types of the caches of all groups of one model.

    Args:
        num_blocks, block_size, dtype, device, quantization: as in `KVSpec`, alike for all groups.
        aliases: layer -> layer whose keys and values it reads, which is in a group.
        num_window_blocks: blocks of the pool of windows, for groups with a `window`.

    Raises:
        ValueError: no group, a layer in two groups, or an alias of a layer that is in none.
    """

    num_blocks: int
    block_size: int
    groups: tuple[KVGroup, ...]
    dtype: torch.dtype
    device: torch.device
    quantization: str | None = None
    aliases: Mapping[int, int] = field(default_factory=dict)
    num_window_blocks: int = 1

    def __post_init__(self) -> None:
        layers = [layer for group in self.groups for layer in group.layers]
        if not layers or len(set(layers)) != len(layers) or set(layers) & set(self.aliases):
            raise ValueError(
                f"each layer must be in one group, got {[group.layers for group in self.groups]}"
            )
        if missing := set(self.aliases.values()) - set(layers):
            raise ValueError(f"the K/V of layers {sorted(missing)} are read, but not stored")
        if odd := {group.chunk for group in self.groups if group.chunk and group.chunk % self.block_size}:
            raise ValueError(
                f"attention in chunks of {min(odd)} tokens needs a block size that divides them, not "
                f"{self.block_size}"
            )

    @cached_property
    def specs(self) -> tuple[KVSpec, ...]:
        """The cache of each group."""
        return tuple(
            KVSpec(
                num_layers=len(group.layers),
                num_blocks=self.num_blocks if group.window is None else self.num_window_blocks,
                block_size=self.block_size,
                num_kv_heads=group.num_kv_heads,
                head_size=group.key_size,
                dtype=self.dtype,
                device=self.device,
                quantization=self.quantization,
                value_size=group.value_size,
                value_in_key=group.value_in_key,
            )
            for group in self.groups
        )

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Layer -> its group, and its index in the group's cache."""
        places = {
            layer: (number, index)
            for number, group in enumerate(self.groups)
            for index, layer in enumerate(group.layers)
        }
        return places | {layer: places[source] for layer, source in self.aliases.items()}

    @property
    def is_plain(self) -> bool:
        """Return True if one `PagedKV` with the model's own layer numbers holds it all."""
        return (
            len(self.groups) == 1
            and self.groups[0].chunk is self.groups[0].window is None
            and all(place == (0, layer) and layer not in self.aliases for layer, place in self.places.items())
        )

    @property
    def storage_dtype(self) -> torch.dtype:
        """Dtype of the stored elements."""
        return self.specs[0].storage_dtype

    @property
    def window(self) -> int | None:
        """The largest window of layers with blocks of their own; None: there are none."""
        return max((group.window for group in self.groups if group.window is not None), default=None)

    @property
    def window_layers(self) -> frozenset[int]:
        """Layers whose blocks are of the pool of windows."""
        return frozenset(
            layer for layer, (group, _) in self.places.items() if self.groups[group].window is not None
        )

    @property
    def bytes_per_slot(self) -> int:
        """Bytes one token takes in all layers but those with blocks of windows."""
        return sum(spec.bytes_per_slot for spec in self._specs_of(windows=False))

    @property
    def bytes_per_block(self) -> int:
        """Bytes one block takes, in all layers that have it."""
        return sum(spec.bytes_per_block for spec in self._specs_of(windows=False))

    @property
    def bytes_per_window_block(self) -> int:
        """Bytes one block of a window takes, in all layers that have it."""
        return sum(spec.bytes_per_block for spec in self._specs_of(windows=True))

    def _specs_of(self, *, windows: bool) -> list[KVSpec]:
        return [
            spec
            for group, spec in zip(self.groups, self.specs, strict=True)
            if (group.window is not None) is windows
        ]

    def with_blocks(self, num_blocks: int, num_window_blocks: int = 1) -> KVLayout:
        """The same with other numbers of blocks."""
        return replace(self, num_blocks=num_blocks, num_window_blocks=num_window_blocks)


class GroupedKV:
    """The caches of all groups of one model, with the interface of `PagedKV`; layers by the model's numbers.

    Attributes:
        spec: the layout it was made with.
        groups: one cache per group.
        windows: saves and loads the blocks of the pool of windows.
    """

    def __init__(self, spec: KVLayout) -> None:
        self.spec = spec
        self.groups = [PagedKV(each) for each in spec.specs]
        # Blocks are saved and loaded without windows, whose pool has blocks of its own.
        parts = list(zip(spec.groups, self.groups, strict=True))
        self._whole = _JoinedBlocks([kv for group, kv in parts if group.window is None])
        self.windows = _JoinedBlocks([kv for group, kv in parts if group.window is not None])

    def __repr__(self) -> str:
        return f"GroupedKV({', '.join(map(repr, self.groups))})"

    def clear(self, num_blocks: int) -> None:
        """See `PagedKV.clear`."""
        for kv in self.groups:  # a slice ends where the blocks do
            kv.clear(num_blocks)

    def tensors(self) -> list[torch.Tensor]:
        """All storage tensors, group after group."""
        return [tensor for kv in self.groups for tensor in kv.tensors()]

    def read(
        self, layer: int, block_table: np.ndarray, num_tokens: int, dtype: torch.dtype = torch.float64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PagedKV.read`."""
        group, index = self.spec.places[layer]
        return self.groups[group].read(index, block_table, num_tokens, dtype)

    def read_keys(
        self, layer: int, blocks: torch.Tensor, num_tokens: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """See `PagedKV.read_keys`."""
        group, index = self.spec.places[layer]
        return self.groups[group].read_keys(index, blocks, num_tokens, dtype)

    def save_blocks(self, blocks: Sequence[int]) -> np.ndarray:
        """See `PagedKV.save_blocks`: of each block, one group after the other."""
        return self._whole.save_blocks(blocks)

    def gather_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        """See `PagedKV.gather_blocks`."""
        return self._whole.gather_blocks(blocks)

    def scatter_blocks(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """See `PagedKV.scatter_blocks`."""
        self._whole.scatter_blocks(blocks, rows)

    def block_reader(self) -> Callable[[int, np.ndarray], None]:
        """See `PagedKV.block_reader`."""
        return self._whole.block_reader()

    def load_blocks(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        """See `PagedKV.load_blocks`."""
        self._whole.load_blocks(blocks, data)


class _JoinedBlocks:
    """Blocks of several caches that have the same ids, saved and loaded as one: one cache after the other."""

    def __init__(self, parts: Sequence[PagedKV]) -> None:
        self._parts = parts
        self._size = sum(kv.spec.bytes_per_block for kv in parts)

    def save_blocks(self, blocks: Sequence[int]) -> np.ndarray:
        """See `PagedKV.save_blocks`."""
        return np.concatenate([kv.save_blocks(blocks) for kv in self._parts], axis=1)

    def gather_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        """See `PagedKV.gather_blocks`."""
        return torch.cat([kv.gather_blocks(blocks) for kv in self._parts], 1)

    def scatter_blocks(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """See `PagedKV.scatter_blocks`."""
        for kv, columns in zip(self._parts, self._columns(), strict=True):
            kv.scatter_blocks(blocks, rows[:, columns])

    def block_reader(self) -> Callable[[int, np.ndarray], None]:
        """See `PagedKV.block_reader`."""
        readers = list(zip((kv.block_reader() for kv in self._parts), self._columns(), strict=True))

        def read(block: int, row: np.ndarray) -> None:
            for read_group, columns in readers:
                read_group(block, row[columns])

        return read

    def load_blocks(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        """See `PagedKV.load_blocks`."""
        rows = saved_rows(data, len(blocks), self._size, f"the K/V of {len(blocks)} blocks is")
        for kv, columns in zip(self._parts, self._columns(), strict=True):
            kv.load_blocks(blocks, [row[columns] for row in rows])

    def _columns(self) -> list[slice]:
        """Slices of the caches' bytes in a block."""
        ends = np.cumsum([0, *(kv.spec.bytes_per_block for kv in self._parts)]).tolist()
        return [slice(start, end) for start, end in pairwise(ends)]


def make_kv(spec: KVSpec | KVLayout) -> PagedKV | GroupedKV:
    """Allocate the cache of a model: one `PagedKV` where that holds it all."""
    if isinstance(spec, KVSpec):
        return PagedKV(spec)
    return PagedKV(spec.specs[0]) if spec.is_plain else GroupedKV(spec)
