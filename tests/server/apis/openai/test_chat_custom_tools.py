# SPDX-License-Identifier: Apache-2.0
"""Custom tools in chats: shown as functions of one text, called by it, whole and in streams."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from live_server import LiveServer, chat, live_server
from openai import BadRequestError
from scripted_engine import ScriptedEngine
from tiny_models import byte_level_tokenizer

from radixkv.text.tokenizer import Tokenizer

MULTIPLY = 'start: NUMBER " * " NUMBER\nNUMBER: /[0-9]+/'
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": MULTIPLY}}
PATCH: Any = {"type": "custom", "custom": {"name": "patch", "description": "Patch files."}}
MATHS: Any = {"type": "custom", "custom": {"name": "maths", "format": GRAMMAR}}
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
NO_GRAMMAR = {"type": "grammar"}
TEXT = 'say "hi"\n*** End'


def called(name: str, arguments: Any) -> str:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'say:<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'


def test_a_call_of_a_custom_tool_has_its_text(server: LiveServer) -> None:
    with server.openai() as client:
        asked = {**chat(called("patch", {"input": TEXT})), "model": "scripted", "tools": [PATCH, LOOK]}
        choice = client.chat.completions.create(**asked).choices[0]
        (call,) = choice.message.tool_calls or ()
        assert (choice.finish_reason, call.type) == ("tool_calls", "custom")
        assert (call.custom.name, call.custom.input) == ("patch", TEXT)
        asked |= chat(called("look", {"city": "Paris"}))
        (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or ()
        assert (call.type, call.function.arguments) == ("function", '{"city": "Paris"}')


@pytest.mark.parametrize("arguments", [{"input": TEXT * 40}, {"x": 1, "input": TEXT}])
def test_a_stream_has_the_text_as_it_is_written(server: LiveServer, arguments: dict[str, Any]) -> None:
    with server.openai() as client:
        asked = {**chat(called("patch", arguments)), "model": "scripted", "tools": [PATCH], "n": 2}
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    for index in (0, 1):
        own = [chunk.delta for chunk in chunks if chunk.index == index]
        calls = [call.model_dump(exclude_unset=True) for delta in own for call in delta.tool_calls or ()]
        begin, *rest = calls
        assert (begin["type"], begin["custom"]) == ("custom", {"name": "patch", "input": ""})
        assert begin["id"]
        pieces = [call["custom"]["input"] for call in rest]
        assert "".join(pieces) == arguments["input"]
        assert (len(pieces) > 10) == ("x" not in arguments)


def test_the_next_turn_has_the_words_of_the_model() -> None:
    written = '{"input":   "a\\u0062c"}'
    engine = ScriptedEngine(tokenizer=Tokenizer(byte_level_tokenizer()), script=lambda text: answers.pop())
    with live_server(engine) as server, server.openai() as client:
        answers = ["ok", "ok", called("patch", written).removeprefix("say:")]
        create: Any = partial(client.chat.completions.create, model="scripted", tools=[PATCH])
        message = create(**chat("x")).choices[0].message
        (call,) = message.tool_calls or ()
        assert call.custom.input == "abc"
        turn: list[Any] = [
            {"role": "user", "content": "x"},
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
        ]
        for call_id, arguments in ((call.id, written), ("another", '{"input": "abc"}')):
            turn[1]["tool_calls"][0]["id"] = turn[2]["tool_call_id"] = call_id
            create(messages=turn)
            assert arguments in engine.tokenizer.decode(engine.requests[-1].prompt)


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_grammar_and_a_choice_are_enforced(server: LiveServer, is_listed: bool) -> None:
    choice: Any = {"type": "custom", "custom": {"name": "maths"}}
    if is_listed:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [choice]}}
    with server.openai() as client:
        asked: Any = {"model": "scripted", "tools": [MATHS, PATCH], "max_tokens": 300, "tool_choice": choice}
        for name, text in (("maths", "12 * 3"), ("maths", "12 + 3"), ("patch", "12 * 3")):
            said = chat(called(name, {"input": text}))
            (call,) = client.chat.completions.create(**said, **asked).choices[0].message.tool_calls or ()
            assert (call.type, call.custom.name) == ("custom", "maths")
            assert (call.custom.input == text) == (text == "12 * 3")


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "custom", "custom": {"name": "a b"}}, "tools[0].custom.name"),
        (
            {"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}},
            "tools[0].custom.format",
        ),
        ({"type": "web_search"}, "tools[0]"),
    ],
)
def test_bad_tools_are_refused_by_name(server: LiveServer, tool: Any, param: str) -> None:
    with server.openai() as client, pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="scripted", **chat("x"), tools=[tool])
    assert caught.value.param == param


def test_a_grammar_that_can_not_be_used_is_named(server: LiveServer) -> None:
    bad = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: nothing"}}
    tool: Any = {"type": "custom", "custom": {"name": "a", "format": bad}}
    with server.openai() as client, pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="scripted", **chat("x"), tools=[tool], tool_choice="required")
    assert (caught.value.param or "").startswith("tools[0].custom.format")
