# SPDX-License-Identifier: Apache-2.0
"""LLM over the paged model: interleaved calls, any number of prompts, calls that fail half way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from paged_language_model import LetterTokenizer, PagedHashModel, make_engine

from radixkv import BeamSearchParams
from radixkv.entrypoints.llm import LLM
from radixkv.errors import InvalidRequestError, RadixKVError, RequestFailedError
from radixkv.sampling.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def llm_of(**options) -> LLM:
    return LLM.from_engine(make_engine(num_blocks=128, **options)[0])


def answer(prompt: list[int]) -> list[int]:
    return llm_of().generate([prompt], GREEDY)[0].outputs[0].token_ids


def assert_idle(llm: LLM) -> None:
    engine = llm.engine
    engine.check()
    assert not engine.has_work
    assert not engine.requests
    assert engine.scheduler.num_waiting == 0
    assert engine.cache.stats.held_blocks == 0


def test_the_models_own_sampling_is_used_where_none_is_given():
    llm = llm_of()
    assert llm.get_default_sampling_params() == SamplingParams()
    llm.engine.model = replace(llm.engine.model, default_sampling={"temperature": 0.0})
    default = llm.get_default_sampling_params()
    assert default.is_greedy
    [output] = llm.generate([[5, 6, 7]])
    assert output.outputs[0].token_ids == llm.generate([[5, 6, 7]], default)[0].outputs[0].token_ids


def test_interleaved_streams_each_get_their_own():
    llm = llm_of()
    prompts = [[5, 6, 7], [8, 9], [5, 6, 1]]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    given: list[list[int]] = [[] for _ in prompts]
    for _ in range(8):
        for tokens, stream in zip(given, streams, strict=True):
            tokens += next(stream).token_ids
    assert given == [answer(prompt) for prompt in prompts]
    assert [list(stream) for stream in streams] == [[], [], []]
    assert_idle(llm)


def test_generate_inside_a_stream():
    llm = llm_of()
    tokens = []
    for delta in llm.stream([5, 6, 7], GREEDY):
        tokens += delta.token_ids
        inner = llm.generate([[9, len(tokens)], [9]], GREEDY)
        assert [output.outputs[0].token_ids for output in inner] == [answer([9, len(tokens)]), answer([9])]
    assert tokens == answer([5, 6, 7])
    assert_idle(llm)


def test_a_stream_that_is_dropped_leaves_nothing():
    llm = llm_of()
    one, two = llm.stream([5, 6, 7], GREEDY), llm.stream([8], GREEDY)
    next(one), next(two)
    one.close()
    assert sum(len(delta.token_ids) for delta in two) == 7
    assert_idle(llm)


def test_more_prompts_than_the_queue_holds():
    llm = llm_of(max_queue=3, max_num_seqs=2)
    prompts = [[1 + i, 2] for i in range(20)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.outputs[0].token_ids for output in outputs[:3]] == [answer(p) for p in prompts[:3]]
    assert_idle(llm)
    assert len(llm.generate(prompts, GREEDY)) == 20


def test_a_streamed_chat_stays_in_its_namespace():
    llm = llm_of(tokenizer=LetterTokenizer())
    chat = [{"role": "user", "content": "a question that fills some blocks of the cache"}]
    deltas = list(llm.stream_chat(chat, GREEDY, namespace=("ada", "salt")))
    [elsewhere], [there] = llm.chat(chat, GREEDY), llm.chat(chat, GREEDY, namespace=("ada", "salt"))
    assert [token for delta in deltas for token in delta.token_ids] == there.outputs[0].token_ids
    assert (elsewhere.num_cached_tokens, there.num_cached_tokens) == (0, len(there.prompt_token_ids) - 1)


def test_a_suspended_stream_does_not_lock_the_others_out():
    llm = llm_of(max_queue=1, max_num_seqs=1)
    stream = llm.stream([5, 6, 7], GREEDY)
    first = next(stream).token_ids
    assert len(llm.generate([[1], [2], [3]], GREEDY)) == 3
    assert first + [token for delta in stream for token in delta.token_ids] == answer([5, 6, 7])
    assert_idle(llm)


def test_streams_may_be_more_than_the_queue_holds():
    llm = llm_of(max_queue=1, max_num_seqs=1)
    streams = [llm.stream([5 + i], GREEDY) for i in range(4)]
    given = [next(stream).token_ids for stream in streams]
    for i, (stream, tokens) in enumerate(zip(streams, given, strict=True)):
        assert tokens + [token for delta in stream for token in delta.token_ids] == answer([5 + i])
    assert_idle(llm)


@pytest.mark.parametrize(
    "fail",
    [
        lambda llm: llm.beam_search([[1, 2], []], BeamSearchParams(beam_width=2, max_tokens=4)),
        lambda llm: llm.generate([[1, 2], []], GREEDY),
        lambda llm: llm.generate([[1, 2], [3]], GREEDY, namespace=5),
        lambda llm: llm.generate([[1, 2], "text"], GREEDY),
        lambda llm: llm.generate([[1, 2], [3]], [GREEDY]),
        lambda llm: list(llm.stream([], GREEDY)),
    ],
)
def test_a_call_that_fails_leaves_nothing_behind(fail):
    llm = llm_of()
    with pytest.raises(RadixKVError):
        fail(llm)
    assert_idle(llm)
    assert llm.generate([[4, 5]], GREEDY)[0].outputs[0].token_ids == answer([4, 5])


def test_an_interrupt_leaves_nothing_behind():
    def interrupt(batch: object) -> bool:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return False

    steps = iter(range(1000))
    llm = llm_of(model=PagedHashModel(128, 8, fail_if=interrupt))
    other = llm.stream([7, 7], GREEDY)
    next(other)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3]], GREEDY)
    assert len(llm.engine.requests) == 1, "the other stream's request goes on"
    assert 1 + len(list(other)) == 8
    assert_idle(llm)


def test_a_failed_stream_raises_with_its_code():
    llm = llm_of(model=PagedHashModel(128, 8, nan_for={"req-0"}))
    with pytest.raises(RequestFailedError, match="NaN") as caught:
        list(llm.stream([5, 6, 7], GREEDY))
    assert caught.value.code == "nan_logits"
    assert_idle(llm)


def test_an_engine_that_others_step_is_an_error_not_a_busy_loop():
    llm = llm_of()
    stream = llm.stream([5, 6, 7], GREEDY)
    next(stream)
    while llm.engine.has_work:
        llm.engine.step()
    with pytest.raises(RuntimeError, match="step"):
        list(stream)


@pytest.mark.parametrize(
    "kind", [np.array, torch.tensor, list, tuple, lambda ids: [np.int32(i) for i in ids]]
)
def test_ids_may_come_in_any_array(kind):
    llm = llm_of()
    for prompts, expected in (
        (kind([5, 6, 7]), [[5, 6, 7]]),
        ([kind([5, 6, 7]), kind([8, 9])], [[5, 6, 7], [8, 9]]),
        ((kind([5]), [8, 9]), [[5], [8, 9]]),
    ):
        outputs = llm.generate(prompts, GREEDY)
        assert [output.prompt_token_ids for output in outputs] == expected
    assert next(llm.stream(kind([5, 6, 7]), GREEDY)).prompt.num_tokens == 3
    beams = llm.beam_search(kind([5, 6, 7]), BeamSearchParams(beam_width=2, max_tokens=2))
    assert beams[0].prompt_token_ids == [5, 6, 7]


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_a_matrix_of_ids_is_a_prompt_per_row(kind):
    outputs = llm_of().generate(kind([[5, 6], [7, 8]]), GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [[5, 6], [7, 8]]


@pytest.mark.parametrize(
    "bad",
    [
        np.array(5),
        np.array([1.5]),
        np.ones((1, 1, 1), int),
        [[[1]]],
        [1, "a"],
        None,
        5,
        torch.ones(2, requires_grad=True),
    ],
)
def test_what_is_no_prompt_is_refused(bad):
    llm = llm_of()
    with pytest.raises(InvalidRequestError):
        llm.generate(bad, GREEDY)
    assert_idle(llm)


def test_text_comes_back_with_the_output():
    llm = llm_of(tokenizer=LetterTokenizer())
    outputs = llm.generate(["abc", [5, 6]], GREEDY)
    assert [output.prompt for output in outputs] == ["abc", None]
    assert outputs[0].outputs[0].text == llm.tokenizer.decode(outputs[0].outputs[0].token_ids)
    assert llm.chat([{"role": "user", "content": "abc"}], GREEDY)[0].prompt_token_ids == (
        outputs[0].prompt_token_ids
    )
