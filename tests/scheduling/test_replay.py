# SPDX-License-Identifier: Apache-2.0
"""Cached tokens that a request computes again: as layers with states need them, whose K/V is there already.

An engine is made to resume up to 63 tokens before the end of each match. Whatever it replays is read from the
cache and not written, so every answer is the plain engine's.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from paged_language_model import PagedHashModel, greedy_reference, make_engine, run_all

from radixkv.cache.leasing import Leasing
from radixkv.engine.engine import CHECK_STEPS
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.scheduler import Scheduler

GRID = 64


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make requests and forks resume at a multiple of 64; the list gets the number of replayed tokens."""
    replayed: list[int] = []
    make, add_fork = Leasing.make, Scheduler.add_fork

    def resumed_early(*arguments: Any) -> Any:
        lease = make(*arguments)
        lease.resume_at = lease.num_cached_tokens // GRID * GRID
        replayed.append(lease.num_cached_tokens - lease.resume_at)
        return lease

    def forked_early(self: Scheduler, fork: Any, parent: Any) -> None:
        add_fork(self, fork, parent)
        if fork.lease is not None:
            fork.num_computed -= fork.num_computed % GRID

    monkeypatch.setattr(Leasing, "make", resumed_early)
    monkeypatch.setattr(Scheduler, "add_fork", forked_early)
    monkeypatch.setenv(CHECK_STEPS, "1")
    return replayed


def _prompts(r: random.Random) -> list[list[int]]:
    shared = [r.randrange(1, 97) for _ in range(230)]
    return [
        [*shared, 5, 6, 7],
        shared[:150] + [9] * 40,
        shared[:203],
        [*shared, 5, 6, 7],
        shared[:101] + [11] * 3,
    ]


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("budget", [24, 96])
def test_replayed_tokens_change_no_answer(replaying: list[int], budget: int, block_size: int) -> None:
    engine, _ = make_engine(num_blocks=400, block_size=block_size, budget=budget)
    prompts = _prompts(random.Random(0))
    sent: dict[str, list[int]] = {}
    for prompt in prompts:  # one after the other
        sent[engine.add_request(prompt, SamplingParams(max_tokens=12, temperature=0.0))] = prompt
        outputs = run_all(engine)
        for name, output in outputs.items():
            assert output.outputs[0].token_ids == greedy_reference(sent[name], 12)
    for prompt in [[*p, 13] for p in prompts] + prompts:  # together
        sent[engine.add_request(prompt, SamplingParams(max_tokens=12, temperature=0.0))] = prompt
    outputs = run_all(engine)
    assert len(outputs) == 2 * len(prompts)
    for name, output in outputs.items():
        assert output.outputs[0].token_ids == greedy_reference(sent[name], 12)
    assert max(replaying) > 32, "nothing was replayed"


@pytest.mark.parametrize("budget", [24, 96])
def test_replaying_forks_give_the_plain_samples(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, budget: int
) -> None:
    def samples() -> list[list[list[int]]]:
        engine, _ = make_engine(num_blocks=300, block_size=16, budget=budget)
        for i, prompt in enumerate(_prompts(random.Random(1))[:3]):
            params = SamplingParams(max_tokens=20, temperature=0.8, seed=3 + i, n=3)
            engine.add_request(prompt, params, request_id=str(i))
        outputs = run_all(engine)
        return [[o.token_ids for o in outputs[str(i)].outputs] for i in range(3)]

    plain = samples()
    request.getfixturevalue("replaying")
    assert samples() == plain


@pytest.mark.parametrize("seed", range(6))
def test_replay_beside_small_pools_faults_and_guesses(replaying: list[int], seed: int) -> None:
    r = random.Random(seed)
    model = PagedHashModel(48, 8, fail_if=lambda batch: r.random() < 0.05)
    engine, _ = make_engine(
        num_blocks=48,
        block_size=8,
        budget=r.choice([24, 96]),
        model=model,
        max_num_seqs=6,
        speculation=r.choice(["off", "auto"]),
    )
    texts = [[r.randrange(1, 4) for _ in range(250)] for _ in range(2)]
    sent: dict[str, tuple[list[int], int]] = {}
    outputs: dict[str, Any] = {}
    for _ in range(25):
        prompt = r.choice(texts)[: r.randrange(1, 250)] + [r.randrange(1, 4) for _ in range(r.randrange(20))]
        num = r.randrange(1, 30)
        sent[engine.add_request(prompt, SamplingParams(max_tokens=num, temperature=0.0))] = prompt, num
        for _ in range(r.randrange(4)):
            result = engine.step()
            engine.check()
            outputs.update({output.request_id: output for output in result.finished})
    outputs.update(run_all(engine))
    finished = 0
    for name, (prompt, num) in sent.items():
        if outputs[name].outputs[0].finish_reason in ("stop", "length"):
            expected = greedy_reference(prompt, num)
            assert outputs[name].outputs[0].token_ids == expected[: len(outputs[name].outputs[0].token_ids)]
            finished += 1
    assert finished > 15
    assert max(replaying) > 32
