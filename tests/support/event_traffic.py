# SPDX-License-Identifier: Apache-2.0
"""Random use of a prefix cache, and what a follower of its events must know at any moment."""

from __future__ import annotations

import random

from radixkv import Lease, OutOfBlocks, PrefixCache
from radixkv.cache.keys import NamespaceKey, encode_tokens
from radixkv.cluster.events.block_keys import NO_CHAIN, BlockKeys, block_key, chains
from radixkv.observe.residency import Residency

SECRET = b"a secret of the tests"
NAMESPACES: tuple[NamespaceKey, ...] = (("",), ("ada",), ("bob",), ("ada", "salt"), ("", "", "adapter"))


class CacheTraffic:
    """A cache in use: one random operation a call."""

    def __init__(self, seed: int, num_blocks: int = 48, block_size: int = 4) -> None:
        self.rng = random.Random(seed)
        self.cache = PrefixCache(num_blocks, block_size)
        self.truth = Residency()
        self.cache.subscribe(self.truth)
        self._leases: list[Lease] = []

    def prompt(self) -> list[int]:
        """Few tokens, so that prompts share prefixes and part within blocks."""
        rng = self.rng
        head = rng.choice((range(100, 124), range(200, 210), range(0)))
        return [*head, *(rng.randrange(3) for _ in range(rng.randrange(1, 24)))]

    def step(self) -> None:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.45:
            self._begin()
        elif kind < 0.9 and self._leases:
            lease = self._leases.pop(rng.randrange(len(self._leases)))
            lease.release(discard=rng.random() < 0.1)
        elif kind < 0.97:
            self.cache.evict(rng.randrange(6))
        elif kind < 0.98:
            self.cache.reset()
        elif kind < 0.99:
            self.cache.publish(self.prompt(), rng.choice(NAMESPACES))
        else:
            self.cache.pin(self.prompt(), rng.choice(NAMESPACES), ttl=0.001)

    def _begin(self) -> None:
        tokens = self.prompt()
        try:
            lease = self.cache.acquire(tokens, self.rng.choice(NAMESPACES))
        except OutOfBlocks:
            return
        lease.commit(self.rng.randrange(lease.num_cached_tokens, len(tokens) + 1))
        self._leases.append(lease)

    def finish(self) -> None:
        for lease in self._leases:
            lease.release()
        self._leases.clear()


def keys_of(truth: Residency, keys: BlockKeys, block_size: int) -> set[int]:
    """The key of every block that is resident, computed from its text alone."""
    found = set()
    for namespace, tokens in truth.prefixes():
        chain = chains(block_size).chain(NO_CHAIN, encode_tokens(list(tokens)))
        found.add(block_key(keys.owner(namespace), bytes(chain[-16:])))
    return found
