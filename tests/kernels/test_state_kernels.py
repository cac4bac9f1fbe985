# SPDX-License-Identifier: Apache-2.0
"""State kernels against the float64 recurrence, and against themselves: the same bits however rows come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from nightly import by_day
from state_cases import LENGTH, Cursor, Inputs, Layer, layer_inputs

pytest.importorskip("numba")

from radixkv_kernels.cpu.recurrence.backend import CpuStates
from radixkv_kernels.state_reference import reference_mix, shape_of
from radixkv_kernels.states import GRID, KINDS, StateShape


def new_layer(kind: str) -> tuple[Layer, Inputs]:
    inputs, constants = layer_inputs(kind)
    return Layer(kind, shape_of(0, kind, inputs, constants), constants, CpuStates()), inputs


@pytest.fixture(scope="module", params=by_day(KINDS, "conv", "delta", "ssd"))
def case(request: pytest.FixtureRequest) -> tuple[str, torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]:
    """A kind with the outputs of one whole prefill, the last state, and the states at 64 and 128."""
    layer, inputs = new_layer(request.param)
    one = Cursor(inputs, 1, (0, 1))
    whole = layer.run(one, [LENGTH], saves=[(0, 64, 5), (0, 128, 6)])
    return request.param, whole, layer.slot(one.slot).clone(), {64: layer.slot(5), 128: layer.slot(6)}


def test_outputs_and_states_are_those_of_the_recurrence(case: Any) -> None:
    kind, whole, last, kept = case
    inputs, constants = layer_inputs(kind)
    outputs, wanted, begin = [], None, 0
    for end, state in (*kept.items(), (3 * GRID, last), (LENGTH, None)):
        part = tuple(each[begin:end] for each in inputs)
        out, wanted = reference_mix(kind, part, constants, wanted)
        outputs.append(out)
        begin = end
        if state is not None:
            inside = state[tuple(slice(size) for size in wanted.shape)]
            assert (inside - wanted).abs().max() < 2e-5 * wanted.std()
    expected = torch.cat(outputs)
    assert (whole - expected).abs().max() < 2e-5 * expected.std()


@pytest.mark.parametrize("size", [1, 7, 63, 64, 65])
def test_pieces_have_the_bits_of_the_whole(case: Any, size: int) -> None:
    kind, whole, last, _ = case
    layer, inputs = new_layer(kind)
    one = Cursor(inputs, 2, (2, 3))
    assert torch.equal(layer.run(one, [*range(size, LENGTH, size), LENGTH]), whole)
    assert torch.equal(layer.slot(one.slot), last)


def test_random_pieces_among_others_have_the_same_bits(case: Any) -> None:
    kind, whole, last, _ = case
    layer, inputs = new_layer(kind)
    others = [layer_inputs(kind, length, seed)[0] for length, seed in ((150, 1), (77, 2))]
    alone = [new_layer(kind)[0].run(Cursor(other, 0, (0, 1)), [len(other[0])]) for other in others]
    random = np.random.default_rng(0)
    sequences = [Cursor(each, ring, (2 * ring, 2 * ring + 1)) for ring, each in enumerate([inputs, *others])]
    outputs: list[list[torch.Tensor]] = [[], [], []]
    while any(one.start < len(one.inputs[0]) for one in sequences):
        rows = []
        for one in sequences:
            count = min(int(random.integers(1, 90)), len(one.inputs[0]) - one.start)
            if count and (random.random() < 0.7 or one is sequences[0]):
                rows.append((one, tuple(each[one.start : one.start + count] for each in one.inputs)))
        if not rows:
            continue
        values = [one.plan_values(len(part[0])) for one, part in rows]
        for (one, part), value, out in zip(rows, values, layer.step(rows), strict=True):
            outputs[sequences.index(one)].append(out)
            one.done(value, len(part[0]))
    for expected, parts in zip([whole, *alone], outputs, strict=True):
        assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(layer.slot(sequences[0].slot), last)


def test_guesses_are_taken_back_by_the_cursor(case: Any) -> None:
    kind, whole, last, _ = case
    layer, inputs = new_layer(kind)
    random, one, outputs = np.random.default_rng(3), Cursor(inputs, 2, (2, 3)), []
    while one.start < LENGTH:
        drafts = min(5, GRID - 1 - one.start % GRID, LENGTH - 1 - one.start)
        right = int(random.integers(0, drafts + 1))
        guessed = tuple(each[one.start : one.start + 1 + drafts].clone() for each in one.inputs)
        for each in guessed:
            each[1 + right :] *= 0.5
        values = one.plan_values(1 + drafts)
        outputs.append(layer.step([(one, guessed)])[0][: 1 + right])
        one.done(values, 1 + right)
    assert torch.equal(torch.cat(outputs), whole)
    assert torch.equal(layer.slot(one.slot), last)


def test_a_saved_state_goes_on_as_if_nothing_had_happened(case: Any) -> None:
    kind, whole, last, kept = case
    for position, state in kept.items():
        first, inputs = new_layer(kind)
        second, _ = new_layer(kind)
        first.slot(4).copy_(state)
        row = np.empty(first.states.spec.bytes_per_slot, np.uint8)
        first.states.read(4, row)
        second.states.load([7], [row])
        one = Cursor(inputs, 3, (0, 1), base=position, slot=7)
        assert torch.equal(second.run(one, [position + 10, LENGTH]), whole[position:])
        assert torch.equal(second.slot(one.slot), last)


def test_a_checkpoint_at_the_end_of_a_step_leaves_the_ring_full() -> None:
    layer, inputs = new_layer("delta")
    one = Cursor(inputs, 0, (0, 1))
    layer.run(one, [GRID], saves=[(0, GRID, 4)])
    assert (one.base, one.slot) == (0, -1)  # its last tokens may be taken back yet
    _, wanted = reference_mix("delta", tuple(each[:GRID] for each in inputs))
    saved = layer.slot(4)[:, :10, :75]
    assert (saved - wanted).abs().max() < 1e-5


def test_a_state_of_another_size_is_refused() -> None:
    layer, _ = new_layer("conv")
    with pytest.raises(ValueError, match="1 states are 1 times 1800 bytes"):
        layer.states.load([0], [b"short"])
    with pytest.raises(ValueError, match="2 to 64 taps"):
        StateShape(0, "conv", (8, 65))
    with pytest.raises(ValueError, match="one of conv, delta"):
        StateShape(0, "other", (8,))
