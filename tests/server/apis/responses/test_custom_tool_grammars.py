# SPDX-License-Identifier: Apache-2.0
"""The grammar of a custom tool's input over HTTP: what a call may hold, and what of a grammar is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import LiveServer, live_server
from openai import OpenAI
from patch_grammar import PATCH
from scripted_engine import ScriptedEngine

GOOD = (
    '*** Begin Patch\n*** Update File: a "b".py\n'
    "@@ def f():\n-\treturn \"\\\\n\"\n+\treturn 'é😀'\n*** End Patch\n"
)
LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def custom(definition: str, name: str = "apply_patch") -> Any:
    return {
        "type": "custom",
        "name": name,
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": definition},
    }


def calling(text: str, name: str = "apply_patch") -> str:
    """A user's message that the scripted engine answers with a call, as far as the grammar lets it."""
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    return f'say:<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(max_model_len=16384, num_blocks=2048)) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[OpenAI]:
    with server.openai() as one:
        yield one


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "name": "apply_patch"}])
@pytest.mark.parametrize("stream", [False, True])
def test_an_input_of_the_grammar_comes_as_it_is(
    server: LiveServer, client: OpenAI, choice: Any, stream: bool
) -> None:
    options: Any = {"model": "scripted", "tools": [LOOK, custom(PATCH)], "store": False}
    options |= {"tool_choice": choice, "max_output_tokens": 2000}
    asked = {"role": "user", "content": calling(GOOD)}
    if stream:
        events: list[Any] = list(client.responses.create(input=[asked], stream=True, **options))
        deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == GOOD
        answer = events[-1].response
    else:
        raw = client.responses.with_raw_response.create(input=[asked], **options)
        assert "without effect" not in raw.headers.get("warning", "")
        answer = raw.parse()
    [call] = answer.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", GOOD)
    first = server.engine.requests[-1]
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "fine"}
    options["tool_choice"] = "auto"
    more: Any = [asked, call.model_dump(exclude_none=True), output]
    client.responses.create(input=more, **options)
    assert server.engine.requests[-1].prompt[: len(first.prompt) - 10] == first.prompt[:-10]


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "name": "apply_patch"}])
def test_no_other_input_is_written(client: OpenAI, choice: Any) -> None:
    definition = 'start: "\\"" NUMBER "\\\\" /[a-c]/i "\\n!"\nNUMBER: /[0-9]{3}/'
    answer: Any = client.responses.create(
        model="scripted",
        input=calling('"12" and more'),
        tools=[custom(definition)],
        tool_choice=choice,
        max_output_tokens=200,
        store=False,
    )
    call = answer.output[0]
    assert call.input.startswith('"12')
    assert re.fullmatch(r'"[0-9]{3}\\[a-cA-C]\n!', call.input)


def test_each_tool_has_a_grammar_of_its_own(client: OpenAI) -> None:
    group: Any = {
        "type": "namespace",
        "name": "g",
        "description": "G.",
        "tools": [custom('start: /".*/', "two")],
    }
    tools = [custom("start: A\nA: /a+/", "one"), group]
    for name, text in (("one", "aa"), ("two", '"\\')):
        answer: Any = client.responses.create(
            model="scripted", input=calling(text, name), tools=tools, tool_choice="required", store=False
        )
        assert (answer.output[0].name, answer.output[0].input) == (name, text)


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        ("start: a\nb: /x/", "unknown name"),
        ("start: /[a/", "not closed"),
        ("start: /(a/", "not closed"),
        ("\nstart: /a/ (/b/", "line "),
        ("start: /a\\q/", "line 1"),
        ('start: "a"\n}\nevil: "b"', "line 2"),
        ("start: %json {}", "%json"),
        ("x: /a/", "start"),
        ("start: " + "A & " * 24 + "A\nA: /(.*a.{9}b.*)/", "&"),
        ("start: /((a{1000}){1000}){1000}/", "nested repetition"),
    ],
)
@pytest.mark.parametrize("place", ["tools[1]", "tools[1].tools[0]"])
def test_a_bad_grammar_is_refused_by_its_place(
    client: OpenAI, definition: str, says: str, place: str
) -> None:
    bad = custom(definition, "bad")
    if "." in place:
        bad = {"type": "namespace", "name": "g", "description": "G.", "tools": [bad]}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="scripted", input="a", tools=[custom(PATCH), bad], store=False)
    error: Any = refused.value.body
    assert error["param"] == f"{place}.format.definition"
    assert says in error["message"]
    assert place in error["message"]
    answer: Any = client.responses.create(model="scripted", input="say:x", tools=[custom(PATCH)], store=False)
    assert answer.output_text == "x"


def test_verbosity_is_taken_with_a_warning(client: OpenAI) -> None:
    raw = client.responses.with_raw_response.create(
        model="scripted", input="say:x", text={"verbosity": "low"}
    )
    assert "text.verbosity" in raw.headers["warning"]
    raw = client.responses.with_raw_response.create(model="scripted", input="a", text={"verbosity": "medium"})
    assert "warning" not in raw.headers
