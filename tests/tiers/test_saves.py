# SPDX-License-Identifier: Apache-2.0
"""Blocks that are copied out to a tier: nobody gets them meanwhile, everybody may afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from paged_language_model import run_all
from scripted_tier import ScriptedTier, SlowCopies
from tier_engines import GREEDY, PROMPT, assert_idle, assert_right, engine_with, filled, steps
from waiting import Clock

from radixkv.engine.engine import Engine
from radixkv.sampling.sampling_params import SamplingParams

OTHERS = [[60 + i] * 20 for i in range(5)]
LONG = [(5 * i) % 89 + 2 for i in range(53)]  # six whole blocks of 8


def saving(num_blocks: int = 10, **options: Any) -> tuple[Engine, SlowCopies, ScriptedTier]:
    """An engine of which a copy is under way: five blocks of `PROMPT`."""
    tier = ScriptedTier()
    model = SlowCopies(num_blocks, 8)
    engine, _, _ = engine_with(tier, model=model, num_blocks=num_blocks, **options)
    engine.add_request(PROMPT, GREEDY)
    run_all(engine)
    assert len(model.copies) == 1
    assert len(model.copies[0].blocks) == 5 + (len(PROMPT) + 3) // 8 - 5
    return engine, model, tier


def saved_prompt_is_right(tier: ScriptedTier) -> None:
    """What the tier has lets another engine answer."""
    tier.at_once = True
    engine, model, _ = engine_with(tier)
    engine.add_request(PROMPT, GREEDY)
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=40)
    assert not model.violations


def test_blocks_are_held_until_they_have_been_copied_and_evictable_afterwards():
    engine, model, tier = saving()
    copied = set(model.copies[0].blocks)
    assert engine.cache.stats.held_blocks == len(copied)
    engine.cache.evict(100)
    engine.check()
    for prompt in OTHERS[:2]:  # these have to do with what is left
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=1))
        (output,) = run_all(engine).values()
        assert_right(output)
        assert engine.cache.match(PROMPT).num_tokens >= 40
    assert not tier.kept
    model.finish_copy()
    steps(engine, 1)
    assert len(tier.kept) >= 5
    model.copies.clear()
    saved_prompt_is_right(tier)
    engine.cache.evict(100)
    assert engine.cache.match(PROMPT).num_tokens == 0


class TimedCopies(SlowCopies):
    """The same model; a token takes it ten milliseconds to compute, by the engine's clock."""

    clock: Clock

    def execute(self, batch: Any) -> Any:
        self.clock.now += 0.01 * batch.num_tokens
        return super().execute(batch)

    def helped(self, seconds: float) -> None:
        super().helped(seconds)
        self.clock.now += seconds


def timed(num_blocks: int, **options: Any) -> tuple[Engine, TimedCopies, ScriptedTier, Clock]:
    """The same as `saving`, where time passes: requests may wait a hundredth of half a second for copies."""
    tier = ScriptedTier()
    model = TimedCopies(num_blocks, 8)
    engine, _, model.clock = engine_with(tier, model=model, num_blocks=num_blocks, **options)
    engine.add_request(PROMPT, GREEDY)
    run_all(engine)
    assert len(model.copies) == 1
    return engine, model, tier, model.clock


NEEDS_ALL = [70 - i for i in range(60)]


def test_who_finds_no_room_helps_to_copy_for_a_hundredth_of_the_steps_time():
    engine, model, tier, _ = timed(8)
    model.num_copied_at_stop = 6  # as many as it had time for
    engine.add_request(NEEDS_ALL, GREEDY)
    (output,) = run_all(engine).values()
    assert_right(output)
    assert model.helped_s[0] == pytest.approx(0.0048)  # a hundredth of 45 + 3 tokens' time
    assert output.times.first_token == pytest.approx(0.6048)
    assert engine.stats().transfers.stopped_saves == 0
    assert not model.violations
    saved_prompt_is_right(tier)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_copy_that_takes_its_time_is_stopped_for_who_needs_its_blocks(is_aborted):
    engine, model, tier, _ = timed(8)
    request_id = engine.add_request(NEEDS_ALL, GREEDY)
    steps(engine, 1)
    if is_aborted:
        engine.abort(request_id)
    outputs = run_all(engine)
    if not is_aborted:
        assert_right(outputs[request_id])
    assert engine.stats().transfers.stopped_saves == 1
    assert model.copies[0].done()
    assert not [run for run, _, _ in tier.kept.values() if run.tokens[:4] == PROMPT[0].to_bytes(4, "little")]
    assert not model.violations


def test_what_was_copied_before_it_was_stopped_is_saved_and_nobody_reads_on():
    engine, model, tier, _ = timed(8)
    model.num_copied_at_stop = 3
    engine.add_request(NEEDS_ALL, GREEDY)
    steps(engine, 1)
    assert model.copies[0].done()  # before its blocks are anybody's
    run_all(engine)
    assert len(tier.kept) == 3
    (counts,) = engine.stats().tiers
    assert (counts.offered_blocks, counts.saved_blocks) >= (6, 3)
    assert counts.dropped_blocks >= 3
    tier.at_once = True
    tier.is_open = False
    other, other_model, _ = engine_with(tier)
    other.add_request(PROMPT, GREEDY)
    (output,) = run_all(other).values()
    assert_right(output, num_cached_tokens=24)
    assert not model.violations
    assert not other_model.violations


def test_what_is_still_cached_after_a_copy_was_stopped_is_copied_later():
    engine, model, tier = saving(num_blocks=9)
    model.num_copied_at_stop = 2
    long = engine.add_request([60] * 10, SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True))
    run_all(engine)  # it takes one of the six
    assert long
    assert len(tier.kept) == 2
    model.num_copied_at_stop = 0
    while model.copies:
        model.finish_copy()
        steps(engine, 2)
    (counts,) = engine.stats().tiers
    assert (
        len([run for run, _, _ in tier.kept.values() if run.tokens[:4] == PROMPT[0].to_bytes(4, "little")])
        >= 4
    )
    assert counts.offered_blocks == counts.saved_blocks + counts.dropped_blocks
    saved_prompt_is_right(tier)
    assert_idle(engine)


def test_copies_make_requests_wait_for_a_hundredth_of_the_time_that_steps_take():
    """However slow they are, and however little room there is."""
    engine, model, _, clock = timed(8)
    started = clock.now
    for i in range(40):
        engine.add_request([1 + i, *NEEDS_ALL], GREEDY)
        run_all(engine)
    assert 0 < sum(model.helped_s) <= 0.011 * (clock.now - started)
    assert engine.stats().transfers.stopped_saves >= 39
    assert len(model.copies) > 39


def test_a_text_of_several_copies_is_saved_as_far_as_there_is_time(monkeypatch):
    monkeypatch.setattr("radixkv.tiers.saves.MAX_COPIED_BLOCKS", 2)
    for num_copied, num_kept in ((2, 6), (1, 1)):
        engine, model, tier, _ = timed(8)
        model.num_copied_at_stop = num_copied
        engine.add_request(NEEDS_ALL, SamplingParams(temperature=0.0, max_tokens=1))
        (output,) = run_all(engine).values()
        assert_right(output)
        first = PROMPT[0].to_bytes(4, "little")
        assert len([run for run, _, _ in tier.kept.values() if run.tokens[:4] == first]) == num_kept
        assert not model.violations


def test_a_request_at_its_tenants_ceiling_gets_the_blocks_of_a_copy():
    model = SlowCopies(30, 8)
    engine, _, _ = engine_with(ScriptedTier(), model=model, num_blocks=30)
    engine.cache.set_quotas({"ada": (0, 8)})
    engine.add_request(PROMPT, GREEDY, namespace="ada")
    run_all(engine)
    engine.add_request([70 - i for i in range(50)], GREEDY, namespace="ada")
    (output,) = run_all(engine).values()
    assert_right(output)
    assert engine.stats().transfers.stopped_saves == 1


def test_a_load_gets_the_blocks_of_a_copy():
    tier = filled(LONG)
    tier.is_open = True
    model = SlowCopies(8, 8)
    engine, _, _ = engine_with(tier, model=model, num_blocks=8)
    engine.add_request(PROMPT, GREEDY)
    run_all(engine)
    assert model.copies
    tier.at_once = True
    engine.add_request(LONG, GREEDY)
    (output,) = run_all(engine).values()
    assert_right(output, num_cached_tokens=48)
    assert engine.stats().transfers.stopped_saves >= 1


def test_a_running_request_gets_the_blocks_of_a_copy():
    engine, model, _ = saving(num_blocks=8)
    engine.add_request([60] * 10, SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    (output,) = run_all(engine).values()
    assert_right(output)
    assert len(output.outputs[0].token_ids) == 50
    assert engine.stats().num_preemptions == 0
    assert engine.stats().transfers.stopped_saves >= 1
    assert not model.violations


def test_the_order_of_eviction_is_that_of_the_requests():
    engine, model, tier = saving(num_blocks=14)
    tier.is_open = False
    engine.add_request(OTHERS[0], SamplingParams(temperature=0.0, max_tokens=1))
    run_all(engine)
    model.finish_copy()
    steps(engine, 1)
    engine.cache.evict(6)  # of the older text, copied or not
    assert engine.cache.match(OTHERS[0]).num_tokens == 20
    assert engine.cache.match(PROMPT).num_tokens < 40


def test_a_copy_that_fails_saves_nothing_and_holds_nothing():
    engine, model, tier = saving()
    model.finish_copy(error=OSError("no memory"))
    steps(engine, 1)
    assert not tier.kept
    assert engine.stats().transfers.failed_saves == 1
    assert_idle(engine)


@pytest.mark.parametrize(("what", "answer"), [("wants", "raises"), ("wants", [7]), ("save", "raises")])
def test_a_tier_that_fails_to_save_harms_nobody(what, answer, monkeypatch):
    tier = ScriptedTier()

    def fail(*arguments: Any) -> Any:
        if answer == "raises":
            raise OSError("the disk is full")
        return answer

    monkeypatch.setattr(tier, what, fail)
    engine, _, _ = engine_with(tier)
    for prompt in (PROMPT, OTHERS[0]):
        engine.add_request(prompt, GREEDY)
        (output,) = run_all(engine).values()
        assert_right(output)
    assert not tier.kept
    assert_idle(engine)


def test_blocks_stay_what_they_are_over_a_reset_until_they_have_been_copied():
    engine, model, tier = saving()
    engine.cache.reset()
    engine.check()
    for prompt in OTHERS[:2]:
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=1))
        run_all(engine)
    model.finish_copy()
    steps(engine, 1)
    model.copies.clear()
    saved_prompt_is_right(tier)


@pytest.mark.injects_faults
def test_what_is_being_copied_is_not_believed_after_the_cache_was_rebuilt():
    engine, model, tier = saving()
    complete = engine.scheduler.complete
    engine.scheduler.complete = lambda batch: (complete(batch), 1 / 0)  # type: ignore[method-assign]
    engine.add_request(OTHERS[0], GREEDY)
    engine.step()
    assert engine.stats().num_rebuilds == 1
    tier.is_open = False
    run_all(engine)
    for prompt in OTHERS:  # the blocks are others' now
        engine.add_request(prompt, GREEDY)
    run_all(engine)
    model.finish_copy()
    steps(engine, 2)
    assert not tier.kept
    assert_idle(engine)


def test_an_abort_between_steps_saves_what_was_computed_and_nothing_else():
    tier = ScriptedTier()
    engine, _, _ = engine_with(tier, budget=16)
    request_id = engine.add_request(PROMPT, GREEDY)
    steps(engine, 2)
    engine.abort(request_id)
    assert engine.has_work
    steps(engine, 2)
    assert len(tier.kept) == 4
    tier.at_once = True
    tier.is_open = False
    other, model, _ = engine_with(tier)
    other.add_request(PROMPT, GREEDY)
    (output,) = run_all(other).values()
    assert_right(output, num_cached_tokens=32)
    assert not model.violations


@pytest.mark.injects_faults
def test_a_step_that_failed_saves_nothing_of_it():
    tier = ScriptedTier()
    engine, model, _ = engine_with(tier, num_blocks=64)
    model.fail_if = lambda batch: True
    engine.add_request(PROMPT, GREEDY)
    run_all(engine)
    steps(engine, 2)
    assert not tier.kept


def test_what_is_evicted_before_its_turn_is_not_saved():
    engine, model, tier = saving(num_blocks=20)
    engine.add_request(OTHERS[0], SamplingParams(temperature=0.0, max_tokens=1))
    run_all(engine)
    engine.cache.evict(100)
    model.finish_copy()
    steps(engine, 2)
    assert not model.copies
    assert all(run.tokens[:4] == PROMPT[0].to_bytes(4, "little") for run, _, _ in tier.kept.values())
    assert_idle(engine)


def test_a_closed_engine_gives_up_what_is_under_way():
    engine, model, tier = saving()
    engine.close()
    model.finish_copy()
    assert not tier.kept
