# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of the Llama shape whose weights stay the blocks of a GGUF file.

Each step between two products is one pass over the rows that ends in the next product's int8 input, as in
`int8_layers`; queries, keys and values are one product, of sections that may differ in their formats, and so
are gates and ups. A step of as many rows as the step before makes the launches before and after the attention
again, each in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from radixkv.model.adapters.attachment import ProductSlot
from radixkv.model.cpu_layers.adapted_products import AdaptedBlocks
from radixkv.model.cpu_layers.block_linear import BlockLinear
from radixkv.model.cpu_layers.llama_layer import LlamaLayer, Scratch
from radixkv.model.decoder_layers import DecoderParts, is_llama_shape, replace_layers
from radixkv.model.step_context import current_step
from radixkv_kernels.cpu.linear.block_product import BlockProduct
from radixkv_kernels.cpu.linear.block_rows import BlockRows
from radixkv_kernels.cpu.linear.launch import RecordedLaunches
from radixkv_kernels.cpu.linear.row_kernels import RowKernels


class BlockLayer(LlamaLayer):
    """A layer with weights in blocks.

    Args:
        rows, scratch: shared by all layers of a model.
    """

    def __init__(self, parts: DecoderParts, kernels: RowKernels, rows: BlockRows, scratch: Scratch) -> None:
        super().__init__(parts, kernels)
        assert parts.gated is not None
        self.merged: BlockProduct | AdaptedBlocks = _merged(parts.heads.merged)
        self.output: BlockProduct | AdaptedBlocks = _merged((parts.heads.output,))
        self.gate_up: BlockProduct | AdaptedBlocks = _merged(parts.gated.gate_up)
        self.down: BlockProduct | AdaptedBlocks = _merged((parts.gated.down,))
        self.rows, self.scratch = rows, scratch
        self._before, self._after = RecordedLaunches(), RecordedLaunches()
        self._recorded: tuple[int, int, int] | None = None  # rows, and where they and the scratch lie
        self._heads: tuple[torch.Tensor, ...] = ()
        self._adapted = False

    def adapted(self, product: BlockProduct, slot: ProductSlot) -> AdaptedBlocks:
        self._adapted = True
        return AdaptedBlocks(product, slot)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **others: Any,
    ) -> torch.Tensor:
        """See `LlamaLayer`. Adapters and ranks put more than launches between the products."""
        if self._adapted or self.joined != (None, None):
            return super().forward(hidden_states, position_embeddings=position_embeddings, **others)
        states = hidden_states[0]
        count, at = states.shape[0], states.data_ptr()

        def before() -> tuple[torch.Tensor, ...]:
            return self._rotated_heads(self.queries_keys_values(states), position_embeddings)

        def after() -> None:
            self.add_attention_output(attended, states)
            self.add_mlp_output(self.mlp_rows(states), states)

        places = (count, self.rows.address, self.scratch.address)
        again = self._recorded == places
        inputs = (at, *(each.data_ptr() for each in position_embeddings))
        if again:
            self._before.run(inputs)
        else:
            self._recorded = None
            self._heads = self._before.record(before, inputs)
        attended = current_step().attend(self.layer_index, *self._heads, scale=self.scale)
        attended = attended.reshape(count, -1)
        if again:
            self._after.run((at, attended.data_ptr()))
        else:
            self._after.record(after, (at, attended.data_ptr()))
            # Memory that grew meanwhile is gone, and earlier launches had its old place.
            if places == (count, self.rows.address, self.scratch.address):
                self._recorded = places
        return hidden_states

    def queries_keys_values(self, states: torch.Tensor) -> torch.Tensor:
        return self._multiply_normed(0, self.merged, states)

    def add_attention_output(self, attended: torch.Tensor, states: torch.Tensor) -> None:
        own = self.rows.quantize(attended, self.output.row_dtype, self.output.order)
        self.output.multiply(own, states, add=True)

    def mlp_rows(self, states: torch.Tensor) -> torch.Tensor:
        # Gates and ups apart, so that the other ranks' columns follow each.
        return self._multiply_normed(1, self.gate_up, states).view(len(states), 2, -1)

    def add_mlp_output(self, rows: torch.Tensor, states: torch.Tensor) -> None:
        own = self.rows.gated(rows.view(len(rows), -1), self.down.row_dtype, self.down.order)
        self.down.multiply(own, states, add=True)

    def _multiply_normed(
        self, which: int, product: BlockProduct | AdaptedBlocks, states: torch.Tensor
    ) -> torch.Tensor:
        own = self.rows.norm(states, *self.norms[which], product.row_dtype, product.order)
        return product.multiply(own, self.scratch.take(len(states), product.out_features))


def _merged(products: tuple[Any, ...]) -> BlockProduct:
    """Layers with the same input as one product, their outputs one after the other; panels are not copied."""
    panels, biases = [each.panels for each in products], [each.bias for each in products]
    return BlockProduct(panels, biases, products[0].product.order)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


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
        merged: Sequence[Any] = parts.heads.merged
        gate_up: Sequence[Any] = gated.gate_up
        products = (*merged, parts.heads.output, *gate_up, gated.down)
        if not all(isinstance(each, BlockLinear) for each in products):
            return None
        for group in (merged, gate_up):
            first = group[0].product
            for each in group[1:]:
                other = each.product
                if other.row_dtype != first.row_dtype or not _same(other.order, first.order):
                    return None
        return BlockLayer(parts, kernels, rows, scratch)

    return replace_layers(model, fused)
