"""Decoder layers of the Llama shape with fewer, larger operations, for float32 on a CPU.

A transformers layer runs about forty torch operators, each a pass over its tensors. `FusedLayer` runs nine
compiled functions, on the same weights, behind the same call:

    norm | q, k and v as one product | rope in place | write, attend | output product, added to the residual
    norm | SiLU of the gate product times the up product             | down product, added to the residual

Only layers whose class is known to compute exactly this are replaced; every other model runs as transformers
wrote it. Each part works row by row: with attention that does not depend on the batch, nor do the results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from radixkv.model.loading.file_pages import address_ranges, release_file_pages

#: transformers' classes with this structure and nothing else (no windows, no norms on q and k).
_LAYER_CLASSES = {("transformers.models.llama.modeling_llama", "LlamaDecoderLayer")}


class Scratch:
    """One float32 matrix that all layers write to in turn; grows to the largest batch."""

    def __init__(self) -> None:
        self._data = torch.empty(0)

    def take(self, rows: int, width: int) -> torch.Tensor:
        """[rows, width], with anything in it; valid until the next call."""
        if self._data.numel() < rows * width:
            self._data = torch.empty(rows * width)
        return self._data[: rows * width].view(rows, width)


class FusedLayer(nn.Module):
    """One layer; takes what transformers passes to its own and returns the same: [1, T, H] -> [1, T, H].

    The residual is added in place: the input's memory holds the result.

    Args:
        layer: the transformers layer, for which `can_fuse` holds.
        kernels: `radixkv_kernels.cpu.linear.row_kernels.RowKernels`.
        scratch: a narrow and a wide one, shared by all layers of a model.
    """

    def __init__(self, layer: Any, kernels: Any, scratch: tuple[Scratch, Scratch]) -> None:
        from radixkv_kernels.cpu.linear.float_product import PackedFloat, PackedGate

        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_index = attention.layer_idx
        self.scale = attention.scaling
        self.head_size = attention.head_dim
        self.num_heads = attention.o_proj.in_features // self.head_size
        self.num_kv_heads = attention.k_proj.out_features // self.head_size
        # A plain tuple: looking a submodule up costs as much as the norm of a row.
        self.norms = tuple(
            (norm.weight.detach(), norm.variance_epsilon)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
        self.merged = PackedFloat(torch.cat([part.weight for part in parts]), bias)
        self.output = PackedFloat(attention.o_proj.weight, attention.o_proj.bias)
        gate, up = mlp.gate_proj, mlp.up_proj
        self.gated = PackedGate(gate.weight, up.weight, gate.bias, up.bias)
        self.down = PackedFloat(mlp.down_proj.weight, mlp.down_proj.bias)
        self.kernels, self.scratch = kernels, scratch

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        radixkv_step: Any,
        **_: Any,
    ) -> torch.Tensor:
        cosines, sines = position_embeddings
        kernels, (narrow, wide) = self.kernels, self.scratch
        states = hidden_states[0]
        count, width = states.shape
        normed = kernels.rms_norm(states, *self.norms[0], out=narrow.take(count, width))
        rows = self.merged.multiply(normed, wide.take(count, self.merged.out_features))
        rotated = self.num_heads + self.num_kv_heads
        kernels.rotate(rows, rotated, cosines[0], sines[0])
        heads = rows.view(count, -1, self.head_size)
        attended = radixkv_step.attend(
            self.layer_index,
            heads[:, : self.num_heads],
            heads[:, self.num_heads : rotated],
            heads[:, rotated:],
            scale=self.scale,
        )
        self.output.multiply(attended.reshape(count, -1), states, add=True)
        normed = kernels.rms_norm(states, *self.norms[1], out=narrow.take(count, width))
        gated = self.gated.multiply(normed, wide.take(count, self.gated.out_features))
        self.down.multiply(gated, states, add=True)
        return hidden_states


@torch.no_grad()
def fuse_layers(model: nn.Module) -> int:
    """Replace the layers that can be; returns how many. The model is called as before, with `radixkv_step`.

    Linear layers that are not part of a replaced layer stay as they are.
    """
    kernels: Any = None
    scratch = (Scratch(), Scratch())
    layers = getattr(getattr(model, "model", None), "layers", [])
    count = 0
    for index, layer in enumerate(layers):
        if can_fuse(layer):
            if kernels is None:
                from radixkv_kernels.cpu.linear.row_kernels import RowKernels

                kernels = RowKernels()
            layers[index] = FusedLayer(layer, kernels, scratch)
            release_file_pages(address_ranges(layer.parameters()))
            count += 1
    return count


def can_fuse(layer: Any) -> bool:
    """Whether the layer is of a known class, with SiLU, float32 on a CPU that the kernels are for."""
    if (type(layer).__module__, type(layer).__name__) not in _LAYER_CLASSES:
        return False
    weight = layer.self_attn.q_proj.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or layer.self_attn.head_dim % 2:
        return False
    if not isinstance(layer.mlp.act_fn, nn.SiLU) and type(layer.mlp.act_fn).__name__ != "SiLUActivation":
        return False
    return has_vector_kernels()


def has_vector_kernels() -> bool:
    """Whether numba is there, and the processor has the multiply-adds that the kernels are made of."""
    try:
        from radixkv_kernels.cpu.vectors import has_multiply_add
    except ImportError:
        return False
    return has_multiply_add()
