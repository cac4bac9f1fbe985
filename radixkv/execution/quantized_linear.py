"""Int8 weights for linear layers on a CPU: `--quantization int8`.

Weights are symmetric int8 with one scale per output channel; activations are quantised in every call with one
scale per token (as in LLM.int8(), Dettmers et al., arXiv 2208.07339, without its outlier columns). Products
are summed in int32, exactly, so a token's result does not depend on its batch mates. It changes answers a
little: that is why it is an option.
"""

from __future__ import annotations

import torch
from torch import nn

from radixkv.errors import ConfigError

_LARGEST = 127.0


class QuantizedLinear(nn.Module):
    """`y = x W^T + b` with int8 W; [..., in] float32 -> [..., out] float32."""

    weight: torch.Tensor  # int8 [out, in]
    scales: torch.Tensor  # float32 [out]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach()
        scales = (weight.abs().amax(dim=1) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        quantized = (weight / scales[:, None]).round().to(torch.int8)
        self.bias = linear.bias
        self.register_buffer("weight", quantized, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, self.in_features)
        own = (rows.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        quantized = (rows / own).round().to(torch.int8)
        out = torch._int_mm(quantized, self.weight.t()).to(torch.float32)
        out.mul_(own).mul_(self.scales)
        if self.bias is not None:
            out.add_(self.bias)
        return out.reshape(*inputs.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, int8"


@torch.no_grad()
def quantize_linear_layers(model: nn.Module) -> None:
    """Replace every linear layer of a float32 CPU model by an int8 one.

    Raises:
        ConfigError: the model is not float32 on a CPU.
    """
    weight = next(model.parameters())
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise ConfigError(
            f"--quantization int8 works for float32 models on a CPU; this one is {weight.dtype} on "
            f"{weight.device}: use --dtype float32 --device cpu, or leave --quantization out"
        )
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, QuantizedLinear(child))
