# SPDX-License-Identifier: Apache-2.0
"""What must not grow with the size of the cache, counted in instructions."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measuring import count_work
from stored_prompts import store

from radixkv import PrefixCache
from radixkv.cache.eviction.registry import POLICIES


def full_cache(num_leaves: int, policy: str = "lru", seed: int = 0) -> PrefixCache:
    """Twice as many leaves came as there is room for, some of them again and again."""
    rng = random.Random(seed)
    cache = PrefixCache(num_leaves, 2, policy)
    for i in range(2 * num_leaves):
        store(cache, [i, 1])
        if i > 4:
            store(cache, [i - rng.randrange(4), 1])
    return cache


def max_work(run: Callable[[], object], times: int = 12) -> int:
    """Instructions of the median call, so that rebalancing once in a while does not count."""
    return sorted(count_work(run, warm_up=0).instructions for _ in range(times))[times // 2]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_large_full_pool_costs_no_more(policy: str) -> None:
    evictions, acquires = [], []
    for num_leaves in (200, 2000):
        cache = full_cache(num_leaves, policy)
        evictions.append(max_work(lambda cache=cache: cache.evict(1)))
        cache.check()
        fresh = iter(range(10**6, 2 * 10**6))
        acquires.append(max_work(lambda cache=cache, fresh=fresh: store(cache, [next(fresh), 1])))
    # `adaptive` looks at each half-octave of ages that occurs, in each class.
    most = 5.0 if policy == "adaptive" else 1.5
    assert evictions[1] < most * evictions[0] + 400
    assert acquires[1] < most * acquires[0] + 400


def test_showing_the_beginning_of_a_large_tree_costs_no_more() -> None:
    work = []
    for leaves in (100, 2000):
        cache = PrefixCache(leaves, 1)
        for i in range(leaves):
            store(cache, [i])
        assert len(cache.tree.show(50).splitlines()) == 51
        work.append(count_work(lambda cache=cache: cache.tree.show(50)).instructions)
    assert work[1] < 1.1 * work[0]


def test_all_of_a_tree_is_shown() -> None:
    cache = PrefixCache(64, 2)
    assert cache.tree.show() == "(empty)"
    for tail in ([1, 1, 1], [1, 2], [2, 2, 2]):
        store(cache, [5, 5, *tail])
    lines = cache.tree.show(5).splitlines()
    assert len(lines) == 5
    assert [line.split(" [")[0] for line in lines[1:3]] == ["  0..2", "    2..5"]
    assert cache.tree.show(4).splitlines() == [*lines[:4], "..."]


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_match_among_many_public_prefixes_costs_no_more(is_nested: bool) -> None:
    work = []
    for prefixes in (10, 2000):
        cache = PrefixCache(64, 4)
        for i in range(prefixes):
            cache.publish([7] * 4 * (i + 1) if is_nested else [i, *range(7)])
        prompt = [*[7] * 200, *range(100)]
        work.append(count_work(lambda cache=cache, prompt=prompt: cache.match(prompt)).instructions)
    assert work[1] < 1.5 * work[0] + 300


BLOCKS = st.lists(st.sampled_from([(0, 0), (0, 1), (1, 0)]), max_size=6).map(
    lambda blocks: [token for block in blocks for token in block]
)


@given(st.lists(BLOCKS, max_size=12), BLOCKS, st.lists(BLOCKS, max_size=4))
def test_the_longest_public_prefix_is_found(
    published: list[list[int]], prompt: list[int], unpublished: list[list[int]]
) -> None:
    cache = PrefixCache(64, 2)
    for prefix in published:
        assert cache.publish(prefix) == len(prefix)
    for prefix in unpublished:
        assert cache.unpublish(prefix) == (bool(prefix) and prefix in published)
        published = [other for other in published if other != prefix]
    expected = max((len(p) for p in published if prompt[: len(p)] == p), default=0)
    lease = cache.acquire([*prompt, 9], "a")
    lease.commit(len(prompt) + 1)
    lease.release()
    assert cache.match([*prompt, 9], "b").num_tokens == expected
    cache.check()
