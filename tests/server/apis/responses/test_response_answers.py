# SPDX-License-Identifier: Apache-2.0
"""Answers of the Responses API as the real openai client sees them, whole and in streams."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from live_server import LiveServer
from openai import OpenAI
from response_prompts import asked_text, last_asked, messages_in


def test_a_whole_answer(server: LiveServer, ada: OpenAI) -> None:
    answer = ada.responses.create(
        model="scripted",
        input="say:hello",
        instructions="Be brief.",
        metadata={"run": "7"},
        temperature=0.5,
        user="u",
    )
    asked = last_asked(server)
    assert (answer.status, answer.output_text, answer.error) == ("completed", "hello", None)
    assert answer.object == "response"
    assert answer.id.startswith("resp_")
    assert answer.completed_at is not None
    assert asked.request_id.startswith(answer.id)
    assert asked.owner == ("ada", "")
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"run": "7"}, 0.5)
    assert (answer.tools, answer.tool_choice, answer.parallel_tool_calls) == ([], "auto", True)
    assert messages_in(asked) == ["system\nBe brief.<|im_end|>", "user\nsay:hello<|im_end|>", "assistant\n"]
    [item] = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    usage = answer.usage
    assert usage.input_tokens == len(asked.prompt)
    assert usage.input_tokens_details.cached_tokens == len(asked.prompt) // 2
    assert usage.input_tokens_details.cache_write_tokens == len(asked.prompt) - len(asked.prompt) // 2
    assert usage.output_tokens == len("hello") + 1
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_an_answer_that_was_cut(ada: OpenAI) -> None:
    answer = ada.responses.create(model="scripted", input="say:hello", max_output_tokens=3)
    assert (answer.status, answer.output_text) == ("incomplete", "hel")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"


def test_all_kinds_of_items_reach_the_template(server: LiveServer, ada: OpenAI) -> None:
    ada.responses.create(
        model="scripted",
        input=[
            {"role": "developer", "content": "rules"},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "?"}],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "see"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "two"}],
            },
            {"role": "user", "content": "say:ok"},
        ],
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    )
    assert messages_in(last_asked(server)) == [
        "system\nrules<|im_end|>",
        "user\na\nb<|im_end|>",
        "assistant\nthink ?\nseecall f({'x': 1})call g({})<|im_end|>",
        "tool\none<|im_end|>",
        "tool\ntwo<|im_end|>",
        "user\nsay:ok<|im_end|>",
        "assistant\n",
    ]
    assert asked_text(last_asked(server)).startswith("tools:['f']\n")


def test_logprobs(ada: OpenAI) -> None:
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = ada.responses.create(model="scripted", input="say:hi", **options)
    logprobs = answer.output[0].content[0].logprobs
    assert [entry.token for entry in logprobs] == ["h", "i"]
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    stream = ada.responses.create(model="scripted", input="say:hi", stream=True, **options)
    events = list(stream)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [[entry.token for entry in event.logprobs] for event in deltas] == [["h"], ["i"]]
    assert events[-1].response.output[0].content[0].logprobs == logprobs


TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def test_a_stream_tells_everything_in_order(ada: OpenAI) -> None:
    events = list(ada.responses.create(model="scripted", input="say:hi", stream=True))
    assert [event.type for event in events] == TEXT_EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    first, last = events[0].response, events[-1].response
    assert (first.status, first.output, first.usage) == ("in_progress", [], None)
    assert (last.status, last.output_text, last.id) == ("completed", "hi", first.id)
    assert last.usage.output_tokens == 3
    added, done = events[2].item, events[-2].item
    assert (added.id, added.content, added.status) == (done.id, [], "in_progress")
    assert done == last.output[0]
    assert ada.responses.retrieve(last.id).output_text == "hi"


def test_the_clients_own_accumulation_agrees(ada: OpenAI) -> None:
    with ada.responses.stream(model="scripted", input="say:hello") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "hello"


def test_the_async_client(server: LiveServer) -> None:
    async def run() -> tuple[list[str], str]:
        async with server.async_openai("key-a") as client:
            stream = await client.responses.create(model="scripted", input="say:hi", stream=True)
            kinds = [event.type async for event in stream]
            whole = await client.responses.create(model="scripted", input="say:yes")
            return kinds, whole.output_text

    assert asyncio.run(run()) == (TEXT_EVENTS, "yes")


def test_a_stream_that_is_cut(ada: OpenAI) -> None:
    events = list(ada.responses.create(model="scripted", input="say:hello", stream=True, max_output_tokens=2))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert events[-2].item.status == "incomplete"


def test_an_error_inside_a_stream(ada: OpenAI) -> None:
    events = list(ada.responses.create(model="scripted", input="say:break", stream=True))
    assert [event.type for event in events[-3:]] == ["response.output_item.done", "error", "response.failed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[-2].code, events[-2].message) == ("request_failed", "broke")
    failed = events[-1].response
    assert (failed.status, failed.error.message, failed.output_text) == ("failed", "broke", "br")
    with pytest.raises(openai.NotFoundError):
        ada.responses.retrieve(failed.id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_never_began_has_a_real_status(ada: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        ada.responses.create(model="scripted", input="overload", stream=stream)
    assert (caught.value.status_code, caught.value.code) == (503, "engine_overloaded")
