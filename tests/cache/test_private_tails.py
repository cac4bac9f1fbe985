# SPDX-License-Identifier: Apache-2.0
"""Leases that share their first tokens only: what comes after is never found, by anybody."""

from __future__ import annotations

import random

from radixkv import OutOfBlocks, PrefixCache


def test_tokens_after_the_limit_stay_private() -> None:
    cache = PrefixCache(16, 4)
    prompt = list(range(14))
    lease = cache.acquire(prompt, most_shared=6)
    lease.commit(14)
    lease.append([90])
    lease.commit(15)
    cache.check()
    assert cache.match([*prompt, 90]).num_tokens == 6
    other = cache.acquire(prompt)  # in the middle of the first one's second block
    assert (other.num_cached_tokens, other.copies[0][2]) == (6, 2)
    other.commit(14)
    third = cache.acquire(prompt, most_shared=6)
    assert third.num_cached_tokens == 6
    for each in (lease, other, third):
        each.release()
        cache.check()
    assert cache.match(prompt).num_tokens == 14
    assert cache.stats.held_blocks == 0


def test_random_limits() -> None:
    """Against a set of the prefixes that were shared."""
    chance = random.Random(3)
    for _ in range(30):
        cache = PrefixCache(24, 4)
        shared: set[tuple[int, ...]] = set()
        leases = []
        for _ in range(60):
            if leases and chance.random() < 0.5:
                lease, limit = chance.choice(leases)
                if chance.random() < 0.5:
                    leases.remove((lease, limit))
                    lease.release()
                else:
                    try:
                        lease.append([chance.randrange(2)])
                    except OutOfBlocks:
                        continue
                    lease.take_copies()
                    lease.commit(lease.num_tokens)
                    tokens = lease.token_ids()
                    shared.update(tuple(tokens[:n]) for n in range(min(len(tokens), limit) + 1))
            else:
                prompt = [chance.randrange(2) for _ in range(chance.randrange(1, 14))]
                limit = chance.choice((100, chance.randrange(1, 12)))
                try:
                    lease = cache.acquire(prompt, most_shared=None if limit == 100 else limit)
                except OutOfBlocks:
                    continue
                assert lease.num_cached_tokens <= limit
                lease.take_copies()
                lease.commit(lease.num_tokens)
                shared.update(tuple(prompt[:n]) for n in range(min(len(prompt), limit) + 1))
                leases.append((lease, limit))
            cache.check()
            probe = [chance.randrange(2) for _ in range(14)]
            assert tuple(probe[: cache.match(probe).num_tokens]) in shared | {()}
