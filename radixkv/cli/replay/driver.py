# SPDX-License-Identifier: Apache-2.0
"""Drive the real PrefixCache with a trace: one request after another, or with requests in flight.

A block id names a whole prefix, so one id can stand for one token: the cache runs with a block size of
one, and a request's prompt is its list of ids. Its radix tree then has the shape, and its eviction the order,
that it would have with the trace's own block size.

A prefix cache always leaves one token to compute, while the model of hit rates counts a fully cached prompt
as a full hit. So each prompt gets one more token, never committed, and the cache one more block to put it
in: at any time the cache holds at most `capacity` blocks of the trace, and it evicts exactly when and as many
blocks as the model does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cli.replay.bounds import BoundHits
from radixkv.cli.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A cell of a hit-rate table.

    Attributes:
        trace: the trace's file name.
        policy: eviction policy, or the name of a bound (`infinite`, `opt-pin`).
        capacity_blocks: None for an unlimited cache.
        requests: requests replayed.
        blocks: blocks they asked for.
        hit_blocks: leading blocks found cached.
        tokens: prompt tokens.
        hit_tokens: prompt tokens in the blocks found.
        seconds: wall time of the replay.
    """

    trace: str
    policy: str
    capacity_blocks: int | None
    requests: int
    blocks: int
    hit_blocks: int
    tokens: int
    hit_tokens: int
    seconds: float

    @classmethod
    def of(
        cls, trace: Trace, policy: str, capacity: int | None, hits: BoundHits, seconds: float
    ) -> ReplayResult:
        return cls(
            trace=trace.name,
            policy=policy,
            capacity_blocks=capacity,
            requests=trace.num_requests,
            blocks=trace.num_blocks,
            hit_blocks=hits.hit_blocks,
            tokens=trace.num_tokens,
            hit_tokens=hits.hit_tokens,
            seconds=round(seconds, 6),
        )

    @property
    def block_hit_rate(self) -> float:
        """Share of the blocks found, 0 for an empty trace."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Share of the prompt tokens found, 0 for an empty trace."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def replay(trace: Trace, policy: str, capacity: int | None) -> ReplayResult:
    """Replay a trace one request after another, inputs only, from a cold cache.

    Per request: the hit is the leading cached blocks; then its first min(n, capacity) blocks are held,
    computed and released again.

    Args:
        trace: what to replay.
        policy: name of an eviction policy.
        capacity: blocks the cache may hold; None: no limit.

    Raises:
        ConfigError: unknown policy.
    """
    began = time.perf_counter()
    room = max(trace.num_unique if capacity is None else min(capacity, trace.num_unique), 1)
    cache = PrefixCache(num_blocks=room + 1, block_size=1, policy=policy)
    per_request = np.zeros(trace.num_requests, dtype=np.int64)
    last = np.array([trace.num_unique], dtype=np.int32)  # the token that is never committed
    ids = trace.block_ids.astype(np.int32)
    offsets = trace.offsets.tolist()
    for request in range(trace.num_requests):
        start = offsets[request]
        length = min(offsets[request + 1] - start, room)
        if length:
            lease = cache.acquire(np.concatenate((ids[start : start + length], last)))
            per_request[request] = lease.num_cached_tokens
            lease.commit(length)
            lease.release()
    seconds = time.perf_counter() - began
    return ReplayResult.of(trace, policy, capacity, BoundHits.of(trace, per_request), seconds)
