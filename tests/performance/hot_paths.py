# SPDX-License-Identifier: Apache-2.0
"""The hot paths of the host side, each as a call that can be repeated, for `test_hot_paths`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from radixkv import PrefixCache
from radixkv.sampling.sampler import sample
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.sampling_state import SamplingState
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence_state import SequenceState
from radixkv_kernels import KVSpec, make_backend

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
    scheduler = Scheduler(cache, max_num_batched_tokens=num_running + 256, max_num_seqs=num_running + 4)
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
        scheduler.add(SequenceState(Request(prompt, endless, request_id=str(i))))
    for _ in range(num_running):
        step()
    assert scheduler.num_running == num_running

    def run() -> None:
        for i in range(16):
            prompt = np.concatenate([families[i % len(families)], own[num_running + i]])
            request = SequenceState(Request(prompt, endless, request_id="new"))
            scheduler.add(request)
            step()
            scheduler.finish(request, discard=True)

    return run


def plan(num_requests: int = 32) -> Path:
    """The attention plan of 32 decodes after one shared prefix, and of a chunk of 64 tokens."""
    spec = KVSpec(
        num_layers=1,
        num_blocks=2048,
        block_size=BLOCK,
        num_kv_heads=3,
        head_size=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
        quantization=None,
    )
    backend = make_backend(
        "cpu",
        num_query_heads=9,
        spec=spec,
        compute_dtype=torch.float32,
        deterministic=False,
        share_prefixes=True,
        max_num_tokens=512,
        max_num_seqs=256,
        max_model_len=4096,
    )
    shared = np.arange(32, dtype=np.int32)
    own = [np.arange(100 + 8 * i, 108 + 8 * i, dtype=np.int32) for i in range(num_requests)]
    tables = [np.concatenate([shared, blocks]) for blocks in own]
    lengths = np.array([40 * BLOCK - 3 - i % 16 for i in range(num_requests)], np.int32)
    starts = np.array([*range(num_requests), num_requests - 1 + 64], np.int32)
    return lambda: backend.plan(starts, lengths, tables)


def sampling(num_rows: int = 64) -> Path:
    """A token for each of 64 rows, of which 48 are greedy and 16 are drawn."""
    logits = torch.rand(num_rows, VOCABULARY, generator=torch.Generator().manual_seed(0))
    greedy = SamplingParams(temperature=0.0)
    drawn = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=1)
    requests: Sequence[Any] = [
        SimpleNamespace(params=p, sampling_state=SamplingState(p, i, [1, 2, 3], [0]))
        for i, p in enumerate([drawn if i % 4 == 0 else greedy for i in range(num_rows)])
    ]
    rows = list(range(num_rows))
    return lambda: sample(logits, rows, requests)


@dataclass(frozen=True)
class HotPath:
    """How to set a path up, and how often a timing repeats it."""

    make: Callable[..., Path]
    repeats: int


PATHS = {
    "match": HotPath(match, 20),
    "acquire": HotPath(acquire, 5),
    "step build": HotPath(step_build, 1),
    "plan": HotPath(plan, 4),
    "sampling": HotPath(sampling, 1),
}
