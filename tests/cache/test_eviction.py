# SPDX-License-Identifier: Apache-2.0
"""What goes to make room, and what stays."""

from __future__ import annotations

import numpy as np
import pytest
from stored_prompts import store_checked as store

from radixkv import OutOfBlocks, PrefixCache
from radixkv.cache.eviction.registry import POLICIES


def test_out_of_blocks_changes_nothing() -> None:
    cache = PrefixCache(8, 4)
    store(cache, list(range(16)))
    held = cache.acquire([50] * 12)
    before = (cache.tree.show(), cache.stats.free_blocks, cache.stats.cached_blocks)
    with pytest.raises(OutOfBlocks) as error:
        cache.acquire([*range(6), *[60] * 20])
    assert (error.value.needed, error.value.available) == (6, 4)
    with pytest.raises(OutOfBlocks):
        held.append([1] * 40)
    assert (cache.tree.show(), cache.stats.free_blocks, cache.stats.cached_blocks) == before
    assert held.num_tokens == 12
    cache.check()


def test_an_acquirers_own_hits_are_never_its_victims() -> None:
    cache = PrefixCache(4, 4)
    table = store(cache, list(range(8)))
    store(cache, [70] * 8)
    lease = cache.acquire([*range(8), *[80] * 8])
    assert lease.num_cached_tokens == 8
    assert lease.block_table[:2].tolist() == table


def test_eviction_is_exact_and_takes_tails_first() -> None:
    cache = PrefixCache(64, 4)
    store(cache, list(range(40)))
    for count in (1, 3, 2):
        free = cache.stats.free_blocks
        assert cache.evict(count) == count
        assert cache.stats.free_blocks == free + count
    assert cache.match(list(range(40))).num_tokens == 16
    assert cache.evict(100) == 4
    assert cache.evict(1) == 0


class LeafLRU:
    """The reference: one entry per block, by prefix; oldest request goes first, deepest first on ties."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.time: dict[tuple[int, ...], int] = {}
        self.now = 0

    def request(self, blocks: list[int]) -> int:
        self.now += 1
        prefixes = [tuple(blocks[: i + 1]) for i in range(min(len(blocks), self.capacity))]
        hit = 0
        while hit < len(prefixes) and prefixes[hit] in self.time:
            hit += 1
        mine = set(prefixes)
        for prefix in prefixes[:hit]:
            self.time[prefix] = self.now
        for prefix in prefixes[hit:]:
            if len(self.time) >= self.capacity:
                parents = {p[:-1] for p in self.time}
                leaves = [p for p in self.time if p not in parents and p not in mine]
                del self.time[min(leaves, key=lambda p: (self.time[p], -len(p)))]
            self.time[prefix] = self.now
        return hit


@pytest.mark.parametrize("seed", range(6))
def test_lru_equals_a_block_by_block_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(4, 40))
    cache, reference = PrefixCache(capacity, 1), LeafLRU(capacity)
    for _ in range(600):
        tokens = rng.integers(0, 3, int(rng.integers(1, 12))).tolist()[:capacity]
        expected = reference.request(tokens)
        assert cache.match(tokens).num_tokens == expected
        lease = cache.acquire(tokens)
        lease.commit(len(tokens))
        lease.release()
    cache.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_end_of_a_session_that_is_over_goes_first(policy: str) -> None:
    cache = PrefixCache(16, 4, policy)
    shared, one, other, third = list(range(8)), [50] * 8, [60] * 8, [70] * 8

    def ask(tokens: list[int], *, done: bool = False) -> None:
        lease = cache.acquire(tokens)
        lease.commit(len(tokens))
        lease.release(done=done)
        cache.check()

    def cached(tokens: list[int]) -> int:
        return cache.match([*tokens, 0]).num_tokens

    for tail in (one, other):
        ask([*shared, *tail])
    ask([*shared, *third], done=True)
    assert cached([*shared, *third]) == 16, "it stays until its room is needed"
    assert cache.evict(3) == 3
    assert [cached([*shared, *tail]) for tail in (one, other, third)].count(16) == 1
    assert cached([*shared, *third]) == 8, "its own blocks went first, what it shares did not"
    cache.check()

    ask([*shared, *third], done=True)
    ask([*shared, *third])  # a use ends it
    held = cache.acquire([*shared, *other])
    ask([*shared, *other], done=True)  # not while somebody holds it
    assert cache.put_first([*shared, *other]) == 0
    assert cache.put_first(shared) == 0, "others go on from it"
    assert cache.put_first([9, 9, 9]) == cache.put_first([*shared, *third], "tenant") == 0
    held.release()
    assert cache.put_first([*shared, *third]) == 16
    assert cache.evict(2) == 2
    assert cached([*shared, *third]) == 8
    cache.reset()
    cache.check()
