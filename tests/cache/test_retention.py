"""Pins, their TTL and budget; quotas: what must survive a flood, and what must not wedge."""

from __future__ import annotations

import pytest
from cache_model import FakeClock

from radixkv import InvalidRequestError, OutOfBlocks, PrefixCache


def store(cache: PrefixCache, tokens: list[int], namespace: str = "") -> None:
    lease = cache.acquire(tokens, namespace)
    lease.commit(len(tokens))
    lease.release()
    cache.check()


def flood(cache: PrefixCache, times: int, namespace: str = "") -> None:
    """Requests of 8 tokens each that fill the pool `times` times over."""
    for i in range(times * cache.num_blocks * cache.block_size // 8):
        store(cache, [1000 + i] * 8, namespace)


def test_a_pinned_prefix_survives_a_flood_of_ten_times_the_pool() -> None:
    cache = PrefixCache(40, 4)
    prompt = list(range(30))
    store(cache, prompt)
    assert cache.pin(prompt, ttl=300.0) == 30
    assert cache.stats.pinned_blocks == 8
    flood(cache, 10)
    assert cache.match(prompt).num_tokens == 30
    assert cache.unpin(prompt)
    assert not cache.unpin(prompt)
    flood(cache, 2)
    assert cache.match(prompt).num_tokens == 0


def test_a_pin_expires_and_a_hit_renews_it() -> None:
    clock = FakeClock()
    cache = PrefixCache(40, 4, clock=clock)
    store(cache, list(range(16)))
    cache.pin(list(range(16)), ttl=10.0)
    clock.now += 8
    cache.acquire([*range(16), 99]).release()
    clock.now += 8
    assert cache.stats.pinned_blocks == 4, "renewed by the hit"
    cache.match(list(range(16)))
    clock.now += 3
    assert cache.stats.pinned_blocks == 0, "looking is not a hit"
    cache.check()
    flood(cache, 2)
    report = cache.explain(list(range(16)))
    assert report.reason == "expired"


def test_the_pin_budget_is_never_exceeded() -> None:
    cache = PrefixCache(40, 4, pin_budget=0.25)
    for i in range(5):
        store(cache, [i] * 16)
    assert [cache.pin([i] * 16) for i in range(5)] == [16, 16, 8, 0, 0]
    assert cache.stats.pinned_blocks == 10
    cache.check()
    assert cache.pin([0] * 16) == 16, "pinning again costs nothing more"


def test_pins_share_the_budget_for_a_common_prefix() -> None:
    cache = PrefixCache(40, 4, pin_budget=0.25)
    for i in range(4):
        store(cache, [*range(24), *[100 + i] * 4])
        cache.pin([*range(24), *[100 + i] * 4])
    assert cache.stats.pinned_blocks == 6 + 4
    cache.check()


def test_pins_give_way_to_a_request_that_could_never_run_beside_them() -> None:
    cache = PrefixCache(10, 4)
    store(cache, list(range(20)))
    cache.pin(list(range(20)))
    lease = cache.acquire([7] * 12)
    with pytest.raises(OutOfBlocks):  # waiting helps: blocks will be released
        cache.acquire([8] * 28)
    assert cache.stats.pinned_blocks == 5
    lease.release()
    big = cache.acquire([8] * 28)
    assert cache.stats.pins_given_way == 1
    big.append([8] * 12)
    with pytest.raises(OutOfBlocks):
        big.append([8])
    cache.check()


def test_a_pin_survives_appends_and_splits() -> None:
    cache = PrefixCache(40, 4)
    lease = cache.acquire(list(range(10)))
    lease.commit(10)
    assert cache.pin(list(range(6))) == 6
    for token in range(20):
        lease.append([token])
        lease.commit(lease.num_tokens)
        cache.check()
    lease.release()
    cache.evict(100)
    assert cache.match(list(range(6))).num_tokens == 6
    assert cache.stats.pinned_blocks == 2


def test_a_ttl_must_be_positive() -> None:
    with pytest.raises(InvalidRequestError):
        PrefixCache(4).pin([1], ttl=0.0)


def test_a_floor_protects_a_quiet_tenant() -> None:
    cache = PrefixCache(40, 4, quotas={"quiet": (8, None)})
    store(cache, list(range(48)), "quiet")
    flood(cache, 3, "noisy")
    assert cache.match(list(range(48)), "quiet").num_tokens == 32
    assert cache.available_blocks("noisy") == 32
    assert cache.available_blocks("quiet") == 40


def test_a_ceiling_bounds_a_noisy_tenant() -> None:
    cache = PrefixCache(40, 4, quotas={"noisy": (0, 10)})
    store(cache, list(range(40)), "other")
    flood(cache, 3, "noisy")
    assert cache.match(list(range(40)), "other").num_tokens == 40
    assert cache.stats.cached_blocks == 10 + 10
    with pytest.raises(OutOfBlocks):
        cache.acquire(list(range(44)), "noisy")
    assert cache.available_blocks("noisy") == 10


def test_a_floor_holds_for_requests_of_any_size() -> None:
    cache = PrefixCache(40, 4, quotas={"quiet": (8, None)})
    store(cache, list(range(48)), "quiet")
    for i in range(30):
        store(cache, [1000 + i] * 28, "noisy")
    assert cache.match(list(range(48)), "quiet").num_tokens == 32


def test_a_public_prefix_that_nobody_holds_does_not_count_against_a_ceiling() -> None:
    cache = PrefixCache(99, 4, quotas={"small": (0, 10)})
    system = list(range(80))
    cache.publish(system)
    store(cache, system, "other")
    lease = cache.acquire([*system, 1, 2, 3, 4, 5], "small")
    assert lease.num_cached_tokens == 80
    lease.commit(85)
    cache.check()
    with pytest.raises(OutOfBlocks) as error:
        cache.acquire([*system, *range(200, 240)], "small")
    assert (error.value.needed, error.value.available) == (10, 8)
