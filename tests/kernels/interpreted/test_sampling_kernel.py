# SPDX-License-Identifier: Apache-2.0
"""The kernel that chooses tokens, interpreted: the same tokens as the sampler of a CPU."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import by_day, tried

from radixkv.sampling.device_arrays import Fetch
from radixkv.sampling.sampler import NOT_A_NUMBER, NOTHING_LEFT, SampledToken, sample_runs
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.sampling_state import SamplingState

#: Closer than this to the next token, a number may draw either: shares are float32 on a CPU.
MARGIN = 2e-6


class Numbered(SamplingState):
    """A state whose random number is known."""

    number = 0.0

    def draw(self, ahead: int = 0) -> float:
        return (self.number + 0.31 * (self.num_generated + ahead)) % 1.0


@dataclass
class Row:
    params: SamplingParams
    number: float = 0.0
    sampling_state: Numbered = field(init=False)

    def __post_init__(self) -> None:
        self.sampling_state = Numbered(self.params, 0, [1, 2, 3, 2], ())
        self.sampling_state.number = self.number


def chosen(logits: torch.Tensor, rows: list[int], requests: list[Row], *, by_kernel: bool) -> list[int]:
    runs = sample_runs(logits, rows, requests, [()] * len(rows), by_kernel=by_kernel)
    return [run[0].token_id for run in runs]


def neighbours(logits: torch.Tensor, row: int, request: Row) -> set[int]:
    """Tokens that numbers and settings beside those of a request give."""
    found = set()
    for by, more in itertools.product((-MARGIN, 0.0, MARGIN), repeat=2):
        number = min(max(request.number + by, 0.0), 1 - 2**-53)
        top_p = request.params.top_p + (more if request.params.top_p < 1.0 else 0.0)
        params = dataclasses.replace(request.params, top_p=min(max(top_p, 1e-9), 1.0))
        found.add(chosen(logits, [row], [Row(params, number)], by_kernel=False)[0])
    return found


def make_logits(count: int, width: int, kind: str, seed: int) -> torch.Tensor:
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    if kind == "sharp":
        rows *= 8
    elif kind == "equal":
        rows.round_()
    elif kind == "masked":
        rows[:, : width - 3] = -torch.inf
    elif kind == "constant":
        rows.zero_()
    elif kind == "sixteen bits":
        rows = (3 * rows).bfloat16()
    return rows


any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-9]),
    top_k=st.sampled_from([-1, -1, 1, 7, 300, 1500, 4000]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.9]),
    allowed_token_ids=st.sampled_from([None, None, [5], [3, 1, 8, 11, 31, 32, 33], range(0, 39, 2)]),
    logit_bias=st.sampled_from([None, None, {4: 30.0, 7: -5.0}]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    bad_words=st.sampled_from([[], [[5, 6], [11]]]),
)


@settings(max_examples=tried(15), deadline=None)
@given(
    st.lists(st.tuples(any_params, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=5),
    st.sampled_from(["flat", "sharp", "equal", "masked", "constant", "sixteen bits"]),
    st.sampled_from([40, 700, 4096, 9000]),
    st.integers(0, 1000),
)
def test_tokens_are_those_of_a_cpu(
    wanted: list[tuple[SamplingParams, float]], kind: str, width: int, seed: int
) -> None:
    """Greedy and drawn rows of all kinds side by side; some of the model's rows are nobody's."""
    logits = make_logits(2 * len(wanted), width, kind, seed)
    requests = [Row(params, number) for params, number in wanted]
    rows = [2 * i + 1 for i in range(len(wanted))]
    expected = chosen(logits, rows, requests, by_kernel=False)
    found = chosen(logits, rows, requests, by_kernel=True)
    for i, request in enumerate(requests):
        assert found[i] == expected[i] or found[i] in neighbours(logits, rows[i], request)


@pytest.mark.parametrize("kind", by_day(["constant", "equal", "flat"], "equal"))
@pytest.mark.parametrize(
    "filters", [{"top_p": 0.9}, {"top_k": 3000}, {"top_k": 2500, "top_p": 0.7}, {"top_p": 0.99, "min_p": 0.3}]
)
def test_rows_with_more_tokens_than_are_listed(kind: str, filters: dict[str, float]) -> None:
    """They are searched whole."""
    logits = make_logits(2, 9000, kind, 3)
    for number in (0.1, 0.9):
        request = Row(SamplingParams(temperature=2.0, **filters), number)  # type: ignore[arg-type]
        (found,) = chosen(logits, [1], [request], by_kernel=True)
        assert found in neighbours(logits, 1, request)


def test_logits_below_the_listed_ones_are_drawn_in_order() -> None:
    """A number for each of 4,000 different tokens, most of which are not listed, draws that token."""
    logits = torch.linspace(0.0, -1.0, 9000)[torch.randperm(9000)][None]
    shares = torch.softmax(logits[0].double(), 0).sort(descending=True, stable=True)
    ends = shares.values.cumsum(0)
    for place in (0, 17, 1500, 2500, 3990):
        number = float((ends[place] - shares.values[place] / 2) / ends[3999])
        request = Row(SamplingParams(temperature=1.0, top_k=4000), number)
        assert chosen(logits, [0], [request], by_kernel=True) == [int(shares.indices[place])]


def test_a_row_without_a_token_says_why() -> None:
    logits = make_logits(5, 50, "flat", 0)
    logits[1, 7], logits[2, 9], logits[3] = torch.nan, torch.inf, -torch.inf
    nothing = SamplingParams(temperature=0.0, allowed_token_ids=[3], bad_words=[[3]])
    ways = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9), SamplingParams())
    for params in ways:
        requests = [*(Row(params) for _ in range(4)), Row(nothing)]
        found = chosen(logits, [0, 1, 2, 3, 4], requests, by_kernel=True)
        assert found[0] >= 0
        assert found[1:] == [NOT_A_NUMBER] * 3 + [NOTHING_LEFT]
    # What is ruled out may be no number.
    logits[1, 7] = torch.nan
    only = Row(SamplingParams(temperature=0.0, allowed_token_ids=[3, 4]))
    assert chosen(logits, [1], [only], by_kernel=True)[0] in (3, 4)


@settings(max_examples=tried(8), deadline=None)
@given(st.lists(any_params, min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 100))
def test_runs_of_drafts_are_those_of_a_cpu(wanted: list[SamplingParams], most: int, seed: int) -> None:
    logits = make_logits(len(wanted) * (most + 1), 60, "sharp", seed)
    rows = [i * (most + 1) for i in range(len(wanted))]
    params = [dataclasses.replace(each, logprobs=2) for each in wanted]

    def runs(drafts: list[list[int]], *, by_kernel: bool) -> list[list[SampledToken]]:
        requests = [Row(each, 0.37) for each in params]
        return sample_runs(logits, rows, requests, drafts, by_kernel=by_kernel)

    drafts: list[list[int]] = [[] for _ in params]
    for _ in range(most):  # right guesses all along
        for draft, run in zip(drafts, runs(drafts, by_kernel=False), strict=True):
            draft[:] = [token.token_id for token in run]
    assert runs(drafts, by_kernel=True) == runs(drafts, by_kernel=False)


def test_a_step_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    wait = Fetch.wait
    monkeypatch.setattr(Fetch, "wait", lambda fetch: waits.append(1) or wait(fetch))
    flat = SamplingParams(temperature=50.0, top_p=0.95, logprobs=1)
    requests = [Row(flat, 0.2), Row(SamplingParams(temperature=1.0, top_p=0.5), 0.9), Row(flat, 0.93)]
    logits = make_logits(3, 5000, "sharp", 1)
    by_kernel = sample_runs(logits, [0, 1, 2], requests, [()] * 3, by_kernel=True)
    assert len(waits) == 1
    assert by_kernel == sample_runs(logits, [0, 1, 2], requests, [()] * 3, by_kernel=False)
