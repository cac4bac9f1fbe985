# SPDX-License-Identifier: Apache-2.0
"""Tool calls and reasoning over HTTP: what clients of chat completions get of them, whole and in streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import LiveServer, live_server
from nightly import by_day
from scripted_engine import ScriptedEngine
from tiny_models import byte_level_tokenizer

from radixkv.errors import ConfigError
from radixkv.text.chat_formats.formats import FORMATS
from radixkv.text.tokenizer import Tokenizer
from radixkv_server.settings import ServerSettings

ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def says(text: str, **fields: Any) -> Any:
    """Arguments of a chat completion that the scripted engine answers with the text."""
    messages = [{"role": "user", "content": "say:" + text}]
    return {"model": "scripted", "messages": messages, "tools": [TOOL], **fields}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(num_blocks=256)) as running:
        yield running


def message(server: LiveServer, text: str, **fields: Any) -> tuple[Any, str]:
    with server.openai() as client:
        choice = client.chat.completions.create(**says(text, **fields)).choices[0]
    return choice.message, choice.finish_reason


def test_a_whole_answer_has_reasoning_content_and_calls(server: LiveServer) -> None:
    answer, reason = message(server, f"<think>\nHm.\n</think>\n\nLook:\n{CALL}\n{CALL}")
    assert (answer.content, answer.reasoning_content, reason) == ("Look:", "Hm.", "tool_calls")
    assert [(call.function.name, call.function.arguments) for call in answer.tool_calls] == [
        ("look", ARGUMENTS)
    ] * 2
    assert len({call.id for call in answer.tool_calls}) == 2
    answer, _ = message(server, CALL)
    assert answer.content is None, "nothing but a call"
    answer, reason = message(server, "<think>Hm.</think>Hi.")
    assert (answer.content, answer.reasoning_content, answer.tool_calls, reason) == (
        "Hi.",
        "Hm.",
        None,
        "stop",
    )


def test_a_stream_tells_name_first_and_arguments_in_pieces(server: LiveServer) -> None:
    long = '{"text": "%s"}' % ("word " * 200)
    second = CALL.replace(ARGUMENTS, long)
    with server.openai() as client:
        chunks = [
            chunk.choices[0]
            for chunk in client.chat.completions.create(
                **says(f"<think>Hm.</think>Hi.\n{CALL}\n{second}", stream=True)
            )
        ]
    deltas = [chunk.delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Hi."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    begun = [call for call in calls if call.id]
    assert [(call.index, call.function.name, call.type) for call in begun] == [
        (0, "look", "function"),
        (1, "look", "function"),
    ]
    pieces = [[c.function.arguments for c in calls if c.index == index and not c.id] for index in (0, 1)]
    assert ["".join(texts) for texts in pieces] == [ARGUMENTS, long]
    assert len(pieces[1]) > 10, "long arguments come as they are written"
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


def test_what_is_no_call_is_text(server: LiveServer) -> None:
    for text in (CALL[:-20], "<tool_call>nonsense</tool_call>", "<tool_call>" * 100):
        answer, reason = message(server, text)
        assert (answer.content, answer.tool_calls, reason) == (text, None, "stop")


def test_calls_are_text_where_there_are_no_tools(server: LiveServer) -> None:
    answer, reason = message(server, CALL, tools=None)
    assert (answer.content, answer.tool_calls, reason) == (CALL, None, "stop")


@pytest.mark.parametrize("text", [CALL, f"Hm. {CALL}", CALL.removeprefix("<tool_call>")])
def test_no_call_is_made_where_none_is_wanted_and_the_tools_stay_in_the_prompt(
    server: LiveServer, text: str
) -> None:
    """A loop that ends with `tool_choice: none` finds the prompt of its earlier turns."""
    message(server, text)
    offered = server.engine.requests[-1].prompt
    answer, reason = message(server, text, tool_choice="none")
    assert server.engine.requests[-1].prompt == offered
    assert (answer.tool_calls, reason) == (None, "stop")
    assert "<tool_call>" not in answer.content
    assert '"name": "look"' not in answer.content
    with server.openai() as client:
        stream = client.chat.completions.create(**says(text, tool_choice="none", stream=True))
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == answer.content
    assert not any(delta.tool_calls for delta in deltas)
    plain = 'Say {"name": "Bob"} <table> and <b>'
    assert message(server, plain, tool_choice="none")[0].content == plain


def test_only_the_first_call_is_told_without_parallel_calls(server: LiveServer) -> None:
    answer, _ = message(server, CALL + "\n" + CALL, parallel_tool_calls=False)
    assert len(answer.tool_calls) == 1


@pytest.mark.parametrize("said", ["", "Let me look. "])
@pytest.mark.parametrize(
    "name",
    by_day(
        ["hermes", "smollm2", "llama3", "mistral", "mistral-args", "deepseek", "harmony"],
        "hermes",
        "harmony",
    ),
)
def test_a_free_call_that_is_cut_is_no_markup(name: str, said: str) -> None:
    """As much of it as there is: nothing, or its name and the beginning of its arguments."""
    written = FORMATS[name].write_calls([("look", ARGUMENTS)])
    if said and written.startswith("{"):
        return  # such a family does not speak before it calls
    start = written.index("look") + 1 if written.startswith("{") else 3
    with live_server(ScriptedEngine(num_blocks=256), chat_format=name) as server, server.http() as http:
        for end in range(start, len(written), 5):
            most = len((said + written[:end]).encode())
            body = says(said + written, max_tokens=most)
            whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]
            assert whole["finish_reason"] == "length"
            assert (whole["message"]["content"] or "").strip() == said.strip(), most
            told = [call["function"] for call in whole["message"].get("tool_calls") or ()]
            assert [call["name"] for call in told] == ["look"][: len(told)]
            assert all(ARGUMENTS.startswith(call["arguments"]) for call in told)
            assert bool(told) == (end > written.index(ARGUMENTS))
            streamed = http.post("/v1/chat/completions", json={**body, "stream": True}).text
            chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert "".join(delta.get("content") or "" for delta in deltas).strip() == said.strip()
            pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
            assert "".join(piece["arguments"] for piece in pieces) == "".join(c["arguments"] for c in told)


@pytest.mark.parametrize(
    ("stop", "told", "reason"), [("P", '{"city": "', "stop"), ("L", ARGUMENTS, "tool_calls")]
)
def test_a_call_that_a_stop_string_cuts_is_not_to_be_made(
    server: LiveServer, stop: str, told: str, reason: str
) -> None:
    body = says(CALL + "Look", stop=stop)
    with server.http() as http:
        choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        streamed = http.post("/v1/chat/completions", json={**body, "stream": True}).text
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == told
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, reason)
    assert f'"finish_reason":"{reason}"' in streamed


def test_logprobs_are_those_of_the_content_and_of_nothing_else(server: LiveServer) -> None:
    """Not of reasoning, of calls, of marks, or of the white space between them."""
    text = f"<think>\nHm, né.\n</think>\n\nLe voilà: \U0001f600.\n{CALL}\n and more\n{CALL}"
    for more in ({}, {"max_tokens": 30}, {"max_tokens": 60}, {"tool_choice": "required"}, {"tools": None}):
        body = {**says(text, logprobs=True, top_logprobs=1), **more}
        with server.http() as http:
            choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
            lines = http.post("/v1/chat/completions", json={**body, "stream": True}).text.splitlines()
        content = choice["message"]["content"] or ""
        assert bytes(b for token in choice["logprobs"]["content"] for b in token["bytes"]).decode() == content
        chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        for chunk in chunks:
            tokens = (chunk["logprobs"] or {"content": []})["content"]
            told = bytes(b for token in tokens for b in token["bytes"]).decode()
            assert told == (chunk["delta"].get("content") or "")


def test_a_template_without_tools_shows_them_all_the_same() -> None:
    """Its format's preamble goes into the system message, and the history's calls into the texts."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"city":"Rome"}'}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    engine = ScriptedEngine(tokenizer=Tokenizer(byte_level_tokenizer()))
    with (
        live_server(engine, chat_format="smollm2") as server,
        server.openai() as client,
        server.http() as http,
    ):
        client.chat.completions.create(model="scripted", messages=messages, tools=[TOOL], max_tokens=1)
        prompt = engine.requests[-1].prompt
        text = engine.tokenizer.decode(prompt, skip_special_tokens=False)
        tokenized = http.post("/tokenize", json={"messages": messages, "tools": [TOOL]}).json()["tokens"]
        client.chat.completions.create(model="scripted", messages=messages, max_tokens=1)
        without = engine.tokenizer.decode(engine.requests[-1].prompt, skip_special_tokens=False)
    preamble = FORMATS["smollm2"].write_preamble([TOOL])
    assert f"<|im_start|>system\nBe brief.\n\n{preamble}<|im_end|>" in text
    assert '<tool_call>[{"name": "look", "arguments": {"city":"Rome"}}]</tool_call><|im_end|>' in text
    assert text.count("<|im_start|>system") == 1
    assert tokenized == prompt
    assert "<tools>" not in without
    assert '{"city":"Rome"}' in without


def test_plain_answers_are_left_alone() -> None:
    with live_server(ScriptedEngine(num_blocks=256), chat_format="plain") as server:
        answer, reason = message(server, f"<think>Hm.</think>{CALL}")
        assert (answer.content, reason) == (f"<think>Hm.</think>{CALL}", "stop")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"chat_format must be one of auto, apertus.*FAMILY\.toml.*nope"):
        ServerSettings(chat_format="nope")


@pytest.mark.parametrize(
    "name", ['a"b', "a\\b", "a.b", "a b", "", "x" * 65, "näme", "look\n", 'a","arguments":{}}']
)
def test_names_of_tools_keep_to_the_apis_rule(server: LiveServer, name: str) -> None:
    function = {"name": name, "parameters": {"type": "object"}}
    messages = [{"role": "user", "content": "hi"}]
    of_chat = {"type": "function", "function": function}
    with server.http() as http:
        for path, body in (
            (
                "/v1/chat/completions",
                {"messages": messages, "tools": [{"type": "function", "function": function}]},
            ),
            ("/tokenize", {"messages": messages, "tools": [of_chat]}),
            ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **function}]}),
        ):
            refused = http.post(path, json=body)
            assert refused.status_code == 400, (path, refused.text)
            assert "name" in refused.text
        if len(name) != 65:
            tools = [{"name": name, "input_schema": {"type": "object"}}]
            refused = http.post("/v1/messages", json={"max_tokens": 5, "messages": messages, "tools": tools})
            assert refused.status_code == 400, "Anthropic's may be 128 long"


def test_names_of_tools_as_agents_have_them(server: LiveServer) -> None:
    function = {"name": "mcp__server-1__" + "x" * 49, "parameters": {"type": "object"}}
    messages = [{"role": "user", "content": "hi"}]
    of_chat = {"type": "function", "function": function}
    tools = [{"name": "x" * 128, "input_schema": {"type": "object"}}]
    with server.http() as http:
        for path, body in (
            ("/v1/chat/completions", {"messages": messages, "tools": [of_chat]}),
            ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **function}]}),
            ("/v1/messages", {"max_tokens": 5, "messages": messages, "tools": tools}),
        ):
            assert http.post(path, json=body).status_code == 200, path


@pytest.mark.parametrize("most", [1, 12, 25, 40, 48])
def test_a_forced_call_that_is_cut_is_no_markup_in_any_api(server: LiveServer, most: int) -> None:
    messages = [{"role": "user", "content": "say:" + CALL}]
    of_responses = {"type": "function", **TOOL["function"]}
    of_messages = {"name": "look", "input_schema": {"type": "object"}}
    chat = {"messages": messages, "tools": [TOOL], "tool_choice": "required", "max_tokens": most}
    with server.http() as http:
        whole = http.post("/v1/chat/completions", json=chat).json()["choices"][0]
        assert (whole["finish_reason"], whole["message"]["content"]) == ("length", None)
        streamed = http.post("/v1/chat/completions", json={**chat, "stream": True}).text
        assert '"content":null' in streamed
        assert '"content":"' not in streamed
        for call in whole["message"].get("tool_calls") or []:
            assert (call["function"]["name"], call["function"]["arguments"][0]) == ("look", "{")
        assert ('"name":"look"' in streamed) == ("tool_calls" in whole["message"])
        response = {"tools": [of_responses], "tool_choice": "required", "max_output_tokens": most}
        answer = http.post("/v1/responses", json={"input": messages, **response}).json()
        assert answer["status"] == "incomplete"
        said = [part["text"] for item in answer["output"] for part in item.get("content") or ()]
        assert not any(said), said
        status = "incomplete" if most < 48 else "completed"  # there only the mark after the call is missing
        assert answer["output"][-1]["status"] == status
        streamed = http.post("/v1/responses", json={"input": messages, **response, "stream": True}).text
        ended = [line for line in streamed.splitlines() if '"response.output_item.done"' in line]
        assert f'"status":"{status}"' in ended[-1]
        message = {"tools": [of_messages], "tool_choice": {"type": "any"}, "max_tokens": most}
        answer = http.post("/v1/messages", json={"messages": messages, **message}).json()
        assert answer["stop_reason"] == "max_tokens"
        assert not any(block.get("text") for block in answer["content"])


@pytest.mark.parametrize("more", [{}, {"stop": "lo"}, {"max_tokens": 4}])
def test_logprobs_of_a_chat_are_those_of_its_content(server: LiveServer, more: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "say:héllo"}], "logprobs": True, **more}
    with server.http() as http:
        choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        lines = http.post("/v1/chat/completions", json={**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
    streamed = [part["logprobs"]["content"] for (part,) in chunks if part["logprobs"]]
    for tokens in (choice["logprobs"]["content"], [token for part in streamed for token in part]):
        told = bytes(byte for token in tokens for byte in token["bytes"])
        assert told.decode() == choice["message"]["content"]


def test_a_call_that_was_cut_off_may_be_sent_back(server: LiveServer) -> None:
    """The prompt has it as far as it was written, as the model wrote it."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"city":"Osl'}}
    history: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "not JSON"},
        {"role": "user", "content": "again"},
    ]
    with server.openai() as client:
        client.chat.completions.create(model="scripted", messages=history, tools=[TOOL])
        asked = server.engine.requests[-1].text
        assert "Osl" in asked
        call["function"]["arguments"] = "{city: Oslo}"
        with pytest.raises(openai.BadRequestError, match="not JSON"):
            client.chat.completions.create(model="scripted", messages=history, tools=[TOOL])
        first = client.responses.create(
            model="scripted",
            input="x",
            instructions=None,
            tools=[{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}],
            tool_choice="required",
            max_output_tokens=45,
        )
        assert first.status == "incomplete"
        client.responses.create(model="scripted", input="go on", previous_response_id=first.id)
