# SPDX-License-Identifier: Apache-2.0
"""Grammars of answers that call tools, in every chat format, with marks as text and as special tokens."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch

from radixkv.errors import InvalidRequestError
from radixkv.grammar.compiler import GrammarCompiler
from radixkv.grammar.vocabulary import Vocabulary
from radixkv.sampling.structured import StructuredOutputs
from radixkv.text.chat_formats.answer import Answer
from radixkv.text.chat_formats.answer_grammar import AnswerGrammar, MarkToken
from radixkv.text.chat_formats.format import ChatFormat, schemas_of
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

    def grammar(self, parallel: bool = True, tools: Any = TOOLS, **options: Any) -> AnswerGrammar:
        return AnswerGrammar(self.format, tools, parallel, self.tokenizer.token_of, **options)

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
    form = replace(known.forms[0], first_index=0)
    case = Case(replace(known, forms=(form,), counts_calls=True), special=True)
    accepts = case.accepts(case.grammar(num_calls=3).required())
    assert accepts(case.two.replace(":1", ":4").replace(":0", ":3"))
    assert not accepts(case.two)


#: One format of each notation of arguments as text, with marks as special tokens.
TEXTUAL = ("qwen3-coder", "glm", "minimax-m3", "kimi-k3", "gemma4", "lfm2", "minicpm5")
TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["v"],
}
DEFINED = {
    "tree": TREE,
    "size": {"$anchor": "size", "type": "integer", "minimum": 5},
    "either": {"anyOf": [{"type": "string", "pattern": "^x"}, {"type": "integer"}]},
}
#: Strict schemas of one argument, values that can be written, and values that can't.
HELD: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "string", "pattern": "^a|b$"}, ["a", "ax", "x\nb"], ["", "xa", "bx"]),
    ({"type": "string", "pattern": "^[^,<]{2,4}$"}, ["f2=3", "it i"], ["f", "a,b", "f2=3x"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["a", "abcd", ""]),
    ({"type": "string", "format": "date"}, ["2026-02-28"], ["2026-13-01", "today", ""]),
    ({"type": ["string", "null"], "enum": ["none", "low", None]}, ["none", "low", None], ["high", 1]),
    ({"enum": ["low", 1, None, True]}, ["low", 1, None, True], ["high", 2, False]),
    ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, ["auto", 12, -3], ["aut", True, None, [1]]),
    ({"type": ["string", "null"], "pattern": "^a"}, ["ab", None], ["b"]),
    (
        {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 100}]},
        ["a", 100],
        ["abc"],
    ),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        [[1, 2]],
        [[], [1], [1] * 4],
    ),
    ({"type": "array", "items": {"type": "string", "maxLength": 2}}, [[], ["ab"]], [["abc"], [1]]),
    ({"$ref": "#size"}, [5], [4, "five"]),
    ({"$ref": "#/$defs/either/anyOf/0"}, ["xa"], ["a", 5]),
    ({"allOf": [{"$ref": "#/$defs/either"}, {"type": "string", "minLength": 2}]}, ["xa"], ["x", 5]),
    ({"$ref": "#/$defs/tree"}, [{"v": 1, "kids": [{"v": 2, "kids": [{"v": 3}]}]}], [{"v": "a"}, {}]),
    (
        {"type": ["object", "null"], "properties": {"v": {"type": "integer"}}},
        [None, {"v": 1}],
        ["a", {"v": "a"}],
    ),
]


@pytest.fixture(scope="module", params=TEXTUAL)
def textual(request: pytest.FixtureRequest) -> Case:
    return Case(FORMATS[request.param], special=True)


def strict_tool(schema: dict[str, Any], **members: Any) -> dict[str, Any]:
    """Return a strict tool with one argument, `a`."""
    parameters = {
        "$defs": DEFINED,
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        **members,
    }
    return {"type": "function", "function": {"name": "look", "strict": True, "parameters": parameters}}


@pytest.mark.parametrize("index", range(len(HELD)))
def test_text_is_held_to_a_strict_schema(textual: Case, index: int) -> None:
    """What a grammar allows is read as a value that the schema allows; what can't be written is only that."""
    schema, allowed, refused = HELD[index]
    tool = strict_tool(schema)
    accepts = textual.accepts(textual.grammar(tools=[tool]).required())
    is_element = textual.format.name == "minimax-m3"  # where nothing is written for null

    def outcome(value: Any) -> tuple[bool, Any]:
        given = "null" if value is None and is_element else value
        written = textual.format.write_calls([("look", json.dumps({"a": given}))])
        parser = textual.format.parser(tools=schemas_of([tool]))
        (call,) = Answer.of([*parser.push(written), *parser.finish()]).tool_calls
        return accepts(written), json.loads(call.arguments)

    for value in allowed:
        assert outcome(value) == (True, {"a": value})
    validator = jsonschema.Draft202012Validator(tool["function"]["parameters"])
    for value in refused:
        is_accepted, read = outcome(value)
        assert not is_accepted or validator.is_valid(read), read


def test_text_can_not_end_a_value_before_its_mark(textual: Case) -> None:
    tool = strict_tool({"type": "string"}, additionalProperties=False)
    accepts = textual.accepts(textual.grammar(tools=[tool]).required())
    once = textual.format.write_calls([("look", '{"a": "x"}')])
    twice = textual.format.write_calls([("look", '{"a": "x", "b": "y"}')])
    assert accepts(once)
    assert not accepts(twice)
    assert not accepts(twice.replace("\n", ""))


def test_members_that_are_not_listed() -> None:
    case = Case(FORMATS["glm"], special=True)
    tool = strict_tool({"type": "integer"}, patternProperties={"^x-": {"type": "boolean"}})
    accepts = case.accepts(case.grammar(tools=[tool]).required())
    for arguments, held in (({"x-a": True}, True), ({"x-a": 1}, False), ({"y": True}, False)):
        assert accepts(case.format.write_calls([("look", json.dumps({"a": 1, **arguments}))])) is held


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"type": "string", "not": {"const": "a"}}, "'a': not "),
        ({"type": "string", "pattern": "a(?=b)"}, "'a': pattern: "),
        ({"type": "string", "format": "iri"}, "'a': format: 'iri' "),
        ({"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string"}]}, "'a': there are too many"),
    ],
)
def test_what_text_can_not_be_held_to_is_refused_by_name(schema: dict[str, Any], what: str) -> None:
    case = Case(FORMATS["qwen3-coder"], special=True)
    nested = {"type": "object", "properties": {"b": schema}}
    for kind, place in ((schema, what), (nested, what.replace("'a'", "'a.b'"))):
        case = Case(FORMATS["qwen3-coder" if kind is schema else "minimax-m3"], special=True)
        with pytest.raises(InvalidRequestError, match="the tool 'look'") as raised:
            case.grammar(tools=[strict_tool(kind)]).required()
        assert place in str(raised.value)
        assert raised.value.param == "tools"
        lax = strict_tool(kind)
        del lax["function"]["strict"]
        assert case.grammar(tools=[lax]).required()


def combined(num: int) -> dict[str, Any]:
    """Return a schema with two alternatives in each of some places that hold together."""
    pairs = [{"anyOf": [{"minLength": i}, {"maxLength": 99 + i}]} for i in range(num)]
    return {"type": "string", "allOf": pairs}


def nested(num: int) -> dict[str, Any]:
    """Return a schema of objects in objects."""
    return {"type": "object", "properties": {"a": nested(num - 1)}} if num else {"type": "string"}


@pytest.mark.parametrize("name", ["glm", "gemma4", "minimax-m3"])
@pytest.mark.parametrize(
    "schema", [combined(40), nested(90), {"$ref": "#/properties/a"}], ids=["all", "deep", "self"]
)
def test_schemas_without_measure_take_no_time(name: str, schema: dict[str, Any]) -> None:
    """A strict one is refused or enforced; one that is not strict is left free where it is too much."""
    case = Case(FORMATS[name], special=True)
    tool = strict_tool(schema)
    started = time.thread_time()
    with contextlib.suppress(InvalidRequestError):
        case.grammar(tools=[tool]).required()
    del tool["function"]["strict"]
    assert case.grammar(tools=[tool]).required()
    assert time.thread_time() - started < 2
