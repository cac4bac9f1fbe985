# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of the Llama shape with fewer, larger operations, for a CPU.

A transformers layer runs about forty torch operators, each a pass over its tensors. `FusedLayer` runs nine
compiled functions, on the same weights, after the same call:

    norm | q, k and v as one product | rope in place | write, attend | output product, added to the residual
    norm | SiLU of the gate product times the up product             | down product, added to the residual

Each part works row by row: with attention that does not depend on the batch, nor do the results.
"""

from __future__ import annotations

from typing import Any

import torch

from radixkv.model.adapters.attachment import ProductSlot
from radixkv.model.cpu_layers.adapted_products import AdaptedFloat, AdaptedGate
from radixkv.model.cpu_layers.llama_layer import LlamaLayer, Scratch
from radixkv.model.decoder_layers import DecoderParts
from radixkv_kernels.cpu.linear.float_product import COLUMNS, PackedFloat, PackedGate
from radixkv_kernels.cpu.linear.row_kernels import RowKernels


class FusedLayer(LlamaLayer):
    """A layer with packed weights of float32, bfloat16 or float16; norms and activations are float32.

    Args:
        scratch: a narrow and a wide one, shared by all layers of a model.
    """

    gate_columns = COLUMNS

    def __init__(self, parts: DecoderParts, kernels: RowKernels, scratch: tuple[Scratch, Scratch]) -> None:
        super().__init__(parts, kernels)
        merged, output, gated = parts.heads.merged, parts.heads.output, parts.gated
        assert gated is not None
        biases = tuple(part.bias for part in merged if part.bias is not None)
        self.merged: PackedFloat | AdaptedFloat = PackedFloat(
            torch.cat(tuple(part.weight for part in merged)), torch.cat(biases) if biases else None
        )
        self.output: PackedFloat | AdaptedFloat = PackedFloat(output.weight, output.bias)
        gate, up = gated.gate_up
        self.gate_up: PackedGate | AdaptedGate = PackedGate(gate.weight, up.weight, gate.bias, up.bias)
        self.down: PackedFloat | AdaptedFloat = PackedFloat(gated.down.weight, gated.down.bias)
        self.narrow, self.wide = scratch

    def adapted(self, product: Any, slot: ProductSlot) -> AdaptedFloat | AdaptedGate:
        return (AdaptedGate if isinstance(product, PackedGate) else AdaptedFloat)(product, slot)

    def queries_keys_values(self, states: torch.Tensor) -> torch.Tensor:
        return self._multiply_normed(0, self.merged, states)

    def add_attention_output(self, attended: torch.Tensor, states: torch.Tensor) -> None:
        self.output.multiply(attended, states, add=True)

    def mlp_rows(self, states: torch.Tensor) -> torch.Tensor:
        return self._multiply_normed(1, self.gate_up, states)

    def add_mlp_output(self, rows: torch.Tensor, states: torch.Tensor) -> None:
        self.down.multiply(rows, states, add=True)

    def _multiply_normed(
        self, which: int, product: PackedFloat | PackedGate | AdaptedFloat | AdaptedGate, states: torch.Tensor
    ) -> torch.Tensor:
        normed = self.kernels.rms_norm(states, *self.norms[which], out=self.narrow.take(*states.shape))
        return product.multiply(normed, self.wide.take(len(states), product.out_features))
