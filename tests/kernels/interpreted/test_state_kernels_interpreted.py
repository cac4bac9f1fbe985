# SPDX-License-Identifier: Apache-2.0
"""State kernels for GPUs, interpreted: the float64 recurrence, and the same bits however rows come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from state_cases import Cursor, Inputs, Layer, layer_inputs

from radixkv_kernels.registry import make_state_backend
from radixkv_kernels.state_reference import reference_mix, shape_of
from radixkv_kernels.states import GRID, KINDS
from radixkv_kernels.triton.state import heads

LENGTH = GRID + 8


def new_layer(kind: str) -> tuple[Layer, Inputs]:
    inputs, constants = layer_inputs(kind, LENGTH, tiny=True)
    shape = shape_of(0, kind, inputs, constants)
    return Layer(kind, shape, constants, make_state_backend("triton")), inputs


#: They have the kernel of kda, and run by night.
LIKE_KDA = ("delta", "ssd")
CASES = [pytest.param(kind, marks=pytest.mark.nightly if kind in LIKE_KDA else ()) for kind in KINDS]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """A kind with the outputs of one whole prefill, and the state at the grid point."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "kda":
            patch.setattr(heads, "STATE_NUMBERS", 64)  # two slices of values
        layer, inputs = new_layer(request.param)
        one = Cursor(inputs, 1, (0, 1))
        whole = layer.run(one, [LENGTH], saves=[(0, GRID, 5), (0, GRID, 6)])
        for slot in (5, 6):
            assert torch.equal(layer.slot(slot), layer.slot(one.slot))
        yield request.param, whole, layer.slot(5)


def test_outputs_and_states_are_those_of_the_recurrence(case: Any) -> None:
    kind, whole, kept = case
    inputs, constants = layer_inputs(kind, LENGTH, tiny=True)
    first, wanted = reference_mix(kind, tuple(each[:GRID] for each in inputs), constants)
    second, _ = reference_mix(kind, tuple(each[GRID:] for each in inputs), constants, wanted)
    expected = torch.cat([first, second])
    assert (whole - expected).abs().max() < 2e-5 * expected.std()
    inside = kept[tuple(slice(size) for size in wanted.shape)]
    assert (inside - wanted).abs().max() < 2e-5 * wanted.std()
    assert not kept.isnan().any()


def test_any_pieces_among_others_have_the_bits_of_the_whole(case: Any) -> None:
    """Prompts in pieces, decodes, guesses that are taken back, and a request that goes on from a saved state,
    in steps together, with padding."""
    kind, whole, kept = case
    layer, inputs = new_layer(kind)
    layer.slot(4).copy_(kept)
    pieces, guessing = Cursor(inputs, 2, (2, 3)), Cursor(inputs, 1, (0, 1))
    resumed = Cursor(inputs, 3, (5, 6), base=GRID, slot=4)
    # Rows of each step, and how many of them stay.
    steps = {
        pieces: [(1, 1), (29, 29), (35, 35), (7, 7)],
        guessing: [(61, 61), (3, 1), (2, 2), (4, 1), (7, 7)],
        resumed: [(2, 2), (5, 3), (3, 3)],
    }
    outputs: dict[Cursor, list[torch.Tensor]] = {one: [] for one in steps}
    for turn in range(5):
        now = {one: own[turn] for one, own in steps.items() if turn < len(own)}
        rows = []
        for one, (count, right) in now.items():
            part = tuple(each[one.start : one.start + count].clone() for each in one.inputs)
            for each in part:
                each[right:] *= 0.5
            rows.append((one, part))
        values = [one.plan_values(count) for one, (count, _) in now.items()]
        results = layer.step(rows, padding=2)
        for (one, (_, right)), value, out in zip(now.items(), values, results, strict=True):
            outputs[one].append(out[:right])
            one.done(value, right)
    for one, parts in outputs.items():
        assert torch.equal(torch.cat(parts), whole[GRID if one is resumed else 0 :])
        assert torch.equal(layer.slot(one.slot), kept)
