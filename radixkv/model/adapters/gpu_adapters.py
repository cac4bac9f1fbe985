# SPDX-License-Identifier: Apache-2.0
"""Adapters in a GPU's memory: matrices, slots, and the tiles of a step at addresses that recorded steps read.

    step's segments -> slots of their adapters -> tiles -> staging memory -> the device, without waiting

An adapter's matrices are one tensor on the device, of the model's dtype. A slot is a row of the table of
places that the kernels read. There are as many slots as a step may have adapters; for an adapter without one,
the least recently used slot is rewritten from the device's memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import nn

from radixkv.errors import AdapterLoadError
from radixkv.model.adapters.adapter_memory import AdapterMemory
from radixkv.model.adapters.attachment import ProductSlot, attach
from radixkv.model.adapters.base_modules import BaseModules
from radixkv.model.adapters.lora_weights import LoraWeights
from radixkv.model.adapters.packed_adapter import ProductPlace
from radixkv.model.adapters.step_adapters import StepAdapters
from radixkv_kernels.triton import low_rank

#: Adapters of a recorded step; one with more is recorded apart, with more tiles.
FEW_ADAPTERS = 8


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """The largest step, in rows and requests, and the most ranks of an adapter."""

    num_tokens: int
    num_seqs: int
    rank: int


class GpuAdapter:
    """An adapter in a GPU's memory, read-only; see `PackedAdapter` for the attributes.

    Attributes:
        table: int64 [parts, PLACE_WIDTH] on the device: a slot's places.
    """

    def __init__(
        self, weights: LoraWeights, places: Sequence[ProductPlace], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.identity, self.rank, self.invocation = weights.identity, weights.rank, weights.invocation
        changes = [[weights.modules.get(path) for path in place.paths] for place in places]
        self.ranks = np.array([sum(len(each.down) for each in own if each is not None) for own in changes])
        unit = low_rank.ALIGNMENT  # in numbers: more than as many bytes
        parts, offsets, end = [], [], 0
        for change in (each for own in changes for each in own):
            matrices = () if change is None else (change.down, change.up.T)
            for matrix in matrices:
                parts.append((end, matrix))
                end += -(-matrix.size // unit) * unit
            rank = 0 if change is None else len(change.down)
            offsets.append((*(begin for begin, _ in parts[-2:]), rank) if matrices else (0, 0, 0))
        flat = np.zeros(end, np.float32)
        for begin, matrix in parts:
            flat[begin : begin + matrix.size] = matrix.reshape(-1)
        self.matrices = torch.from_numpy(flat).to(device).to(dtype)
        table = np.array(offsets, dtype=np.int64)
        table[:, :2] = self.matrices.data_ptr() + table[:, :2] * self.matrices.element_size()
        self.table = torch.from_numpy(table).to(device)
        self.nbytes = self.matrices.nbytes

    def __repr__(self) -> str:
        return f"GpuAdapter({self.identity}, rank {self.rank}, {self.nbytes / 2**20:.1f} MiB)"


@dataclass(frozen=True, slots=True)
class GpuStepAdapters:
    """A step's adapters as the kernels read them.

    Attributes:
        ranks: rank for each product; 0: no adapter changes it.
        tiles, places, max_rank: as `radixkv_kernels.triton.low_rank` says.
    """

    ranks: Sequence[int]
    tiles: torch.Tensor
    places: torch.Tensor
    max_rank: int


class GpuProductSlot(ProductSlot):
    """Adds the changes of a step's adapters to the outputs of one product on a GPU."""

    def __init__(self, index: int, product: low_rank.LowRankProduct) -> None:
        super().__init__(index, None)
        self._product = product

    def add(self, adapters: Any, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `ProductSlot.add`; `adapters`: a `GpuStepAdapters`."""
        low_rank.add_low_rank(self._product, rows, out, adapters.tiles, adapters.places, adapters.max_rank)


class GpuAdapterMemory(AdapterMemory):
    """Reads adapters for a model on a GPU, and brings a step's adapters to where its kernels read them."""

    def __init__(
        self,
        base: BaseModules,
        places: Sequence[ProductPlace],
        device: torch.device,
        dtype: torch.dtype,
        limits: GpuLimits,
    ) -> None:
        super().__init__(base, lambda weights: GpuAdapter(weights, places, device, dtype))
        self._limits = limits
        parts = sum(len(place.paths) for place in places)
        self._ones = [1] * len(places)
        self._places = torch.zeros(
            limits.num_seqs, parts, low_rank.PLACE_WIDTH, dtype=torch.int64, device=device
        )
        self._owners: OrderedDict[int, ref[GpuAdapter] | None] = OrderedDict.fromkeys(range(limits.num_seqs))
        pinned = device.type == "cuda"
        most = -(-limits.num_tokens // low_rank.TILE_ROWS) + limits.num_seqs
        self._tiles = torch.zeros(most, low_rank.TILE_WIDTH, dtype=torch.int32, device=device)
        self._staging = torch.zeros(most, low_rank.TILE_WIDTH, dtype=torch.int32, pin_memory=pinned)
        self._staged = torch.cuda.Event() if pinned else None

    @classmethod
    def on_gpu(
        cls, model: nn.Module, base: BaseModules, device: torch.device, dtype: torch.dtype, limits: GpuLimits
    ) -> GpuAdapterMemory:
        """Prepare a rewritten model for adapters; once."""
        parts = 0

        def make(index: int, place: ProductPlace) -> ProductSlot:
            nonlocal parts
            columns = np.array(list(zip(place.columns, place.widths, strict=True)), dtype=np.int32)
            product = low_rank.LowRankProduct(parts, torch.from_numpy(columns).to(device), place.widths)
            parts += len(place.paths)
            return GpuProductSlot(index, product)

        return cls(base, attach(model, base, make, in_panels=False), device, dtype, limits)

    def _pack(self, weights: LoraWeights) -> GpuAdapter:
        try:
            return super()._pack(weights)
        except torch.cuda.OutOfMemoryError:
            raise AdapterLoadError(
                "the GPU's memory has no place for it; lower max_loras or --gpu-memory-utilization."
            ) from None

    def stage(self, adapters: StepAdapters, padded: int = 0) -> GpuStepAdapters:
        """Bring the adapters of a step to the device.

        Args:
            padded: rows of the step that is recorded; 0: it is not.
        """
        slots = self._take_slots(adapters)
        tiles = low_rank.cut_tiles(
            (segment.start, segment.end, slots[segment.adapter])
            for segment in adapters.segments
            if segment.adapter is not None
        )
        if not padded:
            return self._load(adapters.ranks, tiles, len(tiles))
        return self._load(self._ones, tiles, self._tiles_of(padded, len(tiles)))

    def stage_none(self, padded: int) -> GpuStepAdapters:
        """Bring a step of a few adapters to the device whose rows are yet to come, to record it."""
        tiles = low_rank.cut_tiles(())
        return self._load(self._ones, tiles, self._tiles_of(padded, 0))

    def _tiles_of(self, padded: int, needed: int) -> int:
        """Number of tiles of a recorded step of `padded` rows: one of two."""
        whole = -(-padded // low_rank.TILE_ROWS)
        few = min(padded, whole + FEW_ADAPTERS)
        return few if needed <= few else min(padded, whole + self._limits.num_seqs)

    def _take_slots(self, adapters: StepAdapters) -> dict[Any, int]:
        """The slot of each adapter of the step; all are `GpuAdapter`s."""
        wanted: dict[Any, None] = dict.fromkeys(
            each.adapter for each in adapters.segments if each.adapter is not None
        )
        found: dict[Any, int] = {}
        for slot, owner in self._owners.items():
            adapter = None if owner is None else owner()
            if adapter in wanted:
                found[adapter] = slot
        for slot in found.values():
            self._owners.move_to_end(slot)
        for adapter in wanted:
            if adapter not in found:
                slot = found[adapter] = next(iter(self._owners))
                self._owners[slot] = ref(adapter)
                self._owners.move_to_end(slot)
                self._places[slot].copy_(adapter.table)
        return found

    def _load(
        self, ranks: Sequence[int], tiles: np.ndarray[tuple[int, int], np.dtype[np.int32]], count: int
    ) -> GpuStepAdapters:
        if self._staged is not None:
            # The last copy may still be reading the staging memory.
            self._staged.synchronize()
        host = self._staging.numpy()
        host[: len(tiles)], host[len(tiles) : count] = tiles, 0
        self._tiles[:count].copy_(self._staging[:count], non_blocking=True)
        if self._staged is not None:
            self._staged.record()
        return GpuStepAdapters(ranks, self._tiles[:count], self._places, self._limits.rank)


def bytes_of_adapters(base: BaseModules, count: int, rank: int, dtype: torch.dtype) -> int:
    """Memory of adapters that change all that they may, with the most ranks."""
    return count * rank * dtype.itemsize * sum(sum(shape) for shape in base.shapes.values())
