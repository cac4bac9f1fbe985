# SPDX-License-Identifier: Apache-2.0
"""What a reset forgets, at what cost, and what requests keep."""

from __future__ import annotations

import gc

import pytest
from measuring import Work, count_work
from stored_prompts import store_checked as store

from radixkv import OutOfBlocks, PrefixCache
from radixkv.cache.eviction.registry import POLICIES
from radixkv.cache.node import Node


def test_reset_keeps_held_blocks_valid_and_private() -> None:
    cache = PrefixCache(64, 4)
    store(cache, [9] * 8)
    lease = cache.acquire(list(range(10)))
    lease.commit(10)
    table = lease.block_table.tolist()
    cache.reset()
    cache.check()
    assert cache.stats.cached_blocks == 0
    assert cache.match(list(range(10))).num_tokens == 0
    assert lease.block_table.tolist() == table
    lease.append([1, 2, 3])
    lease.commit(13)
    assert cache.match([*range(10), 1, 2, 3]).num_tokens == 0
    lease.release()
    assert cache.stats.free_blocks == 64


def test_a_lease_from_before_a_reset_shares_nothing_after_it() -> None:
    cache = PrefixCache(64, 4)
    lease = cache.acquire(list(range(10)))
    cache.reset()
    lease.commit(10)
    assert cache.match(list(range(10))).num_tokens == 0
    lease.release()
    assert cache.stats.free_blocks == 64


def filled(num_prompts: int) -> PrefixCache:
    """A cache with prompts of three blocks, of which ten share the first one each."""
    cache = PrefixCache(3 * num_prompts, 2)
    for i in range(num_prompts):
        lease = cache.acquire([i // 10, 0, 10_000 + i, 1, 2, 3])
        lease.commit(6)
        lease.release()
    return cache


def test_a_reset_takes_as_long_for_many_nodes_as_for_few() -> None:
    def work(num_prompts: int) -> Work:
        cache = filled(num_prompts)
        held = [cache.acquire([i, 0, 10_000 + 10 * i, 1, 9]) for i in range(4)]
        work = count_work(cache.reset, warm_up=0)
        cache.check()
        for lease in held:
            lease.release()
        return work

    few, many = work(40), work(1000)
    assert many.instructions <= 1.2 * few.instructions
    assert many.c_calls <= 1.2 * few.c_calls


def test_what_a_reset_leaves_is_free_and_explained_while_it_is_used_again() -> None:
    cache = filled(40)
    held = cache.acquire([3, 0, 10_030, 1, 2, 3])
    table = held.block_table.tolist()
    pinned = [2, 0, 10_020, 1, 2, 3]
    assert cache.pin(pinned).num_tokens == 6
    cache.reset()
    cache.check()
    assert cache.stats.free_blocks == cache.num_blocks - 3
    assert cache.stats.num_nodes == cache.stats.num_pins == cache.stats.cached_blocks == 0
    leases = []
    for i in range(38):  # three blocks each: in the end nearly all of them are in use
        assert cache.explain([i // 10, 0, 10_000 + i, 1, 2, 3]).reason == "reset"
        lease = cache.acquire([20_000 + i] * 6)
        assert cache.stats.free_blocks == cache.num_blocks - 3 * (i + 2)
        assert set(lease.block_table.tolist()).isdisjoint(table)
        lease.commit(6)
        leases.append(lease)
        cache.check()
    assert cache.acquire([1, 5]).report.reason == "first_seen"
    with pytest.raises(OutOfBlocks):
        cache.acquire([1] * 7)
    for lease in [*leases, held]:
        lease.release()
    cache.check()


def test_a_reset_is_told_apart_from_evictions_before_and_after_it() -> None:
    cache = PrefixCache(16, 4)
    store(cache, list(range(8)))
    cache.evict(1)
    cache.reset()
    assert cache.explain([0, 1, 2, 3, 9]).reason == "reset"
    assert cache.explain(list(range(8))).reason == "reset"
    store(cache, list(range(8)))
    cache.evict(2)
    assert cache.explain(list(range(8))).reason == "evicted"
    cache.reset()
    assert cache.explain(list(range(8))).reason == "evicted"


def test_the_tokens_of_a_reset_are_forgotten_like_those_of_evictions() -> None:
    cache = PrefixCache(16, 1, ghost_blocks=24)
    store(cache, list(range(8)))
    cache.reset()
    gc.collect()
    before = sum(type(thing) is Node for thing in gc.get_objects())
    for i in range(12):
        assert cache.explain(list(range(8))).reason == "reset"
        store(cache, [100 + 2 * i, 101 + 2 * i])
        cache.evict(2)
    assert cache.explain(list(range(8))).reason == "first_seen"
    store(cache, [1])
    cache.evict(1)
    after = sum(type(thing) is Node for thing in gc.get_objects())
    assert after < before


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_goes_on_after_a_reset(policy: str) -> None:
    cache = PrefixCache(12, 2, policy)
    for round_number in range(3):
        for i in range(20):
            lease = cache.acquire([i % 3, 0, i, i, 5])
            lease.commit(5)
            lease.release()
            cache.check()
        cache.reset()
        cache.check()
        assert cache.stats.resets == round_number + 1
