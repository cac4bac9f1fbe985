# SPDX-License-Identifier: Apache-2.0
"""Threads of the Messages API, which the server keeps, with Anthropic's SDK and its tool runner."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from live_server import LiveServer
from pydantic import BaseModel

ASK: dict[str, Any] = {"model": "scripted", "max_tokens": 100}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object", "properties": {}}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def result(call_id: str, content: str) -> dict[str, Any]:
    return user([{"type": "tool_result", "tool_use_id": call_id, "content": content}])


def prompts(server: LiveServer) -> list[list[int]]:
    return [asked.prompt for asked in server.engine.requests]


class Place(BaseModel):
    city: str


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner(server: LiveServer, client: anthropic.Anthropic, stream: bool) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather.

        Args:
            city: of it.
        """
        asked.append(city)
        return "say:(so)it is mild"

    begin = len(server.engine.requests)
    call = 'say:(hm)let me see<get_weather{"city":  "Oslo"}>'
    runner = client.beta.messages.tool_runner(
        messages=[user(call)], system="Be brief.", tools=[get_weather], stream=stream, **ASK
    )
    finals = [turn.get_final_message() if stream else turn for turn in runner]
    assert [message.stop_reason for message in finals] == ["tool_use", "end_turn"]
    assert asked == ["Oslo"]
    assert finals[-1].content[-1].text == "it is mild"
    first, second = prompts(server)[begin:]
    whole = client.beta.messages.create(
        messages=[
            user(call),
            {"role": "assistant", "content": finals[0].content},
            result(finals[0].content[-1].id, "say:(so)it is mild"),
        ],
        system="Be brief.",
        tools=[get_weather.to_dict()],
        **ASK,
    )
    assert whole.content[-1].text == "it is mild"
    assert prompts(server)[-1] == second, "a thread makes the prompt of the whole conversation"
    assert len(first) < len(second)


@pytest.mark.parametrize("stream", [False, True])
def test_a_thread_sends_what_is_new_alone(
    server: LiveServer, client: anthropic.Anthropic, stream: bool
) -> None:
    thread = client.beta.messages.thread(system="Be brief.", tools=[TOOL], **ASK)
    answers = []
    for text in ("say:(hm)one", "say:two", "say:three"):
        if stream:
            with thread.stream(user(text)) as events:
                answers.append(events.get_final_message())
        else:
            answers.append(thread.send(user(text)))
    assert [answer.content[-1].text for answer in answers] == ["one", "two", "three"]
    assert thread.previous_message_id == answers[-1].id
    sent = {
        "messages": [user("say:more")],
        "thread": {"type": "continue", "previous_message_id": answers[1].id},
    }
    with server.http(headers={"x-api-key": "key-a"}) as http:
        again = http.post("/v1/messages?beta=true", json={**ASK, **sent})
    assert again.json()["content"] == [{"type": "text", "text": "more"}], "an earlier answer can be continued"
    client.beta.messages.create(
        messages=[*thread.messages[:4], user("say:more")], system="Be brief.", tools=[TOOL], **ASK
    )
    assert prompts(server)[-1] == prompts(server)[-2]


def test_breakpoints_of_earlier_turns_do_not_add_up(client: anthropic.Anthropic) -> None:
    kept = {"type": "ephemeral"}
    thread = client.beta.messages.thread(
        system=[{"type": "text", "text": "Be brief.", "cache_control": kept}], **ASK
    )
    for _ in range(6):
        answer = thread.send(user([{"type": "text", "text": "say:ok", "cache_control": kept}]))
        assert answer.usage.cache_creation_input_tokens + answer.usage.cache_read_input_tokens > 0


def test_a_forced_call_in_a_continued_thread(server: LiveServer, client: anthropic.Anthropic) -> None:
    thread = client.beta.messages.thread(tools=[TOOL], **ASK)
    thread.send(user("say:hello"))
    with pytest.raises(anthropic.BadRequestError, match="there is no tool 'g'"):
        thread.send(user("say:<g{}>"), tool_choice={"type": "tool", "name": "g"})


def test_the_format_of_a_threads_answers(server: LiveServer, client: anthropic.Anthropic) -> None:
    thread = client.beta.messages.thread(output_format=Place, **ASK)
    for text in ("say:one", "say:two"):
        thread.send(user(text))
        assert server.engine.requests[-1].params.structured is not None


def test_threads_that_are_not_there(server: LiveServer, client: anthropic.Anthropic) -> None:
    """A thread of another tenant's is none; the SDK then sends the whole conversation again."""
    ask = {**ASK, "messages": [user("say:hi")]}
    with (
        server.http(headers={"x-api-key": "key-a"}) as ada,
        server.http(headers={"x-api-key": "key-b"}) as bob,
    ):
        plain = ada.post("/v1/messages", json=ask).json()["id"]
        created = ada.post("/v1/messages", json={**ask, "thread": {"type": "create"}}).json()["id"]
        for http, message_id in ((bob, created), (ada, plain), (ada, "msg_none"), (ada, "../x")):
            thread = {"type": "continue", "previous_message_id": message_id}
            answer = http.post("/v1/messages", json={**ask, "thread": thread})
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert (error["type"], error["details"]) == (
                "not_found_error",
                {"error_code": "thread_not_found"},
            )
        for name in (created, f"thread:{created}"):
            assert ada.get(f"/v1/responses/{name}").status_code == 404
            body = {"model": "scripted", "input": "say:hi", "previous_response_id": name}
            assert ada.post("/v1/responses", json=body).status_code == 404
    thread = client.beta.messages.thread(**ASK)
    thread.send(user("say:one"))
    client.api_key = "key-b"  # whose tenant has no such thread
    assert thread.send(user("say:two")).content[-1].text == "two"
    assert "say:one" in server.engine.requests[-1].text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"thread": {"type": "fork"}}, "thread"),
        ({"thread": {"type": "continue"}}, "previous_message_id"),
        ({"thread": {"type": "create", "previous_message_id": "x"}}, "previous_message_id"),
        ({"thread": "create"}, "thread"),
        ({"messages": [], "thread": {"type": "create"}}, "messages"),
        ({"messages": []}, "messages"),
    ],
)
def test_malformed_threads(server: LiveServer, fields: dict[str, Any], message: str) -> None:
    with server.http(headers={"x-api-key": "key-a"}) as http:
        answer = http.post("/v1/messages", json={**ASK, "messages": [user("say:hi")], **fields})
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_a_thread_keeps_its_system_and_tools(server: LiveServer) -> None:
    ask = {**ASK, "messages": [user("say:hi")], "system": "Be brief.", "tools": [TOOL]}
    with server.http(headers={"x-api-key": "key-a"}) as http:
        created = http.post("/v1/messages", json={**ask, "thread": {"type": "create"}}).json()["id"]
        thread = {"type": "continue", "previous_message_id": created}
        for name in ("system", "tools"):
            answer = http.post(
                "/v1/messages", json={**ASK, "messages": [user("x")], "thread": thread, name: ask[name]}
            )
            assert answer.status_code == 400
            assert name in answer.json()["error"]["message"]
        on = http.post("/v1/messages", json={**ASK, "messages": [], "thread": thread, "tools": None})
    assert on.status_code == 200, on.text
    assert "say:hiassistant\nhioptions" in server.engine.requests[-1].text, "nothing new: the answer goes on"
