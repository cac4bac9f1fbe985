# SPDX-License-Identifier: Apache-2.0
"""AdapterMemory: the adapters of a model that somebody holds, by identity."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from torch import nn

from radixkv.model.adapters.attachment import attach
from radixkv.model.adapters.base_modules import BaseModules
from radixkv.model.adapters.lora_weights import read_adapter
from radixkv.model.adapters.packed_adapter import PackedAdapter, ProductPlace


class AdapterMemory:
    """Reads adapters for one model. Keeps none: an adapter lives for as long as its users hold it.

    Thread-safe. Adapters of equal weights are one object.
    """

    def __init__(self, base: BaseModules, places: Sequence[ProductPlace]) -> None:
        self._base, self._places = base, places
        self._lock = threading.Lock()
        self._adapters: WeakValueDictionary[str, PackedAdapter] = WeakValueDictionary()

    @property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """(inputs, outputs) of each linear layer that adapters may change, by its path."""
        return self._base.shapes

    @classmethod
    def attached(cls, model: nn.Module, base: BaseModules) -> AdapterMemory:
        """Prepare a rewritten model for adapters; once."""
        return cls(base, attach(model, base))

    def read(self, folder: Path, max_rank: int) -> PackedAdapter:
        """Read a folder of PEFT's. Raises what `read_adapter` raises."""
        packed = PackedAdapter(read_adapter(folder, self._base, max_rank), self._places)
        with self._lock:
            return self._adapters.setdefault(packed.identity, packed)

    def get(self, identity: str) -> PackedAdapter | None:
        """Return an adapter that is still referenced, or None."""
        with self._lock:
            return self._adapters.get(identity)
