# SPDX-License-Identifier: Apache-2.0
"""A floor holds for blocks that hang below a public prefix, too."""

from __future__ import annotations

import random

import pytest
from stored_prompts import store_checked as store

from radixkv import OutOfBlocks, PrefixCache

PUBLIC = list(range(16))

CLASSIC = "benchmarks.cache.classic_policies"


def cache_with_a_quiet_tenant() -> PrefixCache:
    cache = PrefixCache(12, 4, quotas={"quiet": (4, None)})
    cache.publish(PUBLIC)
    store(cache, [*PUBLIC, *range(100, 116)], "quiet")
    return cache


def test_a_public_prefix_stays_as_long_as_a_floor_needs_it() -> None:
    cache = cache_with_a_quiet_tenant()
    assert cache.available_blocks("noisy") == 4
    with pytest.raises(OutOfBlocks) as caught:
        cache.acquire([9] * 32, "noisy")
    assert caught.value.available == 4
    store(cache, [9] * 16, "noisy")
    store(cache, [8] * 16, "noisy")
    assert cache.match([*PUBLIC, *range(100, 116)], "quiet").num_tokens == 32


def test_the_tenant_itself_may_use_all() -> None:
    cache = cache_with_a_quiet_tenant()
    assert cache.available_blocks("quiet") == 12
    store(cache, [9] * 48, "quiet")


def test_holding_the_public_prefix_is_not_counted_twice() -> None:
    cache = cache_with_a_quiet_tenant()
    lease = cache.acquire([*PUBLIC, *[7] * 16], "noisy")
    assert lease.num_cached_tokens == 16
    cache.check()
    other = cache_with_a_quiet_tenant()
    other.publish(PUBLIC[:8])
    part = other.acquire([*PUBLIC[:8], *[7] * 16], "noisy")
    assert part.num_cached_tokens == 8
    other.check()


@pytest.mark.parametrize("seed", range(20))
def test_no_request_of_others_pushes_a_tenant_under_its_floor(seed: int) -> None:
    rnd = random.Random(seed)
    floor = rnd.randint(1, 8)
    cache = PrefixCache(
        20,
        2,
        policy=rnd.choice(["lru", f"{CLASSIC}:SLRU", f"{CLASSIC}:GDSF"]),
        quotas={"quiet": (floor, None)},
    )
    public = [[1, 1, 2, 2], [1, 1, 2, 2, 3, 3], [4, 4]]
    for prefix in public[: rnd.randint(1, 3)]:
        cache.publish(prefix)
    live = []
    for _ in range(400):
        start = rnd.choice([*public, []])
        tokens = [*start, *[rnd.randrange(5) for _ in range(rnd.randint(1, 16))]]
        namespace = rnd.choice(["quiet", "noisy", "other"])
        before = cache.quota_usage()[0].used_blocks
        try:
            lease = cache.acquire(tokens, namespace)
        except OutOfBlocks as error:
            assert error.needed > error.available  # noqa: PT017
        else:
            lease.commit(len(tokens))
            live.append(lease)
        if namespace != "quiet":
            assert cache.quota_usage()[0].used_blocks >= min(before, floor)
        while len(live) > 2:
            live.pop(rnd.randrange(len(live))).release()
        cache.check()
