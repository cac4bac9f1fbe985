"""Draws are those of plain inverse transform sampling, in float64 over the whole vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.request import SamplingParams
from radixkv.sampling.sampler import sample


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


@settings(max_examples=300, deadline=None)
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
