# SPDX-License-Identifier: Apache-2.0
"""Count of the host memory that operators take, while a model is read for another device."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class HostBytes(TorchDispatchMode):
    """Counts the bytes of CPU tensors that operators of this thread make; files' mapped bytes are not theirs.

    Attributes:
        peak: most bytes that were alive at once.
        moved: bytes of the tensors that were moved from the CPU to another device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.moved = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [each for each in tree_leaves((args, kwargs)) if type(each) in _PLAIN]
        known = {each.untyped_storage().data_ptr() for each in inputs if each.device.type == "cpu"}
        for made in tree_leaves(out):
            if type(made) not in _PLAIN:  # what stands for a tensor has no memory
                continue
            if made.device.type != "cpu":
                self.moved += sum(
                    each.nbytes for each in inputs if each.device.type == "cpu" and each.numel() > 1
                )
                continue
            storage = made.untyped_storage()
            if storage.data_ptr() not in known:
                self._alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {at: own for at, own in self._alive.items() if not own[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out
