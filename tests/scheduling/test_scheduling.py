# SPDX-License-Identifier: Apache-2.0
"""Claims about order: budgets, bounded overtaking, head of line, priorities, fairness, preemption."""

from __future__ import annotations

from collections import abc

import pytest
from paged_language_model import VOCAB, make_engine, run_all
from scheduled_prompts import LONG, ONE, prompt, steps_until

from benchmarks.cluster_simulator.simulated_replica import ReplicaConfig, SimulatedReplica
from benchmarks.cluster_simulator.step_cost import ESTIMATES
from radixkv.cli.options import setting_helps
from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.policy import POLICIES, AdmissionPolicy, MatchedTokens, make_policy
from radixkv.scheduling.sequence import Sequence


def first_scheduled(model) -> list[str]:
    seen: dict[str, None] = {}
    for batch in model.batches:
        for request_id, _, _ in batch:
            seen.setdefault(request_id)
    return list(seen)


def test_three_prompts_share_one_budget_under_a_cap():
    engine, model = make_engine(num_blocks=500, budget=1024, max_tokens_per_request=400)
    for i in range(3):
        engine.add_request(prompt(i, 800), ONE, request_id=f"r{i}")
    engine.step()
    assert [count for _, _, count in model.batches[0]] == [400, 400, 224]


@pytest.mark.parametrize("cap", [None, 256])
def test_a_short_prompt_after_a_long_one_is_served_within_three_steps(cap):
    engine, _ = make_engine(num_blocks=1000, budget=512, max_tokens_per_request=cap)
    engine.add_request(prompt(0, 6000), ONE, request_id="long")
    engine.step()
    engine.add_request(prompt(1, 50), ONE, request_id="short", stream=True)
    assert steps_until(engine, "short") <= 3


def test_the_whole_budget_is_used_when_a_prompt_is_alone():
    engine, model = make_engine(num_blocks=500, budget=512)
    engine.add_request(prompt(0, 1300), ONE)
    run_all(engine)
    assert [batch[0][2] for batch in model.batches] == [512, 512, 276]


def test_the_budget_is_used_while_others_wait_for_the_shared_prefix():
    engine, model = make_engine(num_blocks=1000, budget=256)
    system = prompt(0, 1000)
    for i in range(8):
        engine.add_request([*system, 1 + i], ONE)
    run_all(engine)
    assert [sum(count for _, _, count in batch) for batch in model.batches[:3]] == [256, 256, 256]
    assert len(model.batches) <= 6


def test_longest_cached_prefix_goes_first():
    engine, model = make_engine(num_blocks=200, budget=64, max_num_seqs=1)
    long, short = prompt(1, 60), prompt(2, 30)
    engine.add_request(long, ONE)
    engine.add_request(short, ONE)
    run_all(engine)
    model.batches.clear()
    engine.add_request(prompt(3, 20), ONE, request_id="cold")
    engine.add_request([*short, 5], ONE, request_id="short hit")
    engine.add_request([*long, 5], ONE, request_id="long hit")
    run_all(engine)
    assert first_scheduled(model) == ["long hit", "short hit", "cold"]


def _cold_wait(policy: str, max_overtake: int) -> int:
    """Steps until a cold request starts under an endless stream of hits, one sequence slot."""
    engine, _ = make_engine(
        num_blocks=400, budget=64, max_num_seqs=1, scheduling_policy=policy, max_overtake=max_overtake
    )
    hot = prompt(1, 60)
    engine.add_request(hot, ONE)
    run_all(engine)
    for i in range(3):
        engine.add_request([*hot, 1 + i], ONE)
    engine.add_request(prompt(2, 40), ONE, request_id="cold", stream=True)
    for step in range(1, 200):
        engine.add_request([*hot, step % VOCAB, step // VOCAB + 1], ONE)
        if any(delta.request_id == "cold" for delta in engine.step().deltas):
            return step
    return 200


def test_overtaking_is_bounded():
    assert _cold_wait("prefix", 10**9) == 200, "the adversary does not starve without a bound: a weak test"
    for bound in (0, 1, 8, 20):
        # Up to three earlier requests go first in any order; the cold one itself takes one step.
        assert _cold_wait("prefix", bound) <= bound + 3 + 1
    assert _cold_wait("fcfs", 8) <= 4


def test_a_request_that_does_not_fit_is_passed_but_not_for_ever():
    engine, model = make_engine(num_blocks=20, block_size=8, budget=64, max_overtake=5, max_model_len=150)
    engine.add_request(prompt(0, 60), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    engine.step()
    engine.add_request(prompt(1, 130), ONE, request_id="big")
    for i in range(60):
        engine.add_request(prompt(10 + i, 10), ONE, request_id=f"small-{i}")
    outputs = run_all(engine)
    assert len(outputs) == 62
    order = first_scheduled(model)
    place = order.index("big")
    assert place > 1, "nobody passed it"
    steps_passed = {
        i
        for i, batch in enumerate(model.batches)
        for r, start, _ in batch
        if r in order[1:place] and start == 0
    }
    assert len(steps_passed) <= 5


def test_priority_orders_admission_and_chooses_victims():
    engine, model = make_engine(num_blocks=100, budget=64, max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("c", 5), ("a", -1), ("b", 0), ("b2", 0)):
        engine.add_request(prompt(len(name), 20), ONE, request_id=name, priority=priority)
    run_all(engine)
    assert first_scheduled(model) == ["a", "b", "b2", "c"]

    engine, _ = make_engine(num_blocks=16, budget=64, scheduling_policy="priority", max_model_len=120)
    engine.add_request(prompt(1, 40), LONG, request_id="background", priority=10)
    engine.step()
    engine.add_request(prompt(2, 40), LONG, request_id="urgent", priority=0)
    outputs = run_all(engine)
    assert outputs["background"].num_preemptions > 0
    assert outputs["urgent"].num_preemptions == 0


def test_fairness_serves_namespaces_by_weight():
    engine, model = make_engine(num_blocks=800, budget=40, max_num_seqs=1, scheduling_policy="fair")
    for i in range(20):
        engine.add_request(prompt(i, 30), ONE, request_id=f"noisy-{i}", namespace="noisy")
    engine.step()
    engine.add_request(prompt(99, 30), ONE, request_id="quiet", namespace="quiet")
    run_all(engine)
    assert first_scheduled(model).index("quiet") <= 2
    weighted = make_policy("fair", weights={"big": 3.0})
    weighted.on_served("big", 30)
    weighted.on_served("small", 30)
    assert weighted.served == {"big": 10.0, "small": 30.0}
    with pytest.raises(ConfigError, match="weight"):
        make_policy("fair", weights={"x": 0.0})


def test_every_policy_that_a_setting_may_name_can_be_made():
    for name in POLICIES:
        assert make_policy(name).name == (name if name != "auto" else "prefix")
    with pytest.raises(ConfigError, match=r"round-robin.*prefix, fcfs"):
        make_policy("round-robin")


class LastComeFirst(AdmissionPolicy):
    name = "lifo"

    def order(self, waiting: abc.Sequence[Sequence], matched_tokens: MatchedTokens) -> abc.Sequence[Sequence]:
        return waiting[::-1]


def test_a_new_policy_is_one_class_in_one_file(monkeypatch):
    """Its name on the class is all that the engine, the simulation and the command line need."""
    monkeypatch.setitem(POLICIES, LastComeFirst.name, LastComeFirst)
    engine, model = make_engine(num_blocks=400, budget=64, max_num_seqs=1, scheduling_policy="lifo")
    for index in range(3):
        engine.add_request(prompt(index, 20), SamplingParams(max_tokens=2), request_id=str(index))
    run_all(engine)
    assert first_scheduled(model) == ["2", "1", "0"]
    cost = ESTIMATES["h100-8b"]
    SimulatedReplica(ReplicaConfig(16, 16, policy="lifo"), cost, float, print, print)
    with pytest.raises(ConfigError, match=r"filo.*lifo"):
        SimulatedReplica(ReplicaConfig(16, 16, policy="filo"), cost, float, print, print)
    assert "`lifo`" in setting_helps(EngineConfig)["scheduling_policy"]


def test_order_does_not_depend_on_another_tenants_prompts():
    """The places of a tenant's requests in the queue are the same whatever another tenant's prompts hit."""
    places = []
    for warm in (False, True):
        engine, model = make_engine(num_blocks=400, budget=64, max_num_seqs=1)
        victim_prompt = prompt(1, 50)
        if warm:
            engine.add_request(victim_prompt, ONE, namespace="victim")
            run_all(engine)
        model.batches.clear()
        for i in range(3):
            engine.add_request(prompt(20 + i, 20), ONE, request_id=f"probe-{i}", namespace="attacker")
            engine.add_request([*victim_prompt, i + 1], ONE, request_id=f"victim-{i}", namespace="victim")
        run_all(engine)
        order = first_scheduled(model)
        places.append([order.index(f"probe-{i}") for i in range(3)])
    assert places[0] == places[1]


def test_resumption_is_a_prefix_hit():
    engine, model = make_engine(num_blocks=18, block_size=8, budget=64, max_model_len=128)
    for i in range(2):
        engine.add_request(prompt(i, 40), LONG, request_id=f"r{i}")
    resumed = []
    preempted_before = 0
    while engine.has_work:
        engine.step()
        stats = engine.stats()
        if stats.num_preemptions > preempted_before:
            preempted_before = stats.num_preemptions
            resumed.append(len(model.batches))
    assert resumed, "nothing was preempted: a weak test"
    prompts_total = 80
    outputs_total = 2 * 60
    evicted = engine.cache.stats.evicted_blocks * 8
    # Everything is computed once, but for what was evicted meanwhile and one token per resumption.
    assert model.num_computed <= prompts_total + outputs_total + evicted + preempted_before


def test_each_preempted_request_makes_progress_before_it_is_preempted_again():
    engine, _ = make_engine(num_blocks=16, block_size=8, budget=32, max_model_len=120)
    requests = {}
    for i in range(5):
        engine.add_request(prompt(i, 30), LONG, request_id=f"r{i}")
    for request in engine.scheduler.waiting:
        requests[request.request_id] = request
    progress: dict[str, tuple[int, int]] = {}
    while engine.has_work:
        engine.step()
        for name, request in requests.items():
            preemptions, output = progress.get(name, (0, -1))
            if request.num_preemptions > preemptions:
                assert request.num_preemptions == preemptions + 1
                assert request.num_output_tokens > output, "preempted again without a token in between"
                progress[name] = (request.num_preemptions, request.num_output_tokens)
    assert progress, "nothing was preempted: a weak test"


def test_a_thousand_waiting_requests_are_not_matched_again_when_nothing_changed():
    engine, _ = make_engine(num_blocks=64, budget=16, max_num_seqs=1)
    engine.add_request(prompt(0, 20), SamplingParams(max_tokens=200, ignore_eos=True))
    engine.step()
    for i in range(1000):
        engine.add_request(prompt(i + 1, 30), ONE)
    engine.step()
    calls = 0
    match = engine.cache.match

    def counting(*args, **options):
        nonlocal calls
        calls += 1
        return match(*args, **options)

    engine.cache.match = counting
    for _ in range(5):
        engine.step()
    assert calls == 0


@pytest.mark.parametrize("limit", [{"max_num_seqs": 4}, {"num_blocks": 100}])
@pytest.mark.parametrize("salts", [1, 5])
def test_a_flood_does_not_make_another_tenant_wait_for_its_decodes(limit, salts):
    """What one tenant's decodes hold is shared with a newcomer at once, and nobody loses a token."""
    engine, _ = make_engine(**{"num_blocks": 800, "budget": 64, "scheduling_policy": "fair", **limit})
    for i in range(20):
        engine.add_request(
            prompt(i, 30), LONG, request_id=f"flood-{i}", namespace=("flood", f"salt {i % salts}")
        )
    for _ in range(25):
        engine.step()
    for i in range(4):
        engine.add_request(
            prompt(100 + i, 20), ONE, request_id=f"quiet-{i}", stream=True, namespace=("quiet", "")
        )
        assert steps_until(engine, f"quiet-{i}") <= 2
        engine.check()
    outputs = run_all(engine)
    assert all(
        len(outputs[f"flood-{i}"].outputs[0].token_ids) == 60 for i in range(20) if f"flood-{i}" in outputs
    )


def test_nobodys_last_request_gives_way_to_another_tenant():
    engine, _ = make_engine(num_blocks=400, budget=64, max_num_seqs=3, scheduling_policy="fair")
    for tenant in ("a", "b", "c", "d", "e"):
        engine.add_request(prompt(ord(tenant), 20), LONG, request_id=tenant, namespace=(tenant, ""))
    outputs = run_all(engine)
    assert sum(output.num_preemptions for output in outputs.values()) == 0


def test_a_tenant_at_its_ceiling_makes_nobody_give_way_in_vain():
    engine, _ = make_engine(num_blocks=100, budget=64, scheduling_policy="fair")
    engine.cache.set_quotas({"small": (0, 8), "big": (0, None)})
    for i in range(20):
        engine.add_request(prompt(i, 30), LONG, request_id=f"flood-{i}", namespace=("big", ""))
    for _ in range(25):
        engine.step()
    before = engine.stats().num_preemptions
    engine.add_request(prompt(99, 40), LONG, request_id="small", stream=True, namespace=("small", ""))
    for _ in range(10):
        engine.step()
    assert engine.stats().num_preemptions - before <= 10
    run_all(engine)


def test_what_others_run_takes_nothing_of_a_ceiling():
    """An admission's headroom is for those who can take its blocks: under a ceiling, for its own tenant's."""
    engine, _ = make_engine(num_blocks=400, budget=64, scheduling_policy="fair")
    engine.cache.set_quotas({"small": (0, 8), "big": (0, None)})
    for i in range(20):
        engine.add_request(prompt(i, 30), LONG, request_id=f"big-{i}", namespace=("big", ""))
    for _ in range(25):
        engine.step()
    engine.add_request(prompt(99, 40), ONE, request_id="small", stream=True, namespace=("small", ""))
    assert steps_until(engine, "small") <= 2, "5 blocks of its 8, whatever others run"
    run_all(engine)


@pytest.mark.parametrize("policy", ["fair", "prefix", "fcfs", "priority"])
def test_who_waits_for_its_own_ceiling_holds_up_nobody_else(policy):
    engine, _ = make_engine(num_blocks=400, budget=64, scheduling_policy=policy, max_overtake=3)
    engine.cache.set_quotas({"small": (0, 12)})
    for i in range(4):  # one of them runs at a time, for 60 steps
        engine.add_request(prompt(i, 30), LONG, request_id=f"small-{i}", namespace=("small", ""))
    engine.step()
    for i in range(20):
        engine.add_request(
            prompt(50 + i, 20), ONE, request_id=f"other-{i}", stream=True, namespace=("other", "")
        )
        assert steps_until(engine, f"other-{i}") <= 2
        engine.check()
    assert len(run_all(engine)) == 4


def test_fair_serves_a_tenants_longest_cached_prefix_first_but_passes_nobody_for_ever():
    engine, _ = make_engine(
        num_blocks=400, budget=64, max_num_seqs=1, scheduling_policy="fair", max_overtake=4
    )
    shared = prompt(1, 40)
    engine.add_request(shared, ONE, request_id="first", namespace=("a", ""))
    run_all(engine)
    engine.add_request(prompt(2, 40), ONE, request_id="cold", namespace=("a", ""))
    ended = []
    for i in range(10):
        engine.add_request([*shared, 50 + i], ONE, request_id=f"hot-{i}", namespace=("a", ""))
    while engine.has_work:
        ended += [output.request_id for output in engine.step().finished]
    assert ended == [*(f"hot-{i}" for i in range(4)), "cold", *(f"hot-{i}" for i in range(4, 10))]
