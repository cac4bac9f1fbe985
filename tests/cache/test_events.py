# SPDX-License-Identifier: Apache-2.0
"""Followers of events: whatever they raise, the cache is not disturbed; long runs cost no more than short."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
from measuring import count_work
from stored_prompts import store

from radixkv import Lease, OutOfBlocks, PrefixCache
from radixkv.cache.reporting.events import MAX_FAILURES, BlockChanges, Listener
from radixkv.entrypoints.async_cache import AsyncCache
from radixkv.errors import EngineStoppedError
from radixkv.observe.residency import Residency


def load(cache: PrefixCache, times: int, start: int = 0) -> None:
    """Requests that store, extend, replace and evict blocks."""
    for i in range(start, start + times):
        store(cache, [*range(8), i, i + 1, i + 2, i + 3])
        cache.check()


class Unreliable:
    """Raises at the calls that it is told to."""

    def __init__(self, error: type[BaseException], *fails_at: int) -> None:
        self.error = error
        self.fails_at = fails_at
        self.calls = 0

    def __call__(self, changes: BlockChanges) -> None:
        self.calls += 1
        if self.calls in self.fails_at:
            raise self.error("a listener's own trouble")


class Panic(BaseException):
    """What a foreign library may raise."""


@pytest.mark.parametrize("error", [ValueError, Panic, SystemExit])
@pytest.mark.parametrize("fails_at", [1, 3, 4, 9, 15])
def test_a_listener_that_raises_once_disturbs_nothing(
    error: type[BaseException], fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache = PrefixCache(8, 4)
    listener, follower = Unreliable(error, fails_at), Residency()
    cache.subscribe(listener)
    cache.subscribe(follower)
    load(cache, 12)
    assert cache.stats.evicted_blocks > 0
    assert listener.calls == follower.sequence, "it is still told of everything"
    assert cache.match([*range(8), 11, 12, 13, 14]).num_tokens == 12
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "a listener's own trouble" in caplog.text
    cache.evict(8)
    assert cache.stats.free_blocks == 8
    assert not follower.blocks


def test_a_listener_that_always_raises_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    cache = PrefixCache(8, 4)
    listener = Unreliable(ValueError, *range(1000))
    unsubscribe = cache.subscribe(listener)
    load(cache, 12)
    assert listener.calls == MAX_FAILURES
    assert "receives nothing more" in caplog.records[-1].getMessage()
    unsubscribe()
    unsubscribe()
    load(cache, 2)
    follower = Residency()
    cache.subscribe(follower)
    load(cache, 2)
    cache.reset()
    assert not follower.blocks


def test_a_listener_that_ends_its_own_subscription() -> None:
    cache = PrefixCache(8, 4)
    calls = []

    def once(changes: BlockChanges) -> None:
        calls.append(changes)
        unsubscribe()

    unsubscribe = cache.subscribe(once)
    load(cache, 8)
    assert len(calls) == 1


def test_what_a_listener_raises_in_its_replay_is_its_callers() -> None:
    cache = PrefixCache(8, 4)
    load(cache, 1)
    listener = Unreliable(ValueError, 1)
    with pytest.raises(ValueError, match="own trouble"):
        cache.subscribe(listener)
    load(cache, 2, start=5)
    assert listener.calls == 1, "it was not subscribed"


def test_a_subscription_can_be_ended_after_the_cache_was_rebuilt() -> None:
    cache = PrefixCache(8, 4)
    one, two = Unreliable(ValueError), Unreliable(ValueError)
    end_one, end_two = cache.subscribe(one), cache.subscribe(two)
    load(cache, 1)
    fresh = cache.rebuilt()
    before = one.calls
    load(fresh, 1)
    assert one.calls == two.calls > before
    end_one()
    load(fresh, 1, start=5)
    assert two.calls > one.calls
    before = two.calls
    again = fresh.rebuilt()
    end_two()
    seen = two.calls
    load(again, 2)
    assert two.calls == seen >= before
    ends = again.subscribe(two)
    load(again, 1, start=9)
    assert two.calls > seen, "whoever comes later is told"
    ends()


def hashes(follower: Residency) -> set[tuple[bytes, bytes | None, tuple[int, ...]]]:
    return {(name, block.parent_hash, block.token_ids) for name, block in follower.blocks.items()}


def test_the_hashes_of_a_follower_are_the_same_however_the_blocks_came() -> None:
    """A long run stored at once, in pieces, split, trimmed and grown again, and replayed at the end."""
    cache = PrefixCache(200, 2)
    pieces, late = Residency(), Residency()
    cache.subscribe(pieces)
    long = list(range(1, 230))
    lease = cache.acquire(long[:1])
    for end in range(5, len(long), 7):
        lease.append(long[lease.num_tokens : end])
        lease.commit(end)
    lease.release()
    store(cache, [*long[:101], 7, 7, 7, 7])
    cache.evict(20)
    store(cache, [*long[:190], 9, 9, 9])
    store(cache, long)
    cache.subscribe(late)
    assert hashes(late) == hashes(pieces)
    other = PrefixCache(200, 2)
    whole = Residency()
    other.subscribe(whole)
    for tokens in (long, [*long[:101], 7, 7, 7, 7], [*long[:190], 9, 9, 9]):
        store(other, tokens)
    assert hashes(whole) >= hashes(pieces)


def commit_work(num_blocks: int, chunk: int) -> float:
    """Instructions per block of a commit in chunks with a follower, and of its eviction block by block."""
    cache = PrefixCache(2 * num_blocks, 1)
    cache.subscribe(lambda event: None)
    first = 0

    def run() -> None:
        nonlocal first
        first += 10 * num_blocks
        lease = cache.acquire(list(range(first, first + num_blocks)))
        for end in range(chunk, num_blocks + 1, chunk):
            lease.commit(end)
        lease.release()
        for _ in range(num_blocks):
            cache.evict(1)

    return count_work(run, warm_up=0).instructions / num_blocks


@pytest.mark.parametrize("pieces", [1, 64])
def test_following_a_long_run_costs_no_more_per_block(pieces: int) -> None:
    few, many = (commit_work(blocks, blocks // pieces) for blocks in (256, 2048))
    assert many < 1.5 * few


def explain_work(num_blocks: int) -> float:
    """Instructions per block evicted of explaining what was evicted of one long leaf, block by block."""
    cache = PrefixCache(num_blocks + 8, 1)
    first = 0

    def run() -> None:
        nonlocal first
        first += 10 * num_blocks
        prompt = list(range(first, first + num_blocks))
        store(cache, prompt)
        for _ in range(num_blocks // 4):
            cache.evict(1)
        assert cache.explain(prompt).reason == "evicted"
        cache.evict(num_blocks)
        cache.explain(prompt)

    return count_work(run, warm_up=1).instructions / num_blocks


def test_explaining_evictions_from_a_long_leaf_costs_no_more_per_block() -> None:
    few, many = (explain_work(blocks) for blocks in (256, 2048))
    assert many < 1.2 * few


async def test_an_engine_that_ends_before_a_follower_hears_that_it_is_one() -> None:
    cache = PrefixCache(8, 4)

    async def run(function: Callable[[PrefixCache], Any]) -> Any:
        result = function(cache)
        calls.fail_all(EngineStoppedError("over"))
        return result

    calls = AsyncCache(run)
    with pytest.raises(EngineStoppedError, match="over"):
        await asyncio.wait_for(anext(calls.events()), 30)


async def test_a_follower_that_leaves_before_it_hears_that_it_is_one() -> None:
    cache = PrefixCache(8, 4)
    reached = asyncio.Event()
    ended = 0

    def subscribe(listener: Listener, *, replay: bool = True) -> Callable[[], None]:
        def end() -> None:
            nonlocal ended
            ended += 1

        return end

    async def run(function: Callable[[PrefixCache], Any]) -> Any:
        result = function(cache)
        if not reached.is_set():
            reached.set()
            await asyncio.Event().wait()
        return result

    cache.subscribe = subscribe  # type: ignore[method-assign]
    reader = asyncio.ensure_future(anext(AsyncCache(run).events()))
    await reached.wait()
    reader.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reader
    assert ended == 1


@pytest.mark.parametrize("seed", range(12))
def test_a_call_tells_at_most_one_change_whatever_it_does(seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixCache(12, 2, policy=rng.choice(["lru", "adaptive", "benchmarks.s3fifo:S3FIFO"]))
    told: list[BlockChanges] = []
    follower = Residency()
    cache.subscribe(told.append)
    cache.subscribe(follower)
    leases: list[Lease] = []

    def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        told.clear()
        result = None
        with contextlib.suppress(OutOfBlocks):
            result = function(*arguments, **options)
        assert len(told) <= 1, f"{function.__name__} told {told}"
        assert all(changes.cleared or changes.num_blocks for changes in told), "nothing is not told"
        return result

    for _ in range(400):
        kind = rng.randrange(10)
        if kind < 3 and len(leases) < 4:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
            leases += filter(None, [call(cache.acquire, tokens)])
        elif kind == 3 and 0 < len(leases) < 4:
            leases.append(call(rng.choice(leases).fork))
        elif kind < 6 and leases:
            lease = rng.choice(leases)
            call(lease.append, [rng.randrange(2) for _ in range(rng.randint(1, 3))])
            if rng.random() < 0.5:
                lease.take_copies(until_done=rng.random() < 0.5)
            call(lease.commit, rng.randint(lease.num_committed, lease.num_tokens))
            if rng.random() < 0.5:
                call(lease.copies_done)
        elif kind < 8 and leases:
            lease = leases.pop(rng.randrange(len(leases)))
            call(lease.release, discard=rng.random() < 0.4, keep=rng.choice([None, rng.randint(0, 9)]))
        elif kind == 8:
            call(cache.evict, rng.randint(1, 4))
        elif leases and rng.random() < 0.5:
            lease = rng.choice(leases)
            call(lease.rollback, rng.randint(0, lease.num_committed))
        elif rng.random() < 0.1:
            call(cache.reset)
        else:
            call(cache.discard, [rng.randrange(2) for _ in range(6)], keep=rng.randint(0, 4))
        cache.check()
    assert follower.sequence > 20
