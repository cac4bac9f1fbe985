# SPDX-License-Identifier: Apache-2.0
"""`--chat-format FILE`: answers and earlier calls in a format that a file declares, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family_templates import CHATML, TOOLS, WEATHER, template
from live_server import live_server
from writing_engine import WritingEngine, tokenizer_with

DECLARED = """
name = "acme"
reasoning = {opens = ["<muse>"], closes = ["</muse>"]}

[[forms]]
begin = "<calls>\\n"
head = "<use tool=\\"NAME\\">\\n"
tail = "</use>"
between = "\\n"
end = "\\n</calls>"
opens = ["<calls>"]
reads = '<calls>? <use tool="NAME">'
closes = ["</calls>"]
arguments = {notation = "tags", key = "<arg KEY>", end = "</arg>\\n", between = ""}
"""
CALL = '<calls>\n<use tool="get_weather">\n<arg city>Paris</arg>\n<arg days>2</arg>\n</use>\n</calls>'
BARE = template(*CHATML, tools="{{ '' }}")


@pytest.fixture
def declared(tmp_path: Path) -> str:
    file = tmp_path / "acme.toml"
    file.write_text(DECLARED, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_read_as_the_file_declares(declared: str, stream: bool) -> None:
    engine = WritingEngine(tokenizer_with((), BARE), {"it": f"<muse>Hm.</muse>One moment.{CALL}"})
    asked: list[Any] = [{"role": "user", "content": "write:it:"}]
    with (
        live_server(engine, chat_format=declared) as server,
        server.openai() as client,
        server.http() as http,
    ):
        if stream:
            tools: Any = TOOLS
            chunks = client.chat.completions.create(
                model="scripted", messages=asked, tools=tools, stream=True
            )
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            content = "".join(delta.content or "" for delta in deltas)
            reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
            parts = [call.function for delta in deltas for call in delta.tool_calls or ()]
            name = "".join(part.name or "" for part in parts if part)
            arguments = "".join(part.arguments or "" for part in parts if part)
        else:
            body = {"model": "scripted", "messages": asked, "tools": TOOLS}
            answer = http.post("/v1/chat/completions", json=body).json()["choices"][0]
            (call,) = answer["message"]["tool_calls"]
            content, reasoning = answer["message"]["content"], answer["message"]["reasoning_content"]
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            assert answer["finish_reason"] == "tool_calls"
        (card,) = http.get("/v1/models").json()["data"]
    assert (content, reasoning) == ("One moment.", "Hm.")
    assert (name, json.loads(arguments)) == ("get_weather", WEATHER)
    assert card["chat_format"] == {"name": "acme", "is_known": True}


def test_prompts_describe_tools_and_repeat_calls_in_that_form(declared: str) -> None:
    engine = WritingEngine(tokenizer_with((), BARE), {"it": "Sunny."})
    function = {"name": "get_weather", "arguments": json.dumps(WEATHER)}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        {"role": "user", "content": "write:it:"},
    ]
    with live_server(engine, chat_format=declared) as server, server.http() as http:
        body = {"model": "scripted", "messages": messages, "tools": TOOLS}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        prompt = engine.tokenizer.decode(engine.requests[-1].prompt, skip_special_tokens=False)
    assert CALL in prompt
    assert '<use tool="function-name">\n<arg argument>value</arg>' in prompt, "the example in the preamble"
