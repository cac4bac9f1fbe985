# SPDX-License-Identifier: Apache-2.0
"""Attach adapters to a model: each product that they may change gets a `ProductSlot`, once, at the start.

A rewritten layer that computes several linear layers as one offers `adapt(path, slot_of)`, and wraps its own
products. Every other linear layer, packed or transformers' own, is wrapped as a module. Adapters come and go
afterwards without touching the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from radixkv.model.adapters.base_modules import BaseModules
from radixkv.model.adapters.packed_adapter import ProductPlace
from radixkv.model.adapters.step_adapters import StepAdapters
from radixkv.model.step_context import current_step


class ZeroRows:
    """Rows of float32 zeros that the products of a model change in turn, and leave as zeros again."""

    _BEHIND = 64  # values that a product may read behind the last row

    def __init__(self) -> None:
        self._data = torch.empty(0)

    def take(self, rows: int, width: int) -> torch.Tensor:
        """[rows, width]; valid until the next call."""
        size = rows * width
        if self._data.numel() < size + self._BEHIND:
            self._data = torch.zeros(size + self._BEHIND)
        return self._data[:size].view(rows, width)


class ProductSlot:
    """Adds the changes of a step's adapters to the rows of one product.

    Args:
        index: of the product among the model's.
        num_parts: linear layers that it computes.
        sums: a `LowRankSums`, shared by all products; None: torch computes.
        zeros: shared by all products.
    """

    def __init__(self, index: int, num_parts: int, sums: Any, zeros: ZeroRows) -> None:
        self._index, self._num_parts, self._sums = index, num_parts, sums
        self.zeros = zeros

    def active(self) -> StepAdapters | None:
        """The adapters of the running step; None: none of them changes this product."""
        adapters: StepAdapters | None = current_step().adapters
        return adapters if adapters is not None and adapters.changed[self._index] else None

    def add(self, adapters: StepAdapters, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add the changes of the step's rows.

        Args:
            rows: inputs of the product, [at least `adapters.end`, inputs].
            out: its outputs, [.., outputs].
        """
        first, end = adapters.first, adapters.end
        assert len(rows) >= end, f"{len(rows)} rows, but adapters up to {end}: rows of a step are missing"
        if self._sums is not None and rows.dtype == out.dtype == torch.float32:
            segments = adapters.address(self._index)
            self._sums.add(segments, self._num_parts, adapters.max_inner, first, end - first, rows, out)
            return
        for segment in adapters.segments:
            change = None if segment.adapter is None else segment.adapter.products[self._index]
            if change is not None:
                own = slice(segment.start, segment.end)
                change.add_to(rows[own], out[own])


#: Makes the slot of a product of linear layers, in the order of their outputs, by paths within the layer.
SlotOf = Callable[[Sequence[str]], ProductSlot]


class AdaptsItself(Protocol):
    """A layer that stands for several linear layers."""

    def adapt(self, slot_of: SlotOf) -> None:
        """Wrap the products of the layer."""


class AdaptedLinear(nn.Module):
    """A linear layer, whatever computes it, with the changes of adapters: [..., in] -> [..., out]."""

    def __init__(self, linear: nn.Module, slot: ProductSlot) -> None:
        super().__init__()
        self.linear, self.slot = linear, slot

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(inputs)
        adapters = self.slot.active()
        if adapters is not None:
            rows = inputs.reshape(-1, inputs.shape[-1])
            self.slot.add(adapters, rows.contiguous(), out.view(-1, out.shape[-1]))
        return out


def attach(model: nn.Module, base: BaseModules) -> list[ProductPlace]:
    """Give each product of a rewritten model its slot; once.

    Args:
        base: the model's description from before its layers were rewritten.

    Returns:
        The places that adapters are packed for.
    """
    places: list[ProductPlace] = []
    sums, zeros = _compiled_sums(), ZeroRows()

    def slot(paths: Sequence[str]) -> ProductSlot:
        shapes = [base.shapes[path] for path in paths]
        places.append(ProductPlace(tuple(paths), tuple(out for _, out in shapes), shapes[0][0]))
        return ProductSlot(len(places) - 1, len(paths), sums, zeros)

    done: set[str] = set()
    for path, module in list(model.named_modules()):
        if hasattr(module, "adapt"):
            module.adapt(lambda names, path=path: slot([f"{path}.{name}" for name in names]))
            done.update(name for name in base.shapes if name.startswith(f"{path}."))
    for path in base.shapes:
        if path not in done:
            parent, _, name = path.rpartition(".")
            owner = model.get_submodule(parent)
            setattr(owner, name, AdaptedLinear(getattr(owner, name), slot([path])))
    return places


def adds_by_row() -> bool:
    """Return True if a row's change does not depend on the other rows, bit for bit."""
    return _compiled_sums() is not None


def _compiled_sums() -> Any:
    try:
        from radixkv_kernels.cpu.linear.low_rank import LowRankSums
    except ImportError:
        return None
    return LowRankSums()
