# SPDX-License-Identifier: Apache-2.0
"""Loads that go wrong: what is computed instead, what stays of them, and deadlines, resets, failed steps."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from paged_language_model import VOCAB, PagedHashModel, run_all
from scripted_tier import ScriptedTier
from tier_engines import GREEDY, PROMPT, assert_idle, assert_right, engine_with, filled, slots_of, steps

from radixkv.sampling.sampling_params import SamplingParams
from radixkv.tiers.tier import TierBlocks, TierState


def broken(kind: str, tier: ScriptedTier) -> None:
    """End the first load in some wrong way."""
    run, future = tier.loads[0]
    pieces = tier.pieces(run)
    if kind == "fails":
        tier.fail()
    elif kind == "is cancelled":
        tier.loads.pop(0)
        future.cancel()
    elif kind == "panics":
        tier.fail(error=SystemExit("a thread of the tier"))
    elif kind == "gives nothing":
        tier.finish(result=[])
    elif kind == "gives no blocks":
        tier.finish(result=[None])  # type: ignore[list-item]
    elif kind == "begins too late":
        tier.finish(result=pieces[1:])
    elif kind == "is of other tokens":
        other = bytes(np.frombuffer(pieces[0].run.tokens, np.int32)[::-1].tobytes())
        kept = pieces[0].run
        tier.finish(
            result=[
                TierBlocks(
                    type(kept)(kept.namespace, kept.is_public, other, kept.start, kept.identities),
                    pieces[0].data,
                )
            ]
        )
    elif kind == "is another's":
        kept = pieces[0].run
        foreign = type(kept)(("another",), kept.is_public, kept.tokens, kept.start, kept.identities)
        tier.finish(result=[TierBlocks(foreign, pieces[0].data)])
    elif kind == "is public":
        kept = pieces[0].run
        foreign = type(kept)(kept.namespace, True, kept.tokens, kept.start, kept.identities)
        tier.finish(result=[TierBlocks(foreign, pieces[0].data)])
    elif kind == "has too few bytes":
        tier.finish(result=[TierBlocks(pieces[0].run, [pieces[0].data[0][:-8]])])
    elif kind == "has too many rows":
        tier.finish(result=[TierBlocks(pieces[0].run, pieces[0].data * 2)])


KINDS = (
    "fails",
    "is cancelled",
    "panics",
    "gives nothing",
    "gives no blocks",
    "begins too late",
    "is of other tokens",
    "is another's",
    "is public",
    "has too few bytes",
    "has too many rows",
)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_load_does_not_give_is_computed(kind):
    tier = filled(PROMPT)
    engine, _, _ = engine_with(tier)
    ids = [engine.add_request([*PROMPT, i], GREEDY) for i in (1, 2, 3)]  # two wait with the first one
    steps(engine, 1)
    assert len(tier.loads) == 1
    broken(kind, tier)
    outputs = run_all(engine)
    assert not tier.loads, "who waited for a load that failed is not to try again"
    assert_right(outputs[ids[0]], num_cached_tokens=0)
    for request_id in ids[1:]:
        assert_right(outputs[request_id], num_cached_tokens=45)  # from the one that computed it
    assert engine.stats().transfers.failed_loads == 1
    assert engine.stats().transfers.loaded_blocks == 0
    assert_idle(engine)


@pytest.mark.parametrize("num_pieces", [1, 3, 4])
def test_the_first_blocks_of_a_load_are_of_use_without_the_rest(num_pieces):
    tier = filled(PROMPT)
    engine, _, _ = engine_with(tier)
    engine.add_request(PROMPT, GREEDY)
    steps(engine, 1)
    pieces = tier.pieces(tier.loads[0][0])
    tier.finish(result=[*pieces[:num_pieces], *pieces[num_pieces + 1 :]])
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=8 * num_pieces)
    assert_idle(engine)


def test_a_piece_may_have_several_blocks():
    tier = filled(PROMPT)
    engine, _, _ = engine_with(tier)
    engine.add_request(PROMPT, GREEDY)
    steps(engine, 1)
    run, _ = tier.loads[0]
    rows = [tier.kept[identity][2] for identity in run.identities]
    tier.finish(result=[TierBlocks(run.part(0, 3), rows[:3]), TierBlocks(run.part(3, 5), np.stack(rows[3:]))])
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=40)


def test_a_load_that_hangs_is_given_up_at_the_deadline_and_writes_nothing_later():
    tier = filled(PROMPT)
    engine, model, clock = engine_with(tier, num_blocks=8)
    engine.add_request(PROMPT, GREEDY)
    steps(engine)
    assert engine.cache.stats.held_blocks == 5
    clock.now += 0.2
    assert engine.idle_s == 0.0
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=0)
    assert engine.stats().transfers.late_loads == 1
    assert_idle(engine)
    before = slots_of(model)
    run, future = tier.loads.pop()
    assert future.cancelled()
    other: Future[Any] = Future()
    other.set_result(tier.pieces(run))
    steps(engine)
    assert slots_of(model) == before
    assert_idle(engine)


def test_a_tier_that_can_not_cancel_may_answer_too_late():
    tier = filled(PROMPT)
    engine, model, clock = engine_with(tier, num_blocks=8)
    engine.add_request(PROMPT, GREEDY)
    steps(engine)
    run, future = tier.loads.pop()
    future.set_running_or_notify_cancel()
    clock.now += 1.0
    run_all(engine)
    before = slots_of(model)
    future.set_result(tier.pieces(run))
    steps(engine)
    assert slots_of(model) == before
    assert_idle(engine)


@pytest.mark.parametrize("what", ["lookup", "load"])
@pytest.mark.parametrize("answer", ["raises", None, (TierState.HIT, None), (TierState.HIT, -3), ("HIT", 2)])
def test_a_tier_that_raises_or_talks_nonsense_is_as_one_that_has_nothing(what, answer, monkeypatch):
    tier = filled(PROMPT)

    def fail(run: Any) -> Any:
        if answer == "raises":
            raise OSError("no such disk")
        return answer

    monkeypatch.setattr(tier, what, fail)
    engine, _, _ = engine_with(tier)
    engine.add_request(PROMPT, GREEDY)
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=0)
    assert_idle(engine)


def test_a_tier_that_does_not_know_is_asked_again():
    tier = filled(PROMPT)
    answers = iter([TierState.RETRY, TierState.RETRY, TierState.HIT])
    tier.answer = lambda run, count: next(answers)
    engine, _, clock = engine_with(tier)
    engine.add_request(PROMPT, GREEDY)
    for asked in (1, 2):
        steps(engine)
        assert tier.num_lookups == asked
        idle_s = engine.idle_s
        assert idle_s is not None
        assert 0.0 < idle_s < 0.2
        assert engine.cache.stats.held_blocks == 0
        clock.now += idle_s
    steps(engine)
    clock.now += 0.01
    tier.finish()
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=40)
    (hit,) = output.tier_hits
    assert (hit.num_tokens, hit.seconds) == (40, pytest.approx(0.02))  # 5 ms twice, and the load


def test_a_wait_for_an_answer_that_is_no_is_told_as_well():
    tier = filled(PROMPT)
    answers = iter([TierState.RETRY, TierState.RETRY])
    tier.answer = lambda run, count: next(answers, TierState.MISS)
    engine, _, clock = engine_with(tier)
    engine.add_request(PROMPT, GREEDY)
    for _ in range(2):
        steps(engine, 1)
        clock.now += engine.idle_s
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=0)
    (hit,) = output.tier_hits
    assert (hit.num_tokens, hit.seconds) == (0, pytest.approx(0.01))


def test_a_tier_that_never_knows_is_asked_until_the_deadline():
    tier = filled(PROMPT)
    tier.answer = lambda run, count: TierState.RETRY
    engine, model, clock = engine_with(tier, load_deadline_s=0.1)
    engine.add_request(PROMPT, GREEDY)
    started = clock.now
    for _ in range(1000):
        steps(engine, 1)
        if model.batches:
            break
        clock.now += engine.idle_s or 0.0
    assert clock.now - started == pytest.approx(0.1)
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=0)
    assert output.tier_hits[0].seconds == pytest.approx(0.1)


def test_who_joins_a_load_brings_its_own_deadline():
    tier = filled(PROMPT)
    tier.answer = lambda run, count: TierState.RETRY
    engine, _, clock = engine_with(tier)
    engine.add_request(PROMPT, GREEDY)
    steps(engine, 1)
    clock.now += 0.198
    steps(engine, 1)
    tier.answer = lambda run, count: TierState.HIT
    engine.add_request([*PROMPT, 1], GREEDY)  # it starts a load, and the first one joins
    steps(engine, 2)
    assert len(tier.loads) == 1
    assert engine.idle_s == pytest.approx(0.002)
    clock.now += 0.003
    assert len(run_all(engine)) == 2


def test_a_pool_without_room_for_the_blocks_computes():
    tier = filled(PROMPT)
    engine, _, _ = engine_with(tier, num_blocks=7)
    running = engine.add_request([50] * 20, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    steps(engine, 2)
    engine.add_request(PROMPT, GREEDY)
    steps(engine, 3)
    assert not tier.loads  # it does not fit, so nothing is loaded for it
    outputs = {output.request_id: output for output in steps(engine, 30)}
    assert running in outputs
    tier.finish()
    for output in run_all(engine).values():
        assert_right(output, num_cached_tokens=40)
    assert_idle(engine)


def test_what_is_loaded_over_a_reset_is_dropped():
    tier = filled(PROMPT)
    engine, _, _ = engine_with(tier)
    engine.add_request(PROMPT[:17], GREEDY)
    steps(engine, 1)
    tier.finish()
    run_all(engine)
    engine.add_request(PROMPT, GREEDY)
    steps(engine, 1)
    engine.cache.reset()
    engine.check()
    tier.finish()
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=0)
    assert engine.stats().transfers.failed_loads == 1
    assert_idle(engine)


@pytest.mark.injects_faults
def test_a_rebuilt_cache_knows_nothing_of_loads_that_were_under_way():
    tier = filled(PROMPT, PROMPT[::-1])
    engine, model, _ = engine_with(tier)
    engine.add_request(PROMPT, GREEDY)
    abandoned = engine.add_request(PROMPT[::-1], GREEDY)
    steps(engine, 1)
    engine.abort(abandoned)
    _, hanging = tier.loads.pop()
    run, future = tier.loads.pop()
    future.set_running_or_notify_cancel()
    complete = engine.scheduler.complete
    engine.scheduler.complete = lambda batch: (complete(batch), 1 / 0)  # type: ignore[method-assign]
    other = engine.add_request([60] * 10, GREEDY)
    steps(engine, 1)
    assert engine.stats().num_rebuilds == 1
    assert hanging.cancelled()
    future.set_result(tier.pieces(run))
    steps(engine, 1)  # what the old cache had asked for
    assert len(tier.loads) == 1
    tier.finish()
    outputs = run_all(engine)
    assert len(outputs) == 2
    for output in outputs.values():
        assert_right(output, num_cached_tokens=0 if output.request_id == other else 40)
    assert not model.violations
    assert_idle(engine)


@pytest.mark.injects_faults
def test_a_failed_step_takes_nothing_from_a_load():
    tier = filled(PROMPT)
    fails = iter([False, True, False])
    model = PagedHashModel(64, 8, fail_if=lambda batch: next(fails, False))
    engine, _, _ = engine_with(tier, model=model, num_blocks=64)
    engine.add_request(PROMPT, GREEDY)
    steps(engine, 1)
    engine.add_request([60] * 10, GREEDY)
    steps(engine, 4)
    tier.finish()
    for output in run_all(engine).values():
        assert_right(output)
    assert engine.stats().transfers.loaded_blocks == 5
    assert_idle(engine)


def test_many_blocks_are_written_in_several_steps():
    prompt = [i % (VOCAB - 1) + 1 for i in range(1203)]
    tier = ScriptedTier(at_once=True)
    engine, _, _ = engine_with(tier, num_blocks=400, budget=512)
    engine.add_request(prompt, GREEDY)
    run_all(engine)
    for _ in range(8):  # they are copied out in several pieces, too
        engine.step()
    assert len(tier.kept) == 150
    engine.cache.reset()
    engine.add_request(prompt, GREEDY)
    steps(engine, 2)
    assert engine.stats().num_waiting == 1
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=1200)
    assert_idle(engine)


def test_without_prefix_caching_there_is_no_tier():
    tier = filled(PROMPT)
    engine, _, _ = engine_with(tier, enable_prefix_caching=False)
    engine.add_request(PROMPT, GREEDY)
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=0)
    assert tier.num_lookups == 0
    assert engine.stats().transfers is None
