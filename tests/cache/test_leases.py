# SPDX-License-Identifier: Apache-2.0
"""The end of a lease, what is rolled back or discarded with it, and what may not be done with one."""

from __future__ import annotations

import pytest
from stored_prompts import store_checked as store

from radixkv import LeaseError, PrefixCache


def test_discard_forgets_only_what_the_lease_contributed() -> None:
    cache = PrefixCache(64, 4)
    store(cache, list(range(8)))
    lease = cache.acquire(list(range(20)))
    lease.commit(20)
    lease.release(discard=True)
    assert cache.match(list(range(20))).num_tokens == 8
    cache.check()


def test_keep_forgets_the_rest() -> None:
    cache = PrefixCache(64, 4)
    lease = cache.acquire(list(range(20)))
    lease.commit(20)
    lease.release(keep=10)
    assert cache.match(list(range(20))).num_tokens == 10
    assert cache.stats.cached_blocks == 3
    cache.check()


def test_discard_spares_what_others_hold() -> None:
    cache = PrefixCache(64, 4)
    lease = cache.acquire(list(range(8)))
    lease.commit(8)
    other = cache.acquire(list(range(8)))
    lease.release(discard=True)
    assert cache.match(list(range(8))).num_tokens == 8
    other.release()
    assert cache.match(list(range(8))).num_tokens == 8


@pytest.mark.parametrize(("tokens", "keep"), [([0], 1), ([0, 5, 6, 7, 8], 1), ([0, 0, 1, 1], 4)])
def test_discard_of_tokens_that_are_not_cached_beyond_keep_forgets_nothing(
    tokens: list[int], keep: int
) -> None:
    cache = PrefixCache(64, 4)
    store(cache, [0, 0, 1, 1, 0, 1, 1, 0])
    cache.discard(tokens, keep=keep)
    assert cache.match([0, 0, 1, 1, 0, 1, 1, 0]).num_tokens == 8
    cache.discard([0, 0, 1, 1, 0], keep=2)
    assert cache.match([0, 0, 1, 1, 0, 1, 1, 0]).num_tokens == 2
    cache.check()


def test_rollback_makes_tokens_unshareable_at_once() -> None:
    cache = PrefixCache(64, 4)
    lease = cache.acquire(list(range(20)))
    lease.commit(10)
    lease.commit(20)
    sharer = cache.acquire(list(range(20)))
    lease.rollback(10)
    assert lease.num_committed == 10
    assert cache.match(list(range(20))).num_tokens <= 10
    cache.check()
    sharer.append([7])
    sharer.commit(21)
    assert cache.match([*range(20), 7]).num_tokens <= 10, (
        "what follows tokens that were rolled back is not shared"
    )
    sharer.release()
    lease.commit(20)
    assert cache.match(list(range(20))).num_tokens == 20
    cache.check()


@pytest.mark.parametrize("action", ["release", "fork", "truncate", "append", "commit", "rollback"])
def test_use_after_release_names_the_lease(action: str) -> None:
    cache = PrefixCache(64, 4)
    lease = cache.acquire([1, 2, 3])
    lease.release()
    calls = {
        "release": lease.release,
        "fork": lease.fork,
        "truncate": lambda: lease.truncate(2),
        "append": lambda: lease.append([1]),
        "commit": lambda: lease.commit(1),
        "rollback": lambda: lease.rollback(0),
    }
    with pytest.raises(LeaseError, match=f"Lease\\({lease.id}: "):
        calls[action]()


def test_commit_beyond_the_tokens_names_the_lease() -> None:
    lease = PrefixCache(64, 4).acquire([1, 2, 3])
    with pytest.raises(LeaseError, match=f"Lease\\({lease.id}: .*commit\\(4\\)"):
        lease.commit(4)


def test_a_block_whose_copy_never_ran_is_not_shared() -> None:
    cache = PrefixCache(64, 8)
    parent = cache.acquire([1, 2, 3, 4, 5])
    parent.commit(5)
    child = parent.fork()
    child.append([6])
    parent.rollback(0)
    parent.release()
    assert len(child.copies) == 1
    child.release()
    assert cache.match([1, 2, 3, 4, 5, 6]).num_tokens == 0
    assert cache.stats.free_blocks == 64


def test_keep_spares_what_others_have_used() -> None:
    """Two at once: what the other one shared, and has let go, was used by somebody who wants it kept."""
    cache = PrefixCache(64, 4)
    tokens = list(range(30))
    lease = cache.acquire(tokens)
    lease.commit(30)
    other = cache.acquire([*tokens[:22], 90, 91])
    assert other.num_cached_tokens == 22
    other.commit(24)
    other.release()
    lease.release(keep=0)
    assert cache.match([*tokens[:22], 90, 91]).num_tokens == 24
    assert cache.match(tokens).num_tokens == 22
    cache.check()
    # Nobody else: nothing is left, and of what was there before, all.
    for prefix in (0, 9, 16):
        cache.reset()
        if prefix:
            store(cache, tokens[:prefix])
        lease = cache.acquire(tokens)
        lease.commit(30)
        lease.release(keep=0)
        assert cache.match(tokens).num_tokens == prefix
        cache.check()


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("keep", range(1, 34))
def test_a_pin_ends_at_its_token_when_its_request_keeps_no_more(keep: int, size: int) -> None:
    cache = PrefixCache(96, size)
    tokens = list(range(40))
    lease = cache.acquire(tokens)
    lease.commit(34)
    pin = cache.pin(tokens[:keep], ttl=60.0, at_least=True)
    assert pin is not None
    assert pin.num_tokens == keep
    lease.commit(40)
    lease.release(keep=keep)
    cache.check()
    assert cache.match(tokens).num_tokens == keep
    cache.evict(96)
    assert cache.match(tokens).num_tokens == keep
    assert cache.stats.pinned_blocks == -(-keep // size)
    assert cache.unpin(tokens[:keep])
    cache.check()


def test_a_longer_pin_of_anothers_is_not_cut() -> None:
    cache = PrefixCache(64, 16)
    tokens = list(range(40))
    lease = cache.acquire(tokens)
    lease.commit(40)
    cache.pin(tokens[:20], ttl=60.0)
    cache.pin(tokens[:27], ttl=60.0)
    lease.release(keep=20)
    assert cache.match(tokens).num_tokens >= 27
    cache.check()
