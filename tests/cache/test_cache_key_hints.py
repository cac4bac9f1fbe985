# SPDX-License-Identifier: Apache-2.0
"""Cache key hints: requests that say which others come back with them, and what `adaptive` makes of it."""

from __future__ import annotations

import random

from radixkv import PrefixCache
from radixkv.cache.eviction.lru import LRU


def serve(cache_key_hint: str, *, other: str = "", namespace: str = "agents") -> int:
    """Tokens found beyond the system prompt, where agents come back once and strangers never.

    Args:
        cache_key_hint: of the agents' requests.
        other: of the strangers'.
        namespace: of the strangers.
    """
    rng = random.Random(1)
    cache = PrefixCache(96, 4, "adaptive")
    system = list(range(8))
    due: list[tuple[int, list[int]]] = []
    found = 0
    for number in range(1500):
        own, where = cache_key_hint, "agents"
        if due and due[0][0] <= number:
            tokens = due.pop(0)[1] + rng.choices(range(10**6), k=8)
        else:
            tokens = system + rng.choices(range(10**6), k=24)
            if rng.random() < 0.3:
                due.append((number + 30, tokens))
            else:
                own, where = other, namespace
        lease = cache.acquire(tokens, where, cache_key_hint=own)
        found += max(0, lease.num_cached_tokens - len(system))
        lease.commit(len(tokens))
        lease.release()
    cache.check()
    return found


def test_a_family_that_comes_back_is_told_from_requests_that_do_not() -> None:
    unnamed = serve("")
    assert serve("agent") > 1.05 * unnamed
    assert serve("all", other="all") < 1.05 * unnamed, "a name that all share tells nothing"


def test_a_family_belongs_to_its_namespace() -> None:
    assert serve("a", other="a", namespace="strangers") == serve("a", other="b", namespace="strangers")


def test_a_request_without_room_leaves_its_family_to_nobody() -> None:
    told: list[object] = []

    class Telling(LRU):
        def on_session(self, session: object) -> None:
            told.append(session)

    cache = PrefixCache(4, 4, Telling())
    for cache_key_hint in ("a", ""):
        cache.acquire([1, 2, 3], "t", cache_key_hint=cache_key_hint).release()
    assert told == [(("t",), "a"), None]
