# SPDX-License-Identifier: Apache-2.0
"""Linear layers on a GPU whose weights keep a form of their own, and `--quantization fp8|int8`.

A weight is a checkpoint's, as it stores it (`stored_modules`), or a plain one that is rounded to 8 bits at
load with a scale for each output. Products read the codes as they are and multiply rows in the model's dtype
(`radixkv_kernels.triton.stored_product`), or in 8 bits (`scaled_products`); routed experts the former.
Rounding leaves embeddings, the output layer, routers and gates of shared experts as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.errors import ConfigError
from radixkv.model.decoder_layers import StoredProduct
from radixkv.model.gpu_layers.experts import GpuExperts
from radixkv_kernels.triton.fp8_rows import Fp8Rows, round_rows
from radixkv_kernels.triton.scaled_product import ScaledProduct
from radixkv_kernels.triton.stored_product import multiply_stored
from radixkv_kernels.triton.tiled_weight import TiledWeight, joined

#: Kind -> dtype of codes and the largest code.
KINDS = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
#: First of the GPUs whose compiler converts e4m3.
FP8_CAPABILITY = (8, 9)
#: Products of fewer outputs stay as they are: a tile has more.
_MIN_OUTPUTS = 16
#: Numbers that are rounded at a time.
_NUMBERS_AT_ONCE = 16 << 20


class TiledProduct(StoredProduct):
    """A linear layer on a GPU with weights in any forms that kernels read by tiles.

    Args:
        weights: one above the other, with their biases; those of one form become one.
        dtype: of inputs.

    Attributes:
        weights: a kernel is launched for each.
        scaled: the same for torch's product of 8 bits (`scaled_products`); None: it is not used.
        fixed_rows: a row's bits must not depend on the number of rows (deterministic mode).
    """

    def __init__(self, weights: Sequence[TiledWeight], dtype: torch.dtype) -> None:
        super().__init__(weights[0].in_features, sum(each.out_features for each in weights))
        self.weights, self.dtype = _joined_runs(weights), dtype
        self.scaled: ScaledProduct | None = None
        self.fixed_rows = False

    @classmethod
    def merged(cls, products: Iterable[nn.Linear | TiledProduct], dtype: torch.dtype) -> TiledProduct:
        """Products of the same inputs as one, plain ones among them."""
        weights: list[TiledWeight] = []
        for each in products:
            if isinstance(each, TiledProduct):
                weights += each.weights
            else:
                bias = None if each.bias is None else each.bias.detach()
                weights.append(TiledWeight.plain(each.weight.detach(), bias))
        return cls(weights, dtype)

    @property
    def weight(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype)

    @property
    def bias(self) -> Tensor | None:
        """That of the first weight: what has a bias has one for all outputs."""
        return self.weights[0].bias

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(each.nbytes for each in self.weights)

    def in_order(self, outputs: Tensor) -> TiledProduct:
        """The same product of one weight with its outputs in another order, by their numbers."""
        return TiledProduct([self.weights[0].taken(outputs)], self.dtype)

    @property
    def group(self) -> int:
        """Inputs that share a scale where they are rounded to 8 bits; 0: they are not."""
        return 0 if self.scaled is None or self.fixed_rows else self.scaled.group

    def forward(self, inputs: Tensor | Fp8Rows) -> Tensor:
        """[..., in] -> [..., out]; rows that are rounded already, [T, in] -> [T, out]."""
        if isinstance(inputs, Fp8Rows):
            assert self.scaled is not None
            return self.scaled.multiply(inputs)
        rows = inputs.reshape(-1, self.in_features).contiguous()
        if self.scaled is not None and self.group:
            out = self.scaled.multiply(round_rows(rows, self.group))
            return out.view(*inputs.shape[:-1], self.out_features)
        out = rows.new_empty(len(rows), self.out_features)
        start = 0
        for weight in self.weights:
            own = out[:, start : start + weight.out_features]
            multiply_stored(rows, weight, out=own, fixed_rows=self.fixed_rows)
            start += weight.out_features
        return out.view(*inputs.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.nbytes:,} bytes"


def group_of(product: nn.Module) -> int:
    """Inputs of a product that share a scale where it takes rounded ones; 0: it takes none."""
    return product.group if isinstance(product, TiledProduct) else 0


def merged_linear(parts: Sequence[nn.Linear]) -> nn.Module:
    """Layers with the same input as one, their outputs one after the other."""
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, TiledProduct) for part in parts):
        return TiledProduct.merged(parts, parts[0].weight.dtype)
    first, width = parts[0], sum(part.out_features for part in parts)
    has_bias = first.bias is not None
    merged = nn.Linear(first.in_features, width, bias=has_bias, device="meta")
    merged.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]), requires_grad=False)
    if has_bias:
        merged.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]), requires_grad=False)
    return merged


def can_merge(products: Sequence[Any]) -> bool:
    """Return True for linear layers that can be one, plain or with stored weights."""
    kinds = {(each.weight.dtype, each.bias is None) for each in products if _is_linear(each)}
    return len(kinds) == 1 and all(_is_linear(each) for each in products)


def _is_linear(product: Any) -> bool:
    return type(product) is nn.Linear or isinstance(product, TiledProduct)


def _joined_runs(weights: Sequence[TiledWeight]) -> list[TiledWeight]:
    """Neighbours of one form put together."""
    found = [weights[0]]
    for each in weights[1:]:
        both = joined([found[-1], each])
        if both is None:
            found.append(each)
        else:
            found[-1] = both
    return found


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
    if kind == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
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
                setattr(parent, name, TiledProduct([stored], child.weight.dtype))
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
