# SPDX-License-Identifier: Apache-2.0
"""State kernels for GPUs, interpreted: the float64 recurrence, and the same bits however rows come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_cases import Cursor, Inputs, Layer, layer_inputs

from radixkv_kernels.registry import make_state_backend
from radixkv_kernels.state_reference import reference_mix, shape_of
from radixkv_kernels.states import GRID, KINDS
from radixkv_kernels.triton.state import conv, heads, keep, scan

LENGTH = GRID + 8
#: Kinds that come in chunks, with products of operands of 16 bits.
CHUNKED = ("delta", "ssd", "kda")


def new_layer(kind: str, *, deterministic: bool = True, inputs: Any = None) -> tuple[Layer, Inputs]:
    default, constants = layer_inputs(kind, LENGTH, tiny=True)
    inputs = default if inputs is None else inputs
    backend = make_state_backend("triton", deterministic=deterministic)
    shape = shape_of(0, kind, inputs, constants)
    return Layer(kind, shape, constants, backend, keeps_values=True), inputs


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, in the spread of what is wanted."""
    inside = found[tuple(slice(size) for size in wanted.shape)]
    assert not found.isnan().any()
    return float((inside - wanted).abs().max() / wanted.std())


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest) -> tuple[str, torch.Tensor, torch.Tensor]:
    """A kind with the outputs of one whole prefill, and the state at the grid point."""
    layer, inputs = new_layer(request.param)
    one = Cursor(inputs, 1, (0, 1))
    whole = layer.run(one, [LENGTH], saves=[(0, GRID, 5), (0, GRID, 6)])
    for slot in (5, 6):
        assert torch.equal(layer.slot(slot), layer.slot(one.slot))
    return request.param, whole, layer.slot(5)


def test_outputs_and_states_are_those_of_the_recurrence(case: Any) -> None:
    kind, whole, kept = case
    inputs, constants = layer_inputs(kind, LENGTH, tiny=True)
    first, wanted = reference_mix(kind, tuple(each[:GRID] for each in inputs), constants)
    second, _ = reference_mix(kind, tuple(each[GRID:] for each in inputs), constants, wanted)
    limit = 1e-4 if kind in CHUNKED else 2e-5
    assert error(whole, torch.cat([first, second])) < limit
    assert error(kept, wanted) < limit


@pytest.mark.parametrize("kind", CHUNKED)
def test_narrow_inputs_lose_hardly_anything(kind: str) -> None:
    """bfloat16 inputs are exact operands; a state of three blocks of columns; decodes over the ring."""
    inputs, _ = layer_inputs(kind, LENGTH, tiny=True)
    inputs = (*(each.bfloat16() for each in inputs[:3]), *inputs[3:])
    expected, _ = reference_mix(kind, inputs)
    for cuts in ([LENGTH], [GRID - 2, *range(GRID - 1, LENGTH + 1)]):
        layer, _ = new_layer(kind, deterministic=False, inputs=inputs)
        assert error(layer.run(Cursor(inputs, 1, (0, 1)), cuts), expected) < 5e-5


@pytest.mark.parametrize("kind", ["delta", "kda"])
def test_nearly_equal_keys(kind: str) -> None:
    """The worst case of the inverse: each row's write undoes most of the one before."""
    inputs, _ = layer_inputs(kind, LENGTH, tiny=True)
    q, k, v, decay, _ = inputs
    k = (k[:1] + 0.1 * k).bfloat16()
    inputs = q.bfloat16(), k, v.bfloat16(), 0 * decay, torch.ones(LENGTH, v.shape[1])
    layer, _ = new_layer(kind, inputs=inputs)
    expected, _ = reference_mix(kind, inputs)
    assert error(layer.run(Cursor(inputs, 1, (0, 1)), [LENGTH]), expected) < 3e-4


@pytest.mark.parametrize("kind", ["delta", "kda"])
def test_strong_decays_do_not_overflow(kind: str) -> None:
    """Factors of e^-20 a token: their products and quotients over a chunk have no float."""
    inputs, _ = layer_inputs(kind, LENGTH, tiny=True)
    inputs = (*inputs[:3], 20 * inputs[3], inputs[4])
    expected, _ = reference_mix(kind, inputs)
    for deterministic in (True, False):
        layer, _ = new_layer(kind, deterministic=deterministic, inputs=inputs)
        assert error(layer.run(Cursor(inputs, 1, (0, 1)), [GRID + 1, LENGTH]), expected) < 1e-4


def steps_together(layer: Layer, steps: dict[Cursor, Sequence[tuple[int, int]]]) -> dict[Cursor, Any]:
    """Outputs of sequences in steps together, with padding: rows of each step, and how many of them stay."""
    outputs: dict[Cursor, list[torch.Tensor]] = {one: [] for one in steps}
    for turn in range(max(map(len, steps.values()))):
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
    return {one: torch.cat(parts) for one, parts in outputs.items()}


@pytest.mark.parametrize("deterministic", [True, False])
def test_any_pieces_among_others_have_the_bits_of_the_whole(case: Any, deterministic: bool) -> None:
    """Prompts in pieces, decodes, guesses that are taken back, and a request that goes on from a saved state.

    Without deterministic mode decodes of heads have sums in another order; states have the same bits.
    """
    kind, whole, kept = case
    layer, inputs = new_layer(kind, deterministic=deterministic)
    layer.slot(4).copy_(kept)
    pieces, guessing = Cursor(inputs, 2, (2, 3)), Cursor(inputs, 1, (0, 1))
    resumed = Cursor(inputs, 3, (5, 6), base=GRID, slot=4)
    steps = {
        pieces: [(1, 1), (29, 29), (35, 35), (7, 7)],
        guessing: [(61, 61), (3, 1), (2, 2), (4, 1), (7, 7)],
        resumed: [(2, 2), (5, 3), (3, 3)],
    }
    for one, out in steps_together(layer, steps).items():
        expected = whole[GRID if one is resumed else 0 :]
        if deterministic or kind not in CHUNKED:
            assert torch.equal(out, expected)
        else:
            assert error(out, expected) < 1e-4
        assert torch.equal(layer.slot(one.slot), kept)


@pytest.mark.parametrize("kind", CHUNKED)
def test_blocks_of_columns_have_the_bits_of_a_whole_state(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state wider than a program, whose keys are twice as many as its values."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(LENGTH, 1, 40), (LENGTH, 1, 40), (LENGTH, 1, 40)]
    inputs: Any = tuple(torch.randn(shape, generator=generator) for shape in shapes)
    rest = torch.rand(LENGTH, 1, generator=generator)
    inputs = (*inputs, -rest[:, :, None].expand(LENGTH, 1, 40) if kind == "kda" else -rest, rest)
    inputs = inputs[: 4 if kind == "ssd" else 5]
    expected, _ = reference_mix(kind, inputs)
    outputs = []
    for columns in (16, 64):
        monkeypatch.setattr(heads, "STATE_COLUMNS", columns)
        monkeypatch.setattr(heads, "OUTPUT_COLUMNS", columns)
        layer, _ = new_layer(kind, inputs=inputs)
        outputs.append(layer.run(Cursor(inputs, 1, (0, 1)), [GRID + 3, LENGTH]))
    assert torch.equal(*outputs)
    assert error(outputs[0], expected) < 1e-4


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    cuts=st.sets(st.integers(1, LENGTH - 1), max_size=5), kind=st.sampled_from(CHUNKED), save=st.booleans()
)
def test_states_do_not_depend_on_cuts(cuts: set[int], kind: str, save: bool) -> None:
    """Cut anywhere, beside a request of other inputs, outputs and states are those of one step."""
    others, _ = layer_inputs(kind, LENGTH, seed=1, tiny=True)
    states, outputs = [], []
    for deterministic, ends in ((True, [LENGTH]), (True, [*cuts, LENGTH]), (False, [*cuts, LENGTH])):
        layer, inputs = new_layer(kind, deterministic=deterministic)
        one, other = Cursor(inputs, 2, (2, 3)), Cursor(others, 0, (0, 1))
        layer.run(other, [5])
        saves = [(0, GRID, 7)] if save else []
        outputs.append(layer.run(one, sorted(ends), saves=saves))
        states.append(layer.slot(one.slot))
        if save:
            assert torch.equal(layer.slot(7), layer.slot(one.slot))
    assert torch.equal(outputs[0], outputs[1])
    assert error(outputs[2], outputs[0]) < 1e-4
    assert all(torch.equal(state, states[0]) for state in states)


class RecordedKernel:
    """Stands in for a kernel: launches it, and keeps the launches, as a CUDA graph would."""

    def __init__(self, kernel: Any, log: list[Any]) -> None:
        self.kernel, self.log = kernel, log

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.log.append(lambda: self.kernel[grid](*args, **kwargs))
            self.log[-1]()

        return launch


KERNELS = {
    heads: ("gather_kernel", "scores_kernel", "local_kernel", "state_kernel", "output_kernel", "ring_kernel"),
    conv: ("conv_kernel",),
    scan: ("totals_kernel", "states_kernel", "rows_kernel"),
    keep: ("keep_kernel",),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_recorded_launches_replay_with_other_plans(
    kind: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CUDA graph does: the launches of one step, untouched by the host, run later steps as well.

    Decodes, guesses, a full ring that is folded, a kept state and, where the launches are those for chunks,
    a piece of a prompt: outputs, states and rings are those of eager steps.
    """
    rows = 12
    log: list[Any] = []
    eager, inputs = new_layer(kind, deterministic=False)
    others = [layer_inputs(kind, LENGTH, seed, tiny=True)[0] for seed in (1, 2)]
    cursors = [Cursor(each, ring, (2 * ring, 2 * ring + 1)) for ring, each in enumerate((inputs, *others))]
    for one, end in zip(cursors, (GRID - 1, 3, GRID), strict=True):
        eager.run(one, [end])
    replayed, _ = new_layer(kind, deterministic=False)
    memory, copied = replayed.states.of(0, kind), eager.states.of(0, kind)
    for target, source in zip((memory.slots, *memory.rings), (copied.slots, *copied.rings), strict=True):
        target.copy_(source)
    fixed = tuple(torch.zeros(rows, *each.shape[1:]) for each in inputs)
    out = None
    for counts in ((1, 1, 1), (2, 0, 1), (1, 9 if large else 1, 0), (0, 2, 3), (1, 1, 1)):
        now = [(one, count) for one, count in zip(cursors, counts, strict=True) if count]
        parts = [(one, tuple(each[one.start : one.start + n] for each in one.inputs)) for one, n in now]
        saves = [(0, GRID, 7)] if now[0][0].base < GRID <= now[0][0].start + now[0][1] else []
        plan = eager.plan(parts, saves)
        expected = eager.step(parts, saves)
        staged = plan, rows, rows
        assert replayed.backend.stage(*staged, large=large, device=torch.device("cpu"))
        for place, each in enumerate(fixed):
            each.fill_(float("nan"))
            each[: plan.num_rows] = torch.cat([part[place] for _, part in parts])
        if out is None:
            with monkeypatch.context() as patch:
                for module, names in KERNELS.items():
                    for name in names:
                        patch.setattr(module, name, RecordedKernel(getattr(module, name), log))
                out = replayed.backend.mix(replayed.states, 0, kind, plan, fixed, replayed.constants)
        else:
            out.fill_(7.0)
            for launch in log:
                launch()
        assert torch.equal(out[: plan.num_rows], torch.cat(expected))
        if kind not in ("scan", "lru"):  # these are cleared by torch
            assert not out[plan.num_rows :].any()
        for one, count in now:
            one.done(one.plan_values(count), count)
            assert one.slot < 0 or torch.equal(replayed.slot(one.slot), eager.slot(one.slot))
        if saves:
            assert torch.equal(replayed.slot(7), eager.slot(7))


def test_a_step_too_large_for_recorded_launches_is_not_staged() -> None:
    layer, inputs = new_layer("delta", deterministic=False)
    # Nine rows across a grid point are two chunks each, more than launches for decodes have programs for.
    many = [Cursor(inputs, ring, (2 * ring, 2 * ring + 1)) for ring in range(4)]
    for one in many:
        one.start = GRID - 4
    plan = layer.plan([(one, tuple(each[:9] for each in inputs)) for one in many])
    device = torch.device("cpu")
    assert not layer.backend.stage(plan, 36, 36, large=False, device=device)
    assert layer.backend.stage(plan, 36, 36, large=True, device=device)


def test_recorded_launches_of_deterministic_mode_are_of_one_kind() -> None:
    layer, inputs = new_layer("delta", deterministic=True)
    many = [Cursor(inputs, ring, (2 * ring, 2 * ring + 1)) for ring in range(4)]
    plan = layer.plan([(one, tuple(each[:3] for each in inputs)) for one in many])
    device = torch.device("cpu")
    assert layer.backend.stage(plan, 12, 12, large=False, device=device)
    assert not layer.backend.stage(plan, 12, 12, large=True, device=device)
