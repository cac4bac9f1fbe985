# SPDX-License-Identifier: Apache-2.0
"""Int8 rows and products: against float64, at the edges of tiles, and row by row bit for bit."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")

from radixkv_kernels.cpu.linear.int8_product import GROUP, Int8Method, PackedInt8, methods
from radixkv_kernels.cpu.linear.int8_rows import Int8Rows

pytestmark = pytest.mark.skipif(not methods(), reason="neither VNNI nor AVX2 on this processor")
each_method = pytest.mark.parametrize(
    "method", methods(), ids=lambda m: f"{m.inputs} inputs, {m.lanes} lanes"
)


def values(rows: torch.Tensor, scales: torch.Tensor, width: int) -> torch.Tensor:
    """What quantised rows stand for, float64 [T, width]."""
    offset = 128 if rows.dtype == torch.uint8 else 0
    groups = rows.to(torch.float64).view(len(rows), -1, GROUP) - offset
    return (groups * scales.to(torch.float64)[:, :, None]).flatten(1)[:, :width]


def random_product(
    inputs: int, outputs: int, method: Int8Method | None = None
) -> tuple[PackedInt8, torch.Tensor, torch.Tensor]:
    """A packed weight, the same in float64 [out, in], and its bias."""
    weight = torch.randint(-127, 128, (outputs, inputs)).to(torch.int8)
    scales, bias = torch.rand(outputs) + 0.01, torch.randn(outputs)
    whole = weight.to(torch.float64) * scales.to(torch.float64)[:, None]
    return PackedInt8(weight, scales, bias, method), whole, bias


@each_method
@given(
    tokens=st.integers(1, 150),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 200),
    seed=st.integers(0, 99),
    add=st.booleans(),
)
def test_product_equals_float64(
    method: Int8Method, tokens: int, inputs: int, outputs: int, seed: int, add: bool
) -> None:
    torch.manual_seed(seed)
    product, weight, bias = random_product(inputs, outputs, method)
    rows, scales = Int8Rows(method).quantize(torch.randn(tokens, inputs) * 10, product.row_width)
    before = torch.randn(tokens, outputs)
    out = product.multiply(rows, scales, before.clone(), add=add)
    own = values(rows, scales, inputs)
    expected = own @ weight.T + bias + (before if add else 0)
    # float32 additions of the groups' exact sums: a few roundings of the size of what is added.
    room = 2e-6 * (own.abs() @ weight.abs().T + bias.abs() + before.abs())
    assert torch.all((out - expected).abs() <= room)


@each_method
def test_extreme_values_do_not_overflow(method: Int8Method) -> None:
    weight = torch.full((3, 8192), -127, dtype=torch.int8)
    product = PackedInt8(weight, torch.ones(3), None, method)
    for sign in (-1, 1):
        rows, scales = Int8Rows(method).quantize(torch.full((2, 8192), sign * 5.0), product.row_width)
        out = product.multiply(rows, scales, torch.empty(2, 3))
        torch.testing.assert_close(out, torch.full((2, 3), -sign * 8192 * 5.0 * 127))


@given(tokens=st.integers(1, 60), inputs=st.integers(1, 200), outputs=st.integers(1, 100))
def test_every_method_has_the_same_bits(tokens: int, inputs: int, outputs: int) -> None:
    data, results = torch.randn(tokens, inputs), []
    for method in methods():
        torch.manual_seed(1)
        product, _, _ = random_product(inputs, outputs, method)
        quantized = Int8Rows(method).quantize(data, product.row_width)
        results.append(product.multiply(*quantized, torch.empty(tokens, outputs)))
    assert all(torch.equal(result, results[0]) for result in results)


@each_method
@pytest.mark.parametrize("tokens", [2, 8, 9, 65, 130])
def test_a_row_does_not_depend_on_the_others(method: Int8Method, tokens: int) -> None:
    torch.manual_seed(0)
    product, _, _ = random_product(192, 100, method)
    kernels = Int8Rows(method)
    data, weight = torch.randn(tokens, 192), torch.randn(192)
    gated = torch.randn(tokens, 384)

    def results(part: slice) -> list[torch.Tensor]:
        made = [
            kernels.quantize(data[part], product.row_width),
            kernels.norm(data[part], weight, 1e-5, product.row_width),
            kernels.gated(gated[part], product.row_width),
        ]
        return [product.multiply(*one, torch.empty(len(one[0]), 100)) for one in made]

    whole = results(slice(None))
    for r in {0, tokens // 2, tokens - 1}:
        for alone, together in zip(results(slice(r, r + 1)), whole, strict=True):
            assert torch.equal(alone[0], together[r])


@each_method
@given(tokens=st.integers(1, 40), width=st.integers(1, 300), seed=st.integers(0, 99))
def test_rows_are_within_half_a_step(method: Int8Method, tokens: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    row_width = -(-width // GROUP) * GROUP
    kernels, data, weight = Int8Rows(method), torch.randn(tokens, width) * 7, torch.randn(width)
    halves = torch.randn(tokens, 2 * width) * 20
    normed = torch.nn.functional.rms_norm(data, (width,), weight, 1e-5)
    gated = torch.nn.functional.silu(halves[:, :width]) * halves[:, width:]
    for (rows, scales), expected in (
        (kernels.quantize(data, row_width), data),
        (kernels.norm(data, weight, 1e-5, row_width), normed),
        (kernels.gated(halves, row_width), gated),
    ):
        step = scales.repeat_interleave(GROUP, dim=1)[:, :width]
        assert torch.all((values(rows, scales, width) - expected).abs() <= 0.501 * step + 1e-30)
        assert torch.all(rows[:, :width].to(torch.int32) >= (1 if rows.dtype == torch.uint8 else -127))


@each_method
def test_rows_of_zeros_stay_zero_and_nan_stays_nan(method: Int8Method) -> None:
    product, _, bias = random_product(64, 50, method)
    data = torch.zeros(2, 64)
    data[1, 3] = float("nan")
    rows, scales = Int8Rows(method).quantize(data, product.row_width)
    out = product.multiply(rows, scales, torch.empty(2, 50))
    assert torch.equal(out[0], bias)
    assert out[1].isnan().all()


def test_a_packed_weight_can_not_be_pickled() -> None:
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(random_product(8, 8)[0])


def test_a_method_that_the_processor_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="lanes=32"):
        PackedInt8(torch.zeros(4, 4, dtype=torch.int8), torch.ones(4), None, Int8Method(4, 32))
