# SPDX-License-Identifier: Apache-2.0
"""Messages as clients have stored them: null content, refusals, and calls in the older form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

ASK = {"role": "user", "content": "ask"}
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


def sent(client: httpx.Client, *messages: dict[str, Any]) -> httpx.Response:
    body = {"model": "scripted", "messages": [ASK, *messages, {"role": "user", "content": "go on"}]}
    return client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([{"role": "assistant", "content": None, "reasoning_content": "Hm."}], "think Hm."),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "assistant\n"),
        ([{"role": "assistant", "content": None, "refusal": "I won't."}], "assistant\nI won't."),
        ([{"role": "assistant", "content": "No.", "refusal": "I won't."}], "assistant\nNo.\nI won't."),
        (
            [
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": None},
            ],
            "tool\n",
        ),
        (
            [
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "find", "arguments": '{"a": 1}'},
                },
                {"role": "function", "name": "find", "content": "found"},
            ],
            "call find({'a': 1})",
        ),
        (
            [
                {"role": "assistant", "content": None, "function_call": {"name": "find", "arguments": "{}"}},
                {"role": "function", "name": "find", "content": None},
            ],
            "call find({})",
        ),
    ],
)
def test_nothing_vanishes(
    client: httpx.Client, server: LiveServer, messages: list[dict[str, Any]], shown: str
) -> None:
    answer = sent(client, *messages)
    assert answer.status_code == 200, answer.text
    assert shown in server.engine.requests[-1].text


def test_an_older_call_is_a_tools_call(client: httpx.Client, server: LiveServer) -> None:
    prompts = []
    for messages in (
        [
            {"role": "assistant", "content": None, "function_call": {"name": "find", "arguments": "{}"}},
            {"role": "function", "name": "find", "content": "found"},
        ],
        [
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "found"},
        ],
    ):
        sent(client, *messages).raise_for_status()
        prompts.append(server.engine.requests[-1].text)
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": None},
        {"role": "system", "content": None},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "function_call": {"name": "find"}},
        {"role": "assistant", "content": None, "function_call": {"name": "find", "arguments": "{x"}},
    ],
)
def test_what_says_nothing_is_refused(client: httpx.Client, message: dict[str, Any]) -> None:
    assert sent(client, message).status_code == 400
