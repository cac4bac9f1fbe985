# SPDX-License-Identifier: Apache-2.0
"""The adaptive policy: its statistics, its shadow of LRU, and its behaviour at both ends."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fuzzing import examples
from hypothesis import given
from hypothesis import strategies as st
from trace_tools import build, plain_lru, random_paths

from radixkv import PrefixCache
from radixkv.cache.eviction.adaptive import Adaptive
from radixkv.cache.eviction.reuse_statistics import EDGES, NUM_BINS, ReuseStatistics, age_bin, gittins_index
from radixkv.cache.eviction.shadow_lru import ShadowLRU
from radixkv.cli.replay.bounds import offline_optimum
from radixkv.cli.replay.driver import replay


def test_bins_hold_their_ages() -> None:
    for age in [*range(10_000), 2**17, 2**19 + 1, 2**30]:
        found = age_bin(age)
        assert 0 <= found < NUM_BINS
        if found < NUM_BINS - 1:
            assert EDGES[found] - 1e-6 <= age < EDGES[found + 1]


def test_index_of_a_constant_hazard_is_that_hazard() -> None:
    hazard = np.array([[0.01] * NUM_BINS, [0.3] * NUM_BINS])
    assert gittins_index(hazard) == pytest.approx(hazard, rel=1e-6)


def test_index_of_a_falling_hazard_is_the_hazard_now_and_of_a_rising_one_is_more() -> None:
    falling = np.geomspace(0.5, 1e-6, NUM_BINS)[None]
    assert gittins_index(falling) == pytest.approx(falling, rel=1e-6)
    rising = falling[:, ::-1]
    index = gittins_index(rising)
    assert (index[0, :10] > 10 * rising[0, :10]).all()
    assert (index >= rising * (1 - 1e-9)).all()
    assert (np.diff(index[0]) >= -1e-12).all()


def test_statistics_find_the_rate_of_use() -> None:
    # every request leaves 10 blocks; half of them are used again 8 requests later, the rest never
    statistics = ReuseStatistics(1)
    for now in range(1, 2001):
        statistics.begin(now)
        if now > 8:
            statistics.use(now - 8, 0, 8, 5)
        statistics.add(now, 0, 10)
        if now % 64 == 0:
            statistics.refresh(now)
    assert statistics.counted_blocks == 2000 * 10 - 1992 * 5
    worth = statistics.worth[0]
    assert worth[age_bin(8)] > 5 * worth[age_bin(32)]
    assert worth[age_bin(4)] > worth[age_bin(32)]


def test_statistics_stay_bounded() -> None:
    statistics = ReuseStatistics(2)
    for now in range(1, 40_001):
        statistics.begin(now)
        statistics.add(now, now % 2, 1)
    statistics.refresh(40_000)
    assert statistics.counted_blocks == 40_000
    statistics.add(1, 1, -1)  # long before the rows that are told apart
    assert statistics.counted_blocks == 39_999


@given(seed=st.integers(0, 10**6), capacity=st.integers(5, 60))
def test_shadow_equals_lru(seed: int, capacity: int) -> None:
    paths = random_paths(random.Random(seed), requests=80, blocks=3, depth=5)
    shadow = ShadowLRU(capacity)
    last_use: dict[int, int] = {}
    hits = []
    for request, path in enumerate(paths):
        shadow.begin(request)
        hit = 0
        for depth, block in enumerate(path):
            hit += shadow.holds(last_use[block], depth, 1) if block in last_use else 0
        hits.append(hit)
        for block in path:
            if block in last_use:
                shadow.forget(last_use[block], 1)
        for depth, block in enumerate(path):
            shadow.use(request, depth, 1)
            last_use[block] = request
    assert hits == plain_lru(paths, capacity)


def test_a_loop_larger_than_the_cache_still_hits() -> None:
    # LRU drops each document just before it is asked for again
    documents = [list(range(20 * n, 20 * n + 20)) for n in range(100)]
    trace = build([documents[n % 100] for n in range(3000)])
    assert replay(trace, "lru", 600).hit_blocks == 0
    optimum = offline_optimum(trace, 600).hit_blocks
    assert replay(trace, "adaptive", 600).hit_blocks > 0.8 * optimum


def test_one_hit_tails_do_not_push_out_what_is_used_again() -> None:
    rng = random.Random(5)
    prompts = [list(range(30 * n, 30 * n + 30)) for n in range(40)]
    fresh = iter(range(100_000, 10**9))
    paths = []
    for _ in range(3000):
        if rng.random() < 0.5:
            paths.append([*prompts[min(int(rng.paretovariate(1.0)) - 1, 39)], next(fresh)])
        else:
            paths.append([next(fresh) for _ in range(60)])
    trace = build(paths)
    assert replay(trace, "adaptive", 400).hit_blocks > 1.2 * replay(trace, "lru", 400).hit_blocks


@pytest.mark.parametrize("seed", range(examples(1)))
def test_never_far_below_lru(seed: int) -> None:
    # sessions that come back soon or not at all: LRU's home ground
    rng = random.Random(seed)
    fresh = iter(range(10**9))
    sessions: list[list[int]] = []
    paths = []
    for _ in range(2500):
        if len(sessions) > 12 and rng.random() < 0.8:
            session = sessions[-1 - min(int(rng.expovariate(0.3)), 11)]
        else:
            session = []
            sessions.append(session)
        session.extend(next(fresh) for _ in range(rng.randint(1, 6)))
        paths.append(list(session))
    trace = build(paths)
    for capacity in (200, 500, 2000):
        below = replay(trace, "lru", capacity).hit_blocks - replay(trace, "adaptive", capacity).hit_blocks
        assert 100 * below / trace.num_blocks <= 0.3


def test_invariants_with_real_tokens_discards_and_resets() -> None:
    rng = random.Random(2)
    policy = Adaptive()
    cache = PrefixCache(num_blocks=40, block_size=4, policy=policy)
    leases = []
    for step in range(1500):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
        if rng.random() < 0.6 and len(leases) < 3:
            lease = cache.acquire(tokens)
            lease.commit(rng.randint(lease.num_cached_tokens, len(tokens)))
            leases.append(lease)
        elif leases:
            leases.pop(rng.randrange(len(leases))).release(discard=rng.random() < 0.2)
        if rng.random() < 0.05:
            cache.evict(rng.randint(1, 10))
        if step % 400 == 399:
            cache.reset()
        if step % 10 == 0:
            cache.check()
    for lease in leases:
        lease.release()
    cache.check()
    assert repr(policy).startswith("Adaptive(")


def test_bookkeeping_follows_the_tree() -> None:
    # what is counted is what is cached and what is remembered, block by block
    rng = random.Random(9)
    policy = Adaptive()
    cache = PrefixCache(num_blocks=60, block_size=1, policy=policy)
    for path in random_paths(rng, requests=600, blocks=4, depth=7):
        lease = cache.acquire([*path, 2**20])
        lease.commit(len(path))
        lease.release()
        assert policy.counted_blocks == cache.stats.cached_blocks + policy.remembered_blocks
