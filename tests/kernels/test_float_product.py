# SPDX-License-Identifier: Apache-2.0
"""Float32 products: close to float64, each row on its own, nothing written outside the result."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from radixkv_kernels.cpu.linear.float_product import PackedFloat, PackedGate, can_store

#: Relative to the sum of the products' magnitudes: float32 sums of up to 400 terms, in order.
TOLERANCE = 400 * torch.finfo(torch.float32).eps / 4


NIGHTLY = "RADIXKV_NIGHTLY" in os.environ  # float16 costs two kernels
DTYPES = [torch.float32, torch.bfloat16, *([torch.float16] if NIGHTLY and can_store(torch.float16) else [])]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_product(got: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, rest: torch.Tensor) -> None:
    expected = rows.double() @ weight.double().T + rest.double()
    scale = rows.double().abs() @ weight.double().abs().T + rest.double().abs() + 1e-30
    assert float(((got.double() - expected).abs() / scale).max()) < TOLERANCE


@settings(max_examples=examples(30), deadline=None)
@given(
    rows=st.integers(1, 140), inputs=st.integers(1, 400), outputs=st.integers(1, 210),
    with_bias=st.booleans(), add=st.booleans(), seed=st.integers(0, 99), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_products_equal_float64(
    rows: int, inputs: int, outputs: int, with_bias: bool, add: bool, seed: int, dtype: torch.dtype
) -> None:
    x, weight = random(rows, inputs, seed=seed), random(outputs, inputs, seed=seed + 100).to(dtype)
    bias = random(outputs, seed=seed + 200) if with_bias else None
    held = random(rows, outputs, seed=seed + 300)
    got = PackedFloat(weight, bias).multiply(x, held.clone(), add=add)
    rest = (torch.zeros(outputs) if bias is None else bias) + (held if add else 0)
    assert_product(got, x, weight, rest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 80), (577, 97), (3, 1), (1030, 260)])
def test_a_row_has_the_same_bits_whatever_is_beside_it(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    weight, bias, x = random(outputs, inputs).to(dtype), random(outputs, seed=1), random(200, inputs, seed=2)
    plain = PackedFloat(weight, bias)
    gate = PackedGate(weight, weight.flip(0), bias, None)
    for product in (plain, gate):
        whole = product.multiply(x, torch.empty(200, outputs))
        for count in (1, 2, 3, 5, 7, 8, 9, 12, 13, 64, 65, 130):
            for start in (0, 1, 200 - count):
                own = product.multiply(x[start : start + count].contiguous(), torch.empty(count, outputs))
                assert torch.equal(own, whole[start : start + count]), (type(product), count, start)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_are_a_product_of_no_rows(dtype: torch.dtype) -> None:
    """A chunk within a prompt has no row whose logits are wanted."""
    product = PackedFloat(torch.randn(97, 48).to(dtype))
    assert product.multiply(torch.empty(0, 48), torch.empty(0, 97)).shape == (0, 97)


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    product, x = PackedFloat(random(960, 576)), random(70, 576, seed=1)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(product.multiply(x, torch.empty(70, 960)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("with_bias", [True, False])
def test_gate(with_bias: bool) -> None:
    gate, up, x = random(83, 96), random(83, 96, seed=1), random(37, 96, seed=2)
    biases = (random(83, seed=3), random(83, seed=4)) if with_bias else (None, None)
    got = PackedGate(gate, up, *biases).multiply(x, torch.empty(37, 83))
    own, others = (
        torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double())
        for w, b in zip((gate, up), biases, strict=True)
    )
    torch.testing.assert_close(
        got.double(), torch.nn.functional.silu(own) * others, rtol=2e-5, atol=2e-5 * float(others.abs().max())
    )


def test_gates_far_from_zero_saturate_without_overflow() -> None:
    x = torch.tensor([[1000.0], [-1000.0], [80.0], [-80.0], [0.0]])
    got = PackedGate(torch.ones(1, 1), torch.ones(1, 1)).multiply(x, torch.empty(5, 1))
    expected = torch.nn.functional.silu(x.double()) * x.double()
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-30)


def test_only_the_result_is_written_and_rows_may_lie_apart() -> None:
    weight, wide, out = random(50, 30), random(9, 70, seed=1), torch.full((9, 64), 7.0)
    PackedFloat(weight).multiply(wide[:, 5:35], out[:, 3:53])
    assert_product(out[:, 3:53], wide[:, 5:35], weight, torch.zeros(50))
    assert bool((out[:, :3] == 7).all())
    assert bool((out[:, 53:] == 7).all())


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x = random(20, 33)
    x[4, 7] = torch.nan
    got = PackedFloat(random(70, 33, seed=1)).multiply(x, torch.empty(20, 70))
    assert bool(got[4].isnan().all())
    assert not bool(torch.cat([got[:4], got[5:]]).isnan().any())


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_narrow_weights_have_the_bits_of_wide_ones_and_half_of_the_memory(dtype: torch.dtype) -> None:
    narrow = random(90, 131).to(dtype)
    narrow[0, :6] = torch.tensor([0.0, -0.0, 1e-7, -6e4, torch.finfo(dtype).tiny, torch.finfo(dtype).max])
    x = random(20, 131, seed=1)
    products = [PackedFloat(weight) for weight in (narrow, narrow.float())]
    results = [product.multiply(x, torch.empty(20, 90)) for product in products]
    assert torch.equal(*results)
    gates = [PackedGate(weight[1:], weight[1:].flip(0)) for weight in (narrow, narrow.float())]
    assert torch.equal(*(gate.multiply(x, torch.empty(20, 89)) for gate in gates))
    assert products[0].nbytes < 0.55 * products[1].nbytes


def test_other_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        PackedFloat(random(3, 3).double())


def test_a_packed_weight_cannot_be_copied() -> None:
    with pytest.raises(TypeError, match="addresses"):
        copy.deepcopy(PackedFloat(random(3, 3)))
