# SPDX-License-Identifier: Apache-2.0
"""`keep_tokens`: how much of a request may stay cached because of it, and what others want stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged_language_model import VOCAB, greedy_reference, make_engine, run_all

from radixkv.engine.engine import Engine
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import PrefixPin

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def ask(engine: Engine, tokens: list[int], **options: Any) -> Any:
    request_id = engine.add_request(tokens, options.pop("params", GREEDY), **options)
    return run_all(engine)[request_id]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=0)])
@pytest.mark.parametrize("keep", [0, 1, 7, 8, 21, 37])
def test_no_more_is_found_than_was_to_be_kept(keep: int, params: SamplingParams) -> None:
    engine, _ = make_engine(num_blocks=60, block_size=8)
    tokens = prompt(1, 40)
    output = ask(engine, tokens, params=params, keep_tokens=keep)
    assert output.num_cache_write_tokens == keep
    again = ask(engine, tokens)
    assert again.num_cached_tokens == keep
    assert again.outputs[0].token_ids == greedy_reference(tokens, 12)
    assert ask(engine, tokens, keep_tokens=0).num_cached_tokens == 39, "what others cached is found"
    assert ask(engine, tokens).num_cached_tokens == 39, "and stays"


def test_answers_are_kept_as_far_as_they_may() -> None:
    engine, _ = make_engine(num_blocks=60, block_size=8)
    tokens = prompt(2, 20)
    answer = ask(engine, tokens, keep_tokens=25).outputs[0].token_ids
    assert engine.cache.match([*tokens, *answer]).num_tokens == 25
    assert ask(engine, prompt(3, 20), keep_tokens=1000).num_cache_write_tokens == 20


def test_two_at_once_of_which_one_is_to_stay() -> None:
    """Whichever of the two computes, comes first or ends first."""
    tokens = prompt(4, 40)
    for budget in (16, 200):
        for first, second in ((0, None), (None, 0)):
            for longest in (3, 30):
                engine, _ = make_engine(num_blocks=60, block_size=8, budget=budget)
                for keep, length in ((first, longest), (second, 33 - longest)):
                    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
                    engine.add_request(tokens, params, keep_tokens=keep)
                run_all(engine)
                # The last token of a prompt is computed by each request itself.
                assert engine.cache.match(tokens).num_tokens >= 39


@pytest.mark.parametrize(("num_blocks", "n"), [(14, 1), (60, 3)])
def test_samples_and_preemption_leave_nothing(num_blocks: int, n: int) -> None:
    engine, _ = make_engine(num_blocks=num_blocks, block_size=8, budget=32)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=25, ignore_eos=True, n=n)
    for seed in range(4):
        engine.add_request(prompt(seed, 30), params, keep_tokens=0)
    run_all(engine)
    stats = engine.stats()
    assert bool(stats.num_preemptions) is (n == 1)
    assert (stats.cache.cached_blocks, stats.cache.held_blocks) == (0, 0)


@pytest.mark.parametrize("length", range(16, 25))
def test_what_a_sample_added_while_another_held_it_goes_with_the_last(length: int) -> None:
    engine, _ = make_engine(num_blocks=60, block_size=8, budget=13)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=8, ignore_eos=True, n=2)
    for seed in range(3):
        engine.add_request(prompt(seed, length), params, keep_tokens=0)
    run_all(engine)
    stats = engine.stats()
    assert (stats.num_preemptions, stats.cache.cached_blocks, stats.cache.held_blocks) == (0, 0, 0)


def test_a_pin_holds_to_its_token() -> None:
    engine, _ = make_engine(num_blocks=20, block_size=16)
    tokens = prompt(5, 60)
    output = ask(engine, tokens, pins=[PrefixPin(5, 60.0), PrefixPin(37, 60.0)], keep_tokens=37)
    assert (output.num_pinned_tokens, output.num_cache_write_tokens) == (37, 37)
    for seed in range(6, 12):
        ask(engine, prompt(seed, 200))
    assert engine.cache.match(tokens).num_tokens == 37
    assert ask(engine, tokens).num_cached_tokens == 37
