# SPDX-License-Identifier: Apache-2.0
"""CacheStats: a snapshot of the prefix cache's counters."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.cache.capacity import Capacity
from radixkv.cache.leasing import Leasing


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot of the cache's counters. Blocks: free + cached + held = total."""

    total_blocks: int
    free_blocks: int
    cached_blocks: int  # in the tree and evictable
    held_blocks: int  # held by leases or pins
    pinned_blocks: int  # of the held ones, those that pins protect
    num_nodes: int
    num_leases: int
    num_pins: int
    acquires: int
    queried_tokens: int  # prompt tokens of all acquires
    hit_tokens: int  # those of them found cached
    evicted_blocks: int  # evicted since the start (not those discarded or reset)
    evicted_by_age: tuple[int, ...]  # of these, by the seconds since their latest use; see `AGE_BOUNDS`
    evicted_age_s: float  # sum of those seconds over the evicted blocks
    out_of_blocks: int  # how often OutOfBlocks was raised
    resets: int
    pins_given_way: int
    ghost_blocks: int  # removed blocks that are remembered; one that a reset removed again may count twice
    # Of a model with states: slots in all, of them free, and in the tree as checkpoints; else 0.
    state_slots: int = 0
    free_state_slots: int = 0
    # Of one that frees its windows: blocks for them; else 0. Both kinds have checkpoints; of a model that is
    # both, each is a state and a window.
    window_blocks: int = 0
    free_window_blocks: int = 0
    checkpoints: int = 0
    superseded_checkpoints: int = 0  # of these, those whose only hit went on below
    evicted_checkpoints: int = 0  # that made room for others since the start
    evicted_for_windows: int = 0  # of these, of a model with both, those that made room for blocks of windows


def snapshot(capacity: Capacity, leasing: Leasing, num_resets: int) -> CacheStats:
    """Return the counters of one cache. O(accounts + checkpoints)."""
    pool, pins, cached = capacity.pool, capacity.pins, capacity.accounts.evictable()
    states = capacity.tree.states
    return CacheStats(
        total_blocks=pool.num_blocks,
        free_blocks=pool.num_free,
        cached_blocks=cached,
        held_blocks=pool.num_blocks - pool.num_free - cached,
        pinned_blocks=pins.pinned_blocks,
        num_nodes=capacity.tree.num_nodes,
        num_leases=len(capacity.leases),
        num_pins=len(pins),
        acquires=leasing.made,
        queried_tokens=leasing.queried_tokens,
        hit_tokens=leasing.hit_tokens,
        evicted_blocks=capacity.evicted_blocks,
        evicted_by_age=tuple(capacity.evicted_ages.counts),
        evicted_age_s=capacity.evicted_ages.total_s,
        out_of_blocks=capacity.refused,
        resets=num_resets,
        pins_given_way=pins.given_way,
        ghost_blocks=len(capacity.ghosts),
        **({} if states is None else states.figures()),
    )
