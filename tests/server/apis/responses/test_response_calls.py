# SPDX-License-Identifier: Apache-2.0
"""Reasoning and calls of the Responses API: items, events and what comes back of them."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import LiveServer
from openai import OpenAI
from response_prompts import last_asked, messages_in

MARKED = 'say:(hm)so<f{"x":1}><g{}>'
TOOLS: Any = [{"type": "function", "name": name, "parameters": {}, "strict": False} for name in "fg"]


@pytest.mark.usefixtures("marked")
def test_reasoning_and_calls_are_items(server: LiveServer, ada: OpenAI) -> None:
    answer = ada.responses.create(model="scripted", input=MARKED, tools=TOOLS)
    thought, said, *calls = answer.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "hm", [])
    assert said.content[0].text == answer.output_text == "so"
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"x":1}'), ("g", "{}")]
    assert calls[0].call_id != calls[1].call_id
    assert answer.usage.output_tokens_details.reasoning_tokens == len("(hm")
    assert [tool.name for tool in answer.tools] == ["f", "g"]
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "one"}
    for history in (
        {"previous_response_id": answer.id, "input": [result]},
        {"input": [{"role": "user", "content": MARKED}, *answer.output, result]},
    ):
        ada.responses.create(model="scripted", tools=TOOLS, **history)
        assert messages_in(last_asked(server))[1:3] == [
            "assistant\nthink hm\nsocall f({'x': 1})call g({})<|im_end|>",
            "tool\none<|im_end|>",
        ]


@pytest.mark.usefixtures("marked")
def test_reasoning_and_calls_are_streamed(ada: OpenAI) -> None:
    events = list(ada.responses.create(model="scripted", input=MARKED, tools=TOOLS, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        "output_item.added",
        *["function_call_arguments.delta"] * len('{"x":1}'),
        *("function_call_arguments.done", "output_item.done"),
        "output_item.added",
        *["function_call_arguments.delta"] * len("{}"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    last = events[-1].response
    assert last.usage.output_tokens_details.reasoning_tokens == len("(hm")
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.item for event in done] == last.output
    assert [event.output_index for event in done] == [0, 1, 2, 3]
    arguments = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.name, event.arguments) for event in arguments] == [("f", '{"x":1}'), ("g", "{}")]
