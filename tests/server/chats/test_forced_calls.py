# SPDX-License-Identifier: Apache-2.0
"""Forced calls over HTTP: the next turn finds the whole turn before it, with the templates that models ship.

A model of noise in a real engine writes what the grammar of its family leaves it: thoughts and calls.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import pytest
from family_texts import ROWS
from live_server import live_server
from nightly import by_day
from shipped_templates import ARE_EXACT, FOLDER, NO_FOLDER, QUOTES, RESULTS, TABLE, THOUGHTS, known
from thinking_model import ThinkingModel, thinking_engine

from radixkv.text.chat_formats.formats import FORMATS

pytestmark = pytest.mark.skipif(not FOLDER, reason=NO_FOLDER)

#: One of each kind of form; all others run at night.
SOME = (
    *("Qwen-Qwen3-0.6B", "Qwen3-Coder", "GLM-4.6", "MiniMax-M3", "Kimi-K3", "openai-gpt-oss-120b"),
    *("meta-llama-Llama-3.1-8B-Instruct", "google-gemma-2-2b-it", "Mistral-Small-3.2-24B-Instruct-2506"),
)
FORCED = {name: why for name, (_, why) in TABLE.items() if why in ARE_EXACT}
NAMES = [pytest.param(name, marks=() if name in SOME else pytest.mark.nightly) for name in FORCED]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "O'Fallon", 'New "York"', "007", "Z\u00fcrich </p>"], "description": "x"},
        "days": {"type": "integer", "enum": [1, 2], "description": "x"},
        "now": {"type": "boolean", "description": "x"},
    },
    "required": ["city", "days", "now"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Looks.", "parameters": SCHEMA}}
    for name in ("look", "look_again")
]


@dataclass
class Served:
    """A server, and the model behind it."""

    client: httpx.Client
    model: ThinkingModel

    def ask(self, template: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        body = {"model": "thinking", "chat_template": template, "messages": messages, "tools": TOOLS}
        answer = self.client.post("/v1/chat/completions", json={**body, "max_tokens": 900, **fields})
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    special = dict.fromkeys(token for row in ROWS for token in row.tokens)
    special |= dict.fromkeys(("<think>", "</think>", "[BEGIN FINAL RESPONSE]"))
    sections = [family.reasoning for family in FORMATS.values() if family.reasoning is not None]
    opens = {token for token in special if any(token in section.opens for section in sections)}
    closes = {token for token in special if any(token in mark for part in sections for mark in part.closes)}
    engine, model = thinking_engine(special, opens, closes)
    with live_server(engine, trust_request_chat_template=True) as server, server.http() as client:
        yield Served(client, model)
    asyncio.run(engine.close())


@pytest.mark.parametrize("name", by_day(FORCED, "Qwen-Qwen3-0.6B", "openai-gpt-oss-120b"))
def test_the_next_turn_finds_the_whole_turn_before_it(served: Served, name: str) -> None:
    template = known(name)
    served.model.thinks = template.format.thinking is not None
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Where is it warm? Ask {name}."}]
    named = {"type": "function", "function": {"name": "look_again"}}
    before, why = 0, FORCED[name]
    is_exact: bool | None = True  # None: the template drops thoughts of the first answer alone, and repeats
    # those after it, but for blanks that the noise may have put between thoughts and calls
    for choice, is_parallel in (("required", True), (named, False), ("required", False)):
        fields = {"tool_choice": choice, "parallel_tool_calls": is_parallel}
        told = served.ask(template.text, messages, **fields)
        usage, answer = told["usage"], told["choices"][0]["message"]
        if is_exact is not None:
            assert (usage["prompt_tokens_details"]["cached_tokens"] >= before) is is_exact
        calls = answer["tool_calls"]
        assert told["choices"][0]["finish_reason"] == "tool_calls", answer
        assert answer["content"] is None
        if choice is named or not is_parallel:
            (call,) = calls
            assert choice == "required" or call["function"]["name"] == "look_again"
        for call in calls:
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "It is."} for call in calls]
        is_exact = not (
            (why == RESULTS and len(messages) > 1)
            or (why == THOUGHTS and answer.get("reasoning_content"))
            or (why == QUOTES and any("'" in call["function"]["arguments"] for call in calls))
        )
        if why == THOUGHTS and len(messages) > 1:
            is_exact = None
        messages += [answer, *results]
        before = usage["prompt_tokens"] + usage["completion_tokens"] - 1  # the last token is not computed
