# SPDX-License-Identifier: Apache-2.0
"""Weights of 8 bits on a GPU, made of plain ones at load: `--quantization fp8|int8`.

Each output has a scale of its own. Products read the codes as they are and multiply rows in the model's dtype
(`radixkv_kernels.triton.stored_product`); routed experts likewise. Embeddings, the output layer, routers and
gates of shared experts stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from radixkv.errors import ConfigError
from radixkv.model.decoder_layers import StoredProduct
from radixkv.model.gpu_experts import GpuExperts
from radixkv_kernels.triton.stored_product import multiply_stored
from radixkv_kernels.triton.weight_tiles import TiledWeight

#: Kind -> dtype of codes and the largest code.
KINDS = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
#: First of the GPUs whose compiler converts e4m3.
_FP8_CAPABILITY = (8, 9)
#: Products of fewer outputs stay as they are: a tile has more.
_MIN_OUTPUTS = 16
#: Numbers that are rounded at a time.
_NUMBERS_AT_ONCE = 16 << 20


class TiledProduct(StoredProduct):
    """A linear layer on a GPU with a weight in any form that kernels read by tiles.

    Args:
        stored: the weight and the bias.
        dtype: of inputs.

    Attributes:
        fixed_rows: a row's bits must not depend on the number of rows (deterministic mode).
    """

    def __init__(self, stored: TiledWeight, dtype: torch.dtype) -> None:
        super().__init__(stored.in_features, stored.out_features)
        self.stored, self.dtype = stored, dtype
        self.fixed_rows = False

    @property
    def weight(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = inputs.reshape(-1, self.in_features).contiguous()
        out = multiply_stored(rows, self.stored, fixed_rows=self.fixed_rows)
        return out.view(*inputs.shape[:-1], self.out_features)


@torch.no_grad()
def quantize_products(model: Any, kind: str) -> int:
    """Give linear layers and routed experts weights of 8 bits, one after the other; once is enough.

    Args:
        kind: one of `KINDS`.

    Returns:
        Number of replaced modules.

    Raises:
        ConfigError: the GPU has no floats of 8 bits.
    """
    device = model.get_input_embeddings().weight.device
    if kind == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ConfigError(
            f"--quantization fp8 needs a GPU with 8-bit floats (Ada, Hopper or later), and this is "
            f"{torch.cuda.get_device_name(device)}: use --quantization int8"
        )
    count = 0
    output = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not output and child.out_features >= _MIN_OUTPUTS:
                bias = None if child.bias is None else child.bias.detach()
                stored = quantized(child.weight.detach(), kind, bias)
                setattr(parent, name, TiledProduct(stored, child.weight.dtype))
                count += 1
        if isinstance(parent, GpuExperts) and parent.is_plain:
            parent.store(*(quantized(each.codes, kind, each.bias) for each in (parent.gate_up, parent.down)))
            count += 1
    return count


def quantized(weight: Tensor, kind: str, bias: Tensor | None) -> TiledWeight:
    """Round a weight [..., out, in] to codes with a scale for each output."""
    dtype, largest = KINDS[kind]
    codes = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scales = torch.empty(*weight.shape[:-1], 1, dtype=torch.float32, device=weight.device)
    outputs, inputs = weight.shape[-2:]
    step = max(1, _NUMBERS_AT_ONCE // inputs)
    parts = [(weight, codes, scales)] if weight.ndim == 2 else list(zip(weight, codes, scales, strict=True))
    for plain, own, scale in parts:
        for start in range(0, outputs, step):
            rows = slice(start, start + step)
            numbers = plain[rows].float()
            scale[rows] = (numbers.abs().amax(1, keepdim=True) / largest).clamp_min(1e-30)
            numbers = numbers / scale[rows]
            own[rows] = (numbers if dtype.is_floating_point else numbers.round()).to(dtype)
    return TiledWeight.scaled(codes, scales, (1, inputs), bias=bias)
