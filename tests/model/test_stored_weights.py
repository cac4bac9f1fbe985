# SPDX-License-Identifier: Apache-2.0
"""Stored weights: their parts and their joins are the parts and joins of the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from radixkv.model.stored_weights.affine_weight import AffineWeight
from radixkv.model.stored_weights.codebook_weight import CodebookWeight
from radixkv.model.stored_weights.scaled_weight import Fp8Weight, Int8Weight
from radixkv.model.stored_weights.stored_weight import ScaleGroupCut, StackedWeights, StoredWeight


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def octets(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def fp8(rows: int, height: int, width: int, seed: int) -> StoredWeight:
    grid = random(-(-rows // height), -(-96 // width), seed=seed).abs()
    return Fp8Weight(random(rows, 96, seed=seed).to(torch.float8_e4m3fn), grid, (height, width))


def int8(rows: int, seed: int) -> StoredWeight:
    scales, zeros = random(rows, 3, seed=seed), octets(rows, 3, seed=seed)
    return Int8Weight(octets(rows, 96, seed=seed), scales, (1, 32), zeros)


def affine(rows: int, bits: int, seed: int) -> StoredWeight:
    return AffineWeight(octets(rows, 12 * bits, seed=seed), random(rows, 3), random(rows, 3, seed=seed), bits)


def nf4(rows: int, seed: int) -> StoredWeight:
    table = torch.linspace(-1, 1, 16)
    return CodebookWeight(octets(rows * 48, seed=seed), random(rows * 3), table, rows, 96, 32)


#: Kind -> a weight of so many outputs and 96 inputs, with scales of at most 32 x 32.
MADE: dict[str, Callable[[int, int], StoredWeight]] = {
    "tensor": lambda rows, seed: fp8(rows, rows, 96, seed),
    "channels": lambda rows, seed: fp8(rows, 1, 96, seed),
    "blocks": lambda rows, seed: fp8(rows, 32, 32, seed),
    "int8-groups": int8,
    "affine-4": lambda rows, seed: affine(rows, 4, seed),
    "affine-3": lambda rows, seed: affine(rows, 3, seed),
    "nf4": nf4,
}
made = pytest.mark.parametrize("kind", MADE)


@made
def test_outputs(kind: str) -> None:
    whole = MADE[kind](96, 1)
    part = whole.of_outputs([range(64, 96), range(32)])
    numbers = whole.dequantized()
    assert (part.out_features, part.in_features) == (64, 96)
    assert torch.equal(part.dequantized(), torch.cat((numbers[64:], numbers[:32])))


@made
def test_inputs(kind: str) -> None:
    whole = MADE[kind](96, 1)
    part = whole.of_inputs(range(32, 96))
    assert (part.out_features, part.in_features) == (96, 64)
    assert torch.equal(part.dequantized(), whole.dequantized()[:, 32:])


@made
def test_one_above_the_other(kind: str) -> None:
    weights = [MADE[kind](rows, rows) for rows in (64, 32)]
    joined = type(weights[0]).concat(weights)
    assert torch.equal(joined.dequantized(), torch.cat([each.dequantized() for each in weights]))
    assert joined.nbytes >= sum(each.nbytes for each in weights) - 64


@made
def test_other_dtypes_are_rounded(kind: str) -> None:
    weight = MADE[kind](40, 1)
    assert torch.equal(weight.dequantized(torch.bfloat16), weight.dequantized().to(torch.bfloat16))


def test_the_last_block_may_be_smaller() -> None:
    weight = fp8(72, 32, 40, 0)
    numbers = weight.dequantized()
    assert torch.equal(weight.of_outputs([range(64, 72)]).dequantized(), numbers[64:])
    assert torch.equal(weight.of_inputs(range(80, 96)).dequantized(), numbers[:, 80:])


@pytest.mark.parametrize(
    "cut",
    [
        lambda: fp8(96, 32, 32, 0).of_outputs([range(40)]),
        lambda: fp8(80, 32, 32, 0).of_outputs([range(64, 80), range(32)]),
        lambda: fp8(96, 32, 32, 0).of_inputs(range(16, 96)),
        lambda: int8(8, 0).of_inputs(range(33)),
        lambda: affine(8, 4, 0).of_inputs(range(8, 32)),
        lambda: nf4(8, 0).of_inputs(range(16)),
        lambda: Fp8Weight.concat([fp8(40, 32, 32, 0), fp8(32, 32, 32, 0)]),  # type: ignore[list-item]
        lambda: AffineWeight.concat([affine(8, 4, 0), affine(8, 3, 0)]),  # type: ignore[list-item]
    ],
)
def test_a_group_that_would_be_cut(cut: Callable[[], object]) -> None:
    with pytest.raises(ScaleGroupCut):
        cut()


@pytest.mark.parametrize("inputs_first", [False, True])
def test_experts(inputs_first: bool) -> None:
    weights = [fp8(8, 1, 96, seed) for seed in range(3)]
    stacked = StackedWeights(weights, inputs_first=inputs_first)
    numbers = torch.stack([each.dequantized() for each in weights])
    expected = numbers.transpose(1, 2) if inputs_first else numbers
    assert stacked.shape == tuple(expected.shape)
    assert torch.equal(stacked.dequantized(), expected)
    assert stacked.nbytes == sum(each.nbytes for each in weights)
