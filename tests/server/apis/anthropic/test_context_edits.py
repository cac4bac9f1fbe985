# SPDX-License-Identifier: Apache-2.0
"""`context_management` of the Messages API: what is cleared, what is told of it, and what the counts say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

ASK: dict[str, Any] = {"model": "scripted", "max_tokens": 100}
NAMES = ("read", "search", "read", "write", "read")
CLEARED = "[cleared]"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine()) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with server.anthropic() as one:
        yield one


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def thought(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": "x"}


def call(number: int) -> dict[str, Any]:
    name = NAMES[number]
    return {"type": "tool_use", "id": f"call{number}", "name": name, "input": {"number": f"input{number}"}}


def result(number: int, **more: Any) -> dict[str, Any]:
    content = f"result{number} " + "x" * 40
    return {"type": "tool_result", "tool_use_id": f"call{number}", "content": content, **more}


def loop(uses: int = len(NAMES)) -> list[dict[str, Any]]:
    """A conversation with so many calls, one a message."""
    messages = [user("say:ok")]
    for number in range(uses):
        messages += [said(call(number)), user([result(number)])]
    return messages


def edited(*edits: dict[str, Any]) -> dict[str, Any]:
    return {"context_management": {"edits": list(edits)}}


def tool_edit(**options: Any) -> dict[str, Any]:
    return {"type": "clear_tool_uses_20250919", **options}


def uses(number: int) -> dict[str, Any]:
    return {"type": "tool_uses", "value": number}


def tokens(number: int) -> dict[str, Any]:
    return {"type": "input_tokens", "value": number}


def left(text: str) -> list[int]:
    """The results that a prompt shows."""
    return [number for number in range(len(NAMES)) if f"result{number}" in text]


def ask(client: anthropic.Anthropic, messages: Any, edits: dict[str, Any], *, stream: bool = False) -> Any:
    options: dict[str, Any] = {
        "messages": messages,
        "betas": ["context-management-2025-06-27"],
        **ASK,
        **edits,
    }
    if not stream:
        return client.beta.messages.create(**options)
    with client.beta.messages.stream(**options) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "remaining"),
    [
        ({"trigger": uses(4), "keep": uses(2)}, [3, 4]),
        ({"trigger": uses(0), "keep": uses(0)}, []),
        ({"trigger": uses(2)}, [2, 3, 4]),
        ({"trigger": tokens(100), "keep": uses(1)}, [4]),
        ({"trigger": uses(1), "keep": uses(1), "exclude_tools": ["read"]}, [0, 2, 4]),
        ({"trigger": uses(1), "keep": uses(1), "clear_at_least": tokens(30)}, [4]),
        ({"trigger": uses(1), "keep": uses(1), "exclude_tools": None, "clear_at_least": None}, [4]),
    ],
)
def test_old_results_are_cleared(
    server: LiveServer,
    client: anthropic.Anthropic,
    options: dict[str, Any],
    remaining: list[int],
    stream: bool,
) -> None:
    whole = client.beta.messages.count_tokens(messages=loop(), model="scripted")
    message = ask(client, loop(), edited(tool_edit(**options)), stream=stream)
    asked = server.engine.requests[-1]
    assert left(asked.text) == remaining
    assert asked.text.count(CLEARED) == 5 - len(remaining)
    assert all(f"input{number}" in asked.text for number in range(5))
    (applied,) = message.context_management.applied_edits
    assert (applied.type, applied.cleared_tool_uses) == ("clear_tool_uses_20250919", 5 - len(remaining))
    assert applied.cleared_input_tokens == whole.input_tokens - len(asked.prompt) > 0
    counted = client.beta.messages.count_tokens(
        messages=loop(), model="scripted", **edited(tool_edit(**options))
    )
    assert counted.input_tokens == len(asked.prompt)
    assert counted.context_management.original_input_tokens == whole.input_tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"trigger": uses(5), "keep": uses(0)},
        {"trigger": uses(1), "keep": uses(5)},
        {"trigger": uses(1), "keep": uses(9)},
        {"trigger": tokens(100_000), "keep": uses(0)},
        {"trigger": uses(1), "keep": uses(0), "clear_at_least": tokens(5000)},
        {"trigger": uses(1), "keep": uses(0), "exclude_tools": list(NAMES)},
    ],
)
def test_nothing_is_cleared_below_the_bounds(
    server: LiveServer, client: anthropic.Anthropic, options: dict[str, Any]
) -> None:
    message = ask(client, loop(), edited(tool_edit(**options)))
    assert left(server.engine.requests[-1].text) == [0, 1, 2, 3, 4]
    assert message.context_management.applied_edits == []


@pytest.mark.parametrize(
    ("wanted", "remaining"),
    [(True, [3, 4]), (["search", "write"], [0, 2, 3, 4]), (False, [0, 1, 2, 3, 4]), ([], [0, 1, 2, 3, 4])],
)
def test_inputs_are_cleared_where_that_is_asked_for(
    server: LiveServer, client: anthropic.Anthropic, wanted: Any, remaining: list[int]
) -> None:
    ask(client, loop(), edited(tool_edit(trigger=uses(1), keep=uses(2), clear_tool_inputs=wanted)))
    text = server.engine.requests[-1].text
    assert [number for number in range(5) if f"input{number}" in text] == remaining


def test_results_of_one_message_and_errors(server: LiveServer, client: anthropic.Anthropic) -> None:
    parts = [{"type": "text", "text": "result1 in parts"}]
    messages = [
        user("say:ok"),
        said(call(0), call(1), call(2)),
        user(
            [
                result(0, is_error=True),
                {**result(1), "content": parts},
                result(2),
                {"type": "text", "text": "now"},
            ]
        ),
    ]
    ask(client, messages, edited(tool_edit(trigger=uses(2), keep=uses(1))))
    text = server.engine.requests[-1].text
    assert left(text) == [2]
    assert f"Error: {CLEARED}" in text
    assert "now" in text


THINKING = [
    user("one"),
    said(thought("thought0"), {"type": "text", "text": "answer0"}),
    user("two"),
    said(thought("thought1"), call(0)),
    user([result(0)]),
    said({"type": "redacted_thinking", "data": "radixkv-thinking.dGhvdWdodDI="}, call(1)),
    user([result(1), {"type": "text", "text": "by the way"}]),
    said({"type": "text", "text": "answer1"}),
    user("three"),
    said({"type": "text", "text": "not a thought"}),
    user("four"),
    said(thought("thought3")),
    user("say:ok"),
]


@pytest.mark.parametrize(
    ("keep", "remaining", "turns"),
    [
        ({"keep": "all"}, [0, 1, 2, 3], 0),
        ({"keep": {"type": "all"}}, [0, 1, 2, 3], 0),
        ({}, [3], 2),
        ({"keep": None}, [3], 2),
        ({"keep": {"type": "thinking_turns", "value": 1}}, [3], 2),
        ({"keep": {"type": "thinking_turns", "value": 2}}, [1, 2, 3], 1),
        ({"keep": {"type": "thinking_turns", "value": 9}}, [0, 1, 2, 3], 0),
    ],
)
def test_thinking_of_older_turns_is_cleared(
    server: LiveServer, client: anthropic.Anthropic, keep: dict[str, Any], remaining: list[int], turns: int
) -> None:
    """A loop of tools is one turn: its thinking stays or goes as a whole."""
    whole = client.beta.messages.count_tokens(messages=THINKING, model="scripted")
    message = ask(client, THINKING, edited({"type": "clear_thinking_20251015", **keep}))
    asked = server.engine.requests[-1]
    assert [number for number in range(4) if f"thought{number}" in asked.text] == remaining
    assert "answer0" in asked.text
    applied = message.context_management.applied_edits
    assert [edit.cleared_thinking_turns for edit in applied] == [turns] * bool(turns)
    assert sum(edit.cleared_input_tokens for edit in applied) == whole.input_tokens - len(asked.prompt)


def test_both_edits_in_order(server: LiveServer, client: anthropic.Anthropic) -> None:
    thinking = {"type": "clear_thinking_20251015"}
    message = ask(client, THINKING, edited(thinking, tool_edit(trigger=uses(1), keep=uses(0))))
    whole = client.beta.messages.count_tokens(messages=THINKING, model="scripted")
    asked = server.engine.requests[-1]
    first, second = message.context_management.applied_edits
    assert (first.cleared_thinking_turns, second.cleared_tool_uses) == (2, 2)
    assert first.cleared_input_tokens + second.cleared_input_tokens == whole.input_tokens - len(asked.prompt)
    # What the first edit cleared may keep the second from being needed.
    limit = whole.input_tokens - first.cleared_input_tokens
    for value, number in ((limit, 1), (limit - 1, 2)):
        message = ask(client, THINKING, edited(thinking, tool_edit(trigger=tokens(value), keep=uses(0))))
        assert len(message.context_management.applied_edits) == number


@pytest.mark.parametrize("wanted", [{"context_management": None}, {}])
def test_without_edits_nothing_is_told(client: anthropic.Anthropic, wanted: dict[str, Any]) -> None:
    message = ask(client, loop(), wanted)
    assert message.context_management is None
    counted = client.beta.messages.count_tokens(messages=loop(), model="scripted", **wanted)
    assert counted.context_management is None


@pytest.mark.parametrize("wanted", [{}, {"edits": []}, {"edits": None}])
def test_no_edits(client: anthropic.Anthropic, wanted: dict[str, Any]) -> None:
    assert ask(client, loop(), {"context_management": wanted}).context_management is None


def test_a_stream_tells_at_its_end(server: LiveServer) -> None:
    body = {**ASK, "messages": loop(), "stream": True, **edited(tool_edit(trigger=uses(1)))}
    with server.http() as http:
        text = http.post("/v1/messages", json=body).text
    (last,) = [event for event in text.split("\n\n") if event.startswith("event: message_delta")]
    assert '"context_management":{"applied_edits":[{"type":"clear_tool_uses_20250919"' in last


def test_a_breakpoint_on_a_cleared_result_holds(client: anthropic.Anthropic) -> None:
    messages = loop()
    messages[2]["content"][0]["cache_control"] = {"type": "ephemeral"}
    message = ask(client, messages, edited(tool_edit(trigger=uses(1), keep=uses(1))))
    assert message.usage.cache_creation_input_tokens + message.usage.cache_read_input_tokens > 0


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ([{"type": "clear_everything"}], "clear_everything"),
        ([{"keep": "all"}], "an object with a type"),
        (["clear_thinking_20251015"], "an object with a type"),
        ([{"type": "clear_thinking_20251015", "keep": "some"}], "keep"),
        ([{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}}], "value"),
        ([{"type": "clear_thinking_20251015", "keep": 3}], "keep"),
        ([tool_edit(trigger={"type": "turns", "value": 1})], "turns"),
        ([tool_edit(keep=tokens(3))], "keep"),
        ([tool_edit(keep=uses(-1))], "keep"),
        ([tool_edit(exclude_tools="read")], "exclude_tools"),
        ([tool_edit(keeps=uses(1))], "keeps"),
        ([tool_edit(), {"type": "clear_thinking_20251015"}], "first"),
        ("all", "edits"),
        ([tool_edit()] * 99, "edits"),
    ],
)
def test_malformed_edits_are_refused(server: LiveServer, edits: Any, says: str) -> None:
    with server.http() as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            body = {"messages": loop(), "context_management": {"edits": edits}}
            answer = http.post(path, json={**body, **(ASK if path == "/v1/messages" else {})})
            assert answer.status_code == 400, answer.text
            assert says in answer.json()["error"]["message"]
