# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for blocks of a tier: what they get, what they hold, and who waits with them."""

from __future__ import annotations

from typing import Any

import pytest
from paged_language_model import run_all
from scripted_tier import ScriptedTier
from tier_engines import GREEDY, PROMPT, assert_idle, assert_right, engine_with, filled, steps

from radixkv.cache.eviction.registry import POLICIES
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.tiers.tier import TierState


@pytest.mark.parametrize("eviction_policy", sorted(POLICIES))
def test_blocks_that_a_tier_has_are_loaded_and_count_as_cached(eviction_policy):
    tier = filled(PROMPT)
    engine, model, _ = engine_with(tier, eviction_policy=eviction_policy)
    engine.add_request(PROMPT, GREEDY)
    assert not steps(engine)
    assert model.num_computed == 0
    assert engine.stats().num_waiting == 1
    assert engine.cache.stats.held_blocks == 5
    tier.finish()
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=40)
    assert model.num_computed == 5 + 3
    counts = engine.stats().transfers
    assert (counts.loads, counts.loaded_blocks, counts.failed_loads) == (1, 5, 0)
    assert engine.stats().cached_prompt_tokens == 40
    assert_idle(engine)


def test_a_prompt_of_loaded_blocks_alone_computes_its_last_token():
    tier = filled(PROMPT)
    engine, model, _ = engine_with(tier)
    engine.add_request(PROMPT[:40], SamplingParams(temperature=0.0, max_tokens=1))
    steps(engine, 1)
    tier.finish()
    (output,) = run_all(engine).values()
    assert output.num_cached_tokens == 39
    assert model.num_computed == 1


def test_only_what_follows_the_cached_prefix_is_loaded():
    tier = filled(PROMPT)
    engine, _, _ = engine_with(tier)
    engine.add_request(PROMPT[:19], GREEDY)  # two whole blocks, and three tokens of the next one
    steps(engine, 1)
    run = tier.finish()
    assert (run.start, run.end) == (0, 16)
    run_all(engine)
    engine.add_request(PROMPT, GREEDY)
    steps(engine)
    assert [(run.start, run.end) for run, _ in tier.loads] == [(16, 40)]
    tier.finish()
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=40)
    assert_idle(engine)


@pytest.mark.parametrize("state", [TierState.HIT, TierState.PENDING])
def test_a_waiting_request_is_not_stepped_and_the_engine_has_nothing_to_do(state):
    tier = filled(PROMPT)
    tier.answer = lambda run, count: state
    engine, model, clock = engine_with(tier)
    engine.add_request(PROMPT, GREEDY)
    steps(engine, 1)
    assert engine.has_work
    assert engine.idle_s == pytest.approx(0.2)
    asked, computed = tier.num_lookups, engine.stats().steps
    clock.now += 0.15
    steps(engine, 20)
    assert engine.idle_s == pytest.approx(0.05)
    assert (tier.num_lookups, engine.stats().steps) == (asked, computed)
    assert not model.batches
    tier.finish()
    assert engine.idle_s == 0.0
    run_all(engine)
    assert_idle(engine)


def test_who_waits_holds_up_nobody():
    tier = filled(PROMPT)
    engine, _, _ = engine_with(tier, max_num_seqs=2)
    waiting = engine.add_request(PROMPT, GREEDY)
    others = [engine.add_request([90 - i, 5, 6, 7], GREEDY) for i in range(6)]
    done = [output.request_id for output in steps(engine, 40)]
    assert sorted(done) == sorted(others)
    tier.finish()
    assert list(run_all(engine)) == [waiting]


def test_several_loads_end_in_any_order():
    prompts = [[*range(i, i + 40), 3, 4] for i in (1, 20, 40)]
    tier = filled(*prompts)
    engine, _, _ = engine_with(tier)
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    steps(engine, 1)
    assert len(tier.loads) == 3
    for which, request_id in ((2, ids[2]), (0, ids[0]), (0, ids[1])):
        tier.finish(which)
        (output,) = steps(engine, 12)
        assert output.request_id == request_id
        assert_right(output, num_cached_tokens=40)
    assert_idle(engine)


def test_followers_wait_for_the_load_as_for_a_request_that_computes_their_prefix():
    tier = filled(PROMPT)
    engine, model, _ = engine_with(tier)
    first = engine.add_request(PROMPT, GREEDY)
    steps(engine, 2)
    longer = engine.add_request([*PROMPT, *range(50, 70)], GREEDY)
    shorter = engine.add_request([*PROMPT[:20], 90, 91, 92], GREEDY)
    steps(engine, 2)
    assert len(tier.loads) == 1
    assert not model.batches
    tier.finish()
    outputs = run_all(engine)
    assert len(tier.loads) == 0
    assert_right(outputs[first], num_cached_tokens=40)
    # The blocks that tier and tree lack are computed once: by the first of those that share them.
    assert_right(outputs[longer], num_cached_tokens=45)
    assert outputs[shorter].num_cached_tokens == 20
    assert_right(outputs[shorter])
    assert engine.stats().transfers.loads == 1


def test_a_request_that_wants_its_prompts_logprobs_does_not_wait():
    tier = filled(PROMPT)
    engine, _, _ = engine_with(tier)
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    engine.add_request(PROMPT, params)
    run_all(engine)
    assert tier.num_lookups == 0


def test_what_others_compute_while_it_is_loaded_is_taken_over():
    tier = filled(PROMPT)
    engine, _, _ = engine_with(tier)
    waiting = engine.add_request(PROMPT, GREEDY)
    steps(engine, 1)
    other = engine.add_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=30, prompt_logprobs=0))
    steps(engine, 3)
    tier.finish()
    outputs = run_all(engine)
    assert_right(outputs[waiting], num_cached_tokens=44)
    assert outputs[other].num_cached_tokens == 0
    assert_idle(engine)


@pytest.mark.parametrize("ends", ["finish", "fail"])
def test_the_blocks_of_a_load_outlive_the_request_that_wanted_them(ends):
    tier = filled(PROMPT)
    engine, _, _ = engine_with(tier, num_blocks=8)
    request_id = engine.add_request(PROMPT, GREEDY)
    steps(engine, 1)
    engine.abort(request_id)
    steps(engine, 1)
    assert not engine.scheduler.has_work
    assert engine.cache.stats.held_blocks == 5
    assert engine.idle_s == pytest.approx(0.2)
    getattr(tier, ends)()
    assert engine.has_work
    steps(engine, 1)
    assert_idle(engine)
    assert engine.cache.stats.cached_blocks == (5 if ends == "finish" else 0)
    engine.add_request(PROMPT, GREEDY)
    if ends == "fail":
        steps(engine, 1)
        tier.finish()
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=40)


def test_an_abandoned_load_that_hangs_is_given_up_without_any_request():
    tier = filled(PROMPT)
    engine, _, clock = engine_with(tier)
    request_id = engine.add_request(PROMPT, GREEDY)
    steps(engine, 1)
    engine.abort(request_id)
    steps(engine, 1)
    clock.now += 0.2
    assert engine.has_work
    steps(engine, 2)
    assert_idle(engine)
    assert not engine.has_work
    assert engine.idle_s is None


def test_a_running_request_that_needs_blocks_gets_those_of_a_load():
    tier = filled(PROMPT)
    engine, _, _ = engine_with(tier, num_blocks=9)
    running = engine.add_request([50] * 9, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    steps(engine, 2)
    waiting = engine.add_request(PROMPT, GREEDY)
    steps(engine, 1)
    assert len(tier.loads) == 1
    outputs = run_all(engine)
    assert engine.stats().num_preemptions == 0
    assert_right(outputs[running])
    assert_right(outputs[waiting])
    assert engine.stats().transfers.failed_loads == 1
    assert_idle(engine)


def test_a_preempted_request_may_load_again():
    tier = filled([*PROMPT, *range(50, 70)])
    tier.is_open = True
    engine, _, _ = engine_with(tier, num_blocks=14, max_model_len=100)
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [PROMPT, [*PROMPT[:8], *range(60, 90)]]
    ids = [engine.add_request(prompt, long) for prompt in prompts]
    outputs: dict[str, Any] = {}
    for _ in range(300):
        if tier.loads:
            tier.finish()
        outputs.update({output.request_id: output for output in steps(engine, 1)})
    assert engine.stats().num_preemptions > 0
    for request_id in ids:
        assert_right(outputs[request_id])
    assert_idle(engine)


def test_tenants_do_not_load_each_others_blocks():
    tier = filled(PROMPT, namespace="ada")
    engine, _, _ = engine_with(tier)
    engine.add_request(PROMPT, GREEDY, namespace="bob")
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=0)
    assert not tier.loads
    engine.add_request(PROMPT, GREEDY, namespace="ada")
    steps(engine, 1)
    tier.finish()
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=40)


def test_one_identity_for_all_blocks_gives_nobody_anothers_contents(monkeypatch):
    monkeypatch.setattr("radixkv.cache.block_identity.xxhash.xxh3_128_digest", lambda data: bytes(16))
    tier = filled(PROMPT, namespace="ada")
    other = [*PROMPT[:40:-1], *PROMPT[:30]]
    for namespace, prompt in (("bob", PROMPT), ("ada", other)):
        engine, _, _ = engine_with(tier)
        engine.add_request(prompt, GREEDY, namespace=namespace)
        steps(engine, 1)
        while tier.loads:
            tier.finish()
            steps(engine, 1)
        (output,) = run_all(engine).values()
        assert_right(output, num_cached_tokens=0)
        assert_idle(engine)


def test_public_blocks_are_loaded_once_for_all_tenants_and_private_ones_for_their_own():
    tier = ScriptedTier(at_once=True)
    engine, model, _ = engine_with(tier)
    assert engine.cache.publish(PROMPT[:24]) == 24
    engine.add_request(PROMPT, GREEDY, namespace="ada")
    run_all(engine)
    assert sorted(run.is_public for run, _, _ in tier.kept.values()) == [False] * 3 + [True] * 3
    for namespace, cached in (("bob", 24), ("ada", 45)):
        engine.cache.reset()
        engine.add_request(PROMPT, GREEDY, namespace=namespace)
        before = model.num_computed
        (output,) = run_all(engine).values()
        assert_right(output, num_cached_tokens=min(cached, 40))
        assert model.num_computed - before == len(PROMPT) - min(cached, 40) + 3
    engine.cache.reset()
    for namespace in ("cat", "dog"):
        engine.add_request(PROMPT[:26], GREEDY, namespace=namespace)
    loads = engine.stats().transfers.loads
    for output in run_all(engine).values():
        assert_right(output, num_cached_tokens=24)
    assert engine.stats().transfers.loads == loads + 1
