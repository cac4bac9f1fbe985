# SPDX-License-Identifier: Apache-2.0
"""All chat formats alike: each reads what it writes, in any pieces, cut off or hostile, by tools' schemas."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.text.chat_formats.answer import Answer
from radixkv.text.chat_formats.arguments import JsonArguments
from radixkv.text.chat_formats.format_parser import HELD_ARGUMENTS
from radixkv.text.chat_formats.formats import FORMATS
from radixkv.text.chat_formats.tagged_arguments import TaggedArguments

CALLING = sorted(name for name, known in FORMATS.items() if known.forms)
TEXTUAL = sorted(name for name in CALLING if not isinstance(FORMATS[name].forms[0].arguments, JsonArguments))
TOOLS: dict[str, Any] = {
    "look": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "route": {
                "type": "object",
                "properties": {"legs": {"type": "array", "items": {"type": "string"}}},
            },
            "open": {"type": "boolean"},
        },
    },
    "wait": {"type": "object", "properties": {}},
}
ARGUMENTS = {"city": '007 </p> "Paris"\nit\'s', "days": 2, "route": {"legs": ["a", "b"]}, "open": True}
CALLS = [("look", json.dumps(ARGUMENTS)), ("wait", "{}")]


def parse(name: str, parts: Iterable[str], *, cut: bool = False, **options: Any) -> Answer:
    parser = FORMATS[name].parser(tools=TOOLS, **options)
    answer = Answer()
    for part in parts:
        answer.add(parser.push(part))
    answer.add(parser.finish(cut=cut))
    for call in answer.tool_calls:
        call.id = ""
    return answer


@pytest.mark.parametrize("name", CALLING)
def test_what_is_written_is_read_in_any_pieces(name: str) -> None:
    text = FORMATS[name].write_calls(CALLS)
    whole = parse(name, [text])
    assert [(call.name, json.loads(call.arguments)) for call in whole.tool_calls] == [
        (called, json.loads(arguments)) for called, arguments in CALLS
    ]
    assert not whole.content
    assert parse(name, text) == whole
    for at in range(1, len(text), 7):
        assert parse(name, [text[:at], text[at:]]) == whole, text[:at]
    section = FORMATS[name].reasoning
    if section is not None:
        thought = f"{section.opens[0]}\nA city.\n{section.closes[0]}"
        thinking = parse(name, thought + FORMATS[name].after_reasoning + text)
        assert (thinking.reasoning, thinking.content) == ("A city.", "")
        assert thinking.tool_calls == whole.tool_calls


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("007", "007"), ("true", "true"), ("2", "2"), ('say "a"\n\\n', 'say "a"\n\\n'), ("</p> {", "</p> {")],
)
@pytest.mark.parametrize("name", TEXTUAL)
def test_a_string_keeps_what_it_looks_like(name: str, given: str, wanted: str) -> None:
    text = FORMATS[name].write_calls([("look", json.dumps({"city": given}))])
    (call,) = parse(name, text).tool_calls
    assert json.loads(call.arguments) == {"city": wanted}


@pytest.mark.parametrize(
    ("key", "written", "wanted"),
    [
        ("days", "2", 2),
        ("days", "+2", 2),
        ("days", "two", "two"),
        ("open", "True", True),
        ("open", "false", False),
        ("route", '{"legs": ["a"]}', {"legs": ["a"]}),
        ("route", "{'legs': ['a'], 'x': None}", {"legs": ["a"], "x": None}),
        ("route", "{broken", "{broken"),
        ("unknown", "2", "2"),
    ],
)
def test_text_becomes_what_the_schema_says(key: str, written: str, wanted: Any) -> None:
    text = (
        f"<tool_call>\n<function=look>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    )
    (call,) = parse("qwen3-coder", text).tool_calls
    assert json.loads(call.arguments) == {key: wanted}


#: Schemas of one argument, a text, and the value that it means.
MEANT: list[tuple[Any, str, Any]] = [
    ({"type": ["string", "null"], "enum": ["none", "low", None]}, "none", "none"),
    ({"type": ["string", "null"], "enum": ["none", "low", None]}, "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "none", "none"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    ({"enum": ["true", False, "1", 2]}, "true", "true"),
    ({"enum": ["true", False, "1", 2]}, "false", False),
    ({"enum": ["true", False, "1", 2]}, "1", "1"),
    ({"enum": ["true", False, "1", 2]}, "2", 2),
    ({"enum": ["true", False, "1", 2]}, "3", "3"),
    ({"anyOf": [{"const": "1"}, {"type": "integer"}]}, "1", "1"),
    ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 9}]}, "8", "8"),
    ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 9}]}, "9", 9),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, "[1]", [1]),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, '["a"]', '["a"]'),
    ({"$ref": "#/$defs/a/anyOf/0"}, "1", "1"),
    ({"$ref": "#/$defs/b%20c"}, "1", "1"),
    ({"$ref": "#d"}, "1", "1"),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, "1", "1"),
]
DEFINED = {
    "a": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    "b c": {"type": "string"},
    "d": {"$anchor": "d", "type": "string"},
}


@pytest.mark.parametrize(("schema", "text", "meant"), MEANT)
@pytest.mark.parametrize("name", ["qwen3-coder", "glm", "minimax-m3", "minicpm5"])
def test_a_text_is_the_value_that_its_schema_means(name: str, schema: Any, text: str, meant: Any) -> None:
    """`properties` and `patternProperties` alike; a list of values, or bounds, tell text from the rest."""
    for members in ({"properties": {"a": schema}}, {"properties": {}, "patternProperties": {"^a$": schema}}):
        tools = {"look": {"type": "object", "$defs": DEFINED, **members}}
        parser = FORMATS[name].parser(tools=tools)
        written = FORMATS[name].write_calls([("look", json.dumps({"a": text}))])
        (call,) = Answer.of([*parser.push(written), *parser.finish()]).tool_calls
        value = json.loads(call.arguments)["a"]
        assert (type(value), value) == (type(meant), meant)


def test_a_pattern_of_names_that_takes_for_ever_is_given_up() -> None:
    tools = {"look": {"patternProperties": {"^(a+)+$": {"type": "string"}, "b$": {"type": "string"}}}}
    parser = FORMATS["glm"].parser(tools=tools)
    written = FORMATS["glm"].write_calls([("look", json.dumps({"a" * 60 + "b": "1"}))])
    (call,) = Answer.of([*parser.push(written), *parser.finish()]).tool_calls
    assert json.loads(call.arguments) == {"a" * 60 + "b": "1"}


@pytest.mark.parametrize(
    ("text", "meant"), [("[look(a=None)]", "None"), ("[look(a=1)]", 1), ("[look(a='1')]", "1")]
)
def test_words_without_quotes_are_text_where_the_schema_lists_them(text: str, meant: Any) -> None:
    tools = {"look": {"properties": {"a": {"enum": ["None", "1", 1]}}}}
    parser = FORMATS["pythonic"].parser(tools=tools)
    (call,) = Answer.of([*parser.push(text), *parser.finish()]).tool_calls
    assert json.loads(call.arguments) == {"a": meant}


@pytest.mark.parametrize(
    "text",
    [
        "[look(city=open('x'))]",
        "[look(city=a + b)]",
        "[print('x')]",
        "[look(city='Paris'",
        "[1, 2, 3]",
        "As [look(city='Paris')] shows",
    ],
)
def test_literals_are_read_and_never_evaluated(text: str) -> None:
    assert parse("pythonic", [text]) == Answer(text) == parse("pythonic", text)


def test_a_long_string_comes_word_for_word() -> None:
    words = "word " * 400
    text = FORMATS["glm"].write_calls([("look", json.dumps({"city": words}))])
    parser = FORMATS["glm"].parser(tools=TOOLS)
    deltas = [event for at in range(0, len(text), 5) for event in parser.push(text[at : at + 5])]
    assert len(deltas) > 200


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, str, list[str]]:
    name = draw(st.sampled_from(sorted(FORMATS)))
    known = FORMATS[name]
    whole = known.write_calls(CALLS) if known.forms else "x"
    cuts = st.integers(0, len(whole))
    fragment = st.one_of(
        st.sampled_from(
            [*filter(None, known.marks()), "look", "city", "\n", '{"', '"', "}", "]", "(", ",", ": "]
        ),
        st.sampled_from(["x" * 280, "<", "2", whole]),
        cuts.map(lambda at: whole[:at]),
        cuts.map(lambda at: whole[at:]),
    )
    text = "".join(draw(st.lists(fragment, max_size=9)))
    places = sorted({cut % (len(text) + 1) for cut in draw(st.lists(st.integers(0, 4000), max_size=5))})
    return name, text, [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@settings(max_examples=60, deadline=None)
@given(texts(), st.booleans(), st.booleans())
def test_any_text_is_the_same_in_any_pieces(
    drawn: tuple[str, str, list[str]], cut: bool, forced: bool
) -> None:
    name, text, parts = drawn
    whole = parse(name, [text], cut=cut, forced=forced)
    assert parse(name, parts, cut=cut, forced=forced) == whole
    assert parse(name, text, cut=cut, forced=forced) == whole


@pytest.mark.parametrize("name", ["qwen3-coder", "gemma4"])
def test_hostile_texts_take_linear_time(name: str) -> None:
    def seconds(text: str) -> float:
        parser, started = FORMATS[name].parser(tools=TOOLS), time.thread_time()
        for at in range(0, len(text), 32):
            parser.push(text[at : at + 32])
        parser.finish()
        return time.thread_time() - started

    whole = FORMATS[name].write_calls(CALLS)
    for attack in (FORMATS[name].forms[0].opens[0], whole[: len(whole) // 2], whole[:-1]):
        short, long = (attack * (size // len(attack)) for size in (1 << 11, 1 << 14))
        # The best of some: a busy machine can only make them slower. In quadratic time it were 64 times.
        assert min(seconds(long) for _ in range(2)) < 32 * min(seconds(short) for _ in range(3)), attack


def test_an_escape_is_the_same_in_any_pieces() -> None:
    text = r"[look(city='\u2028 \x41 \U0001F600 \q')]"
    whole = parse("pythonic", [text])
    assert json.loads(whole.tool_calls[0].arguments) == {"city": "\u2028 A \U0001f600 \\q"}
    assert parse("pythonic", text) == whole


def test_tags_may_have_white_space_between_them() -> None:
    """A template writes none, a model does."""
    form = FORMATS["glm"].forms[0]
    assert isinstance(form.arguments, TaggedArguments)
    tight = replace(form.arguments, key="<arg_key>KEY</arg_key><arg_value>", end="</arg_value>", between="")
    known = replace(FORMATS["glm"], forms=(replace(form, head="<tool_call>NAME", arguments=tight),))
    parser = known.parser(tools=TOOLS)
    answer = Answer.of([*parser.push(FORMATS["glm"].write_calls(CALLS)), *parser.finish()])
    assert [json.loads(call.arguments) for call in answer.tool_calls] == [ARGUMENTS, {}]


def test_arguments_before_the_name_wait_for_it_however_long_they_are() -> None:
    """As Hermes 2 Pro writes them; too long ones are text, in any pieces."""
    first = '<tool_call>\n{"arguments": %s, "name": "look"}\n</tool_call>'
    given = json.dumps({"city": "word " * 400})
    text = first % given + "\n" + first % "{}"
    whole = parse("hermes", [text])
    assert [call.arguments for call in whole.tool_calls] == [given, "{}"]
    assert not whole.content
    assert parse("hermes", text) == parse("hermes", [text[:700], text[700:]]) == whole
    broken = first % given.replace("{", "{<")
    long = first % json.dumps({"city": "x" * HELD_ARGUMENTS})
    for text in (broken, long, long[: HELD_ARGUMENTS - 9]):
        pieces = [text[at : at + 301] for at in range(0, len(text), 301)]
        assert parse("hermes", [text]) == parse("hermes", pieces) == Answer(text)


def test_an_element_without_others_is_an_empty_list_or_object() -> None:
    text = FORMATS["minimax-m3"].write_calls([("look", '{"route": {"legs": []}}'), ("look", '{"route": {}}')])
    calls = parse("minimax-m3", [text]).tool_calls
    assert [json.loads(call.arguments) for call in calls] == [{"route": {"legs": []}}, {"route": {}}]


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "deepseek-dsml", "kimi-k2", "olmo3", "hunyuan"])
def test_white_space_around_calls_counts_between_texts_alone(name: str) -> None:
    call = FORMATS[name].write_calls(CALLS)
    assert parse(name, f"Before.\n{call}\nAfter.").content == "Before.\nAfter."
    assert parse(name, f"{call}\n\nAfter.").content == "After."
    assert parse(name, f"Before.\n{call}\n").content == "Before."
