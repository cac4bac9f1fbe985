# SPDX-License-Identifier: Apache-2.0
"""AdapterMemory: the adapters of a model that are in use, by identity."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

from radixkv.model.adapters.attachment import ProductSlot, attach, compiled_sums
from radixkv.model.adapters.base_modules import BaseModules
from radixkv.model.adapters.lora_weights import KnownFiles, LoraWeights, read_adapter
from radixkv.model.adapters.packed_adapter import PackedAdapter
from radixkv.model.adapters.step_adapters import StepAdapters


class AdapterMemory:
    """Reader of adapters for one model, which keeps none: an adapter lives as long as its users hold it.

    Thread-safe. Adapters of equal weights are one object.

    Args:
        pack: brings the matrices of an adapter into the form that the model's products read.
    """

    def __init__(self, base: BaseModules, pack: Callable[[LoraWeights], Any]) -> None:
        self._base, self._packer = base, pack
        self._lock = threading.Lock()
        self._adapters: WeakValueDictionary[str, PackedAdapter] = WeakValueDictionary()

    @property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """(inputs, outputs) of each linear layer that adapters may change, by its path."""
        return self._base.shapes

    @classmethod
    def attached(cls, model: nn.Module, base: BaseModules) -> AdapterMemory:
        """Prepare a rewritten model on a CPU for adapters; once."""
        sums = compiled_sums()
        places = attach(model, base, lambda index, _: ProductSlot(index, sums), in_panels=sums is not None)
        return cls(base, lambda weights: PackedAdapter(weights, places))

    def read(
        self, folder: Path, max_rank: int, known: KnownFiles | None = None
    ) -> tuple[PackedAdapter, KnownFiles | None]:
        """Read a folder of PEFT; see `read_adapter` for the errors.

        Returns:
            The adapter, and the value of `known` for the next reading of the folder.
        """
        weights = read_adapter(folder, self._base, max_rank, known)
        packed = self._pack(weights)
        with self._lock:
            return self._adapters.setdefault(packed.identity, packed), weights.files

    def _pack(self, weights: LoraWeights) -> Any:
        return self._packer(weights)

    def stage(self, adapters: StepAdapters) -> Any:
        """Bring the adapters of a step to where its products read them."""
        return adapters

    def get(self, identity: str) -> PackedAdapter | None:
        """Return an adapter that is still referenced, or None."""
        with self._lock:
            return self._adapters.get(identity)
