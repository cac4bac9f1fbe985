# SPDX-License-Identifier: Apache-2.0
"""Bounds that must hold in every combination: overtaking, in-flight prefixes, thrash, budgets, refusals."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nightly import tried
from paged_language_model import greedy_reference, make_engine, run_all
from scheduled_prompts import LONG, ONE, prompt, steps_until

from radixkv.errors import ConfigError, ContextLengthExceededError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.policy import make_policy, tenant_of

arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),  # shared root, 0: none
        st.integers(1, 40),  # own tokens
        st.integers(1, 3),  # samples
        st.integers(1, 12),  # output tokens
        st.sampled_from(["", "a", "b"]),
        st.integers(0, 3),  # steps until the next one
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=tried(40), deadline=None)
@given(
    arrivals=arrivals,
    bound=st.sampled_from([0, 1, 2, 5]),
    num_blocks=st.sampled_from([20, 40, 100]),
    places=st.sampled_from([1, 3, 8]),
    budget=st.sampled_from([8, 33, 200]),
    cap=st.sampled_from([None, 16]),
    policy=st.sampled_from(["prefix", "fcfs"]),
)
def test_nobody_is_overtaken_beyond_the_bound(arrivals, bound, num_blocks, places, budget, cap, policy):
    """Whatever fits, waits for its producer, forks, ages: later requests go first in `bound` steps at most.

    Steps in which a request waits for its producer are not counted: its tokens are being computed. Long
    prompts have a bound of their own (`test_long_prompts`).
    """
    engine, _ = make_engine(
        num_blocks=num_blocks,
        budget=budget,
        max_num_seqs=places,
        max_overtake=bound,
        max_tokens_per_request=cap,
        scheduling_policy=policy,
        max_model_len=min(150, num_blocks * 8),
    )
    todo = list(enumerate(arrivals))
    order: dict[str, int] = {}
    overtaken: dict[str, int] = {}
    wait = step = 0
    while todo or engine.has_work:
        while todo and wait <= 0:
            i, (root, own, samples, output, namespace, wait) = todo.pop(0)
            tokens = [*prompt(root, 50)[: 50 * bool(root)], *prompt(100 + i, own)]
            params = SamplingParams(n=min(samples, places), seed=i, max_tokens=output, ignore_eos=True)
            engine.add_request(tokens, params, request_id=f"r{i}", namespace=namespace)
            order[f"r{i}"] = i
        wait -= 1
        before = {r.request_id for r in engine.scheduler.waiting if not r.was_admitted}
        engine.step()
        after = {r.request_id: r for r in engine.scheduler.waiting if not r.was_admitted}
        latest = max((order[name] for name in before - after.keys()), default=-1)
        for name, request in after.items():
            is_produced = engine.scheduler.is_produced(request)
            is_long = request.num_tokens > 2 * budget  # it waits for its turn, with a bound of its own
            if latest > order[name] and not is_produced and not is_long:
                overtaken[name] = overtaken.get(name, 0) + 1
        step += 1
        assert step < 5000, "the engine does not come to an end"
    assert max(overtaken.values(), default=0) <= bound


def _under_urgent_load(engine, until, most: int = 300, length: int = 20) -> int:
    """Steps, with an urgent request added in each, until `until(result)`."""
    for step in range(most):
        engine.add_request(prompt(1000 + step, length), ONE, priority=0)
        if until(engine.step()):
            return step + 1
    raise AssertionError(f"not within {most} steps")


def _answers(request_id: str):
    return lambda result: any(output.request_id == request_id for output in result.finished)


@pytest.mark.parametrize("bound", [1, 4, 20])
def test_priority_starves_nobody(bound):
    engine, _ = make_engine(
        num_blocks=100, budget=64, max_num_seqs=1, max_overtake=bound, scheduling_policy="priority"
    )
    _under_urgent_load(engine, lambda result: result.finished)
    for i in range(4):
        engine.add_request(prompt(i, 20), ONE, request_id=f"low-{i}", priority=10**6 - i)
    for i in range(4):  # one after the other: the oldest is promoted
        assert _under_urgent_load(engine, _answers(f"low-{i}")) <= bound + 1


def test_a_backlog_of_unimportant_requests_gets_one_place_in_so_many():
    engine, model = make_engine(
        num_blocks=100, budget=64, max_num_seqs=1, max_overtake=5, scheduling_policy="priority"
    )
    for i in range(100):
        engine.add_request(prompt(i, 20), ONE, request_id=f"low-{i}", priority=7)
    model.batches.clear()
    for step in range(60):
        engine.add_request(prompt(1000 + step, 20), ONE, request_id=f"urgent-{step}", priority=0)
        engine.step()
    served = [name for batch in model.batches for name, _, _ in batch]
    assert 55 / 6 - 1 <= sum(name.startswith("low") for name in served) <= 60 / 6 + 1


def test_an_unimportant_prompt_in_progress_is_not_left_without_tokens():
    engine, _ = make_engine(num_blocks=400, budget=32, max_overtake=4, scheduling_policy="priority")
    engine.add_request(prompt(0, 100), ONE, request_id="low", priority=9)
    engine.step()
    # Each urgent prompt takes the whole budget of a step.
    assert _under_urgent_load(engine, _answers("low"), length=32) <= 4 * 5
    assert engine.stats().num_rebuilds == 0


@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 8), st.integers(-2, 2), st.integers(0, 2)),
        min_size=2,
        max_size=16,
    ),
    bound=st.integers(1, 4),
    num_blocks=st.sampled_from([12, 20, 200]),
    places=st.sampled_from([1, 3]),
    budget=st.sampled_from([8, 33, 200]),
)
# The oldest is a long prompt whose turn has not come: the next one is counted in its place.
@example(
    arrivals=[(25, 1, 0, 0), (17, 1, 1, 2), (1, 1, 1, 0), *[(1, 1, 0, 0)] * 4],
    bound=1,
    num_blocks=12,
    places=1,
    budget=8,
)
def test_nobody_is_overtaken_beyond_the_bound_under_priority(arrivals, bound, num_blocks, places, budget):
    engine, _ = make_engine(
        num_blocks=num_blocks,
        budget=budget,
        max_num_seqs=places,
        max_overtake=bound,
        scheduling_policy="priority",
        max_model_len=90,
    )
    todo = list(enumerate(arrivals))
    long = {f"{i}" for i, (length, *_) in enumerate(arrivals) if length > 2 * budget}
    most_older: dict[str, int] = {}
    overtaken: dict[str, int] = {}
    wait = step = 0
    while todo or engine.has_work:
        while todo and wait <= 0:
            i, (length, output, priority, wait) = todo.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            # All requests that ever came before it may be preempted for it, and wait before it.
            most_older[f"{i}"] = i
            engine.add_request(prompt(i, length), params, request_id=f"{i}", priority=priority)
        wait -= 1
        before = {r.request_id for r in engine.scheduler.waiting}
        engine.step()
        engine.check()
        after = {r.request_id for r in engine.scheduler.waiting}
        latest = max((int(name) for name in before - after), default=-1)
        for name in after & before - long:
            overtaken[name] = overtaken.get(name, 0) + (latest > int(name))
        step += 1
        assert step < 5000, "the engine does not come to an end"
    assert engine.stats().num_rebuilds == 0
    for name, count in overtaken.items():
        assert count <= (most_older[name] + 1) * bound


@settings(max_examples=tried(60), deadline=None)
@given(
    count=st.integers(2, 12),
    shared=st.integers(20, 120),
    tails=st.lists(st.integers(0, 12), min_size=12, max_size=12),
    gaps=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    budget=st.sampled_from([8, 24, 64]),
    cap=st.sampled_from([None, 7]),
    aborts=st.dictionaries(st.integers(0, 11), st.integers(0, 8), max_size=3),
)
def test_no_token_is_computed_twice_while_it_is_being_computed(
    count, shared, tails, gaps, budget, cap, aborts
):
    """Staggered requests under one new prefix, some of them aborted: each prefix is computed once."""
    engine, model = make_engine(num_blocks=600, budget=budget, max_tokens_per_request=cap)
    prompts = [[*prompt(1, shared), *prompt(2, 12)[: tails[i]], 1 + i] for i in range(count)]
    arrival, total = [], 0
    for gap in gaps[:count]:
        total += gap
        arrival.append(total)
    outputs = {}
    step = 0
    while step <= max(arrival) or engine.has_work:
        for i in range(count):
            if arrival[i] == step:
                engine.add_request(prompts[i], ONE, request_id=f"r{i}")
            if i in aborts and arrival[i] + aborts[i] == step:
                engine.abort(f"r{i}")
        result = engine.step()
        engine.check()
        outputs.update({output.request_id: output for output in result.finished})
        step += 1
        assert step < 2000
    computed = [
        (tuple(prompts[int(name[1:])][: position + 1]))
        for batch in model.batches
        for name, start, num in batch
        for position in range(start, start + num)
    ]
    # The last token of a prompt is its own request's to compute, even where others have computed it.
    last = {tuple(p) for p in prompts}
    inner = [prefix for prefix in computed if prefix not in last]
    assert len(inner) == len(set(inner))
    for i in range(count):
        if i not in aborts:
            assert outputs[f"r{i}"].outputs[0].token_ids == greedy_reference(prompts[i], 1)


def test_a_producer_that_is_preempted_leaves_its_waiters_free_to_go_on():
    engine, _ = make_engine(num_blocks=14, budget=8, scheduling_policy="priority", max_model_len=100)
    system = prompt(1, 60)
    engine.add_request([*system, 1], ONE, request_id="producer", priority=5)
    engine.step()
    engine.add_request([*system, 2], ONE, request_id="waits", priority=5)
    engine.step()
    engine.add_request(prompt(2, 70), ONE, request_id="urgent", priority=0)
    outputs = run_all(engine)
    assert outputs["producer"].num_preemptions >= 1, "a weak test"
    assert outputs["waits"].outputs[0].token_ids == greedy_reference([*system, 2], 1)
    assert outputs["urgent"].num_preemptions == 0


def test_tokens_that_a_running_request_decodes_are_shared_in_the_same_step():
    engine, model = make_engine(num_blocks=60)
    first = prompt(1, 20)
    engine.add_request(first, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    for _ in range(8):
        engine.step()
    answer = engine.scheduler.running[0].output_token_ids()
    before = model.num_computed
    engine.add_request([*first, *answer, 5], ONE, request_id="next")
    engine.step()
    assert model.num_computed - before == 2, "one decode, and one token of the newcomer"


@pytest.mark.parametrize("num_long", [1, 3, 6])
@pytest.mark.parametrize("budget", [128, 512])
def test_a_short_prompt_is_not_held_up_by_any_number_of_long_ones(num_long, budget):
    engine, _ = make_engine(num_blocks=6000, budget=budget)
    for i in range(num_long):
        engine.add_request(prompt(i, 6000), ONE, request_id=f"long-{i}")
    for _ in range(3):
        engine.step()
    engine.add_request(prompt(99, 50), ONE, request_id="short", stream=True)
    assert steps_until(engine, "short") <= 3
    run_all(engine, check=False)


def test_long_prompts_in_progress_take_turns():
    """A stream of short prompts must not starve long ones either."""
    engine, _ = make_engine(num_blocks=2000, budget=64)
    for i in range(3):
        engine.add_request(prompt(i, 1000), ONE, request_id=f"long-{i}")
    done: dict[str, int] = {}
    for step in range(400):
        engine.add_request(prompt(100 + step, 40), ONE, request_id=f"short-{step}")
        for output in engine.step().finished:
            done.setdefault(output.request_id, step)
        if all(f"long-{i}" in done for i in range(3)):
            return
    raise AssertionError(f"a long prompt starves: {sorted(done)[:5]}")


def test_no_chunk_exceeds_the_cap_while_others_compute():
    engine, model = make_engine(num_blocks=1000, budget=100, max_tokens_per_request=30)
    for i in range(4):
        engine.add_request(prompt(i, 200), ONE)
    run_all(engine)
    for batch in model.batches:
        if len(batch) > 1:
            assert max(count for _, _, count in batch) <= 30
        assert sum(count for _, _, count in batch) <= 100
    assert [count for _, _, count in model.batches[0]] == [30, 30, 30, 10]


def test_requests_that_can_never_fit_are_refused_with_the_numbers():
    engine, _ = make_engine(num_blocks=10, block_size=8, max_model_len=1000)
    with pytest.raises(
        ContextLengthExceededError, match=r"10 blocks.* hold 80 .* 1000 tokens.* in 80 tokens"
    ):
        engine.add_request(prompt(1, 80), ONE)
    request_id = engine.add_request(prompt(1, 79), LONG)
    output = run_all(engine)[request_id]
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")


def test_pins_do_not_wedge_a_request_that_shares_them_or_needs_their_room():
    engine, _ = make_engine(num_blocks=20, block_size=8, max_model_len=160)
    system = prompt(1, 64)
    engine.add_request(system, ONE)
    run_all(engine)
    assert engine.cache.pin(system).num_tokens == 64
    shares = engine.add_request([*system, *prompt(2, 80)], ONE)
    assert run_all(engine)[shares].num_cached_tokens == 64
    needs = engine.add_request(prompt(3, 150), ONE)
    other = engine.add_request(prompt(4, 20), LONG)
    outputs = run_all(engine)
    assert outputs[needs].outputs[0].token_ids == greedy_reference(prompt(3, 150), 1)
    assert outputs[other].error is None


@pytest.mark.parametrize("policy", ["priority", "fair", "fcfs", "prefix"])
def test_one_that_does_not_fit_is_not_passed_for_ever(policy):
    engine, _ = make_engine(
        num_blocks=20, budget=64, max_overtake=5, max_model_len=150, scheduling_policy=policy
    )
    for i in range(2):
        engine.add_request(prompt(i, 10), SamplingParams(max_tokens=40, ignore_eos=True))
    engine.step()
    engine.add_request(prompt(5, 140), ONE, request_id="big")
    for step in range(300):
        engine.add_request(prompt(10 + step, 10), SamplingParams(max_tokens=6, ignore_eos=True))
        if any(output.request_id == "big" for output in engine.step().finished):
            assert step > 1
            return
    raise AssertionError("the big one starves")


def test_an_urgent_request_displaces_less_urgent_ones_but_never_the_other_way_round():
    engine, _ = make_engine(
        num_blocks=40, budget=64, max_num_seqs=2, scheduling_policy="priority", max_model_len=200
    )
    for i in range(2):
        engine.add_request(prompt(i, 40), LONG, request_id=f"background-{i}", priority=10)
    for _ in range(4):
        engine.step()
    engine.add_request(prompt(5, 40), LONG, request_id="urgent", stream=True, priority=0)
    (urgent,) = engine.requests[-1].samples
    assert steps_until(engine, "urgent") <= 2
    engine.add_request(prompt(6, 40), LONG, request_id="middle", priority=5)
    outputs = run_all(engine)
    assert urgent.num_preemptions == outputs["middle"].num_preemptions == 0
    assert sum(outputs[f"background-{i}"].num_preemptions for i in range(2)) >= 1
    for i in range(2):
        assert outputs[f"background-{i}"].outputs[0].token_ids == [
            int(token) for token in _greedy(prompt(i, 40), 60)
        ]


def _greedy(tokens: list[int], count: int) -> list[int]:
    engine, _ = make_engine(num_blocks=200)
    request_id = engine.add_request(
        tokens, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    )
    return run_all(engine, check=False)[request_id].outputs[0].token_ids


@settings(max_examples=tried(40), deadline=None)
@given(
    num_blocks=st.integers(12, 24),
    lengths=st.lists(st.integers(5, 60), min_size=3, max_size=7),
    budget=st.sampled_from([3, 16, 64]),
    policy=st.sampled_from(["prefix", "fcfs", "fair"]),
)
def test_thrash_is_bounded_and_resumption_recomputes_only_what_was_evicted(
    num_blocks, lengths, budget, policy
):
    engine, model = make_engine(
        num_blocks=num_blocks, budget=budget, scheduling_policy=policy, max_model_len=90
    )
    for i, length in enumerate(lengths):
        engine.add_request(prompt(i, length), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    requests = engine.scheduler.waiting
    seen = {request.request_id: (0, -1) for request in requests}
    while engine.has_work:
        engine.step()
        for request in requests:
            preemptions, tokens = seen[request.request_id]
            if request.num_preemptions > preemptions:
                assert request.num_preemptions == preemptions + 1
                assert request.num_tokens > tokens, "preempted again without a token in between"
                seen[request.request_id] = (request.num_preemptions, request.num_tokens)
    computed_once = sum(length + 29 for length in lengths)
    evicted = engine.cache.stats.evicted_blocks * 8
    guesses = engine.stats().speculation
    wrong = guesses.num_draft_tokens - guesses.num_accepted_tokens
    assert model.num_computed <= computed_once + evicted + engine.stats().num_preemptions + wrong


def test_tenants_share_by_weight_whatever_their_salts():
    engine, model = make_engine(
        num_blocks=900,
        budget=40,
        max_num_seqs=1,
        scheduling_policy="fair",
        namespace_weights={"big": 3.0},
    )
    for i in range(40):
        engine.add_request(prompt(i, 30), ONE, request_id=f"big-{i}", namespace=("big", str(i % 4)))
        engine.add_request(prompt(100 + i, 30), ONE, request_id=f"small-{i}", namespace="small")
    for _ in range(24):
        engine.step()
    served = [name.split("-")[0] for batch in model.batches for name, _, _ in batch]
    assert 2.5 <= served.count("big") / served.count("small") <= 3.5
    assert tenant_of(("big", "1")) == "big"
    with pytest.raises(ConfigError):
        make_engine(namespace_weights={"a": 0})
    assert make_policy("fair", weights={"a": 2.0}).name == "fair"
