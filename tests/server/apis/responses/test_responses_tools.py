# SPDX-License-Identifier: Apache-2.0
"""Tools of the Responses API beyond functions: namespaces, custom tools, and those that run elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import LiveServer, live_server
from openai import OpenAI
from pydantic_core import from_json
from scripted_engine import ScriptedEngine
from scripted_parser import ScriptedParser

from radixkv.text.chat_formats.answer import ToolCallArguments, ToolCallBegin, ToolCallEnd
from radixkv_server.apis.responses.output import OutputItems
from radixkv_server.apis.responses.schemas import ResponseRequest
from radixkv_server.apis.responses.tools import CustomTool, Toolbox
from radixkv_server.chats.chat import AnswerReaders, ChatPrompt

CUSTOM = CustomTool(type="custom", name="patch")
SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "name": "look", "parameters": SCHEMA, "strict": False},
    {
        "type": "namespace",
        "name": "crm",
        "description": "Customers.",
        "tools": [
            {"type": "function", "name": "look", "parameters": SCHEMA},
            {"type": "function", "name": "write", "parameters": SCHEMA, "description": "Writes."},
            {"type": "custom", "name": "note"},
        ],
    },
    {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}},
    {"type": "web_search"},
    {"type": "mcp", "server_label": "x", "server_url": "https://example.org", "require_approval": "never"},
]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(max_model_len=8192)) as running:
        yield running


@pytest.fixture
def client(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAI]:
    monkeypatch.setattr(ChatPrompt, "readers", lambda _: AnswerReaders(ScriptedParser))
    with server.openai() as one:
        yield one


def prompt_of(server: LiveServer) -> str:
    return bytes(token for token in server.engine.requests[-1].prompt if token < 256).decode()


def test_a_namespace_is_its_functions_and_calls_come_back_with_it(server: LiveServer, client: OpenAI) -> None:
    answer = client.responses.create(
        model="scripted", input="say:<look{}><crm__look{}><write{}>", tools=TOOLS, store=False
    )
    assert "tools:['look', 'crm__look', 'write', 'note', 'patch']" in prompt_of(server)
    functions = Toolbox(ResponseRequest.model_validate({"input": "a", "tools": TOOLS}).tools or ()).functions
    assert functions[2]["function"]["description"] == "(crm: Customers.) Writes."
    calls: Any = answer.output
    assert [(call.name, call.namespace) for call in calls] == [
        ("look", None),
        ("look", "crm"),
        ("write", "crm"),
    ]
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"} for call in calls
    ]
    client.responses.create(
        model="scripted", input=[{"role": "user", "content": "a"}, *calls, *results], tools=TOOLS
    )
    assert "call look({})call crm__look({})call write({})" in prompt_of(server)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_custom_tools_take_text(server: LiveServer, client: OpenAI, stream: bool, stored: bool) -> None:
    # A call as a model may write it: spaces that no encoder would write, and escapes.
    asked = 'say:<patch{"input":  "a \\"b\\"\\nc \\u00e9"}>'
    options: Any = {"model": "scripted", "input": asked, "tools": TOOLS, "store": stored}
    text = 'a "b"\nc é'
    if stream:
        events: list[Any] = list(client.responses.create(stream=True, **options))
        answer = events[-1].response
        kinds = [event.type for event in events]
        assert kinds[-2:] == ["response.output_item.done", "response.completed"]
        deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == text
        assert len(deltas) > 3
        [done] = [e for e in events if e.type == "response.custom_tool_call_input.done"]
        assert done.input == text
    else:
        answer = client.responses.create(**options)
    [call] = answer.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", text)
    before = prompt_of(server)
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "fine"}
    if stored:
        more: Any = {"previous_response_id": answer.id, "input": [output]}
    else:
        more = {"input": [{"role": "user", "content": asked}, call, output]}
    client.responses.create(model="scripted", tools=TOOLS, **more)
    after = prompt_of(server)
    assert after.startswith(before.removesuffix("assistant\n"))
    assert "call patch({'input': " in after
    assert "fine" in after


@pytest.mark.parametrize(
    "arguments",
    [
        '{"input": "a \\"b\\" \\\\ \\n \\u00e9\\ud83d\\ude00 é😀/\\/"}',
        ' {\n"input" : ""}',
        '{"input": "whole", "more": [1]}',
        '{"more": "x", "input": "late \\u00e9"}',
        '{"input": 5}',
        '{"input": "cut',
        '{"input": "cut \\u00',
        '{"input": "cut \\ud83d',
        "{",
    ],
)
def test_an_input_is_read_as_it_is_written(arguments: str) -> None:
    """Whatever the pieces are, and in linear time."""
    value = from_json(arguments, allow_partial="trailing-strings").get("input", "")
    wanted = value if isinstance(value, str) else ""
    for size in (1, 2, 3, 7, 1000):
        items = OutputItems(lambda kind, number: kind, Toolbox([CUSTOM]), lambda *_: None)
        events = [*items.add(ToolCallBegin(0, "c", "patch"), [])]
        for at in range(0, len(arguments), size):
            events += items.add(ToolCallArguments(0, arguments[at : at + size]), [])
        events += items.add(ToolCallEnd(0), [])
        deltas = [event["delta"] for event in events if event["type"].endswith("input.delta")]
        [done] = [event["input"] for event in events if event["type"].endswith("input.done")]
        assert "".join(deltas) == done == wanted
        assert all(deltas)


def test_a_regex_is_enforced_and_a_bad_format_refused(client: OpenAI) -> None:
    tool: Any = {"type": "custom", "name": "d", "format": {"type": "grammar", "syntax": "regex"}}
    with pytest.raises(openai.BadRequestError, match="definition"):
        client.responses.create(model="scripted", input="a", tools=[tool])
    tool["format"]["definition"] = "[0-9]+"
    [made] = Toolbox(ResponseRequest.model_validate({"input": "a", "tools": [tool]}).tools or ()).functions
    assert made["function"]["strict"] is True
    assert made["function"]["parameters"]["properties"] == {
        "input": {"type": "string", "pattern": "^(?:[0-9]+)$"}
    }


def test_tools_that_run_elsewhere_are_left_out_with_a_warning(server: LiveServer, client: OpenAI) -> None:
    raw = client.responses.with_raw_response.create(model="scripted", input="say:x", tools=TOOLS)
    warning, _, _ = raw.headers["warning"].removesuffix('"').partition(";")  # a note on the format may follow
    assert warning == '299 radixkv "without effect: tools of type web_search, tools of type mcp'
    assert [tool.type for tool in raw.parse().tools] == ["function", "namespace", "custom"]
    assert "web_search" not in prompt_of(server)
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.responses.create(
            model="scripted", input="x", tools=[{"type": "web_search"}], tool_choice="required"
        )


def test_unknown_types_within_a_namespace_are_refused(client: OpenAI) -> None:
    group: Any = {"type": "namespace", "name": "n", "description": "", "tools": [{"type": "funktion"}]}
    with pytest.raises(openai.BadRequestError, match="funktion"):
        client.responses.create(model="scripted", input="x", tools=[group])


def test_reasoning_comes_back_from_its_encrypted_content(server: LiveServer, client: OpenAI) -> None:
    options: Any = {"model": "scripted", "include": ["reasoning.encrypted_content"], "store": False}
    answer = client.responses.create(input="say:(why not)so", **options)
    thought, said = answer.output
    assert thought.type == "reasoning"
    assert thought.encrypted_content
    item: Any = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    client.responses.create(input=[{"role": "user", "content": "a"}, item, said], **options)
    assert "think why not\nso" in prompt_of(server)
    item["encrypted_content"] = "gAAAA-of another provider"
    client.responses.create(input=[{"role": "user", "content": "a"}, item, said], **options)
    assert "think" not in prompt_of(server)
    plain = client.responses.create(model="scripted", input="say:(why)so")
    assert getattr(plain.output[0], "encrypted_content", None) is None
