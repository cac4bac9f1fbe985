# SPDX-License-Identifier: Apache-2.0
"""An adapter's matrices in the order in which a model's products read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from radixkv.model.adapters.lora_weights import LoraWeights, LowRank, Matrix


@dataclass(frozen=True, slots=True)
class ProductPlace:
    """A product of the model that adapters may change: one linear layer, or several computed as one.

    Attributes:
        paths: of the linear layers, in the order of their outputs.
        widths: outputs of each.
        inputs: inputs of all.
    """

    paths: tuple[str, ...]
    widths: tuple[int, ...]
    inputs: int

    def changes(self, weights: LoraWeights) -> list[tuple[LowRank, int, int]]:
        """The adapter's changes of this product, each with its first column and its number of columns."""
        found, column = [], 0
        for path, width in zip(self.paths, self.widths, strict=True):
            if path in weights.modules:
                found.append((weights.modules[path], column, width))
            column += width
        return found


class PackedAdapter:
    """An adapter in memory, read-only: any number of requests may use it.

    Attributes:
        identity, rank, invocation: as in `LoraWeights`.
        products: for each place the `down` of its parts as one, [ranks, inputs], and for each part its `up`,
            [rank, outputs], with its first column; None: the adapter leaves the product as it is.
        changed: bool [products], whether the adapter changes each.
        nbytes: memory of all matrices.
    """

    def __init__(self, weights: LoraWeights, places: Sequence[ProductPlace]) -> None:
        self.identity, self.rank, self.invocation = weights.identity, weights.rank, weights.invocation
        self.products = [_packed(place.changes(weights)) for place in places]
        self.changed = np.array([product is not None for product in self.products])
        kept = [product for product in self.products if product is not None]
        self.max_inner = max(len(product.down) for product in kept)
        self.nbytes = sum(product.nbytes for product in kept)

    @cached_property
    def table(self) -> npt.NDArray[np.int64]:
        """int64 [products, SEGMENT_SIZE] for `radixkv_kernels.cpu.linear.low_rank`, rows left out."""
        from radixkv_kernels.cpu.linear import low_rank

        table = np.zeros((len(self.products), low_rank.SEGMENT_SIZE), dtype=np.int64)
        for row, product in zip(table, self.products, strict=True):
            if product is None:
                continue
            row[low_rank.DOWN], row[low_rank.RANK] = product.down.ctypes.data, len(product.down)
            row[low_rank.NUM_PARTS] = len(product.ups)
            for part, (up, column) in enumerate(product.ups):
                at = low_rank.PARTS + part * low_rank.PART_SIZE
                row[at : at + low_rank.PART_SIZE] = up.ctypes.data, len(up), column, up.shape[1]
        return table

    def __repr__(self) -> str:
        return f"PackedAdapter({self.identity}, rank {self.rank}, {self.nbytes / 2**20:.1f} MiB)"


@dataclass(frozen=True)
class PackedChange:
    """Change of one product.

    Attributes:
        down: float32 [ranks of all parts, inputs].
        ups: of each part float32 [rank, outputs], and its first column in the product's outputs.
    """

    down: Matrix
    ups: tuple[tuple[Matrix, int], ...]

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


def _packed(changes: Sequence[tuple[LowRank, int, int]]) -> PackedChange | None:
    if not changes:
        return None
    down = np.concatenate([change.down for change, _, _ in changes])
    ups = tuple((np.ascontiguousarray(change.up.T), column) for change, column, _ in changes)
    return PackedChange(down, ups)
