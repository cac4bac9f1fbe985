# SPDX-License-Identifier: Apache-2.0
"""Namespaces come and go: they take memory while something is cached or held in them, and no longer."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from measuring import count_work
from stored_prompts import store

from radixkv import OutOfBlocks, PrefixCache
from radixkv.cache.keys import NamespaceName
from radixkv.cache.node import Namespace
from radixkv.errors import InvalidRequestError


def growth(cache: PrefixCache, run: Callable[[NamespaceName], object], times: int) -> int:
    """Bytes that are still there after as many more namespaces were named, the first ones' left out."""
    for i in range(100):
        run(("tenant", f"warm {i}"))
    gc.collect()
    tracemalloc.start()
    try:
        for i in range(times):
            run(("tenant", f"salt {i}") if i % 2 else f"salt {i}")
        cache.check()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


PROMPT = list(range(9))


def refused(cache: PrefixCache, namespace: NamespaceName) -> None:
    with pytest.raises(OutOfBlocks):
        cache.acquire(list(range(100)), namespace)


@pytest.mark.parametrize(
    "run",
    [
        lambda cache, namespace: cache.match(PROMPT, namespace),
        lambda cache, namespace: cache.explain(PROMPT, namespace),
        lambda cache, namespace: cache.unpin(PROMPT, namespace),
        lambda cache, namespace: cache.pin(PROMPT, namespace),
        lambda cache, namespace: cache.discard(PROMPT, namespace),
        lambda cache, namespace: cache.available_blocks(namespace),
        refused,
        lambda cache, namespace: cache.acquire(PROMPT, namespace).release(),
    ],
    ids=["match", "explain", "unpin", "pin", "discard", "available", "refused", "acquire"],
)
def test_a_namespace_that_was_only_named_leaves_nothing(
    run: Callable[[PrefixCache, NamespaceName], object],
) -> None:
    cache = PrefixCache(8, 4)
    assert growth(cache, lambda namespace: run(cache, namespace), 4000) < 40_000


@pytest.mark.parametrize("public", [False, True])
def test_a_namespace_whose_blocks_have_gone_leaves_nothing(public: bool) -> None:
    cache = PrefixCache(8, 4, ghost_blocks=8)
    if public:
        cache.publish(PROMPT[:4])
    assert growth(cache, lambda namespace: store(cache, PROMPT, namespace), 2000) < 60_000
    cache.reset()
    assert cache.stats.free_blocks == 8


def test_what_is_cached_keeps_its_namespace() -> None:
    cache = PrefixCache(8, 4)
    match = cache.match(PROMPT, "a")
    store(cache, PROMPT, "a")
    assert not cache.is_current(match)
    for i in range(50):
        cache.explain(PROMPT, f"other {i}")
    gc.collect()
    assert cache.match(PROMPT, "a").num_tokens == cache.match(PROMPT, ("a",)).num_tokens == 9
    assert cache.match(PROMPT, ("a", "")).num_tokens == 0


def test_an_eviction_is_explained_after_its_namespace_has_gone() -> None:
    cache = PrefixCache(8, 4)
    store(cache, PROMPT, "a")
    held = cache.match(PROMPT, "a")
    cache.evict(8)
    assert not cache.is_current(held)
    assert cache.explain(PROMPT, "a").reason == "evicted"
    assert cache.explain(PROMPT, "b").reason == "first_seen"
    lease = cache.acquire(PROMPT, "a", match=held)
    assert lease.report.reason == "evicted"
    lease.commit(9)
    lease.release()
    assert cache.match(PROMPT, "a").num_tokens == 9
    cache.check()


def test_a_lease_on_nothing_but_a_public_prefix_keeps_its_namespace() -> None:
    cache = PrefixCache(16, 4)
    cache.publish(PROMPT[:8])
    store(cache, PROMPT[:8], "first")
    one = cache.acquire(PROMPT, "a")
    two = cache.acquire([*PROMPT[:8], 9, 9], "a")
    gc.collect()
    one.commit(9)
    two.commit(10)
    cache.check()
    assert cache.match(PROMPT, "a").num_tokens == 9
    assert cache.match([*PROMPT[:8], 9, 9], "a").num_tokens == 10


def test_an_administrator_among_many_namespaces_is_answered_as_quickly() -> None:
    work = []
    for namespaces in (300, 1200):
        cache = PrefixCache(1200, 4)
        for i in range(namespaces):
            store(cache, [1, 2, 3, i], f"tenant {i}")
        cache.acquire([1, 2, 3, namespaces - 1, 5], "me").release()
        assert cache.explain([1, 2, 3, namespaces - 1, 5], "me", admin=True).reason == "namespace"
        work.append(count_work(lambda cache=cache: cache.explain([7, 7, 7], "me", admin=True)).instructions)
    assert work[1] < 1.2 * work[0]


def num_spaces() -> int:
    gc.collect()
    return sum(type(thing) is Namespace for thing in gc.get_objects())


@pytest.mark.parametrize("options", [{}, {"ghost_blocks": 0}, {"explain": False}, {"ghost_blocks": 40}])
def test_many_resets_of_a_cache_that_never_gets_full_leave_nothing_behind(options: dict[str, Any]) -> None:
    """Nothing is ever evicted from it."""
    before = num_spaces()
    cache = PrefixCache(200, 4, **options)
    for i in range(2000):
        store(cache, [i, *range(9)], ("tenant", f"salt {i}"))
        if i % 5 == 0:
            cache.reset()
    cache.check()
    assert num_spaces() - before < 500


def test_no_name_is_no_namespace() -> None:
    cache = PrefixCache(8, 4)
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            cache.acquire(PROMPT[:4], None)  # type: ignore[arg-type]
