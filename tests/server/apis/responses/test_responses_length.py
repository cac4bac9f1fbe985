# SPDX-License-Identifier: Apache-2.0
"""How long a conversation of the Responses API is, and what shortens it: truncation and compaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import LiveServer, live_server
from openai import OpenAI
from scripted_engine import ScriptedEngine

LONGEST = 2048
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(
        ScriptedEngine(max_model_len=LONGEST, num_blocks=LONGEST // 16), api_keys=("ada=a", "bob=b")
    ) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[OpenAI]:
    with server.openai("a") as one:
        yield one


def prompt_of(server: LiveServer) -> str:
    return bytes(token for token in server.engine.requests[-1].prompt if token < 256).decode()


def said(role: str, text: str) -> Any:
    return {"type": "message", "role": role, "content": text}


# ---------------------------------------------------------------------- counting


@pytest.mark.parametrize(
    "body",
    [
        {"input": "hello"},
        {"input": [said("developer", "rules"), said("user", "hi")], "instructions": "be brief"},
        {"input": "hi", "tools": [TOOL], "tool_choice": "auto", "reasoning": {"effort": "low"}},
    ],
)
def test_the_count_is_that_of_the_response(client: OpenAI, body: Any) -> None:
    counted = client.responses.input_tokens.count(model="scripted", **body)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == client.responses.create(model="scripted", **body).usage.input_tokens


def test_counting_knows_the_turns_before_of_its_tenant_alone(server: LiveServer, client: OpenAI) -> None:
    first = client.responses.create(model="scripted", input="say:one")
    options: Any = {"model": "scripted", "input": "and?", "previous_response_id": first.id}
    counted = client.responses.input_tokens.count(**options).input_tokens
    assert counted == client.responses.create(**options).usage.input_tokens
    with server.openai("b") as other, pytest.raises(openai.NotFoundError):
        other.responses.input_tokens.count(**options)
    with pytest.raises(openai.BadRequestError, match="input"):
        client.responses.input_tokens.count(model="scripted")


# ---------------------------------------------------------------------- truncation

LONG = [
    said("developer", "the rules"),
    said("user", "first " + "a" * 600),
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"far": 1}'},
    said("assistant", "middle " + "b" * 600),
    {"type": "function_call_output", "call_id": "c1", "output": "gave c1"},
    said("user", "second " + "c" * 600),
    said("assistant", "latest " + "d" * 300),
    said("user", "say:end"),
]


def test_what_does_not_fit_is_refused_unless_it_may_be_shortened(client: OpenAI) -> None:
    for options in ({}, {"truncation": "disabled"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="scripted", input=LONG, **options)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_the_oldest_items_go_and_calls_go_whole(server: LiveServer, client: OpenAI, stream: bool) -> None:
    options: Any = {"model": "scripted", "input": LONG, "truncation": "auto", "instructions": "the task"}
    if stream:
        answer = list(client.responses.create(stream=True, **options))[-1].response  # type: ignore[union-attr]
    else:
        answer = client.responses.create(**options)
    assert (answer.output_text, answer.truncation, answer.status) == ("end", "auto", "completed")
    prompt = prompt_of(server)
    assert "the task" in prompt
    assert "the rules" in prompt
    assert "first" not in prompt
    assert ("call f" in prompt) == ("gave c1" in prompt)
    assert "second" in prompt
    assert "latest" in prompt
    counted = client.responses.input_tokens.count(**options).input_tokens
    assert counted == answer.usage.input_tokens < LONGEST


def test_only_as_much_is_left_out_as_must_be(server: LiveServer, client: OpenAI) -> None:
    turns = [said("user" if i % 2 == 0 else "assistant", f"turn {i:03} " + "x" * 90) for i in range(41)]
    answer = client.responses.create(
        model="scripted", input=turns, truncation="auto", max_output_tokens=100, store=False
    )
    kept = [i for i in range(41) if f"turn {i:03}" in prompt_of(server)]
    assert kept == list(range(kept[0], 41))
    assert LONGEST - 100 - 2 * 130 < answer.usage.input_tokens <= LONGEST - 100


def test_a_conversation_that_fits_stays_whole_and_one_message_may_be_too_long(client: OpenAI) -> None:
    short = [said("user", "a"), said("assistant", "b"), said("user", "say:c")]
    plain = client.responses.create(model="scripted", input=short).usage.input_tokens
    auto = client.responses.create(model="scripted", input=short, truncation="auto").usage.input_tokens
    assert auto == plain
    for text in ("x" * LONGEST, "x" * 1_000_000):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(
                model="scripted", input=[*LONG[:3], said("user", text)], truncation="auto"
            )
        assert caught.value.code == "context_length_exceeded"


def test_a_stored_conversation_is_shortened_too_and_kept_whole(client: OpenAI) -> None:
    last = client.responses.create(model="scripted", input="say:begin " + "y" * 300)
    for _ in range(8):
        last = client.responses.create(
            model="scripted", input="say:" + "y" * 300, previous_response_id=last.id, truncation="auto"
        )
    items = client.responses.input_items.list(last.id, order="asc", limit=100)
    assert "begin" in items.data[0].content[0].text  # type: ignore[union-attr, index]


# ---------------------------------------------------------------------- compaction


def test_a_compacted_conversation_is_taken_again(server: LiveServer, client: OpenAI) -> None:
    talk = [
        said("developer", "the rules"),
        said("user", "a question"),
        said("assistant", "an answer that goes"),
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "gone"},
        said("user", "thanks"),
    ]
    short = client.responses.compact(model="scripted", input=talk, instructions="the task")
    assert short.object == "response.compaction"
    asked = prompt_of(server)
    assert "the task" in asked
    assert "an answer that goes" in asked
    assert "Sum up" in asked
    kinds = [getattr(item, "role", item.type) for item in short.output]
    assert kinds == ["developer", "user", "user", "compaction"]
    assert short.usage.output_tokens > 0
    assert short.usage.input_tokens == len(server.engine.requests[-1].prompt)
    items: Any = [item.to_dict(warnings=False) for item in short.output]
    client.responses.create(model="scripted", input=[*items, said("user", "say:on")], instructions="the task")
    prompt = prompt_of(server)
    assert "an answer that goes" not in prompt
    assert "gone" not in prompt
    assert "assistant\nok" in prompt
    assert prompt.index("the rules") < prompt.index("thanks") < prompt.index("assistant\nok")


def test_a_stored_conversation_can_be_compacted_and_a_foreign_item_is_refused(client: OpenAI) -> None:
    first = client.responses.create(model="scripted", input="say:one")
    short = client.responses.compact(model="scripted", previous_response_id=first.id)
    assert [item.type for item in short.output] == ["message", "compaction"]
    foreign: Any = {"type": "compaction", "encrypted_content": "gAAAA"}
    with pytest.raises(openai.BadRequestError, match="compaction"):
        client.responses.create(model="scripted", input=[foreign, said("user", "a")])


def test_a_trigger_answers_with_a_compaction_that_replaces_what_was_before(
    server: LiveServer, client: OpenAI
) -> None:
    trigger: Any = {"type": "compaction_trigger"}
    talk = [
        said("developer", "the rules"),
        said("user", "a question"),
        said("assistant", "an answer that goes"),
    ]
    events = list(client.responses.create(model="scripted", input=[*talk, trigger], stream=True))
    assert "Sum up" in prompt_of(server)
    assert [event.type for event in events] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *("response.output_item.done", "response.completed"),
    ]
    streamed = events[-1].response
    whole = client.responses.create(model="scripted", input=[*talk, trigger])
    for response in (streamed, whole):
        (item,) = response.output
        assert item.type == "compaction"
        assert item.encrypted_content
        for more in (
            {"previous_response_id": response.id, "input": "say:on"},
            {"input": [*talk, trigger, item.to_dict(), said("user", "say:on")]},
        ):
            client.responses.create(model="scripted", **more)
            prompt = prompt_of(server)
            assert "an answer that goes" not in prompt
            assert "Sum up" not in prompt
            assert prompt.index("the rules") < prompt.index("assistant\nok") < prompt.index("say:on")
    alone = client.responses.create(model="scripted", input=[item.to_dict(), said("user", "say:on")])
    assert alone.output_text == "on"
    with pytest.raises(openai.BadRequestError, match="must be the last item"):
        client.responses.create(model="scripted", input=[*talk, trigger, said("user", "more")])
    talking = client.conversations.create(items=talk)
    client.responses.create(model="scripted", input=[trigger], conversation=talking.id)
    client.responses.create(model="scripted", input="say:on", conversation=talking.id)
    assert "an answer that goes" not in prompt_of(server)


def test_what_is_too_long_is_compacted_all_the_same(server: LiveServer, client: OpenAI) -> None:
    short = client.responses.compact(model="scripted", input=LONG)
    assert [getattr(item, "role", item.type) for item in short.output][-1] == "compaction"
    assert len(server.engine.requests[-1].prompt) < LONGEST
