# SPDX-License-Identifier: Apache-2.0
"""Identities propose, tokens decide: with one identity for all blocks every answer is still right."""

import random

import pytest
from paged_language_model import greedy_reference, make_engine, run_all

from radixkv.sampling.sampling_params import SamplingParams


@pytest.fixture(params=[False, True], ids=["chained", "constant"])
def identities(request, monkeypatch):
    if request.param:
        monkeypatch.setattr("radixkv.cache.block_identity.xxhash.xxh3_128_digest", lambda data: bytes(16))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("eviction_policy", ["lru", "adaptive", "benchmarks.s3fifo:S3FIFO"])
@pytest.mark.usefixtures("identities")
def test_requests_that_wait_for_one_another_get_their_own_answers(seed, eviction_policy):
    rng = random.Random(seed)
    engine, _ = make_engine(num_blocks=40, budget=24, eviction_policy=eviction_policy)
    base = [rng.randrange(1, 90) for _ in range(60)]
    for i in range(30):
        other = [*base]
        other[rng.randrange(60)] += i % 3 == 0  # a third part from the others, anywhere
        tokens = other[: rng.randrange(20, 60)] + [rng.randrange(1, 90) for _ in range(rng.randrange(4))]
        params = SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 20))
        engine.add_request(tokens, params, request_id=f"r{i}", namespace=rng.choice(["a", "b"]))
        if rng.random() < 0.5:
            engine.step()
            engine.check()
    for output in run_all(engine).values():
        answer = output.outputs[0].token_ids
        assert answer == greedy_reference(output.prompt_token_ids, len(answer))


def test_a_burst_computes_each_shared_token_once_per_namespace():
    engine, model = make_engine(num_blocks=200, budget=16)
    shared = [(7 * i) % 90 + 1 for i in range(77)]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    for i in range(12):
        engine.add_request([*shared, i + 1, 2, 3], params, namespace="ab"[i % 2])
    outputs = run_all(engine)
    assert len(outputs) == 12
    assert model.num_computed == 2 * len(shared) + 12 * 3
