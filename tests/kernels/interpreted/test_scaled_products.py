# SPDX-License-Identifier: Apache-2.0
"""Products of rows and weights of 8 bits: rounding beside torch's, alone and at the end of norms and gates;
whole models by the reference."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import quantised_checkpoints as written
import torch
from kernel_count import kernels_by_module
from nightly import by_day
from test_fused_gpu_layers import cold_and_hot, expected, make_runner
from test_stored_on_gpu import load
from tiny_models import save_tiny_model
from torch import nn

from radixkv.model.batch_invariance import fix_rows
from radixkv.model.gpu_layers.products import TiledProduct, quantized
from radixkv.model.gpu_layers.scaled_products import use_scaled_products
from radixkv_kernels import Norm
from radixkv_kernels.triton.fp8_rows import Fp8Rows, round_rows
from radixkv_kernels.triton.gated import gate_rows
from radixkv_kernels.triton.residual_norm import add_and_norm_rows, norm_rows
from radixkv_kernels.triton.scaled_product import scaled_product
from radixkv_kernels.triton.tiled_weight import TiledWeight

WIDTH = 384
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def rounded(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales by torch."""
    parts = rows.float().unflatten(1, (-1, group))
    scales = (parts.abs().amax(-1) / 448).clamp_min(1e-30)
    return (parts / scales[..., None]).to(torch.float8_e4m3fn).flatten(1), scales


def check(found: Fp8Rows, rows: torch.Tensor, group: int) -> None:
    codes, scales = rounded(rows, group)
    count = len(rows)
    assert found.count == count
    assert len(found.codes) % 4 == 0
    assert found.scales.stride()[0] == 1
    assert torch.equal(found.scales[:count], scales)
    assert torch.equal(found.codes[:count].float(), codes.float())


@pytest.mark.parametrize("group", [WIDTH, 128])
def test_rows_are_rounded_as_by_torch(group: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, WIDTH) * torch.logspace(-3, 3, WIDTH)
    x[3] = 0
    check(round_rows(x, group), x, group)
    check(round_rows(x.bfloat16(), group), x.bfloat16(), group)


@pytest.mark.parametrize("group", [WIDTH, 128])
def test_norms_and_gates_round_their_results(group: int) -> None:
    torch.manual_seed(1)
    states, added = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    norm = Norm(torch.rand(WIDTH) + 0.5, 1e-6, False, False)
    found = norm_rows(states.clone(), norm, group=group)
    assert isinstance(found, Fp8Rows)
    check(found, norm_rows(states.clone(), norm), group)
    found = add_and_norm_rows(states.clone(), added, norm, group=group)
    assert isinstance(found, Fp8Rows)
    check(found, add_and_norm_rows(states.clone(), added, norm), group)
    both = torch.randn(3, 2 * WIDTH)
    found = gate_rows(both, "silu", group=group)
    assert isinstance(found, Fp8Rows)
    check(found, gate_rows(both, "silu"), group)


def block_weight(outputs: int, inputs: int) -> TiledWeight:
    codes = (torch.randn(outputs, inputs) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-outputs // 128), -(-inputs // 128)) / 100
    return TiledWeight.scaled(codes, scales, (128, 128), bias=torch.randn(outputs))


def test_the_reference_is_the_product_of_the_numbers() -> None:
    """In float64, and beside torch's own scaled product, for scales of rows."""
    torch.manual_seed(2)
    x = torch.randn(6, WIDTH).bfloat16()
    for weight in (block_weight(256, WIDTH), quantized(torch.randn(48, WIDTH), "fp8", torch.randn(48))):
        scaled = scaled_product(weight)
        assert scaled is not None
        rows = round_rows(x, scaled.group)
        assert weight.bias is not None
        wanted = rows.numbers().double() @ weight.numbers().double().t() + weight.bias
        got = scaled.multiply(rows)
        assert got.dtype == torch.bfloat16
        assert (got.double() - wanted).abs().max() <= 4e-3 * wanted.abs().max()
        if scaled.group == WIDTH:
            own = torch._scaled_mm(
                rows.codes, scaled.codes.t(), scale_a=rows.scales, scale_b=scaled.scales, out_dtype=x.dtype
            )[: rows.count]
            assert (own + weight.bias - wanted).abs().max() <= 1e-2 * wanted.abs().max()


def test_forms_and_sizes_that_torch_does_not_take() -> None:
    assert scaled_product(block_weight(200, WIDTH)) is None
    assert scaled_product(quantized(torch.randn(20, WIDTH), "fp8", None)) is None
    assert scaled_product(quantized(torch.randn(48, WIDTH), "int8", None)) is None
    assert scaled_product(TiledWeight.plain(torch.randn(48, WIDTH))) is None
    product = TiledProduct([quantized(torch.randn(48, WIDTH), "fp8", None)], torch.float16)
    assert use_scaled_products(nn.ModuleList([product]), on_cpu=True) == 0


@pytest.mark.parametrize("form", by_day(("blocks", "channels"), "blocks"))
def test_models_round_inputs(form: str, tmp_path: Path) -> None:
    """One kernel rounds, norms and gates do the rest; near the dequantised model; not with fixed rows."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
    folder = save_tiny_model(
        tmp_path / "stored", "llama", num_attention_heads=4, num_key_value_heads=4, **sizes
    )
    plain = Path(shutil.copytree(folder, tmp_path / "plain"))
    if form == "blocks":
        written.quantise(folder, partial(written.block_fp8, block=128), BLOCKS, plain=plain)
    else:
        written.quantise(folder, written.channel_fp8, written.groups("float", "channel"), plain=plain)
    runner = make_runner(load(folder))
    assert use_scaled_products(runner.model) == 0
    exact = cold_and_hot(runner)
    assert use_scaled_products(runner.model, on_cpu=True) == 4
    with kernels_by_module(runner.model.model.layers) as launched:
        rounding = cold_and_hot(runner)
    names = set().union(*launched)
    assert {"residual_norm_kernel", "gated_kernel", "round_rows_kernel"} <= names
    assert all(each["round_rows_kernel"] == 1 for each in launched)
    assert "stored_product_kernel" not in names
    for got, wanted in zip(rounding, expected(plain), strict=True):
        spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1)
        assert ((got - wanted).norm(dim=-1) / spread).max() < 0.1
    fix_rows(runner.model)
    assert all(torch.equal(*both) for both in zip(cold_and_hot(runner), exact, strict=True))
