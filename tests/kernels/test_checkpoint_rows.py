# SPDX-License-Identifier: Apache-2.0
"""Products with the block formats of checkpoints, held to float64 products with their numbers."""

from __future__ import annotations

import pytest
import torch
from nightly import by_day

pytest.importorskip("numba")
from radixkv_kernels.cpu.linear.block_experts import ExpertPanels, ExpertProduct
from radixkv_kernels.cpu.linear.block_formats import (
    A4_BFLOAT,
    A4_HALF,
    A4_SINGLE,
    A8_BFLOAT,
    A8_HALF,
    A8_SINGLE,
    ALL_FORMATS,
    C4_BFLOAT,
    E4M3,
    E4M3_128,
    E5M2,
    E5M2_128,
    FLOAT_TABLES,
    FP4,
    I8_SINGLE,
    MXFP4,
    MXFP4_TABLE,
    NF4,
    NVFP4,
    Q4_0,
    Q8_0,
    U4_BFLOAT,
    U4_HALF,
    U4_SINGLE,
    U8_HALF,
    U8_SINGLE,
    WIDE_FORMATS,
)
from radixkv_kernels.cpu.linear.block_method import BlockMethod, default_method, methods
from radixkv_kernels.cpu.linear.block_panels import BlockPanels
from radixkv_kernels.cpu.linear.block_product import BlockProduct
from radixkv_kernels.cpu.linear.block_rows import BlockRows, widened
from radixkv_kernels.cpu.linear.checkpoint_rows import (
    block_rows,
    format_of_affine,
    format_of_codes,
    least_of_middle,
)

if not methods():
    pytest.skip("neither VNNI nor AVX2", allow_module_level=True)

#: Three panels and a part of one, at any vector width.
OUTPUTS, INPUTS, ROWS = 107, 256, 13
NUMBERS = (
    U4_HALF, U4_BFLOAT, U4_SINGLE, U8_HALF, U8_SINGLE, I8_SINGLE, E4M3, E5M2, E4M3_128, E5M2_128,
    NVFP4, Q4_0, Q8_0, MXFP4, A4_HALF, A4_BFLOAT, A4_SINGLE, A8_HALF, A8_BFLOAT, A8_SINGLE, NF4, FP4,
    C4_BFLOAT,
)  # fmt: skip
WIDE = tuple(number for number in WIDE_FORMATS.values() if number not in NUMBERS)
WIDE_BY_DAY = tuple(WIDE_FORMATS[number] for number in (U4_HALF, I8_SINGLE, A4_BFLOAT, NF4))
BY_NAME = {"ids": lambda number: ALL_FORMATS[number].name}


def stored(number: int, outputs: int = OUTPUTS) -> tuple[BlockPanels, torch.Tensor]:
    """A weight in panels by the default method, and what it stands for in float64."""
    rows, plain, factor = blocks(number, outputs)
    return BlockPanels(number, rows, factor=factor), plain


def blocks(number: int, outputs: int = OUTPUTS) -> tuple[object, torch.Tensor, float]:
    form, source = ALL_FORMATS[number], torch.Generator().manual_seed(number)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=source)

    size = 16 if number == NVFP4 else max(64, form.inputs)
    groups = INPUTS // size
    scales = torch.rand(outputs, groups, generator=source) * 0.01 + 0.001
    factor, zeros = 1.0, None
    if number in FLOAT_TABLES:
        codes = whole(0, 16, outputs, INPUTS).to(torch.uint8)
        table = torch.tensor(FLOAT_TABLES[number])
        if default_method().pairs:  # which rounds it
            table = table.bfloat16()
        numbers = table.double()[codes.int()]
        rows = block_rows(number, codes, scales)
    elif form.has_least:
        dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(form.scale, torch.float32)
        top = 2**form.bits - 1
        scales = scales.to(dtype)
        leasts = (scales.float() * -top * torch.rand(scales.shape, generator=source)).to(dtype)
        codes = whole(0, top + 1, outputs, INPUTS)
        plain = (codes.double() - (form.offset if form.bits == 4 else 0)) * scales.double().repeat_interleave(
            size, 1
        )
        plain += leasts.double().repeat_interleave(size, 1)
        codes = codes.to(torch.uint8) if form.bits == 4 else (codes - 128).to(torch.int8)
        return block_rows(number, codes, scales, leasts=leasts), plain, factor
    elif form.is_float:
        dtype = torch.float8_e4m3fn if number in (E4M3, E4M3_128) else torch.float8_e5m2
        codes = torch.randn(outputs, INPUTS, generator=source).mul(30).to(dtype)
        codes[0, :2] = torch.tensor([2.0**-9, -(2.0**-8)]).to(dtype)  # subnormal
        numbers = codes.double()
        rows = block_rows(number, codes, scales)
    elif form.is_table:
        codes = whole(0, 16, outputs, INPUTS).to(torch.uint8)
        numbers = torch.tensor(MXFP4_TABLE, dtype=torch.float64)[codes.int()] / 2
        if number == NVFP4:
            narrow = scales.mul(1000).to(torch.float8_e4m3fn)
            rows, factor = block_rows(number, codes, narrow.view(torch.uint8)), 128 * 0.003
            scales = narrow.double() * 0.003
        else:
            exponents = whole(115, 125, outputs, groups).to(torch.uint8)
            rows, scales = block_rows(number, codes, exponents), 2.0 ** (exponents.double() - 127)
    else:
        dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(form.scale, torch.float32)
        scales = scales.to(dtype)
        signed = form.bits == 8
        codes = whole(-128 if signed else 0, 128 if signed else 16, outputs, INPUTS)
        if form.has_zero:
            zeros = whole(-128 if signed else 0, 128 if signed else 17, outputs, groups)
        middle = zeros if zeros is not None else torch.full(scales.shape, 0 if signed else 8)
        numbers = codes.double() - middle.double().repeat_interleave(size, 1)
        codes = codes.to(torch.int8 if signed else torch.uint8)
        rows = block_rows(number, codes, scales, zeros)
    return rows, numbers * scales.double().repeat_interleave(size, 1), factor


def inputs(rows: int = ROWS) -> torch.Tensor:
    """Rows with a few large values, as activations have."""
    x = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(1))
    x[:, ::97] *= 8
    return x


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("number", by_day(NUMBERS + WIDE, *NUMBERS, *WIDE_BY_DAY), **BY_NAME)
def test_product_is_that_of_the_numbers_that_the_blocks_stand_for(number: int) -> None:
    panels, plain = stored(number)
    product, rows, x = BlockProduct([panels]), BlockRows(), inputs()
    own = rows.quantize(x, product.row_dtype)
    exact = widened(own, INPUTS).double() @ plain.t()
    found = product.multiply(own, torch.full((ROWS, OUTPUTS), float("nan")))
    # Tables have 16 bits in products.
    assert error(found, exact) < (5e-5 if number in FLOAT_TABLES else 2e-6)
    assert error(found, x.double() @ plain.t()) < 2e-2
    for first, count in ((0, 1), (4, 2), (3, 7), (12, 1)):
        part = product.multiply(
            rows.quantize(x[first : first + count], product.row_dtype), torch.empty(count, OUTPUTS)
        )
        assert torch.equal(part, found[first : first + count])


@pytest.mark.parametrize("number", [U4_HALF, U8_HALF, NVFP4, A8_BFLOAT, WIDE_FORMATS[U8_HALF]], **BY_NAME)
def test_all_methods_give_the_same_bits(number: int) -> None:
    data, _, factor = blocks(number)
    rows, x = BlockRows(), inputs(3)
    found = [
        BlockProduct([BlockPanels(number, data, method=way, factor=factor)]).multiply(
            rows.quantize(x), torch.empty(3, OUTPUTS)
        )
        for way in (*methods(), BlockMethod(True, 8, emulated=True))
    ]
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("number", [E4M3, E5M2_128, WIDE_FORMATS[NF4]], **BY_NAME)
@pytest.mark.parametrize("way", methods(), ids=repr)
def test_floats_by_each_method(number: int, way: BlockMethod) -> None:
    data, plain, _ = blocks(number)
    product, rows, x = BlockProduct([BlockPanels(number, data, method=way)]), BlockRows(), inputs()
    own = rows.quantize(x, product.row_dtype)
    exact = widened(own, INPUTS).double() @ plain.t()
    found = product.multiply(own, torch.empty(ROWS, OUTPUTS))
    # Tables have 16 bits in all methods, but not the same ones.
    assert error(found, exact) < (2e-3 if number in FLOAT_TABLES else 2e-6)
    alone = product.multiply(rows.quantize(x[4:5], product.row_dtype), torch.empty(1, OUTPUTS))
    assert torch.equal(alone, found[4:5])


def test_sections_that_take_other_rows_are_refused() -> None:
    sections = [BlockPanels(number, blocks(number)[0]) for number in (Q8_0, E4M3)]
    with pytest.raises(ValueError, match="must take the same rows, int8 or bfloat16"):
        BlockProduct(sections)


def test_experts_have_factors_of_their_own() -> None:
    data, plain, factor = blocks(NVFP4, 64)
    panels = ExpertPanels(NVFP4, data.reshape(2, 32, -1), factors=[factor, 2 * factor])
    product, rows, x = ExpertProduct([panels], [None]), BlockRows(), inputs(3)
    own = rows.quantize(x)
    import numpy as np

    found = product.multiply(own, np.array([0, 1]), np.array([1, 2]), torch.empty(3, 32))
    exact = widened(own, INPUTS).double()
    assert error(found[:1], exact[:1] @ plain[:32].t()) < 2e-6
    assert error(found[1:], exact[1:] @ plain[32:].t() * 2) < 2e-6


def test_the_narrowest_exact_format_is_chosen() -> None:
    half = torch.tensor([[0.01]]).half()
    tiny = torch.tensor([[1.5e-7]]).bfloat16()
    single = torch.tensor([[0.1234567]])
    eight = torch.tensor([[8]])
    assert format_of_codes(4, half, None) == format_of_codes(4, half.bfloat16(), eight) == Q4_0
    assert format_of_codes(4, half, eight - 1) == U4_HALF
    assert format_of_codes(4, tiny, None) == U4_BFLOAT
    assert format_of_codes(4, single, None) == U4_SINGLE
    assert format_of_codes(8, half, None) == Q8_0
    assert format_of_codes(8, single, None) == I8_SINGLE
    assert format_of_codes(8, half, eight) == U8_HALF
    assert format_of_codes(8, single, eight) == U8_SINGLE
    low = half.bfloat16().float() - 8 * single.bfloat16().float()
    assert format_of_affine(4, single.bfloat16(), half.bfloat16()) == A4_HALF
    assert format_of_affine(4, single.bfloat16(), low) == C4_BFLOAT
    assert torch.equal(least_of_middle(single.bfloat16(), low), half.bfloat16().float())
    assert format_of_affine(4, single, low) == A4_SINGLE


def test_scales_of_one_group_may_lie_in_any_order() -> None:
    codes, scales = torch.zeros(2, 32, dtype=torch.uint8), torch.tensor([[0.5, 2.0]]).half()
    expected = block_rows(Q4_0, codes, scales.t().clone())
    assert (block_rows(Q4_0, codes, scales.t()) == expected).all()


def test_groups_that_cut_a_block_are_refused() -> None:
    codes = torch.zeros(2, 96, dtype=torch.uint8)
    with pytest.raises(ValueError, match="96 inputs in 2 groups are not whole blocks of 32"):
        block_rows(Q4_0, codes, torch.ones(2, 2))
