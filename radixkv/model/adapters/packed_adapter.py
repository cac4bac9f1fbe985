# SPDX-License-Identifier: Apache-2.0
"""An adapter's matrices in the order in which a model's products read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from radixkv.model.adapters.lora_weights import LoraWeights, LowRank, Matrix


@dataclass(frozen=True, slots=True)
class ProductPlace:
    """A product of the model that adapters may change: one linear layer, or several computed as one.

    Attributes:
        paths: of the linear layers, in the order of their outputs.
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
        self.products = [_change(place, place.changes(weights)) for place in places]
        kept = [product for product in self.products if product is not None]
        self.ranks = np.array([0 if product is None else product.rank for product in self.products])
        self.nbytes = sum(product.nbytes for product in kept)

    @cached_property
    def table(self) -> npt.NDArray[np.int64]:
        """int64 [products, SEGMENT_SIZE] for `radixkv_kernels.cpu.linear.low_rank`, rows left out."""
        from radixkv_kernels.cpu.linear import low_rank

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


def _change(place: ProductPlace, changes: Sequence[tuple[LowRank, int]]) -> PlainChange | PanelChange | None:
    if not changes:
        return None
    if place.is_packed:
        return _in_panels(changes, place.columns[-1] + place.widths[-1])
    down = np.concatenate([change.down for change, _ in changes])
    return PlainChange(down, tuple((np.ascontiguousarray(change.up.T), column) for change, column in changes))


def _in_panels(changes: Sequence[tuple[LowRank, int]], outputs: int) -> PanelChange:
    from radixkv_kernels.cpu.linear.float_product import COLUMNS
    from radixkv_kernels.cpu.linear.low_rank import DOWN_COLUMNS, UP_SIZE

    ranks = np.cumsum([0, *(len(change.down) for change, _ in changes)])
    rank, num_panels = int(ranks[-1]), -(-outputs // COLUMNS)
    down = np.zeros((-(-rank // DOWN_COLUMNS), DOWN_COLUMNS, changes[0][0].down.shape[1]), np.float32)
    taken: list[tuple[int, int]] = [(rank, 0)] * num_panels  # ranks of each panel, from the first to the last
    for (change, column), first in zip(changes, ranks, strict=False):
        end = int(first) + len(change.down)
        down.reshape(-1, down.shape[2])[first:end] = change.down
        for panel in range(column // COLUMNS, (column + len(change.up) - 1) // COLUMNS + 1):
            low, high = taken[panel]
            taken[panel] = min(low, int(first)), max(high, end)
    table, ups = np.zeros((num_panels, UP_SIZE), np.int64), []
    for (low, high), group in groupby(range(num_panels), key=taken.__getitem__):
        if low >= high:
            continue
        panels = list(group)
        begin, stop = panels[0] * COLUMNS, (panels[-1] + 1) * COLUMNS
        whole = np.zeros((high - low, stop - begin), np.float32)
        for (change, column), first in zip(changes, ranks, strict=False):
            left, right = max(begin, column), min(stop, column + len(change.up))
            if left < right and low <= first < high:
                own = whole[first - low : first - low + len(change.down), left - begin : right - begin]
                own[:] = change.up[left - column : right - column].T
        up = np.ascontiguousarray(whole.reshape(high - low, len(panels), COLUMNS).transpose(1, 0, 2))
        ups.append(up)
        table[panels, 0] = up.ctypes.data + np.arange(len(panels)) * up.strides[0]
        table[panels, 1:] = low, high - low
    return PanelChange(rank, np.ascontiguousarray(down.transpose(0, 2, 1)), tuple(ups), table)
