# SPDX-License-Identifier: Apache-2.0
"""Products with a GGUF file's blocks, held to float64 products with what the gguf package dequantises."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf_files import random_blocks
from nightly import by_day

pytest.importorskip("numba")
from radixkv_kernels.cpu.linear.block_formats import FORMATS, MXFP4, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0
from radixkv_kernels.cpu.linear.block_method import BlockMethod, methods
from radixkv_kernels.cpu.linear.block_panels import BlockPanels
from radixkv_kernels.cpu.linear.block_product import BlockProduct
from radixkv_kernels.cpu.linear.block_rows import BlockRows

if not methods():
    pytest.skip("neither VNNI nor AVX2", allow_module_level=True)

#: Three panels and a part of one, at any vector width.
OUTPUTS, INPUTS, ROWS = 107, 512, 13
EMULATED = BlockMethod(True, 8, emulated=True)


def weights(number: int, outputs: int = OUTPUTS) -> tuple[np.ndarray, torch.Tensor]:
    """Blocks, and what they stand for."""
    blocks = random_blocks(number, outputs, INPUTS, number)
    plain = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(number))
    return blocks, torch.from_numpy(plain).double()


def inputs(rows: int = ROWS) -> torch.Tensor:
    """Rows with a few large values, as activations have."""
    x = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(1))
    x[:, ::97] *= 8
    return x


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows as int8 with a scale per 32 inputs says them."""
    groups = x.double().view(len(x), -1, 32)
    scales = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return ((groups / scales).round() * scales).view(len(x), -1)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("number", by_day(FORMATS, Q4_0, Q4_K, Q6_K), ids=lambda number: FORMATS[number].name)
def test_product_is_that_of_the_dequantised_weights(number: int) -> None:
    blocks, plain = weights(number)
    product, rows, x = BlockProduct([BlockPanels(number, blocks)]), BlockRows(), inputs()
    found = product.multiply(rows.quantize(x), torch.full((ROWS, OUTPUTS), float("nan")))
    assert error(found, rounded(x) @ plain.t()) < 1e-6
    assert error(found, x.double() @ plain.t()) < 1e-2
    for first, count in ((0, 1), (4, 2), (3, 7), (12, 1)):
        own = product.multiply(rows.quantize(x[first : first + count]), torch.empty(count, OUTPUTS))
        assert torch.equal(own, found[first : first + count])


@pytest.mark.parametrize(
    "number",
    [*(pytest.param(each, marks=pytest.mark.nightly) for each in (Q8_0, Q5_K, MXFP4)), Q6_K],
    ids=lambda number: FORMATS[number].name,
)
def test_dot_products_give_the_same_bits(number: int) -> None:
    """The way of processors with VNNI, its one instruction in plain arithmetic."""
    blocks, _ = weights(number)
    rows, x = BlockRows(), inputs(3)
    ways = [*methods(), EMULATED]
    found = [
        BlockProduct([BlockPanels(number, blocks, method=way)]).multiply(
            rows.quantize(x), torch.empty(3, OUTPUTS)
        )
        for way in ways
    ]
    assert all(torch.equal(each, found[0]) for each in found)


def test_sections_of_several_formats_are_one_product() -> None:
    order = np.random.default_rng(0).permutation(OUTPUTS)
    (first, first_plain), (second, second_plain) = weights(Q4_K), weights(Q6_K, 40)
    bias = torch.randn(OUTPUTS)
    product = BlockProduct([BlockPanels(Q4_K, first, order), BlockPanels(Q6_K, second)], [bias, None])
    x = inputs()
    before = torch.randn(ROWS, OUTPUTS + 40)
    found = product.multiply(BlockRows().quantize(x), before.clone(), add=True)
    plain = torch.cat([first_plain[torch.from_numpy(order)], second_plain])
    expected = rounded(x) @ plain.t() + before.double()
    expected[:, :OUTPUTS] += bias
    assert error(found, expected) < 1e-6


def test_rows_after_a_norm_and_a_gate() -> None:
    blocks, plain = weights(Q4_0)
    product, rows, x, weight = (
        BlockProduct([BlockPanels(Q4_0, blocks)]),
        BlockRows(),
        inputs(),
        torch.rand(INPUTS, generator=torch.Generator().manual_seed(2)),
    )
    normed = torch.nn.functional.rms_norm(x, (INPUTS,), weight, 1e-5)
    found = product.multiply(rows.norm(x, weight, 1e-5), torch.empty(ROWS, OUTPUTS))
    assert error(found, normed.double() @ plain.t()) < 1e-2
    both = torch.cat([x, inputs(2 * ROWS)[ROWS:]], dim=1)
    gated = torch.nn.functional.silu(both[:, :INPUTS]) * both[:, INPUTS:]
    found = product.multiply(rows.gated(both), torch.empty(ROWS, OUTPUTS))
    assert error(found, gated.double() @ plain.t()) < 1e-2


def test_a_row_of_zeros_or_without_a_number_keeps_to_itself() -> None:
    blocks, _ = weights(Q4_0)
    product, rows, x = BlockProduct([BlockPanels(Q4_0, blocks)]), BlockRows(), inputs(3)
    expected = product.multiply(rows.quantize(x), torch.empty(3, OUTPUTS))
    x[0], x[1, 5] = 0, float("nan")
    found = product.multiply(rows.quantize(x), torch.empty(3, OUTPUTS))
    assert found[0].eq(0).all()
    assert found[1].isnan().all()
    assert torch.equal(found[2], expected[2])


def test_what_is_not_whole_blocks_is_refused() -> None:
    blocks, _ = weights(Q8_0)
    with pytest.raises(ValueError, match="not whole blocks of Q8_0"):
        BlockPanels(Q8_0, np.ascontiguousarray(blocks[:, :-1]))
    with pytest.raises(ValueError, match="must name rows out of"):
        BlockPanels(Q8_0, blocks, np.full(OUTPUTS, OUTPUTS))
    other = BlockPanels(Q8_0, np.ascontiguousarray(blocks[:, :34]))
    with pytest.raises(ValueError, match="the same inputs"):
        BlockProduct([BlockPanels(Q8_0, blocks), other])
