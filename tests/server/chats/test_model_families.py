# SPDX-License-Identifier: Apache-2.0
"""Texts that models of all families write, read over HTTP: whole and streamed, in pieces of any size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from family_templates import TOOLS
from family_texts import ROWS, Row
from live_server import LiveServer, live_server
from nightly import by_day
from writing_engine import WritingEngine, tokenizer_with

NAMES = {f"row{i}": row for i, row in enumerate(ROWS)}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[LiveServer, httpx.Client]]:
    special = dict.fromkeys(token for row in ROWS for token in row.tokens)
    engine = WritingEngine(tokenizer_with([*special]), {name: row.text for name, row in NAMES.items()})
    with (
        live_server(engine, trust_request_chat_template=True) as running,
        running.http() as client,
    ):
        yield running, client


def body(name: str, row: Row, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"write:{name}: please"}]
    return {
        "model": "scripted",
        "messages": messages,
        "tools": TOOLS,
        "chat_template": row.template,
        **fields,
    }


def told(message: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return message.get("reasoning_content") or "", message.get("content") or "", calls


def streamed(client: httpx.Client, sent: dict[str, Any]) -> dict[str, Any]:
    """Return the message that a stream's deltas make."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    with client.stream("POST", "/v1/chat/completions", json={**sent, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            delta = json.loads(line[6:])["choices"][0]["delta"]
            for field in ("content", "reasoning_content"):
                message[field] += delta.get(field) or ""
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
                for key, text in call["function"].items():
                    message["tool_calls"][call["index"]]["function"][key] += text or ""
    return message


@pytest.mark.parametrize("name", by_day(NAMES, *list(NAMES)[::5]), ids=lambda name: NAMES[name].name)
def test_the_row_is_read(server: tuple[LiveServer, httpx.Client], name: str) -> None:
    running, client = server
    row = NAMES[name]
    wanted = (row.thought, row.said, [*row.calls])
    answer = client.post("/v1/chat/completions", json=body(name, row)).json()
    assert told(answer["choices"][0]["message"]) == wanted
    assert answer["choices"][0]["finish_reason"] == ("tool_calls" if row.calls else "stop")
    running.engine.step = (1, 3, 17)[int(name.removeprefix("row")) % 3]
    assert told(streamed(client, body(name, row))) == wanted
