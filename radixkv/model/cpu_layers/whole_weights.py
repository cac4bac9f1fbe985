# SPDX-License-Identifier: Apache-2.0
"""Weights of a file on their way into their final form, from which a rank can first choose its share.

A share is chosen by rows and by experts, which any format survives. Blocks stay in the mapped file until
then: a rank's memory never holds more than its share and one more product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from radixkv.model.cpu_layers.block_experts import BlockExperts, PackedExperts
from radixkv.model.cpu_layers.block_linear import BlockLinear, ReorderedBlocks
from radixkv.model.cpu_layers.checkpoint_blocks import blocks_of, common_format, has_blocks
from radixkv.model.cpu_layers.packed_linear import PackedLinear
from radixkv.model.decoder_layers import StoredExperts, StoredProduct, WholeExperts, WholeProduct
from radixkv.model.loading.file_pages import address_ranges, release_file_pages, release_mapped_pages
from radixkv.model.loading.gguf_experts import pack_experts
from radixkv.model.stored_weights.stored_weight import StoredWeight
from radixkv_kernels.cpu.linear.block_experts import ExpertPanels, ExpertProduct
from radixkv_kernels.cpu.linear.block_method import default_method
from radixkv_kernels.cpu.linear.block_panels import BlockPanels
from radixkv_kernels.cpu.linear.block_rows import BlockRows

_Array = np.ndarray[Any, Any]


class FileProduct(WholeProduct):
    """A product of the blocks of a file, which becomes a `BlockLinear` or `ReorderedBlocks`.

    Args:
        tensors: of the file, one above the other, all in formats that have a kernel.
        width: inputs.
        order: for each output, the row of the tensors; None: as they are.
        inputs: for each column of the tensors, the input; None: the same.
        bias: float32 [out] or None.
        rows: shared by all layers of a model.
    """

    def __init__(
        self, tensors: Sequence[Any], width: int, order: _Array | None, inputs: _Array | None,
        bias: torch.Tensor | None, rows: BlockRows,
    ) -> None:  # fmt: skip
        self._counts = [int(tensor.shape[1]) if len(tensor.shape) > 1 else 1 for tensor in tensors]
        super().__init__(width, sum(self._counts) if order is None else len(order))
        self._tensors, self._order, self._inputs = tensors, order, inputs
        self.bias, self._rows = None if bias is None else bias.detach(), rows

    def of_outputs(self, spans: Sequence[range]) -> FileProduct:
        index = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        order = index if self._order is None else self._order[index]
        bias = None if self.bias is None else self.bias[torch.from_numpy(index)]
        return FileProduct(self._tensors, self.in_features, order, self._inputs, bias, self._rows)

    def packed(self) -> StoredProduct:
        if len(self._tensors) == 1:
            return BlockLinear(self._panels(0, self._order), self.bias, self._rows, self._inputs)
        order = np.arange(self.out_features) if self._order is None else self._order
        used = np.sort(order)
        outputs = np.searchsorted(used, order)
        starts = np.cumsum([0, *self._counts])
        panels = []
        for index, start in enumerate(starts[:-1]):
            own = used[(used >= start) & (used < starts[index + 1])] - start
            if len(own):
                panels.append(self._panels(index, own))
        bias = None if self.bias is None else self.bias[torch.from_numpy(np.argsort(outputs))]
        moved = None if np.array_equal(outputs, np.arange(len(outputs))) else outputs
        return ReorderedBlocks(panels, bias, self._rows, self._inputs, moved)

    def _panels(self, index: int, order: _Array | None) -> BlockPanels:
        tensor = self._tensors[index]
        data = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(self._counts[index], -1)
        panels = BlockPanels(int(tensor.tensor_type), data, order)
        release_pages([tensor])
        return panels


class PlainProduct(WholeProduct):
    """A product with a weight of 16 or 32 bits, which becomes a `PackedLinear`.

    Args:
        weight: [out, in].
        bias: float32 [out] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        self._stored, self.bias = weight, None if bias is None else bias.detach()

    def of_outputs(self, spans: Sequence[range]) -> PlainProduct:
        index = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        return PlainProduct(self._stored[index], None if self.bias is None else self.bias[index])

    def packed(self) -> PackedLinear:
        has_bias = self.bias is not None
        plain = nn.Linear(self.in_features, self.out_features, bias=has_bias, device="meta")
        plain.weight = nn.Parameter(self._stored, requires_grad=False)
        if self.bias is not None:
            plain.bias = nn.Parameter(self.bias, requires_grad=False)
        packed = PackedLinear(plain)
        release_file_pages(address_ranges([self._stored]))
        return packed


class FileExperts(WholeExperts):
    """A layer's experts in a file, which become `BlockExperts` or `PackedExperts`.

    Args:
        plain, tensors, rows: see `pack_experts`.
        own: the experts that it answers for; None: all.
    """

    def __init__(
        self, plain: Any, tensors: dict[str, Any], rows: BlockRows, own: range | None = None
    ) -> None:
        super().__init__()
        self.num_experts = int(plain.num_experts)
        # A module in a tuple is none of this one's: its parameters have no values.
        self._source = (plain, tensors, rows)
        self._own = range(self.num_experts) if own is None else own

    def of_experts(self, own: range) -> FileExperts:
        return FileExperts(*self._source, own)

    def packed(self) -> StoredExperts:
        experts = pack_experts(*self._source, self._own)
        release_pages(self._source[1].values())
        return experts


class CheckpointProduct(WholeProduct):
    """A product of stored weights, which becomes a `BlockLinear` or `ReorderedBlocks`.

    Weights that have no blocks are rounded to bfloat16.

    Args:
        weights: one above the other.
        bias: float32 [out] or None.
        rows: shared by all layers of a model.
        order: for each output, the row of the weights; None: as they are.
    """

    def __init__(
        self,
        weights: Sequence[StoredWeight],
        bias: torch.Tensor | None,
        rows: BlockRows,
        order: _Array | None = None,
    ) -> None:
        total = sum(each.out_features for each in weights)
        super().__init__(weights[0].in_features, total if order is None else len(order))
        self._weights, self._order, self._rows = tuple(weights), order, rows
        self.bias = None if bias is None else bias.detach().to(torch.float32)

    def of_outputs(self, spans: Sequence[range]) -> CheckpointProduct:
        index = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        order = index if self._order is None else self._order[index]
        bias = None if self.bias is None else self.bias[torch.from_numpy(index)]
        return CheckpointProduct(self._weights, bias, self._rows, order)

    def packed(self) -> StoredProduct:
        whole = self._order is None or np.array_equal(self._order, np.arange(len(self._order)))
        if all(has_blocks(each) for each in self._weights) and (len(self._weights) == 1 or whole):
            found = self._in_blocks()
            if found is not None:
                return found
        plain = torch.cat([each.dequantized(torch.bfloat16) for each in self._weights])
        if self._order is not None:
            plain = plain[torch.from_numpy(self._order)]
        return PlainProduct(plain, self.bias).packed()

    def _in_blocks(self) -> StoredProduct | None:
        blocks = []
        for weight in self._weights:
            blocks.append(blocks_of(weight))
            release_file_pages(address_ranges(weight.tensors))
        inputs = blocks[0].inputs
        if any(not _same(each.inputs, inputs) for each in blocks):
            return None
        order = self._order if len(blocks) == 1 else None
        panels = [BlockPanels(each.number, each.rows, order, factor=each.factor) for each in blocks]
        if len(panels) == 1:
            return BlockLinear(panels[0], self.bias, self._rows, inputs)
        return ReorderedBlocks(panels, self.bias, self._rows, inputs)


class CheckpointExperts(WholeExperts):
    """A layer's experts of a checkpoint, which become `BlockExperts` or `PackedExperts`.

    Args:
        plain: transformers' module, whose weights are not used.
        first, down: weights of each expert, one above the other: gates and ups (which alternate where
            `plain` says so), and of the last product.
        rows: shared by all layers of a model.
        own: the experts that it answers for; None: all.
    """

    def __init__(
        self,
        plain: Any,
        first: Sequence[Sequence[StoredWeight]],
        down: Sequence[Sequence[StoredWeight]],
        rows: BlockRows,
        own: range | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = int(plain.num_experts)
        # A module in a tuple is none of this one's: its parameters have no values.
        self._source = (plain, first, down, rows)
        self._own = range(self.num_experts) if own is None else own

    def of_experts(self, own: range) -> CheckpointExperts:
        return CheckpointExperts(*self._source, own)

    def packed(self) -> StoredExperts:
        plain, first, down, rows = self._source
        alternate = bool(plain.has_gate and not plain.is_concatenated)
        names = ("gate_up_proj" if plain.has_gate else "up_proj", "down_proj")
        gate_up = [first[each] for each in self._own]
        last = [down[each] for each in self._own]
        biases = [self._bias(plain, name) for name in names]
        if alternate and biases[0] is not None:
            biases[0] = torch.cat([biases[0][:, ::2], biases[0][:, 1::2]], dim=1)
        if _can_stack(gate_up) and _can_stack(last):
            return BlockExperts(
                plain,
                self._own,
                _stacked(gate_up, biases[0], alternate),
                _stacked(last, biases[1], False),
                rows,
            )
        return PackedExperts(
            plain, self._own, _singly(gate_up, biases[0], alternate), _singly(last, biases[1], False)
        )

    def _bias(self, plain: Any, name: str) -> torch.Tensor | None:
        found = getattr(plain, f"{name}_bias", None) if plain.has_bias else None
        return None if found is None else found.detach()[self._own.start : self._own.stop].float()


def _same(one: _Array | None, other: _Array | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _can_stack(experts: Sequence[Sequence[StoredWeight]]) -> bool:
    """True if experts have blocks, inputs in their own order and whole panels."""
    width = default_method().columns
    every = [weight for parts in experts for weight in parts]
    return all(
        has_blocks(each) and getattr(each, "group_of", None) is None and each.out_features % width == 0
        for each in every
    )


def _stacked(
    experts: Sequence[Sequence[StoredWeight]], bias: torch.Tensor | None, alternate: bool
) -> ExpertProduct:
    """The product of experts that `_can_stack`; its outputs are gates, then ups, where they `alternate`."""
    sections = []
    for part in range(len(experts[0])):
        weights = [parts[part] for parts in experts]
        number = common_format(weights)
        rows: list[Any] = []
        factors = []
        for weight in weights:
            blocks = blocks_of(weight, number)
            both = [blocks.rows[::2], blocks.rows[1::2]] if alternate else [blocks.rows]
            rows += both
            factors.append(blocks.factor)
            release_file_pages(address_ranges(weight.tensors))
        stacked = np.concatenate(rows).reshape(len(weights), weights[0].out_features, -1)
        sections.append(ExpertPanels(number, stacked, factors=factors))
    if bias is None:
        return ExpertProduct(sections, [None] * len(sections))
    return ExpertProduct(sections, bias.split([each.out_features for each in sections], dim=1))


def _singly(
    experts: Sequence[Sequence[StoredWeight]], bias: torch.Tensor | None, alternate: bool
) -> list[PackedLinear]:
    """Products of experts that have no blocks, rounded to bfloat16."""
    found = []
    for number, parts in enumerate(experts):
        weight = torch.cat([each.dequantized(torch.bfloat16) for each in parts])
        if alternate:
            weight = torch.cat([weight[::2], weight[1::2]])
        found.append(PlainProduct(weight, None if bias is None else bias[number]).packed())
    return found


def release_pages(tensors: Any) -> None:
    """Give back the memory of pages of a mapped file that have been read.

    Args:
        tensors: of the file.
    """
    for tensor in tensors:
        for part in getattr(tensor, "parts", [tensor]):
            release_mapped_pages(part.data.ctypes.data, part.data.nbytes)
