# SPDX-License-Identifier: Apache-2.0
"""Int8 weights for linear layers on a CPU: `--quantization int8`.

Weights are symmetric int8 with one scale per output channel; activations are quantised in every call with one
scale per token (as in LLM.int8(), Dettmers et al., arXiv 2208.07339, without its outlier columns). Products
are summed in int32, exactly, so a token's result does not depend on its batch mates. It changes answers a
little: that is why it is an option.

On processors with VNNI or AVX2 and with numba installed,
`radixkv_kernels.cpu.linear.int8_product` computes the products; elsewhere torch does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_LARGEST = 127.0
_TINY = 1e-30


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [out, in] -> int8 [out, in], and float32 [out]: the unit of each output's weights."""
    scales = (weight.abs().amax(dim=1) / _LARGEST).clamp(min=_TINY)
    return (weight / scales[:, None]).round().to(torch.int8), scales


class QuantizedLinear(nn.Module):
    """`y = x W^T + b` with int8 W; [..., in] float32 -> [..., out] float32.

    Args:
        linear: the layer to quantise; its weight is not kept.
        rows: an `Int8Rows` of radixkv_kernels, where there are int8 products; None: torch's operators.
    """

    elements: torch.Tensor  # int8 [out, in], without `rows`
    scales: torch.Tensor  # float32 [out], without `rows`

    def __init__(self, linear: nn.Linear, rows: Any = None) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight, scales = quantize_weight(linear.weight.detach())
        self.rows = rows
        if rows is not None:
            from radixkv_kernels.cpu.linear.int8_product import PackedInt8  # needs numba

            bias = None if linear.bias is None else linear.bias.detach()
            self.product = PackedInt8(weight, scales, bias)
        else:
            self.bias = linear.bias
            self.register_buffer("elements", weight, persistent=False)
            self.register_buffer("scales", scales, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """Nothing, in the dtype that inputs have: some models convert them to that of the weight."""
        return torch.empty(0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, self.in_features).contiguous()
        if self.rows is None:
            out = self._with_torch(rows)
        else:
            own, scales = self.rows.quantize(rows, self.product.row_width)
            out = self.product.multiply(own, scales, torch.empty(len(rows), self.out_features))
        return out.view(*inputs.shape[:-1], self.out_features)

    def _with_torch(self, rows: torch.Tensor) -> torch.Tensor:
        own = (rows.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp(min=_TINY)
        quantized = (rows / own).round().to(torch.int8)
        out = torch._int_mm(quantized, self.elements.t()).to(torch.float32)
        out.mul_(own).mul_(self.scales)
        return out if self.bias is None else out.add_(self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, int8"
