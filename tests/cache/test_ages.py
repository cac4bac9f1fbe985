# SPDX-License-Identifier: Apache-2.0
"""Ages in seconds: of nodes, and of what was evicted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from waiting import Clock

from radixkv import PrefixCache
from radixkv.cache.reporting.ages import AGE_BOUNDS, UseTimes


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=50))
def test_ages_are_right_to_a_quarter_of_a_second(gaps: list[float]) -> None:
    clock = Clock()
    times = UseTimes(clock)
    used_at = []
    for tick, gap in enumerate(gaps, 1):
        clock.now += gap
        times.note(tick)
        used_at.append(clock.now)
    clock.now += 3.0
    for tick, at in enumerate(used_at, 1):
        assert 0.0 <= times.age_s(tick) - (clock.now - at) < 0.25 + 1e-6


def test_a_long_life_stays_small_and_recent_ages_exact() -> None:
    clock = Clock()
    times = UseTimes(clock)
    for tick in range(1, 20_001):
        clock.now += 1.0
        times.note(tick)
    assert times.age_s(20_000) == 0.0
    assert times.age_s(19_000) == 1000.0
    assert 19_999.0 <= times.age_s(1) <= 20_000.0


def test_evicted_blocks_are_counted_by_their_age() -> None:
    clock = Clock()
    cache = PrefixCache(num_blocks=8, block_size=4, clock=clock)

    def serve(first: int, num_tokens: int) -> None:
        lease = cache.acquire(range(first, first + num_tokens))
        lease.commit(num_tokens)
        lease.release()

    serve(0, 8)
    clock.now += 100.0
    serve(100, 12)
    clock.now += 10.0
    assert sum(cache.stats.evicted_by_age) == 0
    assert cache.evict(3) == 3
    stats = cache.stats
    assert sum(stats.evicted_by_age) == stats.evicted_blocks == 3
    assert stats.evicted_by_age[AGE_BOUNDS.index(300.0)] == 2
    assert stats.evicted_by_age[AGE_BOUNDS.index(15.0)] == 1
    assert stats.evicted_age_s == 2 * 110.0 + 10.0
