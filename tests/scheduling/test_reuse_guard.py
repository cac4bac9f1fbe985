# SPDX-License-Identifier: Apache-2.0
"""Long prompts and cached prefixes in use: who waits, until when, and who never does."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.engine.config import SchedulerConfig
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request
from radixkv.scheduling.reuse_guard import PATIENCE
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence

# The pool is computed in 10.24 s, so that a prefix is in use for 5.12 s. Over 128 tokens are long.
POOL, BUDGET, TOKEN_S, IN_USE_S = 1024, 64, 0.01, 5.12


class Bench:
    """A scheduler in virtual time."""

    def __init__(self, policy: str = "prefix") -> None:
        self.now = 0.0
        self.cache = PrefixCache(POOL // 16, 16, clock=lambda: self.now)
        self.scheduler = Scheduler(
            self.cache,
            SchedulerConfig(max_num_batched_tokens=BUDGET, scheduling_policy=policy),
            clock=lambda: self.now,
        )

    def ask(self, seed: int, length: int, *, max_tokens: int = 1, **options) -> Sequence:
        tokens = np.random.default_rng(seed).integers(0, 1000, length, dtype=np.int32)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Sequence(Request(tokens, params, **options), arrival_s=self.now)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        batch = self.scheduler.schedule().batch
        if batch is None:
            return
        tokens = sum(entry.count for entry in batch.entries)
        seconds = max(0.2, TOKEN_S * tokens)
        self.now += seconds
        self.scheduler.complete(batch)
        self.scheduler.step_computed(tokens, seconds)
        for entry in batch.entries:
            if entry.samples:
                entry.request.append(7)
                if entry.request.num_output_tokens == entry.request.request.params.max_tokens:
                    self.scheduler.finish(entry.request)

    def answer(self, seed: int, length: int, **options) -> None:
        request = self.ask(seed, length, **options)
        while not request.num_output_tokens:
            self.step()


def busy(policy: str = "prefix", **options) -> Bench:
    """An agent has sent 600 tokens twice and pauses; another request runs."""
    bench = Bench(policy)
    bench.answer(1, 600)
    bench.answer(1, 600, **options)
    bench.ask(2, 20, max_tokens=300)
    bench.step()
    return bench


def test_a_long_prompt_waits_until_what_it_displaces_is_idle_for_long_enough():
    bench = busy()
    cold = bench.ask(3, 700)
    since = bench.now
    while not cold.is_running:
        bench.step()
    assert IN_USE_S - 1 < bench.now - since < IN_USE_S + 0.5
    assert bench.scheduler.num_waiting_for_turn == 0


def test_what_never_waits_for_prefixes_in_use():
    bench = busy()
    fits, short = bench.ask(4, 250), bench.ask(5, 100)
    bench.step()
    assert fits.is_running, "free blocks are enough for it"
    assert short.is_running
    over = busy(session_done=True)
    cold = over.ask(3, 700)
    over.step()
    assert cold.is_running, "the session of what it displaces is over"
    alone = busy()
    (other,) = alone.scheduler.running
    alone.scheduler.finish(other)
    cold = alone.ask(3, 700)
    alone.step()
    assert cold.is_running, "nothing else is to do"


def test_a_prompt_of_which_most_is_cached_does_not_wait():
    bench = busy()
    bench.ask(4, 250)
    for _ in range(8):
        bench.step()
    tokens = np.random.default_rng(1).integers(0, 1000, 600, dtype=np.int32)
    longer = np.concatenate([tokens, np.arange(200, dtype=np.int32)])
    again = Sequence(Request(longer, SamplingParams(max_tokens=1)), arrival_s=bench.now)
    bench.scheduler.add(again)
    bench.step()
    assert again.is_running


def test_nothing_is_displaced_where_requests_hold_the_whole_pool():
    cache = PrefixCache(64, 16, quotas={"ada": (0, 32), "bob": (8, None)})
    held = cache.acquire(np.arange(64 * 16, dtype=np.int32), "bob")
    assert not cache.displaces_younger(8, IN_USE_S, "ada")
    held.commit(64 * 16)
    held.release()
    assert cache.displaces_younger(8, IN_USE_S, "ada")
    assert not cache.displaces_younger(8, 0.0, "ada")


def test_where_nobody_comes_back_nothing_is_in_use():
    bench = Bench()
    for seed in range(3):
        bench.answer(seed, 300)
    bench.ask(9, 20, max_tokens=300)
    bench.step()
    cold = bench.ask(10, 800)
    bench.step()
    assert cold.is_running


def test_the_wait_is_bounded_where_the_prefix_is_used_again_and_again():
    bench = busy()
    cold = bench.ask(3, 700)
    since = bench.now
    while not cold.is_running:
        bench.answer(1, 600)
        for _ in range(12):
            bench.step()
    assert PATIENCE * IN_USE_S <= bench.now - since < (PATIENCE + 1) * IN_USE_S


@pytest.mark.parametrize(("priority", "begins"), [(-1, True), (0, False)])
def test_a_more_urgent_prompt_does_not_wait_for_less_urgent_ones(priority, begins):
    bench = busy("priority")
    cold = bench.ask(3, 700, priority=priority)
    bench.step()
    assert cold.is_running is begins
