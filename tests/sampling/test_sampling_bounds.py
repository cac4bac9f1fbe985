# SPDX-License-Identifier: Apache-2.0
"""Sampling at the edges of its parameters: a sensible token, or a refusal that names the parameter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import tried

from radixkv.errors import InvalidRequestError
from radixkv.sampling.sampler import sample
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.sampling_state import SamplingState

VOCABULARY = 50


@dataclass
class Row:
    params: SamplingParams
    end_token_ids: tuple[int, ...] = ()
    sampling_state: SamplingState = field(init=False)

    def __post_init__(self) -> None:
        self.sampling_state = SamplingState(self.params, 0, [1, 2, 3], self.end_token_ids)


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 5


def chosen(params: SamplingParams, rows: torch.Tensor, ends: tuple[int, ...] = ()) -> int:
    (token,) = sample(rows, [0], [Row(params, ends)])
    return token.token_id


@pytest.mark.parametrize("temperature", [0.0, 1e-308, 1e-46, 1e-30, 1e-6])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.1}])
def test_tiny_temperatures_are_greedy(temperature: float, more: dict[str, Any]) -> None:
    rows = logits()
    assert chosen(SamplingParams(temperature=temperature, **more), rows) == int(rows.argmax())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("repetition_penalty", value) for value in (0.0, 1e-38, 0.009, 101.0, 1e38, float("nan"), True)),
        *(("temperature", value) for value in (-1.0, 100.5, 1e308, 10**400, float("inf"), float("nan"))),
    ],
)
def test_what_would_overflow_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} must be") as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "logit_bias"])
def test_a_number_in_place_of_several_values_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} (must|maps)") as caught:
        SamplingParams(**{name: 5})  # type: ignore[arg-type]
    assert caught.value.param == name


@pytest.mark.parametrize("end", [-1, VOCABULARY, VOCABULARY + 7, 2**40])
def test_end_tokens_that_do_not_exist_mask_nothing(end: int) -> None:
    rows = logits()
    rows[0, -1] = 100.0
    assert chosen(SamplingParams(temperature=0.0, min_tokens=2), rows, (end,)) == VOCABULARY - 1
    assert (
        chosen(SamplingParams(temperature=0.0, min_tokens=2), rows, (end, VOCABULARY - 1)) != VOCABULARY - 1
    )


any_params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 2 * VOCABULARY),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=3),
    min_tokens=st.integers(0, 1),
)


@settings(max_examples=tried(300), deadline=None)
@given(any_params, st.integers(0, 9), st.booleans())
def test_every_allowed_setting_gives_a_token(params: SamplingParams, seed: int, masked: bool) -> None:
    rows = logits(seed)
    if masked:
        rows[0, : VOCABULARY // 2] = -torch.inf
    token = chosen(params, rows, (4, -1, VOCABULARY))
    assert 0 <= token < VOCABULARY
    assert not (masked and token < VOCABULARY // 2)
