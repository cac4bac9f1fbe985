# SPDX-License-Identifier: Apache-2.0
"""Blocks are loaded where that is quicker than computing them; else a request computes at once."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from paged_language_model import PagedHashModel, make_engine, run_all
from tier_engines import GREEDY, PROMPT, assert_idle, assert_right, filled, steps
from waiting import Clock

from radixkv.engine.engine import Engine
from radixkv.tiers.tier import BlocksBeforeDamage, TierState

LONG = [(5 * i) % 89 + 2 for i in range(203)]  # 25 whole blocks of 8


class TimedModel(PagedHashModel):
    """A model that takes its time: so many seconds for a token."""

    def __init__(self, clock: Clock, token_s: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.clock, self.token_s = clock, token_s

    def execute(self, batch: Any) -> Any:
        self.clock.now += batch.num_tokens * self.token_s
        return super().execute(batch)


class Timing:
    """An engine with a tier, both of known speed.

    Args:
        token_s: what a token takes to compute.
        block_s: what a block takes to load.
    """

    def __init__(self, token_s: float, block_s: float, *prompts: list[int]) -> None:
        self.tier, self.block_s = filled(*prompts), block_s
        self.clock = Clock()
        model = TimedModel(self.clock, token_s, 128, 8)
        engine, _ = make_engine(tier=self.tier, clock=self.clock, model=model, num_blocks=128)
        self.engine: Engine = engine
        self.engine.add_request([95] * 32, GREEDY)  # measures what a token costs
        run_all(self.engine)

    def ask(self, prompt: list[int]) -> tuple[Any, list[int]]:
        """The output, and the blocks of each load that it waited for."""
        self.engine.add_request(prompt, GREEDY)
        loads, outputs = [], []
        for _ in range(300):
            outputs += steps(self.engine, 1)
            if outputs:
                break
            if self.tier.loads:
                loads.append(len(self.tier.loads[0][0]))
                self.clock.now += loads[-1] * self.block_s
                self.tier.finish()
        assert_right(outputs[0])
        assert_idle(self.engine)
        return outputs[0], loads


def test_a_tier_that_is_quick_is_loaded_from():
    timing = Timing(0.01, 0.001, PROMPT, LONG)
    for prompt, cached in ((PROMPT, 40), (LONG, 200)):
        output, loads = timing.ask(prompt)
        assert output.num_cached_tokens == cached
        assert sum(loads) * 8 == cached
        (hit,) = output.tier_hits
        assert (hit.tier, hit.num_tokens) == ("tier", cached)
        assert hit.seconds == pytest.approx(sum(loads) * 0.001)


def test_a_tier_that_is_slower_than_computing_is_found_out_and_asked_again_later():
    prompts = [[base + i % 7 for i in range(45)] for base in (10, 20, 30, 40)]
    timing = Timing(0.001, 0.02, *prompts)
    output, loads = timing.ask(prompts[0])  # nothing was known of it
    assert (output.num_cached_tokens, loads) == (40, [5])
    output, loads = timing.ask(prompts[1])
    assert (output.num_cached_tokens, loads) == (0, [])
    timing.clock.now += 60
    timing.block_s = 0.001
    output, loads = timing.ask(prompts[2])
    assert (output.num_cached_tokens, loads) == (40, [5])


def test_a_long_prefix_comes_in_pieces_that_each_arrive_in_time():
    timing = Timing(0.1, 0.02, PROMPT, LONG)
    timing.ask(PROMPT)
    output, loads = timing.ask(LONG)
    assert output.num_cached_tokens == 200
    assert all(count * 0.02 <= 0.2 for count in loads)
    assert len(loads) >= 3
    assert timing.engine.stats().transfers.late_loads == 0


def test_the_report_says_that_loading_was_too_slow():
    timing = Timing(0.001, 0.02, PROMPT, LONG)
    timing.ask(LONG[:60])
    output, _ = timing.ask(PROMPT)
    assert output.cache_report.reason in ("diverged", "first_seen")  # whether the tier has it was not asked
    timing = Timing(0.01, 0.3, PROMPT, LONG)
    timing.engine.add_request(PROMPT, GREEDY)
    steps(timing.engine, 1)
    timing.clock.now += 0.21
    (output,) = run_all(timing.engine).values()
    assert_right(output, num_cached_tokens=0)
    assert (output.cache_report.reason, output.cache_report.tier) == ("load_too_slow", "tier")
    assert "load too slow" in output.cache_report.detail
    assert output.tier_hits[0].num_tokens == 0
    assert output.tier_hits[0].seconds == pytest.approx(0.21)
    (counts,) = timing.engine.stats().tiers
    assert counts.refused["load_too_slow"] == 1
    assert not counts.is_up


def test_a_tier_that_hangs_is_left_alone_for_longer_and_longer():
    prompts = [[base + i % 7 for i in range(45)] for base in range(10, 80)]
    timing = Timing(0.05, 0.001, *prompts)
    asked, waited = [], []
    for prompt in prompts:
        timing.engine.add_request(prompt, GREEDY)
        steps(timing.engine, 1)
        if timing.tier.loads:  # it never answers
            timing.tier.loads.clear()
            asked.append(timing.clock.now)
            timing.clock.now += timing.engine.idle_s
        (output,) = run_all(timing.engine).values()
        assert_right(output)
        waited += [hit.seconds for hit in output.tier_hits]
    assert max(waited) == pytest.approx(0.2)
    pauses = [round(later - earlier) for earlier, later in itertools.pairwise(asked)]
    assert pauses == sorted(pauses)
    assert 3 <= len(asked) <= 10


def test_a_step_of_the_engine_is_no_delay_of_the_tier():
    """The tier did not know at first; when the engine comes back, a long step has passed."""
    timing = Timing(0.01, 0.001, PROMPT)
    timing.tier.answer = lambda run, count: TierState.RETRY if count else TierState.MISS
    timing.engine.add_request([90 - i % 40 for i in range(40)], GREEDY)
    timing.engine.add_request(PROMPT, GREEDY)
    steps(timing.engine, 1)
    timing.tier.answer = lambda run, count: TierState.HIT if count else TierState.MISS
    steps(timing.engine, 1)
    timing.tier.finish()
    outputs = run_all(timing.engine)
    assert sorted(output.num_cached_tokens for output in outputs.values()) == [0, 40]


def test_beside_requests_that_decode_a_tier_that_never_answers_costs_no_more_than_the_deadline():
    timing = Timing(0.03, 0.001, PROMPT)
    timing.tier.answer = lambda run, count: TierState.RETRY if count else TierState.MISS
    timing.engine.add_request([95] * 8, replace(GREEDY, max_tokens=60))
    steps(timing.engine, 2)
    waiting = timing.engine.add_request(PROMPT, GREEDY)
    output = run_all(timing.engine)[waiting]
    assert_right(output, num_cached_tokens=0)
    assert output.tier_hits[0].seconds <= 0.2 + 0.03 + 0.001  # it is looked at between two steps


def test_what_was_damaged_is_told():
    timing = Timing(0.01, 0.001, PROMPT)
    timing.engine.add_request(PROMPT, GREEDY)
    steps(timing.engine, 1)
    run = timing.tier.loads[0][0]
    pieces = timing.tier.pieces(run)[:2]
    timing.tier.finish(result=[pieces[0], BlocksBeforeDamage(*pieces[1])])
    (output,) = run_all(timing.engine).values()
    assert_right(output, num_cached_tokens=16)
    assert (output.cache_report.reason, output.cache_report.tier) == ("checksum", "tier")
    assert timing.engine.stats().tiers[0].refused == {"checksum": 1}
