# SPDX-License-Identifier: Apache-2.0
"""A model's K/V goes out to a tier and comes back: the same tokens, without computing them."""

from __future__ import annotations

import pytest
from nightly import by_day
from scripted_tier import ScriptedTier
from tiny_models import save_tiny_model

from radixkv.entrypoints.llm import LLM
from radixkv.sampling.sampling_params import SamplingParams

PROMPT = [5 + 7 * i % 90 for i in range(53)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tier"), "llama"))


@pytest.mark.parametrize("kv_cache_dtype", by_day(["auto", "int8"], "auto"))
def test_what_was_saved_is_loaded_by_another_engine(model, kv_cache_dtype):
    tier = ScriptedTier(at_once=True)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
    answers = []
    for cached in (0, 48):
        llm = LLM(
            model,
            tier=tier,
            num_blocks=16,
            block_size=8,
            kv_cache_dtype=kv_cache_dtype,
            threads=1,
            deterministic=True,
        )
        (output,) = llm.generate([PROMPT], params)
        assert output.num_cached_tokens == cached
        answers.append(output.outputs[0])
        while not cached and len(tier.kept) < 6:  # they are copied by a thread
            llm.generate([[9, 8, 7]], SamplingParams(max_tokens=1))
            assert llm.engine.stats().transfers.failed_saves == 0
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].logprobs == answers[1].logprobs  # bit by bit


def test_evicted_blocks_come_back_from_the_host_tier(model):
    """In a pool for one prompt, three take turns."""
    prompts = [[start + 7 * i % 90 for i in range(53)] for start in (5, 6, 7)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    options = {"num_blocks": 16, "block_size": 8, "threads": 1}
    expected = [LLM(model, **options).generate([p], params)[0].outputs[0].token_ids for p in prompts]
    with LLM(model, kv_tier="host:1GiB,long=0", **options) as llm:
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert llm.generate([prompt], params)[0].outputs[0].token_ids == tokens
            while llm.engine.has_work:
                llm.engine.step()
        cached = []
        for prompt, tokens in zip(prompts, expected, strict=True):
            (output,) = llm.generate([prompt], params)
            assert output.outputs[0].token_ids == tokens
            cached.append(output.num_cached_tokens)
        assert cached[0] == 48  # the pool had long lost it
        assert llm.engine.stats().transfers.loaded_blocks >= 6
