"""Decoder layers of the Llama shape with int8 weights, for a CPU with int8 dot products.

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
from typing import Any

import torch
from torch import nn

from radixkv.model.cpu.fused_layers import Scratch, can_fuse
from radixkv.model.cpu.quantized_linear import quantize_weight
from radixkv.model.loading.file_pages import address_ranges, release_file_pages
from radixkv_kernels.cpu.linear.int8_product import PackedInt8
from radixkv_kernels.cpu.linear.int8_rows import Int8Rows
from radixkv_kernels.cpu.linear.row_kernels import RowKernels


class Int8Layer(nn.Module):
    """One layer; takes what transformers passes to its own and returns the same: [1, T, H] -> [1, T, H].

    The residual is added in place: the input's memory holds the result.

    Args:
        layer: the transformers layer, for which `can_fuse` holds.
        kernels, rows, buffer: shared by all layers of a model.
    """

    def __init__(self, layer: Any, kernels: RowKernels, rows: Int8Rows, buffer: Scratch) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_index = attention.layer_idx
        self.scale = attention.scaling
        self.head_size = attention.head_dim
        self.num_heads = attention.o_proj.in_features // self.head_size
        self.num_kv_heads = attention.k_proj.out_features // self.head_size
        self.norms = nn.ModuleList([layer.input_layernorm, layer.post_attention_layernorm])
        self.merged = _pack([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = _pack([attention.o_proj])
        self.gate_up = _pack([mlp.gate_proj, mlp.up_proj])
        self.down = _pack([mlp.down_proj])
        self.kernels, self.rows, self.buffer = kernels, rows, buffer

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        radixkv_step: Any,
        **_: Any,
    ) -> torch.Tensor:
        cosines, sines = position_embeddings
        states = hidden_states[0]
        count = states.shape[0]
        heads = self._multiply_normed(0, self.merged, states)
        rotated = self.num_heads + self.num_kv_heads
        self.kernels.rotate(heads, rotated, cosines[0], sines[0])
        heads = heads.view(count, -1, self.head_size)
        attended = radixkv_step.attend(
            self.layer_index,
            heads[:, : self.num_heads],
            heads[:, self.num_heads : rotated],
            heads[:, rotated:],
            scale=self.scale,
        )
        own, scales = self.rows.quantize(attended.reshape(count, -1), self.output.row_bytes)
        self.output.multiply(own, scales, states, add=True)
        gate_up = self._multiply_normed(1, self.gate_up, states)
        own, scales = self.rows.gated(gate_up, self.down.row_bytes)
        self.down.multiply(own, scales, states, add=True)
        return hidden_states

    def _multiply_normed(self, which: int, product: PackedInt8, states: torch.Tensor) -> torch.Tensor:
        norm: Any = self.norms[which]
        own, scales = self.rows.norm(states, norm.weight, norm.variance_epsilon, product.row_bytes)
        return product.multiply(own, scales, self.buffer.take(len(states), product.out_features))


def _pack(linears: Sequence[nn.Linear]) -> PackedInt8:
    """Layers with the same input as one product, their outputs one after the other."""
    parts = [quantize_weight(linear.weight.detach()) for linear in linears]
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias.detach() for linear in linears])
    return PackedInt8(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]), bias)


@torch.no_grad()
def fuse_int8_layers(model: nn.Module, rows: Int8Rows) -> int:
    """Replace the layers that can be; returns how many. The model then needs `radixkv_step` in calls."""
    layers: Any = getattr(getattr(model, "model", None), "layers", [])
    kernels, buffer = RowKernels(), Scratch()
    count = 0
    for index, layer in enumerate(layers):
        if can_fuse(layer):
            layers[index] = Int8Layer(layer, kernels, rows, buffer)
            release_file_pages(address_ranges(layer.parameters()))
            count += 1
    return count
