# SPDX-License-Identifier: Apache-2.0
"""Explanations and the reports of requests say which of the missing tokens a tier has."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from paged_language_model import make_engine, run_all
from scripted_tier import ScriptedTier
from tier_engines import GREEDY, PROMPT, filled, steps
from waiting import Clock

from radixkv.cache.block_run import BlockRun
from radixkv.cli.terminal_chat.partners import LocalPartner
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.entrypoints.llm import LLM
from radixkv.scheduling.request import Request
from radixkv.tiers.tier import TierState
from radixkv.tiers.tier_use import ASK_TIERS_S

OTHERS = [[30 + 3 * number + i % 11 for i in range(100)] for number in range(4)]


def explained(tier: ScriptedTier, *before: list[int], asked: list[int] = PROMPT, **options: Any) -> Any:
    """What an engine says to a prompt after others, and its counts of the tier."""
    tier.at_once = True

    async def life() -> Any:
        engine, _ = make_engine(tier=tier, **{"num_blocks": 20, "load_deadline_s": 60.0} | options)
        serving = AsyncEngine(lambda: engine)
        try:
            for prompt in before:
                await serving.generate(Request(prompt, GREEDY))
            while await serving.call(lambda engine: engine.has_work):
                pass  # what they leave behind is being saved
            report = await serving.cache.explain(asked)
            return report, await serving.call(lambda engine: engine.stats().tiers[0])
        finally:
            await serving.close()

    return asyncio.run(life())


def kept(*prompts: list[int]) -> ScriptedTier:
    """A tier that has the whole blocks of some prompts, and takes no more."""
    tier = ScriptedTier()
    explained(tier, *prompts, num_blocks=64)
    tier.is_open = False
    return tier


def test_what_was_evicted_is_told_to_be_in_the_tier():
    report, counts = explained(ScriptedTier(), PROMPT, *OTHERS)
    assert (report.reason, report.tier, report.num_tier_tokens) == ("evicted", "tier", 40)
    assert "were evicted to tier" in report.detail
    assert "The tier tier has 40 of them." in report.detail
    assert counts.hits == 0


def test_a_part_that_is_still_cached_is_not_counted():
    report, _ = explained(kept(PROMPT), PROMPT[:16], asked=PROMPT)
    assert report.num_hit_tokens == 16
    assert (report.tier, report.num_tier_tokens) == ("tier", 24)
    report, _ = explained(kept(PROMPT), PROMPT[:16], asked=PROMPT[:40])  # the last token is always computed
    assert (report.num_hit_tokens, report.num_tier_tokens) == (16, 23)


def test_what_no_tier_has_is_told_as_before():
    report, _ = explained(kept(OTHERS[0]), asked=PROMPT)
    assert (report.reason, report.tier, report.num_tier_tokens) == ("first_seen", None, 0)
    assert report.detail.endswith("not been seen before.")


def test_a_tier_that_does_not_know_yet_is_asked_again():
    tier = kept(PROMPT)
    states = [TierState.RETRY, TierState.RETRY]
    tier.answer = lambda run, count: states.pop() if states else TierState.HIT
    report, _ = explained(tier)
    assert (report.tier, report.num_tier_tokens) == ("tier", 40)


def test_an_llm_asks_the_tiers_too_and_so_does_a_chat_in_this_process():
    tier = filled(PROMPT)
    states = [TierState.RETRY, TierState.HIT]
    tier.answer = lambda run, count: states.pop(0) if states else TierState.HIT
    llm = LLM.from_engine(make_engine(tier=tier)[0])
    report = llm.explain(PROMPT)
    assert (report.tier, report.num_tier_tokens, states) == ("tier", 40, [])
    assert not tier.loads
    tokenizer = SimpleNamespace(apply_chat_template=lambda messages, tools: PROMPT)
    llm.engine.model = replace(llm.engine.model, tokenizer=tokenizer)
    partner = LocalPartner(llm, max_tokens=4, temperature=0.0)
    assert "The tier tier has 40 of them." in partner.explain([{"role": "user", "content": "x"}])
    tier.answer = lambda run, count: TierState.RETRY
    assert llm.explain(PROMPT).tier is None


def test_a_tier_that_never_knows_is_not_waited_for_for_long():
    tier = kept(PROMPT)
    tier.answer = lambda run, count: TierState.RETRY
    started = time.monotonic()
    report, _ = explained(tier)
    assert (report.reason, report.tier) == ("first_seen", None)
    assert time.monotonic() - started >= ASK_TIERS_S


@pytest.mark.injects_faults
def test_a_tier_that_fails_spoils_no_explanation():
    def fail(run: BlockRun, count: int) -> TierState:
        raise OSError("the disk is gone")

    tier = kept(PROMPT)
    tier.answer = fail
    report, counts = explained(tier)
    assert (report.reason, report.tier) == ("first_seen", None)
    assert counts.errors == {"look up": 1}


def test_what_is_too_slow_to_load_is_told():
    tier, clock = filled(PROMPT, OTHERS[0]), Clock()
    engine, _ = make_engine(tier=tier, clock=clock, num_blocks=64)
    engine.add_request(OTHERS[0], GREEDY)
    steps(engine, 1)
    clock.now += 0.21  # it does not come in time
    (output,) = run_all(engine).values()
    report = output.cache_report
    assert (report.reason, report.tier, report.num_tier_tokens) == ("load_too_slow", "tier", 96)
