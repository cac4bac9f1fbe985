# SPDX-License-Identifier: Apache-2.0
"""Forms of calls that no declaration has, read off what a chat template renders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from family_templates import CHATML, CODER, OBJECT, PARAMETERS, PYTHON, S, W, pairs, tagged, template
from transformers.utils.chat_template_utils import render_jinja_template

from radixkv.errors import InvalidRequestError
from radixkv.text.chat_formats.answer import Answer
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.formats import probe_template

CALLS = [("get_weather", json.loads(W)), ("search", json.loads(S))]
ITEM = r"<acme:arg>KEY<acme:is>VALUE</acme:arg>\n"
TEMPLATES = {
    "a JSON object between marks": (
        template(*CHATML, call="{{- '<acme>' }}" + OBJECT + "{{- '</acme>' }}", between="\n"),
        f'<acme>{{"name": "get_weather", "arguments": {W}}}</acme>\n'
        f'<acme>{{"name": "search", "arguments": {S}}}</acme>',
    ),
    "a list with other names of the members": (
        template(
            *CHATML,
            before="<|acme|>[",
            after="]<|/acme|>",
            between=", ",
            call="{{- '{\"fn\": \"' ~ c.name ~ '\", \"args\": ' ~ (c.arguments | tojson) ~ '}' }}",
        ),
        f'<|acme|>[{{"fn": "get_weather", "args": {W}}}, {{"fn": "search", "args": {S}}}]<|/acme|>',
    ),
    "the name before JSON": (
        template(
            *CHATML,
            before="[[ACME]]",
            after="[[/ACME]]",
            call="{{- '#use ' ~ c.name ~ ' with ' ~ (c.arguments | tojson) ~ ';' }}",
        ),
        f"[[ACME]]#use get_weather with {W};#use search with {S};[[/ACME]]",
    ),
    "items between marks": (
        template(
            *CHATML,
            before="<acme:calls>\n",
            after="</acme:calls>",
            call=pairs(r'<acme:use tool="NAME">\n', ITEM, r"</acme:use>\n"),
        ),
        "<acme:calls>\n"
        + tagged('<acme:use tool="NAME">\n', ITEM.replace(r"\n", "\n"), "</acme:use>")
        + "\n</acme:calls>",
    ),
    "calls as Python writes them": (
        template(*CHATML, before="<|acme|>\n", after="<|/acme|>", call=PYTHON + "{{- '\n' }}"),
        '<|acme|>\nget_weather(city="Paris", days=2)\nsearch(query="007", tags=["a", "b"], exact=True, '
        'filters={"lang": "fr"})\n<|/acme|>',
    ),
}


def found(source: str) -> ChatFormat:
    def render(
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        try:
            rendered, _ = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=source,
                add_generation_prompt=True,
                **options,
            )
        except Exception as error:
            raise InvalidRequestError(str(error)) from error
        return str(rendered[0])

    return probe_template(render, source, lambda text: False).format


def read(known: ChatFormat, pieces: Sequence[str]) -> Answer:
    parser = known.parser(tools=PARAMETERS)
    return Answer.of([*(event for piece in pieces for event in parser.push(piece)), *parser.finish()])


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_form_is_what_the_template_renders(kind: str) -> None:
    source, text = TEMPLATES[kind]
    known = found(source)
    assert (known.name, known.is_known) == ("derived", False)
    for said in ("", "One moment.\n"):
        for pieces in ([said + text], list(said + text)):
            answer = read(known, pieces)
            calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
            assert (calls, answer.content) == (CALLS, said.strip())
    assert read(known, text[: len(text) // 3]).content == text[: len(text) // 3], "cut off, it stays text"
    again = read(known, [known.write_calls([("get_weather", W), ("search", S)])])
    assert [(call.name, json.loads(call.arguments)) for call in again.tool_calls] == CALLS


def test_marks_of_thoughts_are_derived_too() -> None:
    thought = "{{- '<musing>' ~ m.reasoning_content ~ '</musing>' }}"
    known = found(template(*CHATML, call="{{- '<acme>' }}" + OBJECT + "{{- '</acme>' }}", thought=thought))
    answer = read(known, f'<musing>Hm.</musing><acme>{{"name": "get_weather", "arguments": {W}}}</acme>')
    assert (answer.reasoning, answer.content, len(answer.tool_calls)) == ("Hm.", "", 1)


def test_a_declared_family_with_other_marks_in_its_template_reads_both() -> None:
    """A fine-tune with a template of its own: its family's signs are there, and its calls are others."""
    source = template(
        *CHATML,
        tools="Do not write <function= or <parameter=. {{ offered }}",
        call="{{- '<acme>' }}" + OBJECT + "{{- '</acme>' }}",
    )
    known = found(source)
    assert (known.name, known.is_known) == ("qwen3-coder", True)
    for text in (
        f'<acme>{{"name": "get_weather", "arguments": {W}}}</acme>',
        f'<tool_call>{{"name": "get_weather", "arguments": {W}}}</tool_call>',
    ):
        assert [call.name for call in read(known, [text]).tool_calls] == ["get_weather"]


@pytest.mark.parametrize(
    "call",
    [
        OBJECT,
        "{{- 'I call ' ~ c.name ~ ' for ' ~ (c.arguments | tojson) }}",
        "{{- '<acme>' ~ c.arguments.probe_key ~ c.name }}",
    ],
)
def test_what_looks_like_text_is_not_derived(call: str) -> None:
    """Without a mark every object in an answer would be a call; such models are read as Hermes's."""
    known = found(template(*CHATML, call=call))
    assert (known.name, known.is_known) == ("hermes", False)


@pytest.mark.parametrize(("filter_of_values", "word"), [("string", "True"), ("tojson", "true")])
def test_true_is_written_as_the_template_writes_it(filter_of_values: str, word: str) -> None:
    source = CODER.replace("v | tojson", f"v | {filter_of_values}")
    assert f"\n{word}\n" in found(source).write_calls([("search", '{"exact": true}')])
