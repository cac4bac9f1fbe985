"""Decoder layers of the Llama shape with fewer, larger operations, for float32 on a CPU.

A transformers layer runs about forty torch operators, each a pass over its tensors. `FusedLayer` runs ten,
on the same weights, behind the same call:

    norm | q, k and v as one product | rope in place | write, attend | output product + residual
    norm | gate product with SiLU    | up product times gate         | down product + residual

SiLU, the multiplication and the residuals are part of the oneDNN products' last step. Only layers whose class
is known to compute exactly this are replaced; every other model runs as transformers wrote it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from radixkv.execution.file_pages import address_ranges, release_file_pages
from radixkv.execution.packed_linear import PackedLinear

#: transformers' classes with this structure and nothing else (no windows, no norms on q and k).
_LAYER_CLASSES = {("transformers.models.llama.modeling_llama", "LlamaDecoderLayer")}


class FusedLayer(nn.Module):
    """One layer; takes what transformers passes to its own and returns the same: [1, T, H] -> [1, T, H].

    Args:
        layer: the transformers layer, its linear layers not packed yet.
        merged: the product of q, k and v, packed.
        kernels: `radixkv_kernels.row_kernels.RowKernels`.
    """

    def __init__(self, layer: Any, merged: PackedLinear, kernels: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_index = attention.layer_idx
        self.scale = attention.scaling
        self.head_size = attention.head_dim
        self.num_heads = attention.o_proj.in_features // self.head_size
        self.num_kv_heads = (merged.out_features // self.head_size - self.num_heads) // 2
        self.norms = nn.ModuleList([layer.input_layernorm, layer.post_attention_layernorm])
        self.merged = merged
        self.output, self.gate, self.up, self.down = (
            PackedLinear(linear) for linear in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        self.kernels = kernels

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
        rows = self.merged(self._norm(0, states))
        rotated = self.num_heads + self.num_kv_heads
        self.kernels.rotate(rows, rotated, cosines[0], sines[0])
        heads = rows.view(rows.shape[0], -1, self.head_size)
        attended = radixkv_step.attend(
            self.layer_index,
            heads[:, : self.num_heads],
            heads[:, self.num_heads : rotated],
            heads[:, rotated:],
            scale=self.scale,
        )
        states = _product(self.output, attended.reshape(rows.shape[0], -1), states, "add")
        normed = self._norm(1, states)
        gate = torch.ops.mkldnn._linear_pointwise(normed, self.gate.packed, self.gate.bias, "swish", [], "")
        states = _product(self.down, _product(self.up, normed, gate, "mul"), states, "add")
        return states[None]

    def _norm(self, which: int, states: torch.Tensor) -> torch.Tensor:
        norm: Any = self.norms[which]
        out: torch.Tensor = self.kernels.rms_norm(states, norm.weight, norm.variance_epsilon)
        return out


def _product(linear: PackedLinear, inputs: torch.Tensor, other: torch.Tensor, operation: str) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
        inputs, other, linear.packed, linear.bias, operation
    )
    return out


@torch.no_grad()
def fuse_layers(model: nn.Module) -> int:
    """Replace the layers that can be; returns how many. The model is called as before, with `radixkv_step`.

    Linear layers that are not part of a replaced layer stay as they are.
    """
    if "binary" not in torch.ops.mkldnn._linear_pointwise.overloads():
        return 0
    kernels: Any = None
    layers = getattr(getattr(model, "model", None), "layers", [])
    count = 0
    for index, layer in enumerate(layers):
        if can_fuse(layer):
            if kernels is None:
                from radixkv_kernels.row_kernels import RowKernels

                kernels = RowKernels()
            layers[index] = FusedLayer(layer, _merged_inputs(layer.self_attn), kernels)
            release_file_pages(address_ranges(layer.parameters()))
            count += 1
    return count


def _merged_inputs(attention: Any) -> PackedLinear:
    """q, k and v as one packed product."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    rows = sum(part.out_features for part in parts)
    whole = nn.Linear(parts[0].in_features, rows, bias=parts[0].bias is not None, device="meta")
    whole.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    if parts[0].bias is not None:
        whole.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    return PackedLinear(whole)


def can_fuse(layer: Any) -> bool:
    """Whether the layer is of a known class, float32 on a CPU, with SiLU, and numba is there."""
    if (type(layer).__module__, type(layer).__name__) not in _LAYER_CLASSES:
        return False
    weight = layer.self_attn.q_proj.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or layer.self_attn.head_dim % 2:
        return False
    if not isinstance(layer.mlp.act_fn, nn.SiLU) and type(layer.mlp.act_fn).__name__ != "SiLUActivation":
        return False
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True
