# SPDX-License-Identifier: Apache-2.0
"""The work of lookups, admissions and steps grows neither with the cache nor with the running requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from measuring import count_work

from radixkv import PrefixCache
from radixkv.engine.config import SchedulerConfig
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence

BLOCK = 16
VOCABULARY = 512
FAMILY = 1024  # tokens of a cached prompt
Path = Callable[[], object]


def filled_cache(num_blocks: int, rng: np.random.Generator) -> tuple[PrefixCache, list[np.ndarray[Any, Any]]]:
    """A cache that holds `num_blocks` blocks of prompts of FAMILY tokens, and room for as much work again."""
    cache = PrefixCache(num_blocks + 8192, BLOCK)
    families = []
    for _ in range(max(1, num_blocks * BLOCK // FAMILY)):
        tokens = rng.integers(1, VOCABULARY, FAMILY, dtype=np.int32)
        lease = cache.acquire(tokens)
        lease.commit(FAMILY)
        lease.release()
        families.append(tokens)
    return cache, families


def match(num_blocks: int = 1000) -> Path:
    """A lookup of 2,048 tokens, half of them cached."""
    rng = np.random.default_rng(0)
    cache, families = filled_cache(num_blocks, rng)
    prompt = np.concatenate([families[-1], rng.integers(1, VOCABULARY, 1024, dtype=np.int32)])
    return lambda: cache.match(prompt)


def acquire(num_blocks: int = 1000) -> Path:
    """Admission and end of a prompt of 2,048 tokens, half of them cached; the cache is then as it was."""
    rng = np.random.default_rng(0)
    cache, families = filled_cache(num_blocks, rng)
    prompt = np.concatenate([families[-1], rng.integers(1, VOCABULARY, 1024, dtype=np.int32)])

    def run() -> None:
        lease = cache.acquire(prompt)
        lease.commit(len(prompt))
        lease.release(discard=True)

    return run


def step_build(num_blocks: int = 1000, num_running: int = 64) -> Path:
    """Sixteen steps of 64 decodes, in each of which one request is admitted on a cached prefix, and ends."""
    rng = np.random.default_rng(0)
    cache, families = filled_cache(num_blocks, rng)
    scheduler = Scheduler(
        cache, SchedulerConfig(max_num_batched_tokens=num_running + 256, max_num_seqs=num_running + 4)
    )
    endless = SamplingParams(max_tokens=10**6)
    own = rng.integers(1, VOCABULARY, (num_running + 16, 40), dtype=np.int32)

    def step() -> None:
        batch = scheduler.schedule().batch
        assert batch is not None
        scheduler.complete(batch)
        for entry in batch.entries:
            if entry.samples:
                entry.request.append(7)

    for i in range(num_running):
        prompt = np.concatenate([families[i % len(families)], own[i][: 8 + i % 32]])
        scheduler.add(Sequence(Request(prompt, endless, request_id=str(i))))
    for _ in range(num_running):
        step()
    assert scheduler.num_running == num_running

    def run() -> None:
        for i in range(16):
            prompt = np.concatenate([families[i % len(families)], own[num_running + i]])
            request = Sequence(Request(prompt, endless, request_id="new"))
            scheduler.add(request)
            step()
            scheduler.finish(request, discard=True)

    return run


@pytest.mark.parametrize("make", [match, acquire, step_build])
def test_work_does_not_grow_with_what_is_cached(make: Callable[..., Path]) -> None:
    small, large = (count_work(make(num_blocks=n)) for n in (1_000, 100_000))
    assert large.instructions <= 1.1 * small.instructions + 50
    assert large.c_calls <= 1.1 * small.c_calls + 10


def test_a_decode_costs_no_more_among_many() -> None:
    few, many = (count_work(step_build(num_running=n)).instructions for n in (16, 256))
    admissions = count_work(step_build(num_running=1)).instructions
    assert (many - admissions) / 256 <= 1.25 * (few - admissions) / 16
