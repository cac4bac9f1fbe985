# SPDX-License-Identifier: Apache-2.0
"""`max_tokens` 0: the prompt is computed, for the cache, and nothing is sampled."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from engine_process import paged_engine, paged_engine_elsewhere
from paged_language_model import VOCAB, PagedHashModel, greedy_reference, make_engine, run_all

from radixkv.cache.keys import Owner
from radixkv.entrypoints.llm import LLM
from radixkv.errors import InvalidRequestError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import PrefixPin, Request

PREWARM = SamplingParams(max_tokens=0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 64, 65])
@pytest.mark.parametrize("budget", [5, 256])
def test_the_next_request_computes_one_token_of_the_prompt(length: int, budget: int) -> None:
    engine, model = make_engine(num_blocks=40, block_size=8, budget=budget)
    llm, tokens = LLM.from_engine(engine), prompt(length, length)
    [warmed] = llm.generate([tokens], PREWARM)
    [sample] = warmed.outputs
    assert (sample.text, sample.token_ids, sample.finish_reason) == ("", [], "length")
    assert (warmed.num_cached_tokens, warmed.num_cache_write_tokens) == (0, length)
    assert warmed.num_generated_tokens == engine.stats().generated_tokens == 0
    assert warmed.times is not None
    assert warmed.times.first_token is None
    assert warmed.times.finished is not None
    assert model.num_computed == length
    [answered] = llm.generate([tokens], GREEDY)
    assert answered.num_cached_tokens == length - 1
    assert answered.outputs[0].token_ids == greedy_reference(tokens, 5)
    assert model.num_computed == length + 5
    stats = engine.stats()
    assert (stats.finished_requests, stats.generated_tokens, stats.cache.held_blocks) == (2, 5, 0)
    engine.check()


def test_what_follows_the_prompt_hits_all_of_it() -> None:
    engine, _ = make_engine(num_blocks=40, block_size=8)
    llm, tokens = LLM.from_engine(engine), prompt(1, 37)
    llm.generate([tokens], PREWARM)
    [output] = llm.generate([[*tokens, 5, 6]], GREEDY)
    assert output.num_cached_tokens == 37


def test_the_sampler_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[int] = []
    from radixkv.engine import step_pipeline as model_step

    real = model_step.Sampling
    monkeypatch.setattr(
        model_step,
        "Sampling",
        lambda logits, rows, *rest, **other: sampled.append(len(rows)) or real(logits, rows, *rest, **other),
    )
    engine, _ = make_engine(num_blocks=40, block_size=8)
    llm = LLM.from_engine(engine)
    llm.generate([prompt(i, 20) for i in range(3)], PREWARM)
    assert not any(sampled)
    # Beside one that is answered.
    llm.generate([prompt(1, 20), prompt(9, 20)], [PREWARM, GREEDY])
    assert max(sampled) == 1


def test_again_and_at_once_each_token_is_computed_once() -> None:
    engine, model = make_engine(num_blocks=40, block_size=8, budget=16)
    llm, tokens = LLM.from_engine(engine), prompt(2, 50)
    outputs = llm.generate([tokens, tokens, tokens], PREWARM)
    assert sorted(output.num_cached_tokens for output in outputs) == [0, 49, 49]
    assert model.num_computed == 52
    assert engine.stats().cache.held_blocks == 0
    engine.check()


def test_it_pins_once_its_prompt_is_computed() -> None:
    engine, _ = make_engine(num_blocks=20, block_size=8)
    tokens = prompt(3, 37)
    engine.add_request(tokens, PREWARM, pins=[PrefixPin(21, 60.0)], stream=True)
    deltas: list[Any] = []
    while engine.has_work:
        deltas += engine.step().deltas
    [delta] = deltas
    assert (delta.finish_reason, delta.token_ids, delta.is_last) == ("length", [], True)
    assert delta.prompt.num_pinned_tokens == 21
    engine.cache.evict(20)
    assert engine.cache.match(tokens).num_tokens >= 21
    engine.check()


def test_scores_of_the_prompt_come_without_a_token() -> None:
    engine, _ = make_engine(num_blocks=20, block_size=8)
    [output] = LLM.from_engine(engine).generate(
        [prompt(4, 20)], SamplingParams(max_tokens=0, prompt_logprobs=1)
    )
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 20
    assert output.outputs[0].token_ids == []


def test_broken_logits_leave_nothing_in_the_cache() -> None:
    model = PagedHashModel(40, 8, nan_for={"broken"})
    engine, _ = make_engine(model=model, num_blocks=40, block_size=8)
    engine.add_request(prompt(5, 30), PREWARM, request_id="broken", pins=[PrefixPin(30, 60.0)])
    output = run_all(engine)["broken"]
    assert output.error_code == "nan_logits"
    assert engine.cache.match(prompt(5, 30)).num_tokens == 0
    assert engine.stats().cache.pinned_blocks == 0


def test_a_failed_step_runs_it_again() -> None:
    failing = iter([True] + [False] * 100)
    model = PagedHashModel(40, 8, fail_if=lambda batch: next(failing))
    engine, _ = make_engine(model=model, num_blocks=40, block_size=8)
    engine.add_request(prompt(6, 30), PREWARM, request_id="again")
    assert run_all(engine)["again"].outputs[0].finish_reason == "length"
    assert engine.cache.match(prompt(6, 30)).num_tokens == 30


def test_it_waits_for_room_and_can_be_aborted() -> None:
    engine, _ = make_engine(num_blocks=8, block_size=8, budget=8)
    engine.add_request(prompt(7, 40), GREEDY, request_id="long")
    engine.step()
    engine.add_request(prompt(8, 50), PREWARM, request_id="waits")
    engine.add_request(prompt(9, 50), PREWARM, request_id="aborted")
    engine.step()
    engine.abort("aborted")
    outputs = run_all(engine)
    assert outputs["waits"].outputs[0].finish_reason == "length"
    assert outputs["long"].outputs[0].token_ids == greedy_reference(prompt(7, 40), 5)
    assert engine.stats().cache.held_blocks == 0
    engine.check()


@pytest.mark.parametrize("samples", [{"n": 2}, {"best_of": 2}, {"min_tokens": 1}])
def test_there_is_nothing_to_sample(samples: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(max_tokens=0, **samples)
    assert refused.value.param == ("n" if "min_tokens" not in samples else "min_tokens")


@pytest.mark.parametrize("make", [paged_engine, paged_engine_elsewhere], ids=["here", "elsewhere"])
def test_it_goes_through_every_client(make: Any) -> None:
    async def run() -> None:
        engine = make(num_blocks=40, block_size=8)
        try:
            tokens = prompt(10, 30)
            output = await engine.generate(Request(tokens, PREWARM, tenant="ada"))
            assert output.outputs[0].finish_reason == "length"
            deltas = [delta async for delta in engine.stream(Request(tokens, PREWARM, tenant="ada"))]
            assert [(delta.token_ids, delta.is_last) for delta in deltas] == [([], True)]
            assert deltas[0].prompt.num_cached_tokens == 29
            assert await engine.cache.match(tokens, Owner("bob")) == 0
        finally:
            await engine.close()

    asyncio.run(run())
