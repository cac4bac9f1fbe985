# SPDX-License-Identifier: Apache-2.0
"""The bounds: the offline optimum against exhaustive search, the unlimited cache against a set."""

from __future__ import annotations

import random

import pytest
from trace_tools import build, exhaustive_optimum, plain_lru, random_paths

from radixkv.cli.replay.bounds import infinite_bound, offline_optimum


@pytest.mark.parametrize("seed", range(60))
def test_optimum_equals_exhaustive_search(seed: int) -> None:
    rng = random.Random(seed)
    paths = random_paths(rng, requests=rng.randint(3, 9), blocks=rng.randint(2, 3), depth=rng.randint(1, 4))
    trace = build(paths)
    for capacity in (1, 2, 3, 5, 7):
        assert offline_optimum(trace, capacity).hit_blocks == exhaustive_optimum(paths, capacity), capacity


@pytest.mark.parametrize("seed", range(10))
def test_optimum_lies_between_lru_and_the_unlimited_cache(seed: int) -> None:
    paths = random_paths(random.Random(seed), requests=200, blocks=4, depth=6)
    trace = build(paths)
    unlimited = infinite_bound(trace).hit_blocks
    previous = 0
    for capacity in (2, 5, 10, 30, 100, 10_000):
        optimum = offline_optimum(trace, capacity).hit_blocks
        assert sum(plain_lru(paths, capacity)) <= optimum <= unlimited
        assert optimum >= previous
        previous = optimum
    assert previous == unlimited


def test_unlimited_cache_equals_a_set() -> None:
    paths = random_paths(random.Random(1), requests=300, blocks=5, depth=5)
    seen: set[int] = set()
    expected = []
    for path in paths:
        expected.append(sum(block in seen for block in path))
        seen.update(path)
    assert infinite_bound(build(paths)).per_request.tolist() == expected


def test_capacity_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        offline_optimum(build([[0]]), 0)
