# SPDX-License-Identifier: Apache-2.0
"""The turn of long prompts: who begins, what is reserved, and all that the rule lives with."""

from __future__ import annotations

import math

import numpy as np
import pytest
from paged_language_model import VOCAB, make_engine, run_all
from scheduled_prompts import LONG, ONE, prompt, steps_until
from scripted_tier import ScriptedTier

from radixkv.sampling.sampling_params import SamplingParams

# With a budget of 64, a prompt that misses more than 128 tokens is long.
FEW = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


def engine_of(**options):
    return make_engine(**{"num_blocks": 1000, "budget": 64, "max_model_len": 4000, **options})[0]


def running(engine) -> set[str]:
    engine.check()
    return {request.request_id for request in engine.scheduler.running}


def add(engine, name: str, length: int, *, after: int = 0, seed: int | None = None, **options) -> None:
    """A prompt of its own; `after`: tokens of the shared prompt that it begins with."""
    own = prompt(sum(map(ord, name)) * 1000 + length if seed is None else seed, length)
    engine.add_request([*prompt(0, 3000)[:after], *own], FEW, request_id=name, **options)


def warm(engine, length: int, namespace="") -> None:
    """Have the shared prompt cached."""
    engine.add_request(prompt(0, 3000)[:length], ONE, namespace=namespace)
    run_all(engine)


def test_a_long_prompt_begins_when_those_in_progress_have_twice_as_much_left():
    engine = engine_of()
    add(engine, "first", 1000)
    engine.step()  # 936 left
    for name, length in (("equal", 1000), ("more than half", 480), ("less than half", 400), ("short", 100)):
        add(engine, name, length)
    engine.step()
    assert running(engine) == {"first", "less than half", "short"}
    assert engine.stats().prompts_waiting_for_turn == 2
    outputs = run_all(engine)
    assert len(outputs) == 5
    assert engine.stats().prompts_waiting_for_turn == 0


def test_prompts_are_long_by_the_lowered_budget():
    """Steps that found no memory are smaller: 100 missing tokens are more than two steps of 32."""
    engine = engine_of()
    assert engine.scheduler.lower_budget(64)
    add(engine, "first", 150)
    engine.step()
    add(engine, "short before", 100)
    add(engine, "short", 60)
    engine.step()
    assert running(engine) == {"first", "short"}
    assert len(run_all(engine)) == 3


def test_a_warm_turn_never_waits_and_nothing_in_progress_means_go():
    engine = engine_of()
    warm(engine, 2000)
    add(engine, "cold", 1500)
    engine.step()
    assert running(engine) == {"cold"}
    add(engine, "turn", 50, after=2000, stream=True)
    assert steps_until(engine, "turn") <= 2


def test_what_is_reserved_and_not_computed_is_at_most_twice_the_longest_prompt():
    engine = engine_of(max_num_seqs=64)
    rng = np.random.default_rng(5)
    for i, length in enumerate(rng.integers(130, 1000, 60)):
        add(engine, f"r{i}", int(length))
    while engine.has_work:
        engine.step()
        in_progress = [r.num_to_compute for r in engine.scheduler.running if r.num_to_compute > 128]
        assert sum(in_progress) <= 2 * 1000
        assert len(in_progress) <= math.log2(1000 / 128) + 1
        assert engine.stats().reserved_tokens <= 2 * 1000 + 64 * 128


def test_a_long_prompt_is_passed_by_so_many_later_long_ones_and_no_more():
    engine = engine_of(max_long_overtake=3)
    add(engine, "giant", 3000)
    engine.step()
    add(engine, "late", 2000, stream=True)
    begun = 0
    while "late" not in running(engine):
        if engine.scheduler.num_waiting < 3:
            add(engine, f"later {begun}-{engine.stats().steps}", 200)
        before = running(engine)
        engine.step()
        begun += len(running(engine) - before) if "late" not in running(engine) else 0
    assert begun == 3
    assert all(r.num_to_compute <= 128 or r.request_id.startswith("la") for r in engine.scheduler.running)
    # From there on it is computed as all are: what is waiting now halves it again.
    assert steps_until(engine, "late") <= 2 * 2000 / 32


def test_a_prompt_that_waits_for_its_turn_bars_no_warm_turn_however_old():
    engine = engine_of(max_overtake=2, num_blocks=400, max_model_len=2500)
    warm(engine, 300)
    add(engine, "first", 2000)
    engine.step()
    add(engine, "cold", 2400)  # it would not even fit
    for turn in range(8):
        add(engine, f"turn {turn}", 20, after=300, stream=True)
        assert steps_until(engine, f"turn {turn}") <= 2
    (cold,) = engine.scheduler.waiting
    assert not engine.scheduler.policy.passed.overtaken.get(cold)
    run_all(engine)


def test_fair_lets_one_prompt_at_a_time_of_an_idle_tenant_begin_at_once():
    engine = engine_of(scheduling_policy="fair")
    for i in range(4):
        add(engine, f"flood {i}", 1500, namespace="a")
    engine.step()
    assert running(engine) == {"flood 0"}
    add(engine, "b", 1500, namespace="b", stream=True)
    add(engine, "c", 1500, namespace="c")
    engine.step()
    assert running(engine) == {"flood 0", "b"}
    assert steps_until(engine, "b") <= 1500 / 32 + 2
    engine.step()
    assert "c" in running(engine)


@pytest.mark.parametrize("cached", [0, 1400])
def test_no_prompt_passes_another_tenants_for_what_is_cached_of_it(cached):
    """Behind tenant a's waiting prompt, b's goes by its whole length, however much is cached."""
    engine = engine_of(scheduling_policy="fcfs")
    if cached:
        warm(engine, cached, namespace="b")
    add(engine, "in progress", 1000, namespace="a")
    engine.step()
    add(engine, "a", 1500, namespace="a")
    add(engine, "b", 1700 - cached, after=cached, namespace="b")
    engine.step()
    assert running(engine) == {"in progress"}
    assert len(run_all(engine)) == 3


def test_a_more_urgent_prompt_waits_for_no_less_urgent_one():
    engine = engine_of(scheduling_policy="priority")
    add(engine, "low", 1500, priority=5)
    engine.step()
    add(engine, "low too", 1500, priority=5)
    add(engine, "urgent", 1500, priority=1)
    engine.step()
    assert running(engine) == {"low", "urgent"}


def test_a_late_prompt_at_its_tenants_ceiling_keeps_nobody_waiting():
    engine = engine_of(scheduling_policy="fcfs", max_long_overtake=0)
    engine.cache.set_quotas({("a",): (0, 150)})
    engine.add_request(prompt(7, 900), LONG, request_id="holds", namespace="a")
    while engine.scheduler.running[:1] == [] or engine.scheduler.running[0].num_to_compute > 1:
        engine.step()
    add(engine, "in progress", 1600, namespace="b")
    engine.step()
    add(engine, "at its ceiling", 1000, namespace="a")
    add(engine, "b", 300, namespace="b")
    engine.step()
    assert "b" in running(engine)
    assert "at its ceiling" not in running(engine)


def test_a_preempted_prompt_waits_for_its_turn_again_and_keeps_its_place():
    engine = engine_of(num_blocks=200, max_model_len=1500, scheduling_policy="priority", max_long_overtake=1)
    add(engine, "low", 1400, priority=5)
    for _ in range(5):
        engine.step()
    (low,) = engine.scheduler.running
    add(engine, "urgent", 1450, priority=1)
    add(engine, "low too", 1400, priority=5, seed=8)
    engine.step()
    assert (running(engine), low.num_preemptions) == ({"urgent"}, 1)
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step().finished]
        engine.check()
    assert order == ["urgent", "low", "low too"]


def test_public_and_pinned_prefixes_are_not_missing():
    engine = engine_of()
    warm(engine, 2000)
    engine.cache.publish(prompt(0, 3000)[:2000])
    warm(engine, 2000, namespace="b")
    engine.cache.pin(prompt(0, 3000)[:2000], namespace="b")
    add(engine, "cold", 1500)
    engine.step()
    for name in ("b", "c"):
        add(engine, name, 100, after=2000, namespace=name)
    engine.step()
    assert running(engine) == {"cold", "b", "c"}


def test_under_fair_a_prompt_that_was_passed_too_often_bars_its_own_tenant_alone():
    engine = engine_of(scheduling_policy="fair", max_long_overtake=0)
    for name in "ab":  # of both something runs, so that neither tenant is to go first
        engine.add_request(prompt(5, 20), LONG, namespace=name)
    engine.step()
    add(engine, "in progress", 3000, namespace="a")
    engine.step()
    add(engine, "late", 2000, namespace="a")
    for name in "ab":
        add(engine, f"{name} small", 300, namespace=name)
    for _ in range(3):
        engine.step()
    assert running(engine) & {"late", "a small", "b small"} == {"b small"}


def test_a_prompt_in_flight_is_not_long_for_those_that_follow_it():
    engine = engine_of()
    engine.add_request(prompt(0, 3000)[:1500], FEW, request_id="producer")
    engine.step()
    for i in range(3):
        add(engine, f"follower {i}", 60, after=1500)
    engine.step()
    assert running(engine) == {"producer"}
    assert engine.stats().prompts_waiting_for_turn == 0, "they wait for its tokens, not for their turn"
    run_all(engine)
    assert engine.stats().computed_prompt_tokens <= 1500 + 3 * 61


def test_prompts_whose_logits_are_wanted_count_all_their_tokens_and_leave_the_step_to_others():
    engine = engine_of(budget=1024, num_blocks=4000, max_model_len=20_000)
    scored = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    warm(engine, 3000)
    engine.add_request(prompt(0, 3000), scored, request_id="scored")
    engine.step()
    add(engine, "long", 6000)  # 512 tokens a step are for the first: there is room for another
    engine.step()
    assert running(engine) == {"scored", "long"}
    add(engine, "longer", 6000, seed=3)
    engine.step()
    assert running(engine) == {"scored", "long"}


def test_a_cap_on_a_prompts_tokens_in_a_step_lets_as_many_begin_as_fill_one():
    engine = engine_of(max_tokens_per_request=16)
    for i in range(8):
        add(engine, f"r{i}", 1000 + i)
    engine.step()
    assert len(running(engine)) == 4


def test_samples_and_many_tokens_per_prompt_count_once():
    engine = engine_of(max_num_seqs=16)
    engine.add_request(prompt(1, 1000), SamplingParams(n=4, max_tokens=2, seed=1), request_id="n")
    engine.step()
    add(engine, "half", 450)
    engine.step()
    assert running(engine) == {"n", "half"}
    run_all(engine)


@pytest.mark.parametrize("options", [{"long_prompt_tokens": 4000}, {"enable_prefix_caching": False}])
def test_without_the_rule_all_begin_that_fit(options):
    engine = engine_of(**options)
    for i in range(4):
        add(engine, f"r{i}", 1000 + i)
    engine.step()
    engine.step()
    assert len(running(engine)) == 4


def test_a_prompt_that_a_tier_brings_counts_by_the_time_of_its_load():
    now = [0.0]

    def tick() -> float:
        now[0] += 0.001
        return now[0]

    tier = ScriptedTier()
    engine = engine_of(tier=tier, clock=tick, load_deadline_s=1000.0)
    warm(engine, 1500)
    engine.cache.evict(engine.cache.num_blocks)
    assert len(tier.kept) >= 1500 // 8 - 1
    add(engine, "cold", 1500)
    engine.step()
    add(engine, "kept", 20, after=1496)
    add(engine, "cold too", 1500)
    for _ in range(3):
        engine.step()
    waiting = {request.request_id: request for request in engine.scheduler.waiting}
    assert "kept" not in waiting or engine.scheduler.is_produced(waiting["kept"]), "its load has begun"
    assert not waiting["cold too"].was_admitted
    assert engine.stats().prompts_waiting_for_turn == 1


@pytest.mark.parametrize("load_s", [0.001, 60.0])
def test_a_load_counts_by_its_speed(load_s: float):
    """Behind a prompt with 1,400 tokens left, 1,500 tokens in a fast tier go, and wait in a slow one."""
    now = [0.0]

    def tick() -> float:
        now[0] += 0.001
        return now[0]

    tier = ScriptedTier()
    engine = engine_of(tier=tier, clock=tick, load_deadline_s=1000.0)
    warm(engine, 1500)
    engine.cache.evict(engine.cache.num_blocks)
    add(engine, "measured", 20, after=1496)
    engine.step()
    now[0] += load_s
    tier.finish()
    run_all(engine)
    engine.cache.evict(engine.cache.num_blocks)
    add(engine, "cold", 1500)
    engine.step()
    add(engine, "kept", 20, after=1496, seed=9)
    engine.step()
    assert (len(tier.loads), engine.stats().prompts_waiting_for_turn) == ((1, 0) if load_s < 1 else (0, 1))


def agents_on(engine, num_agents: int, context: int, turns: int, pause_steps: int) -> float:
    """Closed loops of agents; tokens computed over tokens asked for the first time."""
    rng = np.random.default_rng(1)
    history = {i: rng.integers(1, VOCAB, context).tolist() for i in range(num_agents)}
    first_time = sum(map(len, history.values()))
    due = {i: int(rng.integers(pause_steps)) for i in range(num_agents)}
    left, step = dict.fromkeys(range(num_agents), turns), 0
    while any(left.values()) or engine.has_work:
        for i in [i for i, when in due.items() if when <= step and left[i]]:
            engine.add_request(history[i], FEW, request_id=f"{i}-{left[i]}")
            del due[i]
        for output in engine.step().finished:
            i = int(output.request_id.split("-")[0])
            new = [*output.outputs[0].token_ids, *rng.integers(1, VOCAB, 20).tolist()]
            history[i] += new
            left[i] -= 1
            first_time += len(new) if left[i] else 0
            due[i] = step + 1 + int(rng.exponential(pause_steps))
        step += 1
        assert step < 20_000
    return engine.stats().computed_prompt_tokens / first_time


def test_agents_whose_contexts_outgrow_the_pool_compute_next_to_nothing_again():
    """Fourteen agents of 600 tokens in a pool of 5,120: 1.7 times what it holds at the end."""
    ratio = {}
    for name, threshold in (("rule", 128), ("without", 5000)):
        engine = make_engine(
            num_blocks=640, budget=64, max_model_len=5000, max_num_seqs=32, long_prompt_tokens=threshold
        )[0]
        ratio[name] = agents_on(engine, 14, 600 - 20, 6, 8)
    assert ratio["rule"] <= 1.5
    assert ratio["without"] >= 1.5 * ratio["rule"], ratio
