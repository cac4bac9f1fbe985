# SPDX-License-Identifier: Apache-2.0
"""The random model that coding agents are tried with: long prompts, answers that end, calls that are forced.

Its marks of calls are added tokens that are not special, as in the tokenizers of Qwen.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from live_server import LiveServer, live_server
from long_context_model import POSITIONS, save_long_context_model

from radixkv import EngineConfig
from radixkv.entrypoints.async_engine import AsyncEngine

SCHEMA: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"enum": ["metric", "imperial"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days", "units", "tags"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = save_long_context_model(tmp_path_factory.mktemp("model") / "noise")
    engine = AsyncEngine.from_config(EngineConfig(str(folder), num_blocks=4096))
    with live_server(engine) as running:
        yield running
    asyncio.run(engine.close())


def ask(server: LiveServer, messages: list[Any], **fields: Any) -> Any:
    with server.openai() as client:
        return client.chat.completions.create(model="noise", messages=messages, **fields)


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_ends_without_a_limit(server: LiveServer, temperature: int) -> None:
    answer = ask(server, [{"role": "user", "content": "Hello"}], temperature=temperature)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens < 20


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_forced_calls(server: LiveServer, choice: Any, temperature: int) -> None:
    messages = [{"role": "user", "content": "The weather, please."}]
    answer = ask(server, messages, tools=[TOOL], tool_choice=choice, temperature=temperature)
    assert answer.choices[0].finish_reason == "tool_calls"
    for call in answer.choices[0].message.tool_calls:
        assert call.function.name == "look"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert answer.usage.completion_tokens < 200


def test_a_long_prompt_is_found_again(server: LiveServer) -> None:
    text = Path(__file__).with_name("test_client_libraries.py").read_text() * 6
    messages: list[Any] = [{"role": "system", "content": text}, {"role": "user", "content": "Hello"}]
    first = ask(server, messages)
    assert 10_000 < first.usage.prompt_tokens < POSITIONS
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    again = ask(server, [*messages, answer, {"role": "user", "content": "And now?"}])
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1
