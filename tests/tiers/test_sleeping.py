# SPDX-License-Identifier: Apache-2.0
"""Engines sleep while blocks are loaded, with a thread of their own or without, and the tier wakes them."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections import deque
from typing import Any

import pytest
from paged_language_model import PagedHashModel, greedy_reference, make_engine
from scripted_tier import ScriptedTier
from tier_engines import PROMPT, assert_right, filled
from waiting import until_async

from radixkv.engine.engine import Engine
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.entrypoints.engine_thread import RestartPolicy
from radixkv.entrypoints.llm import LLM
from radixkv.errors import EngineStoppedError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request
from radixkv.tiers.tier import TierState

LONG_S = 1000.0  # nobody waits as long
SAMPLING = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


class Told(ScriptedTier):
    """Says when a load is wanted, and when it was asked for the third time."""

    def __init__(self, kept: dict[bytes, Any]) -> None:
        super().__init__()
        self.kept = kept
        self.is_open = False
        self.has_load = threading.Event()
        self.was_asked_often = threading.Event()

    def load(self, run: Any) -> Any:
        future = super().load(run)
        self.has_load.set()
        return future

    def lookup(self, run: Any) -> tuple[TierState, int]:
        if self.num_lookups > 1:
            self.was_asked_often.set()
        return super().lookup(run)


@pytest.fixture
def tier() -> Told:
    return Told(filled(PROMPT, namespace=("", "", "", "")).kept)


class CountedSteps:
    """Counts an engine's steps; says when there are suspiciously many."""

    def __init__(self, engine: Engine) -> None:
        self.count = 0
        self.too_many = threading.Event()
        self._step = engine.step
        engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> Any:
        self.count += 1
        if self.count > 100:
            self.too_many.set()
        return self._step()


def happens(event: threading.Event) -> Any:
    return asyncio.to_thread(event.wait, 60.0)


async def test_the_thread_sleeps_until_the_tier_has_loaded_the_blocks(tier):
    engine, _ = make_engine(tier=tier, load_deadline_s=LONG_S)
    steps = CountedSteps(engine)
    serving = AsyncEngine(engine)
    try:
        answer = asyncio.create_task(serving.generate(Request(PROMPT, SAMPLING)))
        assert await happens(tier.has_load)
        assert not await asyncio.to_thread(steps.too_many.wait, 0.3), "the thread spins"
        other = await serving.generate(
            Request([60, 61, 62], SAMPLING)
        )  # it can be reached, and held up nobody
        assert_right(other)
        assert not answer.done()
        await asyncio.to_thread(tier.finish)
        assert_right(await asyncio.wait_for(answer, 60.0), num_cached_tokens=40)
    finally:
        await serving.close()
    assert not steps.too_many.is_set(), "it spins"


async def test_the_thread_asks_a_tier_again_that_does_not_know(tier):
    tier.answer = lambda run, count: TierState.HIT if tier.was_asked_often.is_set() else TierState.RETRY
    serving = AsyncEngine(make_engine(tier=tier, load_deadline_s=LONG_S)[0])
    try:
        answer = asyncio.create_task(serving.generate(Request(PROMPT, SAMPLING)))
        assert await happens(tier.has_load)
        tier.finish()
        assert_right(await asyncio.wait_for(answer, 60.0), num_cached_tokens=40)
    finally:
        await serving.close()


async def test_the_thread_gives_up_a_load_that_hangs(tier):
    serving = AsyncEngine(make_engine(tier=tier, load_deadline_s=0.02)[0])
    try:
        assert_right(await serving.generate(Request(PROMPT, SAMPLING)), num_cached_tokens=0)
        assert tier.has_load.is_set()
        stats = await serving.call(lambda engine: engine.stats())
        assert stats.transfers is not None
        assert stats.transfers.late_loads == 1
    finally:
        await serving.close()


async def test_an_engine_is_closed_while_blocks_are_loaded(tier):
    serving = AsyncEngine(make_engine(tier=tier, load_deadline_s=LONG_S)[0])
    answer = asyncio.create_task(serving.generate(Request(PROMPT, SAMPLING)))
    assert await happens(tier.has_load)
    await serving.close()
    with pytest.raises(EngineStoppedError):
        await answer
    ((_, future),) = tier.loads
    assert future.cancelled()


async def test_what_is_saved_after_the_last_request_reaches_the_tier():
    tier = ScriptedTier()
    saved = threading.Event()
    save = tier.save
    tier.save = lambda run, data: (save(run, data), saved.set())  # type: ignore[method-assign]
    serving = AsyncEngine(make_engine(tier=tier)[0])
    try:
        await serving.generate(Request(PROMPT, SAMPLING))
        assert await happens(saved)
        assert len(tier.kept) >= 5
    finally:
        await serving.close()


@pytest.mark.injects_faults
async def test_an_engine_that_is_made_anew_goes_on_with_the_tier_and_the_old_one_is_gone(tier, monkeypatch):
    monkeypatch.setattr("paged_language_model.MADE", deque(maxlen=0))  # what is made may go
    monkeypatch.setattr(logging.getLogger("radixkv"), "disabled", True)  # tracebacks hold on to frames
    made: list[weakref.ref[Engine]] = []

    def die(batch: Any) -> bool:
        if len(made) == 1:
            raise SystemExit("memory is broken")
        return False

    def source() -> Engine:
        engine, _ = make_engine(model=PagedHashModel(64, 8, fail_if=die), tier=tier, load_deadline_s=LONG_S)
        made.append(weakref.ref(engine))
        return engine

    serving = AsyncEngine(source, restart=RestartPolicy(pause_s=0.001))
    try:
        answer = asyncio.create_task(serving.generate(Request(PROMPT, SAMPLING)))
        assert await happens(tier.has_load)
        tier.has_load.clear()
        for request in (serving.generate(Request([60, 61, 62], SAMPLING)), answer):
            with pytest.raises(EngineStoppedError):
                await request
        await until_async(lambda: serving.is_healthy)
        answer = asyncio.create_task(serving.generate(Request(PROMPT, SAMPLING)))
        assert await happens(tier.has_load)
        (_, late), _ = tier.loads
        assert late.cancelled()
        tier.finish(1)
        assert_right(await asyncio.wait_for(answer, 60.0), num_cached_tokens=40)
        del answer, request
        await until_async(lambda: gc.collect() >= 0 and made[0]() is None)
    finally:
        await serving.close()


def test_an_llm_waits_for_the_tier(tier):
    engine, _ = make_engine(tier=tier, load_deadline_s=LONG_S)
    steps = CountedSteps(engine)

    def load_when_wanted() -> None:
        assert tier.has_load.wait(60.0)
        steps.too_many.wait(0.2)
        tier.finish()

    loader = threading.Thread(target=load_when_wanted)
    loader.start()
    outputs = LLM.from_engine(engine).generate([PROMPT, [60, 61, 62]], SAMPLING, namespace=("", "", "", ""))
    loader.join()
    assert_right(outputs[0], num_cached_tokens=40)
    assert outputs[1].outputs[0].token_ids == greedy_reference([60, 61, 62], 4)
    assert not steps.too_many.is_set(), "it spins"
