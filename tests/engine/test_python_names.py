# SPDX-License-Identifier: Apache-2.0
"""The Python API as its users meet it: exported names, other engines' names, misspelt ones, and reprs."""

from __future__ import annotations

import copy
import inspect
import pickle

import numpy as np
import pytest
from paged_language_model import LetterTokenizer, make_engine

import radixkv
from radixkv import (
    LLM,
    AsyncEngine,
    BeamSearchParams,
    ConfigError,
    EngineConfig,
    EngineStoppedError,
    InvalidRequestError,
    Request,
    SamplingParams,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
CHAT = [{"role": "user", "content": "abc"}]


@pytest.fixture
def llm() -> LLM:
    return LLM.from_engine(make_engine(num_blocks=64, tokenizer=LetterTokenizer())[0])


def test_every_exported_name_is_there():
    assert all(getattr(radixkv, name) is not None for name in radixkv.__all__)
    assert {"AsyncEngine", "Request", "SamplingParams"} <= set(dir(radixkv))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SamplingParams(max_token=3), "did you mean 'max_tokens'"),
        (lambda: SamplingParams(structured_outputs={}), 'structured={"json": schema}'),
        (lambda: SamplingParams(guided_regex="a+"), 'structured={"regex": ...}'),
        (lambda: SamplingParams(structured_output={}), "structured"),
        (lambda: SamplingParams(detokenize=False), "leave it out"),
        (lambda: BeamSearchParams(temperature=0.0), "leave it out"),
        (lambda: EngineConfig(tensor_parallel_size=2), "tensor_parallel"),
        (lambda: EngineConfig("model", blok_size=16), "did you mean 'block_size'"),
        (lambda: LLM("no-such-model", enforce_eager=True), 'warm_up="off"'),
        (lambda: LLM("no-such-model", max_modellen=5), "did you mean 'max_model_len'"),
        (lambda: LLM("no-such-model", qqq=5), "its options are .*max_model_len"),
    ],
)
def test_a_name_that_is_not_ours_is_refused_with_ours(make, said):
    with pytest.raises((ConfigError, InvalidRequestError), match=said):
        make()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_tqdm": False}, "progress"),
        ({"sampling_params": GREEDY}, "params, the second argument"),
        ({"lora_request": None}, "lora="),
        ({"max_tokens": 5}, r"SamplingParams\(max_tokens=...\)"),
        ({"namespase": "a"}, "did you mean 'namespace'"),
    ],
)
def test_calls_name_the_argument_that_was_meant(llm, options, said):
    calls = [
        lambda: llm.generate("abc", **options),
        lambda: llm.chat(CHAT, **options),
        lambda: llm.beam_search("abc", BeamSearchParams(), **options),
        lambda: llm.stream("abc", **options),
        lambda: llm.stream_chat(CHAT, **options),
    ]
    for call in calls:
        with pytest.raises(InvalidRequestError, match=said):
            call()
    assert llm.chat(CHAT, GREEDY, enable_thinking=False), "the template's own options go on to it"


def test_parameters_that_were_checked_can_be_copied():
    params = SamplingParams(max_tokens=3, structured={"regex": "a+"})
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert str(params) == "SamplingParams(max_tokens=3, structured=StructuredOutputs(regex='a+'))"


def test_options_of_an_llm_are_those_of_its_settings():
    settings = inspect.signature(EngineConfig).parameters
    options = dict(inspect.signature(LLM).parameters)
    assert options.pop("tier").default is None
    assert options == dict(settings)
    assert {"block_size", "kv_tier"} <= set(settings)


def test_prompts_in_dictionaries(llm):
    one, two = llm.generate([{"prompt": "abc"}, {"prompt_token_ids": np.array([5, 6])}], GREEDY)
    assert (one.prompt, two.prompt_token_ids) == ("abc", [5, 6])
    alone = llm.generate({"prompt_token_ids": [5, 6], "prompt": "said", "cache_salt": None}, GREEDY)
    assert alone[0].outputs[0].token_ids == two.outputs[0].token_ids
    beams = llm.beam_search([{"prompt": "abc"}], BeamSearchParams(beam_width=2, max_tokens=2))
    assert beams[0].prompt_token_ids == one.prompt_token_ids
    assert llm.explain({"prompt": "abc"}).reason == llm.explain("abc").reason == "hit"
    assert next(llm.stream({"prompt": "abc"}, GREEDY)).prompt.num_tokens == 3
    assert Request({"prompt": "abc"}).prompt == "abc"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"role": "user", "content": "abc"}, "chat"),
        ({"prompt": "abc", "multi_modal_data": {"image": 1}}, "takes text only"),
        ({"prompt": "abc", "cache_salt": "s"}, "namespace"),
        ({"prompt": 5}, "a prompt is text"),
        ({}, "a prompt is text"),
    ],
)
def test_dictionaries_that_are_no_prompts_are_refused(llm, prompt, said):
    for call in (lambda: llm.generate(prompt, GREEDY), lambda: llm.generate([prompt], GREEDY)):
        with pytest.raises(InvalidRequestError, match=said):
            call()


def test_parameters_of_the_wrong_kind_are_named(llm):
    with pytest.raises(InvalidRequestError, match="SamplingParams"):
        llm.generate("abc", {"max_tokens": 3})
    with pytest.raises(InvalidRequestError, match="BeamSearchParams"):
        llm.beam_search("abc", GREEDY)


def test_explain_takes_text_and_conversations(llm):
    assert llm.explain("abcd").num_prompt_tokens == 4
    llm.chat(CHAT, GREEDY)
    assert (llm.explain("abcd").reason, llm.explain_chat(CHAT).reason) == ("hit", "hit")
    assert llm.explain(np.array([1, 2, 3])).reason == "first_seen"


def test_reprs_say_what_happened(llm):
    assert "hits: none yet of 0 prompt tokens" in repr(llm)
    [output] = llm.generate("abcdefgh" * 20, GREEDY)
    assert f"RequestOutput({output.request_id}: 160 prompt tokens 'abcdefgh" in repr(output)
    assert "0 cached (first_seen)" in repr(output)
    assert "4 tokens, length" in repr(output.outputs[0])
    assert len(repr(output)) < 300
    assert "64 blocks of 8 tokens" in repr(llm)
    [delta, *_] = llm.stream("abc", GREEDY)
    assert "1 tokens" in repr(delta)


def test_calls_after_close_are_refused(llm):
    stream = llm.stream("abc", GREEDY)
    next(stream)
    with llm:
        pass
    llm.close()
    calls = [
        lambda: llm.generate("abc", GREEDY),
        lambda: llm.chat(CHAT, GREEDY),
        lambda: list(llm.stream("abc", GREEDY)),
        lambda: list(stream),
        lambda: llm.beam_search("abc", BeamSearchParams()),
        lambda: llm.explain("abc"),
    ]
    for call in calls:
        with pytest.raises(EngineStoppedError, match="was closed"):
            call()
    assert "closed" in repr(llm)
    assert llm.engine.cache.stats.held_blocks == 0


async def test_an_async_engine_takes_prompts_and_requests():
    async with AsyncEngine(make_engine(num_blocks=64, tokenizer=LetterTokenizer())[0]) as engine:
        whole = await engine.generate("abc", GREEDY)
        tokens = whole.outputs[0].token_ids
        for prompt in ({"prompt": "abc"}, whole.prompt_token_ids, Request("abc", GREEDY)):
            params = None if isinstance(prompt, Request) else GREEDY
            assert (await engine.generate(prompt, params)).outputs[0].token_ids == tokens
            prompt = Request("abc", GREEDY) if isinstance(prompt, Request) else prompt
            streamed = [token async for delta in engine.stream(prompt, params) for token in delta.token_ids]
            assert streamed == tokens
        assert len((await engine.generate("abc")).outputs[0].token_ids) >= 1, "the engine's own defaults"
        with pytest.raises(InvalidRequestError, match="beside a Request"):
            await engine.generate(Request("abc"), GREEDY)
        with pytest.raises(InvalidRequestError, match="SamplingParams"):
            await engine.generate("abc", 5)
        with pytest.raises(InvalidRequestError, match=r"Request\(prompt, params, tenant=...\)"):
            await engine.generate("abc", GREEDY, tenant="ada")
    with pytest.raises(EngineStoppedError):
        await engine.generate("abc", GREEDY)
