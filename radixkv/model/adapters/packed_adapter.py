# SPDX-License-Identifier: Apache-2.0
"""An adapter's matrices in the order in which a model's products read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from radixkv.model.adapters.lora_weights import LoraWeights, LowRank, Matrix

_LINE = 16  # numbers of a cache line


@dataclass(frozen=True, slots=True)
class ProductPlace:
    """A product of the model that adapters may change: one linear layer, or several computed as one.

    Attributes:
        paths: paths of the linear layers, in the order of their outputs.
        columns: first output of each.
        widths: outputs of each.
        inputs: inputs of all.
        is_packed: adapters lie in the panels of `radixkv_kernels.cpu.linear.low_rank`; False: torch computes.
    """

    paths: tuple[str, ...]
    columns: tuple[int, ...]
    widths: tuple[int, ...]
    inputs: int
    is_packed: bool

    def changes(self, weights: LoraWeights) -> list[tuple[LowRank, int]]:
        """The adapter's changes of this product, each with its first column."""
        return [
            (weights.modules[path], column)
            for path, column in zip(self.paths, self.columns, strict=True)
            if path in weights.modules
        ]


class PackedAdapter:
    """An adapter in memory, read-only: any number of requests may use it.

    Attributes:
        identity, rank, invocation: as in `LoraWeights`.
        products: its change of each place; None: the adapter leaves the product as it is.
        ranks: int64 [products], of all parts of each product; 0: unchanged.
        nbytes: memory of all matrices.
    """

    def __init__(self, weights: LoraWeights, places: Sequence[ProductPlace]) -> None:
        self.identity, self.rank, self.invocation = weights.identity, weights.rank, weights.invocation
        changes = [place.changes(weights) for place in places]
        arena = _Arena(sum(map(_most_numbers, changes)) if any(place.is_packed for place in places) else 0)
        self.products = [_change(place, own, arena) for place, own in zip(places, changes, strict=True)]
        kept = [product for product in self.products if product is not None]
        self.ranks = np.array([0 if product is None else product.rank for product in self.products])
        self.nbytes = sum(product.nbytes for product in kept)

    @cached_property
    def table(self) -> npt.NDArray[np.int64]:
        """int64 [products, SEGMENT_SIZE] for `radixkv_kernels.cpu.linear.low_rank`, rows left out."""
        from radixkv_kernels.cpu.linear import low_rank  # needs numba, as packed products do

        table = np.zeros((len(self.products), low_rank.SEGMENT_SIZE), dtype=np.int64)
        for row, product in zip(table, self.products, strict=True):
            if isinstance(product, PanelChange):
                row[low_rank.DOWN], row[low_rank.RANK] = product.down.ctypes.data, product.rank
                row[low_rank.UPS] = product.table.ctypes.data
        return table

    def __repr__(self) -> str:
        return f"PackedAdapter({self.identity}, rank {self.rank}, {self.nbytes / 2**20:.1f} MiB)"


@dataclass(frozen=True)
class PlainChange:
    """Change of one product, computed by torch.

    Attributes:
        down: float32 [ranks of all parts, inputs].
        ups: of each part float32 [rank, outputs], and its first column in the product's outputs.
    """

    down: Matrix
    ups: tuple[tuple[Matrix, int], ...]

    @property
    def rank(self) -> int:
        return len(self.down)

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + sum(up.nbytes for up, _ in self.ups)

    def add_to(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add the change of rows [T, inputs] to `out` [T, outputs], by torch, in float32."""
        inner = rows.to(torch.float32) @ torch.from_numpy(self.down).t()
        begin = 0
        for up, column in self.ups:
            own = inner[:, begin : begin + len(up)] @ torch.from_numpy(up)
            out[:, column : column + up.shape[1]] += own.to(out.dtype)
            begin += len(up)


@dataclass(frozen=True)
class PanelChange:
    """Change of one product in the panels of `radixkv_kernels.cpu.linear.low_rank`.

    Attributes:
        rank: of all parts.
        down: float32 [panels, inputs, DOWN_COLUMNS].
        ups: float32 [panels, ranks, COLUMNS] of neighbouring panels with the same ranks.
        table: int64 [panels, UP_SIZE]: where the ranks of each panel lie.
    """

    rank: int
    down: Matrix
    ups: tuple[Matrix, ...]
    table: npt.NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + sum(up.nbytes for up in self.ups) + self.table.nbytes


class _Arena:
    """A single piece of memory for all panels of an adapter: the system gives it in large pages."""

    def __init__(self, size: int) -> None:
        self._memory = np.empty(size, np.float32)
        self._used = 0

    def take(self, *shape: int) -> Matrix:
        """Float32 of a shape, with anything in it, on a cache line of its own."""
        begin, end = self._used, self._used + math.prod(shape)
        self._used = -(-end // _LINE) * _LINE
        return self._memory[begin:end].reshape(shape)


def _most_numbers(changes: Sequence[tuple[LowRank, int]]) -> int:
    """Return the most numbers that the panels of a product take from an arena."""
    # These need numba, as packed products do.
    from radixkv_kernels.cpu.linear.float_product import COLUMNS
    from radixkv_kernels.cpu.linear.low_rank import DOWN_COLUMNS

    if not changes:
        return 0
    rank, inputs = sum(len(change.down) for change, _ in changes), changes[0][0].down.shape[1]
    # At both ends of a linear layer's columns there may be a panel that others change, too.
    ups = sum(change.stored_up.size + 2 * COLUMNS * rank + _LINE for change, _ in changes)
    return (rank + DOWN_COLUMNS) * inputs + ups + (len(changes) + 2) * _LINE


def _change(
    place: ProductPlace, changes: Sequence[tuple[LowRank, int]], arena: _Arena
) -> PlainChange | PanelChange | None:
    if not changes:
        return None
    if place.is_packed:
        return _in_panels(changes, place.columns[-1] + place.widths[-1], arena)
    down = np.concatenate([change.down for change, _ in changes])
    return PlainChange(down, tuple((np.ascontiguousarray(change.up.T), column) for change, column in changes))


@dataclass(frozen=True, slots=True)
class _PanelGroup:
    """Neighbouring panels of `up` that take the same ranks [low, high)."""

    first: int
    count: int
    low: int
    high: int


@lru_cache(maxsize=256)
def _groups(parts: tuple[tuple[int, int, int], ...], num_panels: int) -> tuple[_PanelGroup, ...]:
    """Return the panels that parts (column, outputs, rank) of a product change; most adapters agree."""
    from radixkv_kernels.cpu.linear.float_product import COLUMNS  # needs numba, as packed products do

    taken: list[tuple[int, int]] = [(0, 0)] * num_panels
    first = 0
    for column, outputs, rank in parts:
        for panel in range(column // COLUMNS, (column + outputs - 1) // COLUMNS + 1):
            low, high = taken[panel]
            taken[panel] = (low if high else first, first + rank)
        first += rank
    groups = []
    for (low, high), panels in groupby(range(num_panels), key=taken.__getitem__):
        own = list(panels)
        if high:
            groups.append(_PanelGroup(own[0], len(own), low, high))
    return tuple(groups)


def _in_panels(changes: Sequence[tuple[LowRank, int]], outputs: int, arena: _Arena) -> PanelChange:
    # These need numba, as packed products do.
    from radixkv_kernels.cpu.linear.float_product import COLUMNS
    from radixkv_kernels.cpu.linear.low_rank import DOWN_COLUMNS, UP_SIZE

    parts = tuple((column, *change.stored_up.shape) for change, column in changes)
    rank, num_panels = sum(part[2] for part in parts), -(-outputs // COLUMNS)
    down = arena.take(-(-rank // DOWN_COLUMNS), changes[0][0].down.shape[1], DOWN_COLUMNS)
    if rank % DOWN_COLUMNS:
        down[-1] = 0.0
    first = 0
    for change, _ in changes:
        end = first + len(change.down)
        for begin in range(first // DOWN_COLUMNS * DOWN_COLUMNS, end, DOWN_COLUMNS):
            low, high = max(begin, first), min(begin + DOWN_COLUMNS, end)
            panel = down[begin // DOWN_COLUMNS, :, low - begin : high - begin]
            panel[:] = change.down[low - first : high - first].T
        first = end
    table, ups = np.zeros((num_panels, UP_SIZE), np.int64), []
    for group in _groups(parts, num_panels):
        up = arena.take(group.count, group.high - group.low, COLUMNS)
        _fill_up(up, changes, group)
        ups.append(up)
        own = table[group.first : group.first + group.count]
        own[:, 0] = up.ctypes.data + np.arange(group.count) * up.strides[0]
        own[:, 1:] = group.low, group.high - group.low
    return PanelChange(rank, down, tuple(ups), table)


def _fill_up(up: Matrix, changes: Sequence[tuple[LowRank, int]], group: _PanelGroup) -> None:
    """Write the panels of a group: float32 [panels, ranks taken, COLUMNS]."""
    num_panels, ranks, width = up.shape
    start, stop = group.first * width, (group.first + num_panels) * width
    whole, first = None, 0
    for change, column in changes:
        stored, end = change.stored_up, first + len(change.down)
        left, right = max(start, column), min(stop, column + len(stored))
        if left < right and group.low <= first < group.high:
            if (left, right, end - first) == (start, stop, ranks):  # nothing else is in these panels
                panels = stored[left - column : right - column].reshape(num_panels, width, ranks)
                np.multiply(panels.transpose(0, 2, 1), np.float32(change.scale), out=up)
                return
            if whole is None:
                whole = np.zeros((ranks, stop - start), np.float32)
            own = whole[first - group.low : end - group.low, left - start : right - start]
            np.multiply(stored[left - column : right - column].T, np.float32(change.scale), out=own)
        first = end
    assert whole is not None, "a group of panels that no part changes"
    up[:] = whole.reshape(ranks, num_panels, width).transpose(1, 0, 2)
