# SPDX-License-Identifier: Apache-2.0
"""Tokenizers' own response templates: declarations where no known family says the same, robust as these."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from family_templates import PARAMETERS, S, W
from transformers.utils.chat_parsing import parse_response

from radixkv.text.chat_formats.answer import Answer
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.formats import FORMATS
from radixkv.text.chat_formats.response_template import with_response_template

CALLED = {"type": "function", "function": "{content}"}
OBJECTS: dict[str, Any] = {
    "start_anchor": "<acme>assistant\n",
    "fields": {
        "thinking": {"open": "<musing>", "close": "</musing>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<use>",
            "close": "</use>",
            "repeats": True,
            "content": "json",
            "transform": CALLED,
        },
        "content": {"close": "<end>", "content": "text"},
    },
}
ITEMS: dict[str, Any] = {
    "start_anchor": "<acme>assistant\n",
    "fields": {
        "reasoning_content": {"open": ["<musing>", "<hm>"], "close": ["</musing>", "</hm>"]},
        "tool_calls": {
            "open_pattern": r"<use (?P<name>\w+)>\s*",
            "close_pattern": r"\s*</use>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}
OBJECT_TEXT = "\n".join(
    f'<use>{{"name": "{name}", "arguments": {given}}}</use>'
    for name, given in (("get_weather", W), ("search", S))
)
ITEM_TEXT = (
    "<use get_weather>\n<city>Paris</city><days>2</days>\n</use><use search>\n<query>007</query>"
    '<tags>["a", "b"]</tags><exact>true</exact><filters>{"lang": "fr"}</filters></use>'
)


NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
#: Calls as the tokenizers of known families declare them, with other marks, and a text of their models.
SHIPPED: dict[str, tuple[dict[str, Any], str]] = {
    "marks around names and values": (
        {
            "open_pattern": r"<do>\s*<fn=(?P<name>\w+)>",
            "close": "</do>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<arg=(?P<key>\w+)>\s*(?P<value>.*?)\s*</arg>"},
            "transform": NAMED,
        },
        "<do>\n<fn=get_weather>\n<arg=city>\nParis\n</arg>\n<arg=days>\n2\n</arg>\n</do>",
    ),
    "attributes of tags": (
        {
            "open_pattern": r'<x:use\b[^>]*?\bname="(?P<name>[^"]+)">',
            "close": "</x:use>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r'<x:arg\b[^>]*?\bname="(?P<key>[^"]+)"[^>]*?>(?P<value>.*?)</x:arg>',
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": NAMED,
        },
        '<x:use name="get_weather"><x:arg name="city">Paris</x:arg><x:arg name="days">2</x:arg></x:use>',
    ),
    "JSON with names without quotes": (
        {
            "open_pattern": r"<\|act>call:(?P<name>\w+)",
            "close": "<act|>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<|'|>", "<|'|>"]]},
            "transform": NAMED,
        },
        "<|act>call:get_weather{city:<|'|>Paris<|'|>,days:2}<act|>",
    ),
    "a list with other names of the members": (
        {
            "open": "<|ACTS|>",
            "close_pattern": r"(?:<\|END_ACTS\|>|$)",
            "content": "json",
            "transform": {"function": {"name": "{tool_name}", "arguments": "{given}"}},
            "transform_each": True,
        },
        f'<|ACTS|>[\n    {{"tool_name": "get_weather", "given": {W}}}\n]<|END_ACTS|>',
    ),
    "the name in front of JSON": (
        {
            "open_pattern": r"(?:<\|begin\|>)?<\|call\|>(?P<name>[\w.]+)\s*<\|args\|>",
            "close": ["<|called|>", "<|end|>"],
            "repeats": True,
            "content": "json",
            "transform": NAMED,
        },
        f"<|call|>get_weather<|args|>{W}<|called|>",
    ),
}


def known_with(given: dict[str, Any]) -> ChatFormat:
    return with_response_template(FORMATS["hermes"], given)


def read(known: ChatFormat, text: str, size: int = 10_000, *, cut: bool = False, **options: Any) -> Answer:
    parser = known.parser(tools=PARAMETERS, **options)
    events = [event for at in range(0, len(text), size) for event in parser.push(text[at : at + size])]
    answer = Answer.of([*events, *parser.finish(cut=cut)])
    for call in answer.tool_calls:
        call.id = ""
    return answer


@pytest.mark.parametrize(("given", "text"), [(OBJECTS, OBJECT_TEXT), (ITEMS, ITEM_TEXT)], ids=["json", "xml"])
def test_regions_become_the_parts_of_an_answer_in_any_pieces(given: dict[str, Any], text: str) -> None:
    known = known_with(given)
    written = f"<musing>\nHm.\n</musing>One moment.\n{text}"
    answers = [read(known, written, size) for size in (10_000, 1, 2, 7)]
    assert answers.count(answers[0]) == 4
    calls = [(call.name, json.loads(call.arguments)) for call in answers[0].tool_calls]
    assert calls == [("get_weather", json.loads(W)), ("search", json.loads(S))]
    assert (answers[0].reasoning, answers[0].content) == ("Hm.", "One moment.")
    opened = read(known, f"Hm.</musing>{text}", prompt_end="<acme>user\nx<acme>assistant\n<musing>")
    assert (opened.reasoning, len(opened.tool_calls)) == ("Hm.", 2)
    assert read(known, written, calls=False).content == f"One moment.\n{text}"


@pytest.mark.parametrize("kind", SHIPPED)
def test_a_declaration_reads_and_writes_what_the_template_reads(kind: str) -> None:
    field, text = SHIPPED[kind]
    given = {"start_anchor": "<acme>", "fields": {"tool_calls": field, "content": {}}}
    known = known_with(given)
    for pieces in (10_000, 1):
        answer = read(known, f"One moment.\n{text}", pieces)
        calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
        assert (calls, answer.content) == ([("get_weather", json.loads(W))], "One moment.")
    written = known.write_calls([("get_weather", '{"city": "Paris"}')])
    found = parse_response(written, given, prefix="")["tool_calls"]
    (call,) = found if isinstance(found, list) else [found]
    assert call["function"] == {"name": "get_weather", "arguments": {"city": "Paris"}}
    forced = read(known, written, forced=True)
    assert [call.name for call in forced.tool_calls] == ["get_weather"]


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ({"open_pattern": r"<(use|do) (?P<name>\w+)>", "content": "json", "transform": NAMED}, "the pattern"),
        ({"open_pattern": r"<use (?P<name>\w+)>", "content": "kv-lines", "transform": NAMED}, "kv-lines"),
        (
            {"open": "<use>", "content": "xml-inline", "content_args": {"tag_pattern": "x"}},
            "a group for the name",
        ),
        ({"open_pattern": r"use (?P<name>\w+) with", "content": "int", "transform": NAMED}, "'int'"),
    ],
)
def test_a_form_that_can_not_be_declared_is_named(field: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        known_with({"start_anchor": "<acme>", "fields": {"tool_calls": field, "content": {}}})


@pytest.mark.parametrize("pattern", [r"<muse\s+on>", r"<(?:very)?muse>", r"<muse|<hm", r"<muse \d+>"])
def test_a_pattern_of_thoughts_that_is_no_mark_is_named(pattern: str) -> None:
    thinking = {"open_pattern": pattern, "close": "</muse>"}
    with pytest.raises(ValueError, match="the pattern"):
        known_with({"start_anchor": "<acme>", "fields": {"thinking": thinking, "content": {}}})


def test_a_malformed_call_is_text_and_the_others_are_calls() -> None:
    broken = '<use>{"name": "search", "arguments": {"query": </use>'
    answer = read(known_with(OBJECTS), f"So: {broken}{OBJECT_TEXT} Done.")
    assert (answer.content, len(answer.tool_calls)) == (f"So: {broken} Done.", 2)
    assert read(known_with(OBJECTS), f"So: {broken[:-6]}", 3).content == f"So: {broken[:-6]}"
    assert read(known_with(OBJECTS), f"So: {broken[:-6]}", cut=True).content == "So:"
    assert read(known_with(OBJECTS), "a<end>b<end>").content == "ab", "a second region adds to the first"


def test_a_family_that_reads_the_same_keeps_its_own_reader() -> None:
    """It gives arguments as they come."""
    marks = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
    fields = {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {**marks, "transform": CALLED},
        "content": {},
    }
    given = {"start_anchor": "<|im_start|>assistant\n", "fields": fields}
    assert known_with(given) is FORMATS["hermes"]
    other = with_response_template(FORMATS["glm"], given)
    written = f'<tool_call>{{"name": "search", "arguments": {S}}}</tool_call>'
    assert other.write_calls([("search", S)]) == written


def test_the_template_that_a_family_ships_changes_nothing() -> None:
    """Muse writes ` to=self<|message|>`, with a blank that its own template leaves out."""
    tag = r'<atem:parameter\b[^>]*?\bname="(?P<key>[^"]+)"[^>]*?>(?P<value>.*?)</atem:parameter>'
    fields = {
        "reasoning_content": {"open_pattern": r"to=self<\|message\|>", "close": "<|eom|>"},
        "tool_calls": {
            "open_pattern": r'<atem:invoke\b[^>]*?\bname="(?P<name>[^"]+)">',
            "close": "</atem:invoke>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": tag},
            "transform": NAMED,
        },
        "content": {"open_pattern": r"to=user<\|message\|>", "close": ["<|eot|>", "<|eom|>"]},
    }
    given = {"start_anchor": "<|start|>assistant", "fields": fields}
    assert with_response_template(FORMATS["muse"], given) is FORMATS["muse"]


def test_a_forced_call_is_read_in_the_form_that_its_grammar_has() -> None:
    known = known_with(OBJECTS)
    written = known.write_calls([("get_weather", W)])
    assert [call.name for call in read(known, written, forced=True).tool_calls] == ["get_weather"]


def test_what_is_no_response_template_is_refused() -> None:
    with pytest.raises(ValueError, match="start_anchor"):
        known_with({"fields": {"content": {}}})


def test_long_answers_take_linear_time() -> None:
    def seconds(text: str) -> float:
        started = time.thread_time()
        read(known_with(OBJECTS), text, 64)
        return time.thread_time() - started

    for attack in ("word ", "<use>", "<", "<use>{", OBJECT_TEXT):
        short, long = (attack * (size // len(attack)) for size in (1 << 10, 1 << 13))
        assert seconds(long) < 32 * min(seconds(short) for _ in range(3)), attack
