# SPDX-License-Identifier: Apache-2.0
"""Samples and beams: the same results with few slots, few blocks and preemption as with plenty of all."""

from __future__ import annotations

import numpy as np
import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_language_model import END, VOCAB, make_engine, next_logits, run_all

from radixkv.entrypoints.beam_search import BeamSearch, BeamSearchParams
from radixkv.entrypoints.llm import LLM
from radixkv.errors import InvalidRequestError
from radixkv.sampling.sampling_params import SamplingParams


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def one_by_one(p: list[int], params: SamplingParams) -> list[list[int]]:
    """Each sample as a request of its own, in an engine with plenty of everything."""
    engine, _ = make_engine(num_blocks=400, budget=512)
    samples = []
    for i in range(params.num_samples):
        assert params.seed is not None
        alone = SamplingParams(
            temperature=params.temperature,
            seed=params.seed + i,
            max_tokens=params.max_tokens,
            presence_penalty=params.presence_penalty,
        )
        request_id = engine.add_request(p, alone)
        samples.append(run_all(engine, check=False)[request_id].outputs[0].token_ids)
    return samples


def assert_nothing_held(engine) -> None:
    engine.check()
    assert engine.cache.stats.held_blocks == 0
    assert not engine.requests


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 64])
def test_more_samples_than_slots(slots):
    p = prompt(1, 30)
    params = SamplingParams(n=5, seed=7, temperature=1.0, max_tokens=15, presence_penalty=0.5)
    engine, model = make_engine(num_blocks=200, max_num_seqs=slots)
    request_id = engine.add_request(p, params)
    output = run_all(engine)[request_id]
    assert [completion.token_ids for completion in output.outputs] == one_by_one(p, params)
    assert max(len(batch) for batch in model.batches) <= slots
    assert engine.stats().prompt_tokens == len(p), "a prompt counts once, whatever its samples"
    assert_nothing_held(engine)


@settings(max_examples=examples(15), deadline=None)
@given(
    num_blocks=st.integers(8, 30),
    slots=st.integers(1, 8),
    budget=st.sampled_from([4, 16, 64]),
    samples=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=4),
    policy=st.sampled_from(["prefix", "fcfs", "priority", "fair"]),
    arrivals=st.lists(st.integers(0, 8), min_size=4, max_size=4),
)
def test_samples_do_not_depend_on_slots_blocks_or_company(
    num_blocks, slots, budget, samples, policy, arrivals
):
    engine, model = make_engine(
        num_blocks=num_blocks, max_num_seqs=slots, budget=budget, scheduling_policy=policy, max_model_len=60
    )
    wanted = {}
    outputs = {}
    step = 0
    while step <= 8 or engine.has_work:
        for i, (n, root) in enumerate(samples):
            if arrivals[i] == step:
                p = [*prompt(root, 25), 1 + i]
                params = SamplingParams(n=n, seed=10 * i, temperature=0.8, max_tokens=14)
                request_id = engine.add_request(p, params, priority=i % 2)
                wanted[request_id] = (p, params)
        result = engine.step()
        engine.check()
        outputs.update({output.request_id: output for output in result.finished})
        step += 1
        assert step < 3000, "the engine does not come to an end"
    for request_id, (p, params) in wanted.items():
        assert outputs[request_id].error is None
        got = [completion.token_ids for completion in outputs[request_id].outputs]
        assert got == one_by_one(p, params)
    assert max(len(batch) for batch in model.batches) <= slots
    assert_nothing_held(engine)


def beam_reference(p: list[int], params: BeamSearchParams, room: int) -> list[tuple[tuple[int, ...], float]]:
    """Beam search computed on the plain model, without engine or cache."""
    search = BeamSearch(params, end_token_ids=[END], max_new_tokens=min(params.max_tokens, room))
    while not search.is_done:
        candidates = []
        for beam in search.running:
            logits = next_logits(np.asarray([*p, *beam.tokens])).astype(np.float64)
            logprobs = logits - np.log(np.exp(logits).sum())
            best = np.argsort(-logprobs, kind="stable")[: search.num_candidates]
            candidates.append([(int(token), float(logprobs[token])) for token in best])
        search.advance(candidates)
    return [(hypothesis.tokens, hypothesis.score) for hypothesis in search.results()]


@settings(max_examples=examples(15), deadline=None)
@given(
    num_blocks=st.integers(7, 40),
    slots=st.integers(4, 8),
    budget=st.sampled_from([2, 16, 64]),
    searches=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    width=st.integers(1, 6),
    max_tokens=st.integers(1, 12),
    others=st.integers(0, 4),
    ignore_eos=st.booleans(),
)
def test_beams_do_not_depend_on_slots_blocks_or_company(
    num_blocks, slots, budget, searches, width, max_tokens, others, ignore_eos
):
    engine, model = make_engine(num_blocks=num_blocks, max_num_seqs=slots, budget=budget, max_model_len=50)
    for i in range(others):
        engine.add_request(prompt(i, 20), SamplingParams(seed=i, n=1 + i % 3, max_tokens=10))
    prompts = [[*prompt(root, 20), 1 + i] for i, root in enumerate(searches)]
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=ignore_eos)
    outputs = LLM.from_engine(engine).beam_search(prompts, params)
    run_all(engine, max_steps=3000)
    for p, got in zip(prompts, outputs, strict=True):
        reference = beam_reference(p, params, 50 - len(p))
        assert got.error is None
        assert got.prompt_token_ids == p
        assert [tuple(beam.token_ids) for beam in got.outputs] == [tokens for tokens, _ in reference]
        scores = [score for _, score in reference]
        assert [beam.score for beam in got.outputs] == pytest.approx(scores, abs=1e-4)
    assert max(len(batch) for batch in model.batches) <= slots
    assert_nothing_held(engine)


@pytest.mark.parametrize("width", [1, 4, 64])
def test_each_step_of_a_beam_search_computes_one_token_a_beam(width):
    engine, model = make_engine(num_blocks=2000, budget=512, max_model_len=200)
    llm = LLM.from_engine(engine)
    first, second = prompt(1, 100), prompt(2, 57)
    params = BeamSearchParams(beam_width=width, max_tokens=9, ignore_eos=True)
    output = llm.beam_search(first, params)[0]
    assert output.num_cached_tokens == 0
    assert [beam.finish_reason for beam in output.outputs] == ["length"] * width
    assert len(output.outputs) == width
    assert model.num_computed == len(first) + 8 * min(width, VOCAB)
    batches = len(model.batches)
    llm.beam_search([first, second], params)
    assert len(model.batches) == batches + 9, "searches take their steps together"
    assert_nothing_held(engine)


def test_a_bad_prompt_of_a_beam_search_leaves_nothing_behind():
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match="empty"):
        LLM.from_engine(engine).beam_search([prompt(1, 10), []], BeamSearchParams())
    assert not engine.has_work


def test_a_sample_is_forked_after_its_prompt_was_preempted():
    """The parent loses its blocks in the middle of the prompt, before there is any sample to fork."""
    engine, _ = make_engine(num_blocks=12, budget=8, scheduling_policy="priority", max_model_len=90)
    p = prompt(3, 40)
    params = SamplingParams(n=3, seed=2, temperature=1.0, max_tokens=5)
    sampled = engine.add_request(p, params, priority=5)
    engine.step()
    engine.step()
    urgent = engine.add_request(prompt(4, 50), SamplingParams(temperature=0.0, max_tokens=5), priority=0)
    outputs = run_all(engine)
    assert outputs[sampled].num_preemptions > 0, "nothing was preempted: a weak test"
    assert outputs[urgent].num_preemptions == 0
    assert [completion.token_ids for completion in outputs[sampled].outputs] == one_by_one(p, params)
    assert_nothing_held(engine)


def test_prompt_logprobs_survive_preemption():
    expected = None
    for num_blocks in (200, 12):
        engine, _ = make_engine(
            num_blocks=num_blocks, budget=8, scheduling_policy="priority", max_model_len=90
        )
        params = SamplingParams(n=2, seed=1, max_tokens=20, prompt_logprobs=1, ignore_eos=True)
        asked = engine.add_request(prompt(1, 30), params, priority=1)
        for _ in range(6):
            engine.step()
        for i in range(3):
            engine.add_request(prompt(2 + i, 40), SamplingParams(max_tokens=8, seed=i))
            engine.step()
        output = run_all(engine)[asked]
        assert len(output.prompt_logprobs) == 30
        found = [
            [entry.chosen for entry in output.prompt_logprobs[1:]],
            [c.token_ids for c in output.outputs],
        ]
        assert expected in (None, found)
        expected = found
    assert output.num_preemptions > 0, "nothing was preempted: a weak test"
    assert_nothing_held(engine)
