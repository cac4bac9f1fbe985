# SPDX-License-Identifier: Apache-2.0
"""Products of stored weights, interpreted: near float64, rows alone, models quantised at load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nightly import by_day
from tiny_configs import tiny_config
from torch import nn
from transformers import AutoModelForCausalLM

from radixkv.model.batch_invariance import fix_rows
from radixkv.model.decoder_layers import StoredProduct
from radixkv.model.device_paths import rewrite_layers
from radixkv.model.gpu_layers.experts import GpuExperts
from radixkv.model.gpu_layers.products import TiledProduct, quantize_products, quantized
from radixkv_kernels.triton.stored_product import multiply_stored
from radixkv_kernels.triton.tiled_weight import TiledWeight

OUTPUTS, INPUTS = 72, 96


def stored(form: str, dtype: torch.dtype) -> tuple[TiledWeight, torch.Tensor]:
    """A random weight with a bias, and the numbers that it stands for."""
    bias = torch.randn(OUTPUTS).to(dtype)
    if form in ("fp8", "int8"):
        weight = torch.randn(OUTPUTS, INPUTS).to(dtype)
        found = quantized(weight, form, bias)
        assert found.scales is not None
        numbers = found.codes.float() * found.scales
        assert (numbers - weight.float()).abs().max() < 0.07 * weight.abs().max()
        return found, numbers
    codes = torch.randint(0, 16, (OUTPUTS, INPUTS))
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    scales, zeros = torch.rand(OUTPUTS, INPUTS // 32) * 0.1, torch.randint(0, 16, (OUTPUTS, INPUTS // 32))
    numbers = (codes - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)
    return TiledWeight.scaled(packed, scales, (1, 32), zeros, bias, packed=True), numbers


@pytest.mark.parametrize(
    ("form", "dtype"),
    by_day(
        [(form, dtype) for form in ("fp8", "int8", "int4") for dtype in (torch.bfloat16, torch.float32)],
        ("fp8", torch.bfloat16),
        ("int4", torch.bfloat16),
        ("int8", torch.float32),
    ),
)
def test_products(form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, numbers = stored(form, dtype)
    x = torch.randn(20, INPUTS).to(dtype)
    got = multiply_stored(x, weight)
    assert weight.bias is not None
    wanted = F.linear(x.double(), numbers.double(), weight.bias.double())
    limit = 8e-3 if dtype == torch.bfloat16 else 2e-6
    assert (got.double() - wanted).abs().max().item() <= limit * wanted.abs().max().item()
    fixed = multiply_stored(x, weight, fixed_rows=True)
    assert torch.equal(multiply_stored(x[7:8], weight, fixed_rows=True)[0], fixed[7])
    assert multiply_stored(x[:0], weight).shape == (0, OUTPUTS)


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_models_are_quantised_at_load(kind: str) -> None:
    """Fused layers and experts have weights of 8 bits; embeddings, output layer and routers do not."""
    model = make_model("mixtral")
    rewrite_layers(model, kind, "triton")
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    assert linears == [model.get_output_embeddings()]
    assert any(isinstance(module, TiledProduct) for module in model.modules())
    experts = [module for module in model.modules() if isinstance(module, GpuExperts)]
    assert experts
    assert not any(each.is_plain for each in experts)
    assert not any("gate_up_proj" in name for name, _ in model.named_parameters())
    assert quantize_products(model, kind) == 0
    fix_rows(model)
    assert all(module.fixed_rows for module in model.modules() if isinstance(module, TiledProduct))


def test_a_product_stands_for_its_linear_layer() -> None:
    linear = nn.Linear(INPUTS, OUTPUTS)
    product = TiledProduct([quantized(linear.weight.detach(), "int8", linear.bias.detach())], torch.float32)
    assert isinstance(product, StoredProduct)
    x = torch.randn(1, 3, INPUTS)
    assert product.weight.dtype == torch.float32
    assert (product(x) - linear(x)).abs().max().item() < 0.02
