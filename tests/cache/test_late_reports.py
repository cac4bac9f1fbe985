# SPDX-License-Identifier: Apache-2.0
"""A report tells of the moment of its acquire, whenever it is read."""

from __future__ import annotations

import random

import pytest
from stored_prompts import store
from waiting import Clock

from radixkv import OutOfBlocks, PrefixCache
from radixkv.cache.prefix_cache import Lease, MissReport


def test_a_block_that_was_evicted_again_since() -> None:
    clock = Clock()
    cache = PrefixCache(16, 4, clock=clock)
    prompt = list(range(20))
    store(cache, prompt)
    cache.evict(16)
    unread = []
    for age in (3.0, 5.0, 7.0):
        clock.now += age
        lease = cache.acquire(prompt)
        lease.commit(20)
        lease.release()
        unread.append((lease, age))
        clock.now += 1.0
        cache.evict(16)
    clock.now += 100.0
    for lease, age in reversed(unread):
        assert (lease.report.reason, lease.report.age_s) == ("evicted", age)


def test_a_ghost_that_was_forgotten_since() -> None:
    cache = PrefixCache(16, 4, ghost_blocks=8)
    prompt = list(range(20))
    store(cache, prompt)
    cache.evict(16)
    lease = cache.acquire(prompt)
    lease.release()
    for i in range(10):
        store(cache, [100 + i] * 20)
        cache.evict(16)
    assert cache.explain(prompt).reason == "first_seen", "forgotten by now"
    assert lease.report.reason == "evicted", "but known then"


def test_a_neighbour_that_has_gone_since() -> None:
    cache = PrefixCache(16, 4)
    store(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    lease = cache.acquire([1, 2, 3, 4, 5, 9, 9, 9])
    lease.release()
    cache.reset()
    report = lease.report
    assert (report.reason, report.diverged_at) == ("diverged", 5)
    assert report.cached_tokens_after == [6, 7, 8]
    assert report.new_tokens_after == [9, 9, 9]


def test_tokens_appended_since_are_not_part_of_the_prompt() -> None:
    cache = PrefixCache(16, 4)
    store(cache, list(range(8)))
    cache.evict(16)
    lease = cache.acquire([0, 1, 2])
    lease.append([3, 4, 5])
    assert lease.report.num_prompt_tokens == 3
    assert lease.report.reason == "first_seen", "the block evicted was longer than the prompt"


def test_a_fork_has_its_parents_report() -> None:
    cache = PrefixCache(16, 4)
    store(cache, list(range(8)))
    cache.evict(16)
    lease = cache.acquire(list(range(8)))
    child = lease.fork()
    lease.release()
    child.release()
    cache.evict(16)
    assert child.report.reason == lease.report.reason == "evicted"


@pytest.mark.parametrize("seed", range(12))
def test_reading_late_and_reading_at_once_agree(seed: int) -> None:
    rnd = random.Random(seed)
    clock = Clock()
    options = {"clock": clock, "ghost_blocks": rnd.choice([0, 10, 40, None])}
    size = rnd.choice([1, 4])
    caches = [PrefixCache(24, size, **options) for _ in range(2)]  # type: ignore[arg-type]
    prompts: list[list[int]] = [[0]]
    live: list[tuple[Lease, Lease]] = []
    unread: list[tuple[dict[str, object], Lease]] = []
    for _ in range(600):
        clock.now += rnd.choice([0.0, 0.5, 2.0])
        kind = rnd.random()
        if kind < 0.5:
            base = rnd.choice(prompts)
            tokens = base[: rnd.randint(0, len(base))] + [rnd.randrange(3) for _ in range(rnd.randint(1, 12))]
            prompts = [*prompts[-20:], tokens]
            try:
                pair = caches[0].acquire(tokens), caches[1].acquire(tokens)
            except OutOfBlocks:
                continue
            live.append(pair)
            unread.append((pair[0].report.to_dict(), pair[1]))
            for lease in pair:
                lease.commit(len(tokens))
        elif kind < 0.8 and live:
            for lease in live.pop(rnd.randrange(len(live))):
                lease.release()
        elif kind < 0.95:
            count = rnd.randint(1, 12)
            for cache in caches:
                cache.evict(count)
        elif kind < 0.96:
            for cache in caches:
                cache.reset()
        if unread and rnd.random() < 0.1:
            expected, lease = unread.pop(rnd.randrange(len(unread)))
            assert lease.report.to_dict() == expected
        if len(unread) > 40:
            del unread[rnd.randrange(40)]
    for expected, lease in unread:
        assert lease.report.to_dict() == expected


def shown(report: MissReport) -> tuple[object, ...]:
    return report.reason, report.num_hit_tokens, report.diverged_at, report.age_s, report.evicted_by


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_read_at_once", [False, True])
def test_a_report_says_what_explain_said_just_before(seed: int, is_read_at_once: bool) -> None:
    """The acquire's own evictions add ghosts to a small index and push others out: not for its report."""
    rng = random.Random(seed)
    cache = PrefixCache(12, 2, ghost_blocks=6, clock=Clock())
    due: list[tuple[Lease, tuple[object, ...]]] = []
    reasons = set()
    for _ in range(300):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 16))]
        expected = shown(cache.explain(prompt))
        lease = cache.acquire(prompt)
        if lease.num_cached_tokens == expected[1]:  # else there was no room to copy a part of a block
            due.append((lease, expected))
            assert not is_read_at_once or shown(lease.report) == expected
        lease.commit(len(prompt))
        lease.release()
        cache.check()
        if len(due) > 20:
            for old, said in due:
                assert shown(old.report) == said
                reasons.add(said[0])
            due.clear()
    assert {"hit", "evicted", "diverged", "first_seen"} <= reasons
