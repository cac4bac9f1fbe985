# SPDX-License-Identifier: Apache-2.0
"""Structured output through an engine: with samples, preemption, faults, stops, logprobs; one fails alone."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import jsonschema
import numpy as np
import pytest
from paged_language_model import (
    END,
    LetterGrammarSource,
    LetterTokenizer,
    PagedHashModel,
    make_engine,
    next_logits,
)

from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.entrypoints.llm import LLM
from radixkv.errors import InvalidRequestError, RequestFailedError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.structured import StructuredOutputs
from radixkv.scheduling.request import Request

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -99, "maximum": 999},
        "b": {"enum": ["x", "yy"]},
        "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
#: Compiles, and goes wrong after more tokens than are tried out.
TOO_COMPLEX = {"regex": "x{60}" + "(a?){1000}" * 99 + "a"}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, n] for n in range(10, 13)]


def llm(**options: Any) -> LLM:
    return LLM.from_engine(make_engine(tokenizer=LetterTokenizer(), **options)[0])


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"structured": {"json": SCHEMA}, "max_tokens": 200, "seed": 1, **options})


def texts(outputs: Any) -> list[list[str]]:
    return [[sample.text for sample in output.outputs] for output in outputs]


def check_all(outputs: Any) -> None:
    for output in outputs:
        assert output.error is None
        for sample in output.outputs:
            assert sample.finish_reason == "stop"
            jsonschema.validate(json.loads(sample.text), SCHEMA)


def test_every_sample_matches_and_ends_where_the_grammar_does():
    model = llm()
    outputs = model.generate(PROMPTS, params(n=4))
    check_all(outputs)
    assert len({text for several in texts(outputs) for text in several}) > 6
    assert all(sample.token_ids[-1] != END for output in outputs for sample in output.outputs)
    model.engine.check()


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 9},  # preempts
        {"budget": 8},  # prompts in chunks
        {"enable_prefix_caching": False},
        {"max_num_seqs": 1},
        {"deterministic": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_same_answers_whatever_else_happens(options):
    expected = llm().generate(PROMPTS, params(max_tokens=30))
    model = llm(**{"num_blocks": 64, **options})
    outputs = model.generate(PROMPTS, params(max_tokens=30))
    assert texts(outputs) == texts(expected)
    if options.get("num_blocks") == 9:
        assert sum(output.num_preemptions for output in outputs) > 0
    again = model.generate(PROMPTS, params(max_tokens=30))  # on cached prefixes
    assert texts(again) == texts(expected)
    model.engine.check()


@pytest.mark.injects_faults
def test_steps_that_fail_change_no_answer():
    expected = texts(llm().generate(PROMPTS, params(n=2)))
    steps = iter(range(1, 10**6))
    faulty = PagedHashModel(64, 8, fail_if=lambda batch: len(batch.entries) > 1 and next(steps) % 7 == 0)
    model = llm(model=faulty)
    assert texts(model.generate(PROMPTS, params(n=2))) == expected


def test_greedy_takes_the_likeliest_token_that_is_allowed():
    (output,) = llm().generate([PROMPTS[0]], params(structured={"regex": "[A-F]{6}"}, temperature=0.0))
    context, allowed = list(PROMPTS[0]), [ord(letter) - 33 for letter in "ABCDEF"]
    for token in output.outputs[0].token_ids:
        logits = next_logits(np.asarray(context))
        assert token == max(allowed, key=lambda one: logits[one])
        context.append(token)
    assert len(output.outputs[0].text) == 6


def test_logprobs_are_the_models_own():
    (output,) = llm().generate(
        [PROMPTS[0]], params(structured={"regex": "[AB]{3}"}, temperature=0.0, logprobs=3)
    )
    context = list(PROMPTS[0])
    for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        logits = next_logits(np.asarray(context)).astype(np.float64)
        expected = logits[token] - np.log(np.exp(logits).sum())
        assert entry.chosen.logprob == pytest.approx(expected, abs=1e-4)
        assert len(entry.top) == 3
        context.append(token)


def test_best_of_matches():
    outputs = llm().generate(PROMPTS[:2], params(n=2, best_of=4))
    check_all(outputs)
    assert all(len(output.outputs) == 2 for output in outputs)


def test_what_is_cut_off_says_so():
    (output,) = llm().generate([PROMPTS[0]], params(max_tokens=4))
    assert output.outputs[0].finish_reason == "length"
    (output,) = llm().generate([PROMPTS[0]], params(stop=['"b"']))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", '"b"')
    assert output.outputs[0].text.endswith(",")


def test_complete_in_the_last_token_is_no_cut():
    (output,) = llm().generate([PROMPTS[0]], params(structured={"choice": ["abcd"]}, max_tokens=4))
    assert (output.outputs[0].finish_reason, output.outputs[0].text) == ("stop", "abcd")


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_hold_as_long_as_the_grammar_goes_on(ignore_eos):
    options = {"min_tokens": 12, "max_tokens": 40, "ignore_eos": ignore_eos, "n": 4}
    (output,) = llm().generate([PROMPTS[0]], params(structured={"regex": "a+"}, **options))
    assert all(len(sample.text) >= 11 for sample in output.outputs)
    assert all(sample.finish_reason in ("stop", "length") for sample in output.outputs)
    (output,) = llm().generate([PROMPTS[0]], params(structured={"regex": "a{3}"}, **options))
    assert {(sample.text, sample.finish_reason) for sample in output.outputs} == {("aaa", "stop")}
    forbidden = params(structured={"regex": "a{3}b*"}, stop_token_ids=[ord("a") - 33], min_tokens=8)
    (output,) = llm().generate([PROMPTS[0]], forbidden)
    assert output.error is None
    assert output.outputs[0].text.startswith("aaa")


def test_bias_and_penalties_come_before_the_grammar():
    wanted = params(structured={"regex": "[ab]{8}"}, logit_bias={ord("b") - 33: 100.0, 5: 100.0})
    (output,) = llm().generate([PROMPTS[0]], wanted)
    assert output.outputs[0].text == "bbbbbbbb"


def test_one_that_becomes_too_complex_fails_alone():
    several = [params(), params(structured=TOO_COMPLEX, min_tokens=100), params()]
    model = llm()
    outputs = model.generate(PROMPTS[:3], several)
    check_all([outputs[0], outputs[2]])
    assert outputs[1].error_code == "grammar_failed"
    assert "grammar" in outputs[1].error
    model.engine.check()
    assert model.engine.cache.stats.held_blocks == 0


#: Each token takes more to place than the one before.
AMBIGUOUS = {"grammar": 'start: s\ns: s s s | s s | "a" | ""'}


@pytest.mark.parametrize("late", ["", "/x{40}/ "])
def test_one_that_makes_too_much_work_fails_alone(late):
    grammar = {"grammar": AMBIGUOUS["grammar"].replace("start: ", f"start: {late}")}
    hostile = params(structured=grammar, logit_bias={ord("a") - 33: 100.0}, max_tokens=1000)
    model = llm(num_blocks=1024)
    started = time.thread_time()
    outputs = model.generate(PROMPTS[:3], [params(), hostile, params()])
    check_all([outputs[0], outputs[2]])
    assert outputs[1].error_code == "grammar_failed"
    assert time.thread_time() - started < 5  # of all steps; the grammar alone would take minutes
    model.engine.check()


def test_a_refused_grammar_starts_nothing():
    model = llm()
    with pytest.raises(InvalidRequestError, match='"not"'):
        model.generate(PROMPTS[:2], [params(), params(structured={"json": {"not": {}}})])
    assert not model.engine.has_work


def test_without_a_tokenizer_a_grammar_is_refused():
    model = LLM.from_engine(make_engine()[0])
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        model.generate(PROMPTS[:1], params())


async def test_through_asyncio():
    engine = AsyncEngine(make_engine(tokenizer=LetterTokenizer())[0])
    try:
        output = await engine.generate(Request(PROMPTS[0], params(n=2)))
        check_all([output])
        pieces = ["", ""]
        async for delta in engine.stream(Request(PROMPTS[0], params(n=2))):
            pieces[delta.index] += delta.text
        assert [pieces] == texts([output])
        with pytest.raises(InvalidRequestError, match="multipleOf"):
            await engine.generate(Request(PROMPTS[0], params(structured={"json": {"multipleOf": 1000003}})))
        with pytest.raises(RequestFailedError, match="grammar") as caught:
            await engine.generate(Request(PROMPTS[0], params(structured=TOO_COMPLEX, min_tokens=100)))
        assert caught.value.code == "grammar_failed"
    finally:
        await engine.close()


def test_the_parameter():
    spec = StructuredOutputs(choice=["a", "b"])
    for given in ({"choice": ["a", "b"]}, spec):
        assert SamplingParams(structured=given).structured == spec
    with pytest.raises(InvalidRequestError, match="exactly one"):
        SamplingParams(structured={"regex": "a", "json": {}})


async def test_others_go_on_while_a_grammar_is_compiled():
    """The compiler has a thread of its own: neither the event loop nor a step waits for it."""
    compiling, release = threading.Event(), threading.Event()

    class SlowToCompile(LetterTokenizer):
        def grammar_source(self) -> LetterGrammarSource:
            compiling.set()
            assert release.wait(60)
            return super().grammar_source()

    engine = AsyncEngine(make_engine(tokenizer=SlowToCompile())[0])
    try:
        waiting = asyncio.create_task(engine.generate(Request(PROMPTS[0], params())))
        while not compiling.is_set():
            await asyncio.sleep(0)
        other = await engine.generate(Request(PROMPTS[1], SamplingParams(max_tokens=20, ignore_eos=True)))
        assert len(other.outputs[0].token_ids) == 20
        assert not waiting.done()
        left = asyncio.create_task(engine.generate(Request(PROMPTS[2], params())))
        await asyncio.sleep(0)
        left.cancel()  # the grammar is still compiled for the one that waits
        release.set()
        check_all([await waiting])
    finally:
        release.set()
        await engine.close()
