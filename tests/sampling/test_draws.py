# SPDX-License-Identifier: Apache-2.0
"""Draws are those of plain inverse transform sampling, in float64 over the whole vocabulary."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import tried
from torch.utils._python_dispatch import TorchDispatchMode

from radixkv.sampling import sampler
from radixkv.sampling.draws import draw
from radixkv.sampling.sampler import sample
from radixkv.sampling.sampling_params import SamplingParams


@dataclass
class Drawn:
    """A request whose random number is known."""

    params: SamplingParams
    number: float

    @property
    def sampling_state(self) -> Drawn:
        return self

    processors: tuple[()] = ()

    def draw(self, ahead: int = 0) -> float:
        return self.number


def reference(logits: np.ndarray, params: SamplingParams, number: float) -> tuple[int, float]:
    """The token, and how far the number is from one that would give another."""
    shares = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    order = np.argsort(-shares, kind="stable")
    kept = np.zeros(len(shares), dtype=bool)
    kept[order[: params.top_k if params.top_k > 0 else len(order)]] = True
    shares[~kept] = 0
    shares /= shares.sum()
    before = np.cumsum(shares[order]) - shares[order]
    cut = before >= params.top_p if params.top_p < 1 else np.zeros(len(order), dtype=bool)
    cut[0] = False
    margin = float(np.abs(before[1:] - params.top_p).min(initial=1.0)) if params.top_p < 1 else 1.0
    shares[order[cut]] = 0
    shares[shares < params.min_p * shares.max()] = 0
    filtered = params.top_k > 0 or params.top_p < 1
    places = order if filtered else np.arange(len(shares))
    ends = np.cumsum(shares[places])
    target = number * ends[-1]
    margin = min(margin, float(np.abs(ends[shares[places] > 0][:-1] - target).min(initial=1.0)))
    return int(places[np.searchsorted(ends, target, side="right")]), margin


@settings(max_examples=tried(300), deadline=None)
@given(
    width=st.sampled_from([1, 2, 50, 255, 256, 257, 512, 1000, 5000]),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.5, 5.0, 40.0]),
    masked=st.floats(0, 0.999),
    number=st.one_of(st.just(0.0), st.just(1 - 2**-53), st.floats(0, 1, exclude_max=True)),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.05, 0.7, 1.0, 2.0]),
        top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.3]),
        top_k=st.sampled_from([-1, -1, 1, 7, 300]),
    ),
)
def test_draws_are_those_of_the_plain_formula(
    width: int, seed: int, spread: float, masked: float, number: float, params: SamplingParams
) -> None:
    random = np.random.default_rng(seed)
    logits = (random.permutation(width) * (spread / width)).astype(np.float32)
    hidden = random.random(width) < masked
    hidden[random.integers(width)] = False
    logits[hidden] = -np.inf  # all others differ: equal ones are in any order
    other = random.standard_normal(width).astype(np.float32)
    rows = torch.from_numpy(np.stack([other, logits, other]))
    requests = [Drawn(params, number) for _ in range(3)]
    token = sample(rows, [0, 1, 2], requests)[1].token_id  # type: ignore[arg-type]
    assert np.isfinite(logits[token])
    expected, margin = reference(logits, params, number)
    if margin > 1e-5:
        assert token == expected


LOGITS = st.sampled_from(["spread", "flat", "equal", "masked", "sixteen bits"])


def many_rows(count: int, width: int, kinds: list[str], seed: int) -> torch.Tensor:
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    for row, kind in zip(rows, itertools.cycle(kinds)):
        if kind == "spread":
            row *= 10
        elif kind == "equal":
            row.round_()
        elif kind == "masked":
            row[: width - 3] = -torch.inf
        elif kind == "sixteen bits":
            row.copy_((3 * row).bfloat16())
    return rows


any_filter = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-9]),
    top_k=st.sampled_from([-1, -1, 1, 7, 300, 1025]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
)


@settings(max_examples=tried(100), deadline=None)
@given(
    st.lists(any_filter, min_size=1, max_size=6),
    st.lists(LOGITS, min_size=1, max_size=3),
    st.sampled_from([32, 700, 3000]),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 1000),
)
def test_a_rows_draw_is_its_own(
    params: list[SamplingParams], kinds: list[str], width: int, number: float, seed: int
) -> None:
    """Beside whichever others."""
    rows = many_rows(len(params), width, kinds, seed)
    numbers = [(number + 0.37 * i) % 1 for i in range(len(params))]
    together = draw(rows, params, numbers).tolist()
    alone = [draw(rows[[i]], [params[i]], [numbers[i]]).item() for i in range(len(params))]
    assert together == alone


@pytest.mark.parametrize("top_k", [1, 5, 300])
def test_equal_logits_are_in_the_order_of_their_ids(top_k: int) -> None:
    rows = many_rows(4, 3000, ["equal"], 0)
    for number in (0.0, 0.3, 0.99):
        drawn = draw(rows, [SamplingParams(temperature=1.0, top_k=top_k)] * 4, [number] * 4)
        for row, token in zip(rows.numpy(), drawn.tolist(), strict=True):
            order = np.argsort(-row, kind="stable")[:top_k]
            ends = np.cumsum(np.exp(row[order].astype(np.float64) - row.max()))
            assert token == order[np.searchsorted(ends, number * ends[-1], side="right")]


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_wide_rows_are_sorted_together() -> None:
    """Rows whose candidates are most of the vocabulary, on a CPU: one sort, however many rows."""
    flat = SamplingParams(temperature=5.0, top_p=0.95)
    counts = []
    for size in (2, 8):
        logits = many_rows(size, 5000, ["spread"], 1)
        with Operations() as operations:
            draw(logits, [flat] * size, [0.3] * size)
        counts.append(operations.count)
    assert counts[1] <= counts[0] + 5


@pytest.mark.parametrize("count", [1, 3, 20, 64])
def test_top_logprobs_of_equal_tokens_are_those_of_the_lowest_ids(count: int) -> None:
    """In id order and whatever the row's batch mates: `topk` alone chooses among equal ones as it likes."""
    rows = many_rows(6, 1000, ["sixteen bits", "equal", "masked"], 3)
    rows[4] = 0.0
    for logits in (rows, rows[[1]], rows[[4]], rows.flip(0)):
        for row, found in zip(logits, sampler.gather_logprobs(logits, [0] * len(logits), count), strict=True):
            order = np.argsort(-torch.log_softmax(row, 0).numpy(), kind="stable")
            assert [token for token, _ in found.top] == order[:count].tolist()
