# SPDX-License-Identifier: Apache-2.0
"""Attach adapters to a model: each product that they may change gets a `ProductSlot`, once, at the start.

A rewritten layer that computes several linear layers as one is an `AdaptsItself`, and wraps its own
products. Every other linear layer, packed or transformers' own, is wrapped as a module. Adapters come and go
afterwards without touching the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from radixkv.model.adapters.base_modules import BaseModules
from radixkv.model.adapters.packed_adapter import PlainChange, ProductPlace
from radixkv.model.adapters.step_adapters import StepAdapters
from radixkv.model.step_context import current_step


class ProductSlot:
    """Finds the changes of a step's adapters to the rows of one product.

    Args:
        index: number of the product in the model.
        sums: a `LowRankSums`, shared by all products; None: torch computes.
    """

    def __init__(self, index: int, sums: Any) -> None:
        self._index, self._sums = index, sums

    def active(self) -> StepAdapters | None:
        """Return the adapters of the running step; None: none of them changes this product."""
        adapters: StepAdapters | None = current_step().adapters
        return adapters if adapters is not None and adapters.ranks[self._index] else None

    def changes(self, rows: torch.Tensor) -> int:
        """Return `changes` for a float product (`radixkv_kernels.cpu.linear`) with rows [T, inputs]."""
        adapters = self.active()
        return 0 if adapters is None else self._sums.inner(*self._segments(adapters, rows), rows)

    def add(self, adapters: StepAdapters, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add the changes of the step's rows.

        Args:
            rows: inputs of the product, [at least `adapters.end`, inputs].
            out: its outputs, [.., outputs].
        """
        if self._sums is None:
            for segment in adapters.segments:
                change = None if segment.adapter is None else segment.adapter.products[self._index]
                if isinstance(change, PlainChange):
                    own = slice(segment.start, segment.end)
                    change.add_to(rows[own], out[own])
            return
        segments = self._segments(adapters, rows)
        if rows.dtype == out.dtype == torch.float32:
            self._sums.add(*segments, rows, out)
            return
        sums = torch.zeros(out.shape)
        self._sums.add(*segments, rows.to(torch.float32), sums)
        out += sums.to(out.dtype)

    def _segments(self, adapters: StepAdapters, rows: torch.Tensor) -> tuple[int, int, int, int, int]:
        """The first arguments of `LowRankSums`."""
        first, end, product = adapters.first, adapters.end, self._index
        assert len(rows) >= end, f"{len(rows)} rows, but adapters up to {end}: rows of a step are missing"
        return (
            adapters.address(product),
            len(adapters.segments),
            adapters.ranks[product],
            first,
            end - first,
        )


class SlotOf(Protocol):
    """Makes the slots of a layer's products."""

    def __call__(self, paths: Sequence[str], panel: int = 1) -> ProductSlot:
        """Make the slot of a product of linear layers.

        Args:
            paths: paths within the layer, in the order of their outputs.
            panel: each linear layer's outputs begin at a multiple of it.
        """


@runtime_checkable
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


def attach(
    model: nn.Module,
    base: BaseModules,
    make: Callable[[int, ProductPlace], ProductSlot],
    *,
    in_panels: bool,
) -> list[ProductPlace]:
    """Give each product of a rewritten model its slot; once.

    Args:
        base: the model's description from before its layers were rewritten.
        make: the slot of a product, from its number and place.
        in_panels: see `ProductPlace`.

    Returns:
        The places that adapters are packed for.
    """
    places: list[ProductPlace] = []
    done: set[str] = set()

    def slot(paths: Sequence[str], panel: int = 1) -> ProductSlot:
        columns, widths, end = [], [], 0
        for path in paths:
            columns.append(-(-end // panel) * panel)
            widths.append(base.shapes[path][1])
            end = columns[-1] + widths[-1]
        inputs = base.shapes[paths[0]][0]
        done.update(paths)
        places.append(ProductPlace(tuple(paths), tuple(columns), tuple(widths), inputs, in_panels))
        return make(len(places) - 1, places[-1])

    for path, module in list(model.named_modules()):
        if isinstance(module, AdaptsItself):
            module.adapt(lambda names, panel=1, path=path: slot([f"{path}.{name}" for name in names], panel))
    for path in base.shapes:
        if path not in done:
            parent, _, name = path.rpartition(".")
            owner = model.get_submodule(parent)
            setattr(owner, name, AdaptedLinear(getattr(owner, name), slot([path])))
    return places


def adds_by_row() -> bool:
    """Return True if a row's change does not depend on the other rows, bit for bit."""
    return compiled_sums() is not None


def compiled_sums() -> Any:
    """The compiled sums of a CPU, for all products of a model; None: torch computes."""
    try:  # numba is optional
        from radixkv_kernels.cpu.linear.low_rank import LowRankSums
        from radixkv_kernels.cpu.vectors import has_multiply_add
    except ImportError:
        return None
    return LowRankSums() if has_multiply_add() else None
