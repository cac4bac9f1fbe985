# SPDX-License-Identifier: Apache-2.0
"""Replaying through the real cache: exact LRU, all policies within the bounds, overlapping requests."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_tools import build, plain_lru, random_paths

from radixkv.cache.eviction.registry import POLICIES
from radixkv.cli.replay.bounds import infinite_bound, offline_optimum
from radixkv.cli.replay.concurrent import ServiceRates, replay_concurrent
from radixkv.cli.replay.driver import replay
from radixkv.errors import ConfigError


@given(seed=st.integers(0, 10**6), capacity=st.integers(1, 40))
def test_lru_equals_a_plain_list(seed: int, capacity: int) -> None:
    paths = random_paths(random.Random(seed), requests=60, blocks=3, depth=5)
    result = replay(build(paths), "lru", capacity)
    assert result.hit_blocks == sum(plain_lru(paths, capacity))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_stays_within_the_bounds(policy: str) -> None:
    trace = build(random_paths(random.Random(7), requests=400, blocks=4, depth=6))
    for capacity in (1, 6, 25, 100):
        assert replay(trace, policy, capacity).hit_blocks <= offline_optimum(trace, capacity).hit_blocks
    assert replay(trace, policy, None).hit_blocks == infinite_bound(trace).hit_blocks
    assert replay(trace, policy, 10**6).hit_blocks == infinite_bound(trace).hit_blocks


def test_tokens_of_a_partial_last_block_are_not_padded() -> None:
    from radixkv.cli.replay.trace import TraceBuilder

    builder = TraceBuilder("partial")
    for _ in range(2):
        builder.add([0, 1, 2], input_length=2 * 512 + 100)
    result = replay(builder.build(512), "lru", 10)
    assert (result.hit_blocks, result.hit_tokens, result.tokens) == (3, 1124, 2248)


def test_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        replay(build([[0]]), "nonsense", 1)


def test_one_request_in_flight_with_ample_room_hits_like_a_sequence() -> None:
    trace = build(random_paths(random.Random(11), requests=300, blocks=4, depth=6))
    result = replay_concurrent(trace, "lru", None, 1)
    assert result.hit_blocks == infinite_bound(trace).hit_blocks
    assert result.hit_blocks_in_flight == 0
    assert result.delayed_requests == 0


def test_running_requests_share_their_blocks() -> None:
    # four equal prompts arrive together: the last three hit what the first one holds
    trace = build([[0, 1, 2]] * 4)
    slow = ServiceRates(prefill_tokens_per_s=1.0, decode_tokens_per_s=1.0)
    result = replay_concurrent(trace, "lru", 100, 4, slow)
    assert result.hit_blocks == result.hit_blocks_in_flight == 9
    assert result.peak_held_blocks == 3 + 4  # the prompt once, a block of answer each


def test_a_full_pool_delays_and_a_too_large_request_is_refused() -> None:
    trace = build([[0, 1], [2, 3], [4, 5, 6, 7, 8, 9]])
    slow = ServiceRates(prefill_tokens_per_s=1.0, decode_tokens_per_s=1.0)
    result = replay_concurrent(trace, "lru", 4, 8, slow)
    assert result.refused_requests == 1
    assert result.delayed_requests == 1
    assert result.delay_s > 0
    assert result.peak_held_blocks <= 4


@given(seed=st.integers(0, 10**6), capacity=st.integers(6, 40), concurrency=st.integers(1, 9))
def test_overlap_never_beats_the_unlimited_cache(seed: int, capacity: int, concurrency: int) -> None:
    trace = build(random_paths(random.Random(seed), requests=60, blocks=3, depth=5))
    result = replay_concurrent(trace, "lru", capacity, concurrency, ServiceRates(50.0, 5.0))
    assert result.hit_blocks <= infinite_bound(trace).hit_blocks
    assert result.hit_blocks_in_flight <= result.hit_blocks
    assert result.peak_held_blocks <= capacity
    assert result.mean_in_flight <= concurrency
