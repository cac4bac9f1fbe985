# SPDX-License-Identifier: Apache-2.0
"""Bad words and allowed tokens through an engine: beside guesses, samples, penalties and grammars."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nightly import by_day
from paged_language_model import END, VOCAB, LetterTokenizer, make_engine, next_logits

from radixkv.entrypoints.llm import LLM
from radixkv.errors import InvalidRequestError
from radixkv.sampling.sampling_params import SamplingParams

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, n] for n in range(10, 14)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}


class Tokenizer(LetterTokenizer):
    """Encodes to what decodes to the same text; a space is no letter of an answer."""

    def encode(self, text: str, add_special_tokens: bool = True, *, allow_special: bool = True) -> list[int]:
        return [(ord(letter) - 33) % VOCAB for letter in text]


def llm(**options: Any) -> LLM:
    return LLM.from_engine(make_engine(tokenizer=Tokenizer(), **options)[0])


def ids(outputs: Any) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def contains(tokens: list[int], word: list[int]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens)))


def words_of(answers: list[list[int]]) -> list[list[int]]:
    """Of each answer: its third token, and what comes fifth to seventh."""
    return [word for tokens in answers for word in (tokens[2:3], tokens[4:7])]


def likeliest(prompt: list[int], params: SamplingParams, count: int) -> list[int]:
    """The greedy answer, plainly."""
    context, answer = list(prompt), list[int]()
    for _ in range(count):
        logits = next_logits(np.asarray(context))
        for token in range(VOCAB):
            ruled_out = params.allowed_token_ids is not None and token not in params.allowed_token_ids
            for word in params.bad_words:
                assert not isinstance(word, str)
                ruled_out |= [*answer, token][-len(word) :] == list(word)
            if ruled_out:
                logits[token] = -np.inf
        answer.append(int(np.argmax(logits)))
        context.append(answer[-1])
    return answer


class TestBadWords:
    def test_a_greedy_answer_avoids_what_it_would_have_been(self) -> None:
        model = llm()
        words = words_of(ids(model.generate(PROMPTS, SamplingParams(**GREEDY))))
        params = SamplingParams(bad_words=words, **GREEDY)
        answers = ids(model.generate(PROMPTS, params))
        assert not any(contains(answer, word) for answer in answers for word in words)
        assert answers == [likeliest(prompt, params, 30) for prompt in PROMPTS]

    def test_texts_are_ruled_out_with_and_without_a_space(self) -> None:
        model = llm()
        (free,) = model.generate(PROMPTS[:1], SamplingParams(**GREEDY))
        text = free.outputs[0].text
        for word in (text[3], text[6:9], " " + text[6:9]):
            (output,) = model.generate(PROMPTS[:1], SamplingParams(bad_words=[word], **GREEDY))
            assert word.strip() not in output.outputs[0].text
        encoded = model.engine.input_processor.encode_words(SamplingParams(bad_words=["ab", " ab", "c"]))
        encode = Tokenizer().encode
        assert {tuple(word) for word in encoded.bad_words} == {
            tuple(encode(text)) for text in ("ab", " ab", "c", " c")
        }

    @pytest.mark.parametrize(
        "options",
        by_day(
            [
                {"num_blocks": 14},  # preempts
                {"budget": 8},
                {"enable_prefix_caching": False},
                {"max_num_seqs": 1},
                {"speculation": "off"},
                {"max_draft_tokens": 8},
            ],
            {"num_blocks": 14},
            {"max_draft_tokens": 8},
        ),
        ids=lambda options: "-".join(map(str, *options.items())),
    )
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_the_same_answers_whatever_else_happens(
        self, options: dict[str, Any], temperature: float
    ) -> None:
        more: dict[str, Any] = {"temperature": temperature, "n": 3, "seed": 7, "max_tokens": 24}
        more |= {"ignore_eos": True, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
        words = words_of(ids(llm(speculation="off").generate(PROMPTS, SamplingParams(**more))))
        params = SamplingParams(bad_words=words, **more)
        expected = ids(llm(speculation="off").generate(PROMPTS, params))
        assert not any(contains(answer, word) for answer in expected for word in words)
        model = llm(**{"num_blocks": 64, **options})
        outputs = model.generate(PROMPTS, params)
        assert ids(outputs) == expected
        if options.get("num_blocks") == 14:
            assert sum(output.num_preemptions for output in outputs) > 0
        again = model.generate(PROMPTS, params)  # on cached prompts, with guesses of what was said before
        assert ids(again) == expected
        if options.get("max_draft_tokens"):
            assert sum(output.accepted_draft_tokens for output in again) > 0
        model.engine.check()

    def test_guesses_of_what_is_ruled_out_are_not_made_or_are_wrong(self) -> None:
        """The cache goes on with the very tokens that are bad now."""
        model = llm(max_draft_tokens=8)
        free = ids(model.generate(PROMPTS, SamplingParams(**GREEDY)))
        params = SamplingParams(bad_words=words_of(free), **GREEDY)
        assert ids(model.generate(PROMPTS, params)) == [likeliest(p, params, 30) for p in PROMPTS]
        said = sorted({token for answer in free for token in answer[::2]})
        allowed = SamplingParams(allowed_token_ids=said, **GREEDY)
        assert ids(model.generate(PROMPTS, allowed)) == [likeliest(p, allowed, 30) for p in PROMPTS]


class TestAllowedTokens:
    def test_only_these_are_generated(self) -> None:
        params = SamplingParams(allowed_token_ids=[3, 5, 8, 13, 3], **GREEDY)
        answers = ids(llm().generate(PROMPTS, params))
        assert answers == [likeliest(prompt, params, 30) for prompt in PROMPTS]
        drawn = SamplingParams(
            allowed_token_ids=range(4, 9), temperature=3.0, top_p=0.9, n=4, max_tokens=20, min_tokens=2
        )
        assert set().union(*map(set, ids(llm().generate(PROMPTS, drawn)))) <= set(range(4, 9))

    def test_a_single_one_is_all_there_is(self) -> None:
        several: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 5.0, "top_k": 3},
            {"min_p": 0.9},
        ]
        for more in several:
            (answer,) = ids(llm().generate(PROMPTS[:1], SamplingParams(allowed_token_ids=[7], **more)))
            assert answer == [7] * 16

    def test_the_end_comes_only_where_it_is_allowed(self) -> None:
        (ended,) = llm().generate(PROMPTS[:1], SamplingParams(allowed_token_ids=[END], max_tokens=9))
        assert (ended.outputs[0].token_ids, ended.outputs[0].finish_reason) == ([END], "stop")

    def test_beside_a_grammar_both_hold(self) -> None:
        letters = [ord(letter) - 33 for letter in "BDF"]
        (output,) = llm().generate(
            PROMPTS[:1],
            SamplingParams(
                structured={"regex": "[A-F]{6}"}, allowed_token_ids=letters, bad_words=["BB", "DF"], seed=3
            ),
        )
        text = output.outputs[0].text
        assert len(text) == 6
        assert set(text) <= set("BDF")
        assert "BB" not in text
        assert "DF" not in text


class TestNothingLeft:
    @pytest.mark.parametrize(
        ("params", "blamed"),
        [
            ({"allowed_token_ids": [5], "bad_words": [[5]]}, "allowed_token_ids"),
            ({"allowed_token_ids": [END], "min_tokens": 2}, "allowed_token_ids"),
            ({"bad_words": [[token] for token in range(VOCAB)]}, "bad_words"),
            ({"bad_words": [[t] for t in range(VOCAB) if t != END], "min_tokens": 1}, "bad_words"),
        ],
    )
    def test_what_can_be_seen_before_is_refused(self, params: dict[str, Any], blamed: str) -> None:
        with pytest.raises(InvalidRequestError, match="leave no token to choose") as refused:
            llm().generate(PROMPTS[:1], SamplingParams(**params))
        assert refused.value.param == blamed

    @pytest.mark.parametrize(
        "params",
        [
            {"structured": {"choice": ["AAA", "AAB"]}, "bad_words": ["AA"]},
            {"structured": {"regex": "[A-C]+"}, "allowed_token_ids": [40, 41]},
            {"allowed_token_ids": [5, 6], "bad_words": [[5, 5], [5, 6], [6, 5], [6, 6]]},
        ],
    )
    def test_what_comes_up_later_fails_that_request_alone(self, params: dict[str, Any]) -> None:
        model = llm(max_draft_tokens=8)
        fine = SamplingParams(**GREEDY)
        expected = ids(model.generate(PROMPTS, fine))
        each = [fine, SamplingParams(**{**GREEDY, **params}), fine, fine]
        outputs = model.generate(PROMPTS, each)
        assert (outputs[1].outputs[0].finish_reason, outputs[1].error_code) == ("error", "no_token_left")
        assert "no token is left" in str(outputs[1].error)
        assert [ids([outputs[i]])[0] for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]
        model.engine.check()


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("bad_words", "ab"),
            ("bad_words", [""]),
            ("bad_words", [3]),
            ("bad_words", [b"ab"]),
            ("bad_words", [[]]),
            ("bad_words", [[-1]]),
            ("bad_words", [[True]]),
            ("bad_words", [["a"]]),
            ("bad_words", 7),
            ("bad_words", ["a" * 1025]),
            ("bad_words", ["a"] * 1025),
            ("allowed_token_ids", []),
            ("allowed_token_ids", [-1]),
            ("allowed_token_ids", [1.0]),
            ("allowed_token_ids", [True]),
            ("allowed_token_ids", ["1"]),
            ("allowed_token_ids", "12"),
            ("allowed_token_ids", b"12"),
            ("allowed_token_ids", 12),
        ],
    )
    def test_by_the_parameters(self, name: str, value: Any) -> None:
        with pytest.raises(InvalidRequestError, match=name) as refused:
            SamplingParams(**{name: value})
        assert refused.value.param == name

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("allowed_token_ids", [1, VOCAB]),
            ("bad_words", [[1, VOCAB]]),
            ("bad_words", [f"{i:04}" * 200 for i in range(30)]),
            ("bad_words", [[1] * 8193]),
        ],
    )
    def test_by_the_model(self, name: str, value: Any) -> None:
        model = llm()
        with pytest.raises(InvalidRequestError, match=name) as refused:
            model.generate(PROMPTS[:1], SamplingParams(**{name: value}))
        assert refused.value.param == name
        assert not model.engine.has_work
