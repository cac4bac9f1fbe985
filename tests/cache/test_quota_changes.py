# SPDX-License-Identifier: Apache-2.0
"""Quotas that change while the cache is in use."""

from __future__ import annotations

import random

import pytest

from radixkv import ConfigError, OutOfBlocks, PrefixCache
from radixkv.cache.accounts import Quota


def quotas_of(cache: PrefixCache) -> dict[str, Quota]:
    return {usage.namespace[0]: Quota(usage.floor, usage.ceiling) for usage in cache.quota_usage()}


def store(cache: PrefixCache, tokens: list[int], tenant: str, salt: str = "") -> None:
    lease = cache.acquire(tokens, (tenant, salt))
    lease.commit(len(tokens))
    lease.release()
    cache.check()


def test_a_floor_given_later_holds_from_then_on() -> None:
    cache = PrefixCache(8, 4)
    cache.set_quotas({"quiet": (0, None)})
    prompt = list(range(16))
    store(cache, prompt, "quiet")
    cache.set_quotas({"quiet": (4, None)})
    for i in range(10):
        store(cache, [100 + i] * 16, "noisy")
    assert cache.match(prompt, ("quiet", "")).num_tokens == 16
    cache.set_quotas({})
    store(cache, [99] * 32, "noisy")
    assert cache.match(prompt, ("quiet", "")).num_tokens == 0
    assert quotas_of(cache) == {"quiet": Quota()}


def test_a_lower_ceiling_takes_what_is_cached_at_once_and_what_is_held_later() -> None:
    cache = PrefixCache(16, 4)
    cache.set_quotas({"noisy": (0, None)})
    held = cache.acquire([1] * 32, ("noisy", "a"))
    held.commit(32)
    store(cache, [2] * 16, "noisy", "b")
    cache.set_quotas({"noisy": (0, 4)})
    cache.check()
    assert cache.match([2] * 16, ("noisy", "b")).num_tokens == 0
    assert cache.stats.held_blocks == 8, "nobody takes a running request's blocks"
    with pytest.raises(OutOfBlocks):
        cache.acquire([3] * 4, ("noisy", "c"))
    held.release()
    cache.check()
    store(cache, [3] * 16, "noisy", "c")
    assert cache.stats.cached_blocks == 4


def test_quotas_that_can_not_be_change_nothing() -> None:
    cache = PrefixCache(8, 4, quotas={"a": (2, 4)})
    store(cache, [1] * 4, "late")
    for wrong in ({"a": (5, None), "b": (4, None)}, {"a": (3, 2)}, {"late": (1, None)}):
        with pytest.raises(ConfigError):
            cache.set_quotas(wrong)
        assert quotas_of(cache) == {"a": Quota(2, 4)}
        cache.check()
    cache.reset()
    cache.set_quotas({"late": (1, None)})
    assert quotas_of(cache.rebuilt())["late"] == Quota(1, None)


@pytest.mark.parametrize("seed", range(10))
def test_any_changes_keep_the_cache_in_order(seed: int) -> None:
    rnd = random.Random(seed)
    cache = PrefixCache(24, 2)
    names = ["a", "b", "c"]
    cache.set_quotas(dict.fromkeys(names, (0, None)))
    live = []
    for _ in range(150):
        if rnd.random() < 0.1:
            quotas = {}
            for name in rnd.sample(names, rnd.randint(0, 3)):
                floor = rnd.randint(0, 8)
                quotas[name] = (floor, rnd.choice([None, max(1, floor) + rnd.randint(0, 8)]))
            cache.set_quotas(quotas)
            assert quotas_of(cache) == {name: Quota(*quotas.get(name, ())) for name in names}
        else:
            tokens = [rnd.randrange(3) for _ in range(rnd.randint(1, 16))]
            try:
                lease = cache.acquire(tokens, (rnd.choice([*names, "other"]), rnd.choice("xy")))
            except OutOfBlocks:
                pass
            else:
                lease.commit(len(tokens))
                live.append(lease)
        while len(live) > 3 or (live and rnd.random() < 0.3):
            live.pop(rnd.randrange(len(live))).release()
        cache.check()
