# SPDX-License-Identifier: Apache-2.0
"""Grammars of answers that call tools, in every chat format, with marks as text and as special tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from radixkv.grammar.compiler import GrammarCompiler
from radixkv.grammar.vocabulary import Vocabulary
from radixkv.sampling.structured import StructuredOutputs
from radixkv.text.chat_formats.answer_grammar import AnswerGrammar, MarkToken
from radixkv.text.chat_formats.calls import CallForm
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.formats import FORMATS

END = 256
#: Parts of marks that are tokens in some vocabulary.
TOKEN = re.compile(r"<[^<>\s=\"]*(?:\"\|)?>|\[/?[A-Z_]+\]|\]<\]\w+\[>\[")
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "strict": True, "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "wait", "parameters": {"properties": {"b": {"not": {}}}}}},
]
#: One format of each notation and of each way to frame content, some with marks that are text.
CALLING = [
    *((name, False) for name in ("hermes", "deepseek", "harmony", "llama3", "qwen3-coder")),
    *((name, True) for name in ("hermes", "smollm2", "mistral", "mistral-args", "harmony", "glm", "gemma4")),
    *(
        (name, True)
        for name in ("deepseek-dsml", "minimax-m3", "lfm2", "kimi-k2", "kimi-k3", "command", "solar")
    ),
    *((name, True) for name in ("functionary-v3.2", "apertus", "minicpm5")),
]


class Marked:
    """Bytes as tokens, and the marks of a format as special ones."""

    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id = END, None

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.ids = {mark: END + 1 + i for i, mark in enumerate(marks)}
        self.tokens = [*(bytes([i]) for i in range(256)), b"<end>", *(mark.encode() for mark in marks)]
        self.special_token_ids = [END, *self.ids.values()]

    def grammar_source(self) -> Marked:
        return self

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode() if isinstance(text, bytes) else text
        pieces = re.split(f"({'|'.join(map(re.escape, self.ids))})", plain) if self.ids else [plain]
        return [token for piece in pieces for token in self._encode(piece)]

    def _encode(self, piece: str) -> Iterator[int]:
        return iter([self.ids[piece]] if piece in self.ids else piece.encode())

    def token_of(self, text: str) -> MarkToken | None:
        return MarkToken(self.ids[text], is_special=True) if text in self.ids else None


class Case:
    def __init__(self, chat_format: ChatFormat, special: bool) -> None:
        marks = chat_format.marks() if special else ()
        self.format = chat_format.with_vocabulary(token for mark in marks for token in TOKEN.findall(mark))
        self.tokenizer = Marked(self.format.special_tokens)
        self.compiler = GrammarCompiler(lambda: Vocabulary(self.tokenizer, {END}))
        self.call = chat_format.write_calls([("look", '{"a": 12}')])
        self.bad = chat_format.write_calls([("look", '{"a": "x"}')])
        self.two = chat_format.write_calls([("look", '{"a":1}'), ("wait", '{"b": "x"}')])
        marks = chat_format.reasoning
        self.thinking = marks.opens[0] + "so {} or" + marks.closes[0] if marks is not None else ""
        spoken = chat_format.spoken if chat_format.frames_content else None
        self.spoken = spoken.opens[0] if spoken is not None else ""

    def grammar(self, parallel: bool = True, **options: Any) -> AnswerGrammar:
        return AnswerGrammar(self.format, TOOLS, parallel, self.tokenizer.token_of, **options)

    def accepts(self, lark: str | None) -> Callable[[str], bool]:
        assert lark is not None
        grammar = self.compiler.compile(StructuredOutputs(grammar=lark))

        def accepts(text: str) -> bool:
            mask, tokens = grammar.start(), self.tokenizer(text)
            return mask.num_allowed(tokens) == len(tokens) and self._may_end(mask, tokens)

        return accepts

    def _may_end(self, mask: Any, tokens: list[int]) -> bool:
        for token in tokens:
            mask.accept(token)
        logits = torch.zeros(1, len(self.tokenizer.tokens))
        type(mask).apply(logits, [0], [mask])
        return bool(torch.isfinite(logits[0, END]))


@pytest.fixture(scope="module", params=CALLING, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    name, special = request.param
    return Case(FORMATS[name], special)


def test_required(case: Case) -> None:
    accepts = case.accepts(case.grammar().required())
    assert accepts(case.call)
    assert accepts(case.two)
    assert not accepts(case.bad)
    assert not accepts("Hello")
    assert not accepts("Hello " + case.call)
    assert not accepts("")


def test_one_function_once(case: Case) -> None:
    accepts = case.accepts(case.grammar().required("look"))
    assert accepts(case.call)
    assert not accepts(case.two)
    assert not accepts(case.format.write_calls([("wait", "{}")]))
    alone = case.accepts(case.grammar(parallel=False).required())
    assert alone(case.call)
    assert not alone(case.two)


def test_thinking_comes_first_where_the_model_has_marks_for_it(case: Case) -> None:
    has_marks = any(mark in case.thinking for mark in case.tokenizer.ids)
    assert case.accepts(case.grammar().required())(case.thinking + case.call) == has_marks
    assert not case.accepts(case.grammar().required())(case.thinking + case.bad)


def test_free_answers_hold_their_calls_to_strict_schemas(case: Case) -> None:
    if case.grammar().optional() is None:
        assert case.format.frames_content or case.format.form.bare
        return
    accepts = case.accepts(case.grammar().optional())
    for text in ("", "Hello {}", case.call, "Hello " + case.call, case.two, case.thinking + "Hello"):
        assert accepts(text)
    assert not accepts("Hello " + case.bad)
    once = case.accepts(case.grammar(parallel=False).optional())
    assert once("Hello " + case.call)
    assert not once(case.two)


def test_text_in_which_no_call_begins(case: Case) -> None:
    accepts = case.accepts(case.grammar().without_calls())
    for text in ("", "Hello {} <b>\n", '{"name": "Bob"}', case.thinking + case.spoken + "Hello"):
        assert accepts(text)
    for text in (case.call, "Hello\n" + case.call, case.thinking + case.call, case.two, case.bad):
        assert not accepts(text)
    if '"name":' in case.call:
        for name in ("look", "wait"):
            assert not accepts(f'{{ "name" : "{name}", "arguments"')


def test_json_or_a_call(case: Case) -> None:
    accepts = case.accepts(case.grammar().json('{"type": "integer"}'))
    assert accepts(case.spoken + "12")
    assert accepts(case.call)
    assert not accepts(case.spoken + "twelve")


def test_where_nothing_is_to_be_held() -> None:
    case = Case(FORMATS["hermes"], special=False)
    lax = [TOOLS[1]]
    assert AnswerGrammar(case.format, lax, True, case.tokenizer.token_of).optional() is None
    assert AnswerGrammar(case.format, [], True, case.tokenizer.token_of).json("{}") is None
    plain = AnswerGrammar(FORMATS["plain"], TOOLS, True, case.tokenizer.token_of)
    assert plain.required() is plain.optional() is plain.json("{}") is plain.without_calls() is None


def test_thinking_that_the_prompt_has_opened_is_closed_first() -> None:
    case = Case(FORMATS["hermes"], special=False)
    accepts = case.accepts(case.grammar(prompt_end="assistant\n<think>\n").required())
    assert accepts("so.\n</think>\n\n" + case.call)
    assert not accepts(case.call)


@pytest.mark.parametrize("special", [False, True])
def test_thinking_is_closed_as_the_template_closes_it(special: bool) -> None:
    case = Case(replace(FORMATS["hermes"], thinking=("<think>\n", "\n</think>", "\n\n")), special)
    accepts = case.accepts(case.grammar(prompt_end="assistant\n<think>\n").required())
    assert accepts("so {}\n\nor\n</think>\n\n" + case.call)
    assert not accepts("so</think>\n\n" + case.call)


def test_calls_have_the_numbers_that_the_template_gives_them() -> None:
    case = Case(FORMATS["kimi-k3"], special=True)
    accepts = case.accepts(case.grammar().required())
    assert accepts(case.two)
    assert not accepts(case.two.replace('index="2"', 'index="7"'))
    known = FORMATS["kimi-k2"]
    form = replace(cast(CallForm, known.forms[0]), first_index=0)
    case = Case(replace(known, forms=(form,), counts_calls=True), special=True)
    accepts = case.accepts(case.grammar(num_calls=3).required())
    assert accepts(case.two.replace(":1", ":4").replace(":0", ":3"))
    assert not accepts(case.two)
