# SPDX-License-Identifier: Apache-2.0
"""Requests under their tenant's ceiling: refused if they never fit, ended by `length` where it ends them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from paged_language_model import VOCAB, make_engine, next_logits, run_all

from radixkv.engine.engine import Engine
from radixkv.errors import ContextLengthExceededError
from radixkv.sampling.sampling_params import SamplingParams

SIZE = 8
LONG = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def continuation(tokens: list[int], length: int) -> list[int]:
    """What greedy decoding gives, computed without any engine."""
    known = list(tokens)
    for _ in range(length):
        known.append(int(next_logits(np.asarray(known)).argmax()))
    return known[len(tokens) :]


def engine_with(quotas: dict[str, tuple[int, int | None]], **options: Any) -> Engine:
    engine, _ = make_engine(block_size=SIZE, **{"num_blocks": 60, **options})
    engine.cache.set_quotas({(name,): quota for name, quota in quotas.items()})
    return engine


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_that_never_fits_below_the_ceiling_is_refused_at_once(n: int) -> None:
    engine = engine_with({"small": (0, 4)})
    params = SamplingParams(temperature=0.0, max_tokens=1, n=n)
    for length in (32, 33, 200):
        with pytest.raises(ContextLengthExceededError, match=f"{length} tokens.*ceiling_blocks.*4 blocks"):
            engine.add_request(prompt(length, length), params, namespace=("small", "salt"))
    engine.add_request(prompt(1, 200), params, namespace=("other", ""))
    engine.add_request(prompt(2, 31), params, namespace=("small", "salt"))
    outputs = run_all(engine)
    assert {sample.finish_reason for output in outputs.values() for sample in output.outputs} == {"length"}


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_an_answer_that_reaches_the_ceiling_ends_by_length(policy: str) -> None:
    engine = engine_with({"small": (0, 4)}, num_blocks=20, scheduling_policy=policy)
    for salt in ("a", "b", "c"):  # at once: they share the ceiling and wait for one another
        engine.add_request(prompt(ord(salt), 20), LONG, request_id=salt, namespace=("small", salt))
    many = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True, n=2, best_of=3)
    engine.add_request(prompt(4, 9), many, request_id="many", namespace=("small", "a"))
    for i in range(3):
        engine.add_request(prompt(10 + i, 40), LONG, request_id=f"big-{i}", namespace=("big", ""))
    outputs = run_all(engine, check=False)
    for salt in ("a", "b", "c"):
        (sample,) = outputs[salt].outputs
        assert (sample.finish_reason, len(sample.token_ids)) == ("length", 32 - 20)
    assert [len(sample.token_ids) for sample in outputs["many"].outputs] == [32 - 9] * 2
    for i in range(3):
        assert outputs[f"big-{i}"].outputs[0].finish_reason == "length"
        assert len(outputs[f"big-{i}"].outputs[0].token_ids) == 20 * SIZE - 40


def test_a_tenants_own_pins_give_way_below_its_ceiling_and_nobody_elses() -> None:
    engine = engine_with({"small": (0, 6)}, pin_budget=0.5)
    for name in ("small", "big"):
        engine.add_request(prompt(1, 30), SamplingParams(max_tokens=1), namespace=(name, ""))
    run_all(engine)
    for name in ("small", "big"):
        assert engine.cache.pin(prompt(1, 30), (name, "")).num_tokens == 30
    engine.add_request(prompt(5, 100), LONG, request_id="big", namespace=("big", ""))
    for _ in range(5):
        engine.step()
    engine.add_request(prompt(2, 40), LONG, request_id="small", namespace=("small", ""))
    outputs = {}
    while "small" not in outputs:
        outputs.update({output.request_id: output for output in engine.step().finished})
    assert "big" not in outputs, "it did not wait for others to end"
    assert len(outputs["small"].outputs[0].token_ids) == 8
    assert [pin.namespace[0] for pin in engine.cache.pins()] == ["big"]
    engine.add_request(prompt(3, 10), LONG, request_id="grows", namespace=("small", ""))
    assert len(run_all(engine)["grows"].outputs[0].token_ids) == 38


def test_what_a_lowered_ceiling_ends() -> None:
    engine = engine_with({"small": (0, 12)})
    engine.add_request(prompt(1, 40), LONG, request_id="runs", namespace=("small", ""))
    engine.add_request(prompt(2, 80), LONG, request_id="waits", namespace=("small", "x"))
    for _ in range(10):
        engine.step()
    engine.cache.set_quotas({("small",): (0, 6)})
    outputs = run_all(engine)
    (sample,) = outputs["runs"].outputs
    assert (sample.finish_reason, outputs["runs"].error) == ("length", None)
    assert sample.token_ids == continuation(prompt(1, 40), len(sample.token_ids))
    assert outputs["waits"].error_code == "context_length_exceeded"


def test_public_blocks_count_for_no_ceiling() -> None:
    engine = engine_with({"small": (0, 3)})
    public = prompt(1, 80)
    engine.cache.publish(public)
    engine.add_request([*public, 1], SamplingParams(max_tokens=1), namespace=("big", ""))
    run_all(engine)
    engine.add_request([*public, *prompt(2, 10)], LONG, request_id="fits", namespace=("small", ""))
    with pytest.raises(ContextLengthExceededError):
        engine.add_request([*public, *prompt(2, 24)], LONG, namespace=("small", ""))
    assert len(run_all(engine)["fits"].outputs[0].token_ids) == 14


@pytest.mark.parametrize("seed", range(4))
def test_small_ceilings_pins_and_several_tenants(seed: int) -> None:
    """Random traffic: what is accepted comes to its end as it would alone."""
    rng = random.Random(seed)
    ceilings = {"a": 3, "b": rng.randint(4, 9), "c": 1, "d": None}
    policy = rng.choice(["fair", "prefix", "fcfs", "priority"])
    engine = engine_with(
        {name: (0, most) for name, most in ceilings.items()},
        num_blocks=rng.randint(14, 40),
        pin_budget=0.6,
        scheduling_policy=policy,
        budget=rng.choice([16, 64]),
        speculation=rng.choice(["auto", "off"]),
    )
    pool = engine.cache.num_blocks
    asked: dict[str, tuple[list[int], int, int]] = {}
    outputs: dict[str, Any] = {}
    for i in range(40):
        tenant = rng.choice("aabbcd")
        most = (ceilings[tenant] or pool) * SIZE
        tokens = prompt(rng.randrange(4), rng.randint(1, min(most, pool * SIZE) + 10))
        params = SamplingParams(
            temperature=0.0,
            max_tokens=rng.choice([1, 5, 90]),
            ignore_eos=True,
            n=rng.choice([1, 1, 2]),
            prompt_logprobs=rng.choice([None, None, 0]),
        )
        namespace = (tenant, rng.choice(["", "x"]))
        if len(tokens) >= most:
            with pytest.raises(ContextLengthExceededError):
                engine.add_request(tokens, params, namespace=namespace)
        else:
            engine.add_request(tokens, params, request_id=str(i), namespace=namespace)
            asked[str(i)] = tokens, min(params.max_tokens or 0, most - len(tokens)), params.n
        for _ in range(rng.randrange(12)):
            outputs.update({output.request_id: output for output in engine.step().finished})
            engine.check()
        if rng.random() < 0.5:
            engine.cache.pin(tokens, namespace, ttl=rng.choice([None, 1000.0]))
    outputs |= run_all(engine)
    for name, (tokens, length, n) in asked.items():
        assert outputs[name].error is None, outputs[name].error
        for sample in outputs[name].outputs:
            assert (len(sample.token_ids), sample.finish_reason) == (length, "length")
            assert sample.token_ids == continuation(tokens, length)
        assert len(outputs[name].outputs) == n
    assert engine.stats().num_rebuilds == 0
