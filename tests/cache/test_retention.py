# SPDX-License-Identifier: Apache-2.0
"""Pins, their TTL and budget; quotas: what must survive a flood, and what must not wedge."""

from __future__ import annotations

import contextlib
import gc
import random
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from measuring import count_work
from stored_prompts import store_checked as store
from waiting import Clock

from radixkv import InvalidRequestError, OutOfBlocks, PrefixCache


def flood(cache: PrefixCache, times: int, namespace: str = "") -> None:
    """Requests of 8 tokens each that fill the pool `times` times over."""
    for i in range(times * cache.num_blocks * cache.block_size // 8):
        store(cache, [1000 + i] * 8, namespace)


def test_a_pinned_prefix_survives_a_flood_of_ten_times_the_pool() -> None:
    cache = PrefixCache(40, 4)
    prompt = list(range(30))
    store(cache, prompt)
    assert cache.pin(prompt, ttl=300.0).num_tokens == 30
    assert cache.stats.pinned_blocks == 8
    flood(cache, 10)
    assert cache.match(prompt).num_tokens == 30
    assert cache.unpin(prompt)
    assert not cache.unpin(prompt)
    flood(cache, 2)
    assert cache.match(prompt).num_tokens == 0


def test_a_pin_expires_and_a_hit_renews_it() -> None:
    clock = Clock()
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
    pins = [cache.pin([i] * 16) for i in range(5)]
    assert [pin and pin.num_tokens for pin in pins] == [16, 16, 8, None, None]
    assert cache.stats.pinned_blocks == 10
    cache.check()
    assert cache.pin([0] * 16).num_tokens == 16, "pinning again costs nothing more"


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
    assert cache.pin(list(range(6))).num_tokens == 6
    for token in range(20):
        lease.append([token])
        lease.commit(lease.num_tokens)
        cache.check()
    lease.release()
    cache.evict(100)
    assert cache.match(list(range(6))).num_tokens == 6
    assert cache.stats.pinned_blocks == 2


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


def growth(run: Callable[[int], object], times: int) -> int:
    """Bytes that are still there after `times` more calls, the first ones' left out."""
    for i in range(20):
        run(i)
    tracemalloc.start()
    try:
        for i in range(20, 20 + times):
            run(i)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_renewing_a_pin_takes_no_memory() -> None:
    cache = PrefixCache(600, 16)
    prompt = list(range(8000))
    store(cache, prompt)
    encoded = cache.encode(prompt)
    assert growth(lambda i: cache.pin(encoded, ttl=[300, None][i % 2]), 1000) < 100_000
    assert cache.stats.num_pins == 1
    cache.check()


def test_a_pin_takes_memory_for_what_it_pins_not_for_what_was_asked() -> None:
    cache = PrefixCache(2, 16, pin_budget=0.5)
    store(cache, list(range(16)))
    rng = np.random.default_rng(0)

    def pin(i: int) -> None:
        prompt = rng.integers(0, 1000, 20_000)
        prompt[:16] = range(16)
        assert cache.pin(prompt).num_tokens == 16

    assert growth(pin, 100) < 200_000
    assert cache.stats.num_pins == 120
    assert cache.stats.pinned_blocks == 1
    cache.check()


def test_a_pin_for_at_least_a_time_shortens_no_other() -> None:
    clock = Clock()
    cache = PrefixCache(8, 4, clock=clock)
    store(cache, list(range(16)))
    cache.pin(list(range(8)))
    cache.pin(list(range(12)), ttl=300.0)
    for end, left in ((8, None), (12, 300.0), (16, 60.0)):
        assert cache.pin(list(range(end)), ttl=60.0, at_least=True).num_tokens == end
        cache.check()
        assert [pin.expires_in_s for pin in cache.pins() if pin.num_tokens == end] == [left]
    assert cache.pin(list(range(16)), ttl=3600.0, at_least=True).num_tokens == 16
    assert cache.stats.num_pins == 3
    clock.now += 3000.0
    assert [pin.num_tokens for pin in cache.pins()] == [8, 16]
    cache.check()


def test_pins_for_at_least_a_time_beyond_the_budget_are_one() -> None:
    """Each hit of what they share renews them all: they would never go."""
    cache = PrefixCache(16, 4, pin_budget=0.25)
    store(cache, list(range(16)))
    for i in range(20):
        store(cache, [*range(16), 50 + i, 1, 2, 3])
        assert cache.pin([*range(16), 50 + i, 1, 2], ttl=60.0, at_least=True).num_tokens == 16
        assert cache.stats.num_pins == 1
        cache.check()


def test_each_of_many_pins_at_one_place_has_its_own_time() -> None:
    clock = Clock()
    cache = PrefixCache(8, 4, clock=clock)
    store(cache, list(range(16)))
    for i in range(10):
        cache.pin([*range(16), i], ttl=1.0 + i)
    for i in range(10):
        assert cache.stats.num_pins == 10 - i
        cache.check()
        clock.now += 1.0
    cache.pin([*range(16), 1], ttl=5.0)
    cache.pin([*range(16), 2], ttl=2.0)
    clock.now += 1.5
    cache.acquire([*range(16), 99]).release(discard=True)
    clock.now += 1.5
    assert cache.stats.num_pins == 2, "both were renewed"
    clock.now += 1.0
    assert cache.stats.num_pins == 1
    assert not cache.unpin([*range(16), 2])
    assert cache.unpin([*range(16), 1])
    cache.check()


def test_pins_give_way_in_the_order_in_which_they_would_expire() -> None:
    clock = Clock()
    cache = PrefixCache(8, 4, clock=clock, pin_budget=1.0)
    for i, ttl in enumerate([None, 30.0, 10.0, 20.0]):
        store(cache, [i] * 4)
        cache.pin([i] * 4, ttl=ttl)
    clock.now += 5.0
    cache.acquire([2] * 5).release(discard=True)  # expires after 15 s now
    clock.now += 1.0
    cache.acquire([3] * 5).release(discard=True)  # and this one after 26 s
    for left in ([0, 1, 3], [0, 1], [0], []):
        cache.acquire(list(range(100, 100 + 4 * (8 - len(left))))).release(discard=True)
        assert [i for i in range(4) if cache.match([i] * 4).num_tokens] == left
        assert cache.stats.num_pins == len(left)
        cache.check()
    assert cache.stats.pins_given_way == 4


def test_no_pin_ends_for_a_request_that_would_not_fit_without_any() -> None:
    cache = PrefixCache(12, 4, quotas={"ada": (0, 6)}, pin_budget=1.0)
    for i in range(2):
        store(cache, [i] * 8, "ada")
        cache.pin([i] * 8, "ada")
    held = cache.acquire([9] * 32)
    for _ in range(2):
        with pytest.raises(OutOfBlocks):  # 4 blocks are pinned, all others held
            cache.acquire([7] * 20, "ada")
        assert (cache.stats.num_pins, cache.stats.pinned_blocks, cache.stats.pins_given_way) == (2, 4, 0)
        cache.check()
    held.release(discard=True)
    flood(cache, 3)
    assert [cache.match([i] * 8, "ada").num_tokens for i in range(2)] == [8, 8]
    cache.acquire([7] * 20, "ada").release()
    assert cache.stats.num_pins == 0
    cache.check()


def give_way_work(num_pins: int) -> float:
    """Instructions per pin when many give way to one request."""

    caches = [PrefixCache(2 * num_pins, 1, pin_budget=1.0) for _ in range(2)]
    for cache in caches:
        for i in range(num_pins):
            lease = cache.acquire([i, 1])
            lease.commit(2)
            lease.release()
            cache.pin([i, 1])

    def run() -> None:
        cache = caches.pop()
        cache.acquire(list(range(10**6, 10**6 + 2 * num_pins)))
        assert cache.stats.num_pins == 0

    return count_work(run, warm_up=0).instructions / num_pins


def test_many_pins_give_way_in_linear_time() -> None:
    few, many = give_way_work(32), give_way_work(768)
    assert many < 1.3 * few


def test_a_tenants_salts_share_its_quota() -> None:
    cache = PrefixCache(40, 4, quotas={"tenant": (0, 10), ("tenant", "own"): (0, 3)})
    for salt in ("a", "b"):
        lease = cache.acquire(list(range(1, 21)), ("tenant", salt, "", "model"))
        lease.commit(20)
        if salt == "a":
            lease.release()
            cache.pin(list(range(1, 21)), ("tenant", salt, "", "model"))
    assert cache.available_blocks(("tenant", "c")) == 0
    assert cache.available_blocks("tenant") == 0
    assert cache.available_blocks(("tenant", "own")) == 3
    assert cache.available_blocks(("other", "tenant")) == 30
    with pytest.raises(OutOfBlocks):
        cache.acquire([9], ("tenant", "c"))
    cache.check()
    lease.release()


def quota_work(num_groups: int) -> int:
    """Instructions of an acquire that evicts, among so many quotas."""
    quotas = {f"tenant {i}": (1, None) for i in range(num_groups)}
    cache = PrefixCache(2 * num_groups + 64, 4, quotas=quotas)
    for i in range(num_groups):
        for j in range(2):
            lease = cache.acquire([j] * 4, f"tenant {i}")
            lease.commit(4)
            lease.release()
    rng = iter(range(10**6))

    def run() -> None:
        lease = cache.acquire([next(rng) for _ in range(8)], f"tenant {num_groups // 2}")
        lease.commit(8)
        lease.release()

    for _ in range(40):
        run()
    work = count_work(run).instructions
    cache.check()
    assert cache.stats.evicted_blocks
    return work


def test_an_acquire_among_many_quotas_costs_no_more() -> None:
    few, many = quota_work(10), quota_work(1000)
    assert many < 1.5 * few


def test_pins_are_listed_with_what_they_pin_and_unpinned_by_it() -> None:
    clock = Clock()
    cache = PrefixCache(16, 4, clock=clock)
    store(cache, list(range(10)), "a")
    cache.pin([*range(10), 77, 78], "a", ttl=30.0)
    cache.pin(list(range(5)), "a")
    clock.now += 10.0
    listed = [(pin.namespace, pin.token_ids, pin.num_tokens, pin.expires_in_s) for pin in cache.pins()]
    assert listed == [(("a",), tuple(range(10)), 10, 20.0), (("a",), tuple(range(5)), 5, None)]
    assert not cache.unpin(list(range(10)), "b")
    assert not cache.unpin(list(range(9)), "a")
    assert cache.unpin(list(range(10)), "a")
    assert cache.unpin(list(range(5)), "a")
    assert not cache.pins()
    cache.check()


def test_pins_of_a_public_prefix_are_their_namespaces_own():
    cache = PrefixCache(num_blocks=64, block_size=4)
    shared = list(range(8))
    cache.publish(shared)
    lease = cache.acquire([*shared, 9], "writer")
    lease.commit(8)
    lease.release(discard=False)
    assert cache.pin([*shared, 1, 2], "a", ttl=60.0).num_tokens == 8
    assert cache.pin([*shared, 3], "b").num_tokens == 8
    gc.collect()
    assert not cache.unpin(shared, "c")
    assert cache.unpin(shared, "b")
    assert [pin.namespace for pin in cache.pins()] == [("a",)]
    assert not cache.unpin(shared, "b")
    assert cache.unpin([*shared, 1, 2], "a")
    assert not cache.pins()
    cache.check()


def test_pins_expire_also_after_a_request_for_which_they_could_not_make_room() -> None:
    clock = Clock()
    cache = PrefixCache(8, 4, clock=clock)
    store(cache, list(range(8)))
    cache.pin(list(range(8)), ttl=5.0)
    cache.pin(list(range(4)), ttl=50.0)
    with pytest.raises(OutOfBlocks):
        cache.acquire([9] * 4 * 9)  # more than the pool
    lease = cache.acquire([7] * 8)
    with pytest.raises(OutOfBlocks):
        lease.append([7] * 4 * 7)
    lease.release()
    assert [pin.num_tokens for pin in cache.pins()] == [8, 4]
    clock.now += 6.0
    assert (cache.stats.num_pins, cache.stats.pinned_blocks) == (1, 1)
    cache.check()


@pytest.mark.parametrize("hash_function", [None, lambda data: 7])
def test_pins_of_different_tokens_are_different_pins_whatever_the_hash(
    hash_function: Callable[[bytes], int] | None,
) -> None:
    cache = PrefixCache(32, 4, hash_function=hash_function)
    prompts = [[i, *range(1, 8)] for i in range(3)]
    for namespace in ("a", "b"):
        for prompt in prompts:
            store(cache, prompt, namespace)
            assert cache.pin(prompt, namespace).num_tokens == 8
            assert cache.pin(prompt, namespace, ttl=9.0).num_tokens == 8, "the same again"
    ids = {(pin.namespace, pin.id): pin.token_ids for pin in cache.pins()}
    assert sorted(ids.values()) == sorted(map(tuple, 2 * prompts))
    del ids[("b",), ids_of(cache, prompts[1], "b")]
    assert cache.unpin_id(ids_of(cache, prompts[1], "b"), "b")
    assert not cache.unpin([9, *range(1, 8)], "a")
    assert {(pin.namespace, pin.id): pin.token_ids for pin in cache.pins()} == ids
    for prompt in prompts:
        assert cache.unpin(prompt, "a")
    assert [pin.namespace for pin in cache.pins()] == [("b",)] * 2
    cache.check()


def ids_of(cache: PrefixCache, tokens: list[int], namespace: str) -> str:
    (found,) = [p.id for p in cache.pins() if (p.namespace, p.token_ids) == ((namespace,), tuple(tokens))]
    return found


def test_a_pin_keeps_its_id_when_more_is_cached_and_ends_also_after_its_prefix_became_public() -> None:
    cache = PrefixCache(32, 4)
    prompt = list(range(16))
    store(cache, prompt[:8], "a")
    assert cache.pin(prompt, "a").num_tokens == 8
    (before,) = cache.pins()
    store(cache, prompt, "a")
    assert cache.pin(prompt, "a").num_tokens == 16
    (after,) = cache.pins()
    assert after.id == before.id
    cache.publish(prompt[:8], "a")
    assert cache.unpin(prompt, "a")
    assert not cache.pins()
    cache.check()


def test_a_pin_for_at_least_a_time_ends_by_whatever_tokens_it_was_set_with() -> None:
    cache = PrefixCache(16, 4, pin_budget=0.25)
    store(cache, list(range(16)))
    asked = [[*range(16), 50 + i, 1, 2] for i in range(3)]
    for tokens in asked:
        assert cache.pin(tokens, ttl=60.0, at_least=True).num_tokens == 16
    assert not cache.unpin([*range(16), 99])
    assert cache.unpin(asked[1])
    assert not cache.pins()
    assert not cache.unpin(asked[0])
    cache.check()


@pytest.mark.parametrize("hash_function", [None, lambda data: 7])
def test_pins_that_share_what_is_cached_of_them_are_pins_of_their_own(
    hash_function: Callable[[bytes], int] | None,
) -> None:
    cache = PrefixCache(16, 4, hash_function=hash_function)
    store(cache, list(range(8)))
    one, two, never = ([*range(8), i, 1] for i in range(20, 23))
    for tokens in (one, two, one):
        assert cache.pin(tokens).num_tokens == 8
    assert len({pin.id for pin in cache.pins()}) == cache.stats.num_pins == 2
    assert not cache.unpin(never)
    assert cache.unpin(one)
    assert not cache.unpin(one)
    assert cache.unpin(list(range(8))), "the other pins just these"
    assert not cache.unpin(two)
    cache.check()


@pytest.mark.parametrize("seed", range(8))
def test_what_was_pinned_is_found_by_its_tokens_whatever_came_between(seed: int) -> None:
    rng = random.Random(seed)
    hash_function = rng.choice([None, lambda data: 7])
    cache = PrefixCache(24, 4, pin_budget=rng.choice([0.2, 0.5]), hash_function=hash_function)
    pinned: dict[tuple[int, ...], int] = {}
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 25))]
        action = rng.random()
        if action < 0.5:
            with contextlib.suppress(OutOfBlocks):
                lease = cache.acquire(tokens)
                lease.commit(rng.randrange(len(tokens) + 1))
                lease.release()
        elif action < 0.55:
            cache.evict(rng.randrange(8))
        elif action < 0.58:
            cache.publish(tokens)
        elif action < 0.8:
            pin = cache.pin(tokens)
            if pin is not None:
                pinned[tuple(tokens)] = pin.num_tokens
                assert pin == cache.pins()[-1]
        else:
            if pinned and rng.random() < 0.7:
                tokens = list(rng.choice(sorted(pinned)))
            by_part = [key for key, count in pinned.items() if key[:count] == tuple(tokens)]
            expected = tuple(tokens) in pinned or bool(by_part)
            before = {pin.id for pin in cache.pins()}
            assert cache.unpin(tokens) == expected
            assert len(before - {pin.id for pin in cache.pins()}) == expected
            if tuple(tokens) in pinned:
                del pinned[tuple(tokens)]
            elif expected:
                del pinned[by_part[0]]
        assert cache.stats.num_pins == len(pinned)
        cache.check()


@pytest.mark.parametrize("ttl", ["x", True, float("nan"), 0, -1.0, [1]])
def test_a_ttl_that_is_no_time_is_refused_clearly(ttl: object) -> None:
    with pytest.raises(InvalidRequestError, match="ttl must be a number of seconds above 0"):
        PrefixCache(4).pin([1], ttl=ttl)


@pytest.mark.parametrize("token_ids", [None, 7, 1.5, object(), {1, 2}, {1: 2}, iter([1])])
def test_what_is_no_sequence_of_tokens_is_refused_clearly(token_ids: object) -> None:
    cache = PrefixCache(4)
    for call in (cache.pin, cache.unpin, cache.match, cache.acquire, cache.explain, cache.encode):
        with pytest.raises(InvalidRequestError, match="token ids must be"):
            call(token_ids)
