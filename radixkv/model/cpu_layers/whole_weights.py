# SPDX-License-Identifier: Apache-2.0
"""Weights of a GGUF file on their way into their final form, from which a rank can first choose its share.

A share is chosen by rows and by experts, which any format survives. Blocks stay in the mapped file until
then: a rank's memory never holds more than its share and one more product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from radixkv.model.cpu_layers.block_linear import BlockLinear, ReorderedBlocks
from radixkv.model.cpu_layers.packed_linear import PackedLinear
from radixkv.model.decoder_layers import StoredExperts, StoredProduct, WholeExperts, WholeProduct
from radixkv.model.loading.file_pages import release_mapped_pages
from radixkv.model.loading.gguf_experts import pack_experts
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
        if len(self._tensors) == 1 and self._inputs is None:
            return BlockLinear(self._panels(0, self._order), self.bias, self._rows)
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
        return PackedLinear(plain)


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


def pack_whole_weights(model: nn.Module) -> None:
    """Give every product and all experts of a model that have not got it yet their final form."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, WholeProduct | WholeExperts):
                setattr(parent, name, child.packed())


def release_pages(tensors: Any) -> None:
    """Give back the memory of pages of a mapped file that have been read.

    Args:
        tensors: of the file.
    """
    for tensor in tensors:
        for part in getattr(tensor, "parts", [tensor]):
            release_mapped_pages(part.data.ctypes.data, part.data.nbytes)
