# SPDX-License-Identifier: Apache-2.0
"""Bounds: the hits of an unlimited cache, and of a clairvoyant one of a given size (`opt-pin`).

The optimum is Belady's rule on the trie: among unpinned blocks, drop the one whose next use is farthest
away, blocks never used again first. Along a path the next use can only get later with depth (a block is
used with all its ancestors), so the rule, with the deepest first on ties, drops leaves only: the optimum
over all sets is reached by one a radix tree can hold. `opt-pin` adds a constraint of every serving
engine: the running request must be resident in full.

Cost: each request changes the next use of its own path only, and that next use is constant over long
stretches of the path. So a path is kept as segments (next use, from depth, to depth), and a heap orders
segments rather than blocks: O(segments log segments), independent of the path's length.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from radixkv.cli.replay.trace import Int64Array, Trace


@dataclass(frozen=True, slots=True)
class BoundHits:
    """Hits of one replay.

    Attributes:
        hit_blocks: leading blocks found, over all requests.
        hit_tokens: prompt tokens in them.
        per_request: int64 [requests], leading blocks found by each.
    """

    hit_blocks: int
    hit_tokens: int
    per_request: Int64Array

    @classmethod
    def of(cls, trace: Trace, per_request: Int64Array) -> BoundHits:
        return cls(int(per_request.sum()), trace.hit_tokens(per_request), per_request)


def infinite_bound(trace: Trace) -> BoundHits:
    """Hits of a cache that never evicts: blocks that an earlier request asked for. O(blocks)."""
    first_seen = np.full(trace.num_unique, trace.num_blocks, dtype=np.int64)
    np.minimum.at(first_seen, trace.block_ids, np.arange(trace.num_blocks))
    requests = np.repeat(np.arange(trace.num_requests), np.diff(trace.offsets))
    owner = requests[first_seen] if trace.num_blocks else first_seen
    known = owner[trace.block_ids] < requests
    return BoundHits.of(trace, np.bincount(requests[known], minlength=trace.num_requests).astype(np.int64))


def _next_uses(trace: Trace, capacity: int) -> list[list[tuple[int, int, int]]]:
    """For each request, its path cut into stretches of equal next use. O(blocks).

    A use counts only within the first `capacity` blocks of a request: no cache of that size can hold the
    rest.

    Returns:
        Per request a list of (next request, first depth, end depth), in order of depth, with ascending next
        use; never again is the number of requests.
    """
    never = trace.num_requests
    upcoming = np.full(trace.num_unique, never, dtype=np.int64)
    segments: list[list[tuple[int, int, int]]] = [[] for _ in range(never)]
    for request in range(never - 1, -1, -1):
        path = trace.path(request)[:capacity]
        if not len(path):
            continue
        uses = upcoming[path]
        cuts = (np.flatnonzero(uses[1:] != uses[:-1]) + 1).tolist()
        starts = [0, *cuts]
        ends = [*cuts, len(path)]
        segments[request] = list(zip(uses[starts].tolist(), starts, ends, strict=True))
        upcoming[path] = request
    return segments


def offline_optimum(trace: Trace, capacity: int) -> BoundHits:
    """Hits of the offline optimum that must hold the running request (`opt-pin`), cold start.

    Model: requests one after another; a request's hit is its leading resident blocks; then its first
    min(n, capacity) blocks are made resident, others evicted as need be.

    Raises:
        ValueError: capacity below 1.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1 block, not {capacity}")
    if capacity >= trace.num_unique:
        return infinite_bound(trace)
    segments = _next_uses(trace, capacity)
    hits = np.zeros(trace.num_requests, dtype=np.int64)
    # The resident blocks, as segments that end at some depth of the path of the request that left them:
    # alive[(owner, first depth)] = end depth. All resident blocks with next use `r` lie on r's path and
    # are its leading blocks, so the hit of `r` is the deepest end among them.
    alive: dict[tuple[int, int], int] = {}
    due: dict[int, list[tuple[int, int]]] = {}
    heap: list[tuple[int, int, int, int]] = []  # (-next use, -end depth, owner, first depth)
    resident = 0
    lengths = np.minimum(np.diff(trace.offsets), capacity).tolist()
    for request, length in enumerate(lengths):
        hit = 0
        for key in due.pop(request, ()):
            hit = max(hit, alive.pop(key, 0))
        hits[request] = hit
        surplus = resident + (length - hit) - capacity
        resident += length - hit
        while surplus > 0:
            next_use, end_key, owner, start = heap[0]
            key = (owner, start)
            end = alive.get(key, 0)
            if end != -end_key:  # used since, or trimmed and queued again
                heapq.heappop(heap)
                continue
            take = min(surplus, end - start)
            surplus -= take
            resident -= take
            if take == end - start:
                heapq.heappop(heap)
                del alive[key]
            else:
                alive[key] = end - take
                heapq.heapreplace(heap, (next_use, -(end - take), owner, start))
        for next_use, start, end in segments[request]:
            key = (request, start)
            alive[key] = end
            heapq.heappush(heap, (-next_use, -end, request, start))
            if next_use < trace.num_requests:
                due.setdefault(next_use, []).append(key)
    return BoundHits.of(trace, hits)
