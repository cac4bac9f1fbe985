# SPDX-License-Identifier: Apache-2.0
"""Prompts that are cached already, asked again in ways that compute them: nothing breaks, all is right."""

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import tried
from paged_language_model import PagedHashModel, greedy_reference, make_engine, next_logits, run_all

from radixkv.sampling.sampling_params import SamplingParams

PROMPT = [(7 * i) % 90 + 1 for i in range(400)]
ONE = SamplingParams(temperature=0.0, max_tokens=1)


@functools.cache
def logprob(context: tuple[int, ...], token: int) -> float:
    logits = next_logits(np.asarray(context)).astype(np.float64)
    return float(logits[token] - math.log(np.exp(logits).sum()))


@pytest.mark.parametrize("public", [0, 200, 400])
@pytest.mark.parametrize("budget", [64, 100, 256])
def test_prompt_logprobs_of_a_cached_prompt_beside_a_decode_and_a_waiting_prompt(budget, public):
    engine, _ = make_engine(num_blocks=400, budget=budget)
    engine.cache.publish(PROMPT[:public])
    engine.add_request(PROMPT, ONE)
    run_all(engine)
    engine.add_request([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    engine.step()
    scored = engine.add_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    engine.add_request([9, 8, 7] * 10, ONE)
    outputs = run_all(engine)
    assert engine.stats().num_rebuilds == 0
    assert len(outputs[scored].prompt_logprobs) == 400
    assert engine.cache.match(PROMPT).num_tokens == 400


@pytest.mark.parametrize("before", [True, False])
def test_a_prefix_that_is_published_or_taken_back_while_prompts_are_computed(before):
    """A request's tokens stay where its lease began, whatever is public by now."""
    for budget in range(60, 70):
        engine, _ = make_engine(num_blocks=400, budget=budget)
        if before:
            engine.cache.publish(PROMPT)
        engine.add_request(PROMPT, ONE)
        run_all(engine)
        params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
        ids = [engine.add_request(PROMPT, params) for _ in range(2)]
        engine.add_request([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        engine.step()
        if before:
            engine.cache.unpublish(PROMPT)
        else:
            engine.cache.publish(PROMPT)
        outputs = run_all(engine)
        assert engine.stats().num_rebuilds == 0
        assert {tuple(outputs[i].outputs[0].token_ids) for i in ids} == {tuple(greedy_reference(PROMPT, 2))}


@pytest.mark.parametrize("budget", range(42, 52))
def test_two_equal_prompts_where_the_first_ones_chunk_lacks_a_token(budget):
    """The second copies the first one's partial block, completes it, and the first could dedupe with it."""
    engine, _ = make_engine(num_blocks=400, budget=budget)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    ids = [engine.add_request(PROMPT[:24], params) for _ in range(3)]
    outputs = run_all(engine)
    assert engine.stats().num_rebuilds == 0
    assert {tuple(outputs[i].outputs[0].token_ids) for i in ids} == {tuple(greedy_reference(PROMPT[:24], 3))}


asked = st.tuples(
    st.integers(0, 5),  # step of arrival
    st.integers(1, 90),  # tokens of the prompt
    st.sampled_from([0, 0, 0, 5]),  # tokens of its own after them
    st.booleans(),  # prompt logprobs
    st.sampled_from(["a", "a", "b"]),  # namespace
    st.integers(1, 12),  # tokens to generate
)


@settings(max_examples=tried(60))
@given(
    hot=st.lists(st.tuples(st.integers(1, 90), st.sampled_from(["a", "b"])), max_size=3),
    public=st.sampled_from([0, 0, 24, 40]),
    requests=st.lists(asked, min_size=1, max_size=7),
    budget=st.sampled_from([5, 24, 46, 47, 64, 100]),
    cap=st.sampled_from([None, None, 7, 16]),
    num_blocks=st.sampled_from([24, 200]),
    bad_step=st.sampled_from([None, None, 1, 2, 4]),
    policy=st.sampled_from(["prefix", "priority", "fair"]),
)
def test_skipped_lookups_over_hot_caches(hot, public, requests, budget, cap, num_blocks, bad_step, policy):
    model = PagedHashModel(num_blocks, 8)
    engine, _ = make_engine(
        model=model,
        num_blocks=num_blocks,
        budget=budget,
        max_tokens_per_request=cap,
        max_model_len=110,
        scheduling_policy=policy,
    )
    if public:
        engine.cache.publish(PROMPT[:public])
    for length, namespace in hot:
        engine.add_request(PROMPT[:length], ONE, namespace=namespace)
    run_all(engine)
    count = iter(range(10**6))
    model.fail_if = lambda batch: next(count) == bad_step
    pending = sorted(requests)
    given_out, outputs, step = {}, {}, 0
    while engine.has_work or pending:
        while pending and pending[0][0] <= step:
            _, length, own, scored, namespace, max_tokens = pending.pop(0)
            prompt = PROMPT[:length] + [96 - step] * own
            params = SamplingParams(
                temperature=0.0, max_tokens=max_tokens, prompt_logprobs=0 if scored else None
            )
            given_out[engine.add_request(prompt, params, namespace=namespace)] = (prompt, max_tokens)
        outputs.update({output.request_id: output for output in engine.step().finished})
        engine.check()
        step += 1
        assert step < 3000, "the engine does not come to an end"
    assert engine.stats().num_rebuilds == 0
    for request_id, (prompt, max_tokens) in given_out.items():
        output = outputs[request_id]
        assert output.error is None
        assert output.outputs[0].token_ids == greedy_reference(prompt, max_tokens)
        for i, found in enumerate(output.prompt_logprobs or ()):
            if i:
                assert found.chosen.logprob == pytest.approx(logprob(tuple(prompt[:i]), prompt[i]), abs=1e-3)
    assert engine.cache.stats.held_blocks == 0
