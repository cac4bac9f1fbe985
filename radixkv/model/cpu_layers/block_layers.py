# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of the Llama shape whose weights stay the blocks of a GGUF file.

Each step between two products is one pass over the rows that ends in the next product's int8 input, as in
`int8_layers`; queries, keys and values are one product, of sections that may differ in their formats, and so
are gates and ups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from radixkv.model.adapters.attachment import SlotOf
from radixkv.model.cpu_layers.adapted_products import AdaptedBlocks
from radixkv.model.cpu_layers.block_linear import BlockLinear
from radixkv.model.cpu_layers.llama_layer import ATTENTION_INPUTS, GATE_UP, LlamaLayer, Scratch
from radixkv.model.decoder_layers import DecoderParts, is_llama_shape, replace_layers
from radixkv_kernels.cpu.linear.block_product import BlockProduct
from radixkv_kernels.cpu.linear.block_rows import BlockRows
from radixkv_kernels.cpu.linear.row_kernels import RowKernels


class BlockLayer(LlamaLayer):
    """A layer with weights in blocks.

    Args:
        rows, scratch: shared by all layers of a model.
    """

    def __init__(self, parts: DecoderParts, kernels: RowKernels, rows: BlockRows, scratch: Scratch) -> None:
        super().__init__(parts, kernels)
        assert parts.gated is not None
        self.merged: BlockProduct | AdaptedBlocks = _merged(parts.attention.merged)
        self.output: BlockProduct | AdaptedBlocks = _merged((parts.attention.output,))
        self.gate_up: BlockProduct | AdaptedBlocks = _merged(parts.gated.gate_up)
        self.down: BlockProduct | AdaptedBlocks = _merged((parts.gated.down,))
        self.rows, self.scratch = rows, scratch

    def adapt(self, slot_of: SlotOf) -> None:
        """See `radixkv.model.adapters.attachment`."""

        def adapted(product: BlockProduct | AdaptedBlocks, names: Sequence[str]) -> AdaptedBlocks:
            assert isinstance(product, BlockProduct)
            return AdaptedBlocks(product, slot_of(names))

        self.merged = adapted(self.merged, ATTENTION_INPUTS)
        self.output = adapted(self.output, ["self_attn.o_proj"])
        self.gate_up = adapted(self.gate_up, GATE_UP)
        self.down = adapted(self.down, ["mlp.down_proj"])

    def queries_keys_values(self, states: torch.Tensor) -> torch.Tensor:
        return self._multiply_normed(0, self.merged, states)

    def add_attention_output(self, attended: torch.Tensor, states: torch.Tensor) -> None:
        self.output.multiply(self.rows.quantize(attended), states, add=True)

    def mlp_rows(self, states: torch.Tensor) -> torch.Tensor:
        # Gates and ups apart, so that the other ranks' columns follow each.
        return self._multiply_normed(1, self.gate_up, states).view(len(states), 2, -1)

    def add_mlp_output(self, rows: torch.Tensor, states: torch.Tensor) -> None:
        self.down.multiply(self.rows.gated(rows.view(len(rows), -1)), states, add=True)

    def _multiply_normed(
        self, which: int, product: BlockProduct | AdaptedBlocks, states: torch.Tensor
    ) -> torch.Tensor:
        own = self.rows.norm(states, *self.norms[which])
        return product.multiply(own, self.scratch.take(len(states), product.out_features))


def _merged(products: tuple[Any, ...]) -> BlockProduct:
    """Layers with the same input as one product, their outputs one after the other; panels are not copied."""
    return BlockProduct([each.panels for each in products], [each.bias for each in products])


def fuse_block_layers(model: nn.Module) -> int:
    """Replace decoder layers of the Llama shape whose products are all in blocks; returns how many."""
    found = next((module for module in model.modules() if isinstance(module, BlockLinear)), None)
    if found is None:
        return 0
    kernels, rows, scratch = RowKernels(), found.rows, Scratch()

    def fused(parts: DecoderParts) -> nn.Module | None:
        gated = parts.gated
        if not is_llama_shape(parts) or gated is None:
            return None
        products = (*parts.attention.merged, parts.attention.output, *gated.gate_up, gated.down)
        if not all(isinstance(each, BlockLinear) for each in products):
            return None
        return BlockLayer(parts, kernels, rows, scratch)

    return replace_layers(model, fused)
