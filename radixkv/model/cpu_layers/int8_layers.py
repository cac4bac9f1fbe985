# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of the Llama shape with int8 weights, for a CPU with VNNI or AVX2.

Each step between two products is one pass over the rows that ends in the next product's int8 input:

    norm to int8        | q, k and v as one product | rope in place | write, attend
    quantise            | output product, added to the residual
    norm to int8        | gate and up as one product
    SiLU, times, to int8 | down product, added to the residual

Every part of it works row by row and products are exact in int32: with attention that does not depend on the
batch either, nor do the layer's results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from radixkv.model.adapters.attachment import ProductSlot
from radixkv.model.cpu_layers.adapted_products import AdaptedInt8
from radixkv.model.cpu_layers.llama_layer import LlamaLayer, Scratch
from radixkv.model.cpu_layers.quantized_linear import quantize_weight
from radixkv.model.decoder_layers import DecoderParts
from radixkv_kernels.cpu.linear.int8_product import PackedInt8
from radixkv_kernels.cpu.linear.int8_rows import Int8Rows
from radixkv_kernels.cpu.linear.row_kernels import RowKernels


class Int8Layer(LlamaLayer):
    """A layer with int8 weights.

    Args:
        rows, scratch: shared by all layers of a model.
    """

    def __init__(self, parts: DecoderParts, kernels: RowKernels, rows: Int8Rows, scratch: Scratch) -> None:
        super().__init__(parts, kernels)
        assert parts.gated is not None
        self.merged: PackedInt8 | AdaptedInt8 = _pack(parts.heads.merged)
        self.output: PackedInt8 | AdaptedInt8 = _pack([parts.heads.output])
        self.gate_up: PackedInt8 | AdaptedInt8 = _pack(parts.gated.gate_up)
        self.down: PackedInt8 | AdaptedInt8 = _pack([parts.gated.down])
        self.rows, self.scratch = rows, scratch

    def adapted(self, product: PackedInt8, slot: ProductSlot) -> AdaptedInt8:
        return AdaptedInt8(product, slot)

    def queries_keys_values(self, states: torch.Tensor) -> torch.Tensor:
        return self._multiply_normed(0, self.merged, states)

    def add_attention_output(self, attended: torch.Tensor, states: torch.Tensor) -> None:
        own, scales = self.rows.quantize(attended, self.output.row_width)
        self.output.multiply(own, scales, states, add=True)

    def mlp_rows(self, states: torch.Tensor) -> torch.Tensor:
        # Gates and ups apart, so that the other ranks' columns follow each.
        return self._multiply_normed(1, self.gate_up, states).view(len(states), 2, -1)

    def add_mlp_output(self, rows: torch.Tensor, states: torch.Tensor) -> None:
        own, scales = self.rows.gated(rows.view(len(rows), -1), self.down.row_width)
        self.down.multiply(own, scales, states, add=True)

    def _multiply_normed(
        self, which: int, product: PackedInt8 | AdaptedInt8, states: torch.Tensor
    ) -> torch.Tensor:
        own, scales = self.rows.norm(states, *self.norms[which], product.row_width)
        return product.multiply(own, scales, self.scratch.take(len(states), product.out_features))


def _pack(linears: Sequence[nn.Linear]) -> PackedInt8:
    """Layers with the same input as one product, their outputs one after the other."""
    parts = [quantize_weight(linear.weight.detach()) for linear in linears]
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias.detach() for linear in linears])
    return PackedInt8(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]), bias)
