# SPDX-License-Identifier: Apache-2.0
"""Answers of several families in all four dialects, cut anywhere: a stream says what the whole answer says.

`RADIXKV_FAMILY_TRIALS` sets how many trials each family gets.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from family_templates import TOOLS
from family_texts import ROWS, Row
from live_server import live_server
from nightly import by_day
from writing_engine import WritingEngine, tokenizer_with

ROW = {row.name: row for row in ROWS}
NAMES = ("Qwen 3", "GLM 4.5", "Gemma 4", "gpt-oss", "Llama 4", "Command A", "Kimi K3", "DeepSeek V4")
TRIALS = int(os.environ.get("RADIXKV_FAMILY_TRIALS", "4"))
#: Reasoning, content, and calls with the text of their arguments.
Said = tuple[str, str, list[tuple[str, str]]]


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data.startswith("{"):
                yield json.loads(data)


def chat(client: httpx.Client, limits: dict[str, Any]) -> tuple[list[Said], list[Said]]:
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "write:it:"}],
        "tools": TOOLS,
        **limits,
    }
    whole = client.post("/v1/chat/completions", json=body).json()
    told: list[Said] = []
    for choice in whole["choices"]:
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        told.append(
            (
                message.get("reasoning_content") or "",
                message.get("content") or "",
                [(call["name"], call["arguments"]) for call in calls],
            )
        )
    parts: list[Any] = [["", "", []] for _ in told]
    for event in events(client, "/v1/chat/completions", body):
        for choice in event["choices"]:
            delta, part = choice["delta"], parts[choice["index"]]
            part[0] += delta.get("reasoning_content") or ""
            part[1] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    part[2].append((call["function"]["name"], ""))
                name, arguments = part[2][call["index"]]
                part[2][call["index"]] = name, arguments + call["function"]["arguments"]
    return told, [(part[0], part[1], part[2]) for part in parts]


def responses(client: httpx.Client, limits: dict[str, Any]) -> tuple[list[Said], list[Said]]:
    tools = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
    body: dict[str, Any] = {"model": "scripted", "input": "write:it:", "tools": tools}
    if "max_tokens" in limits:
        body["max_output_tokens"] = max(16, limits["max_tokens"])

    def said(output: list[dict[str, Any]]) -> Said:
        thought, content, calls = "", "", []
        for item in output:
            if item["type"] == "reasoning":
                thought += "".join(part["text"] for part in item.get("content") or item["summary"])
            elif item["type"] == "message":
                content += "".join(part["text"] for part in item["content"])
            else:
                calls.append((item["name"], item["arguments"]))
        return thought, content, calls

    whole = said(client.post("/v1/responses", json=body).json()["output"])
    last: dict[str, Any] = {}
    content, arguments, thought = "", "", ""
    for event in events(client, "/v1/responses", body):
        last, kind = event, event["type"]
        content += event["delta"] if kind == "response.output_text.delta" else ""
        thought += event["delta"] if kind.startswith("response.reasoning") and "delta" in event else ""
        arguments += event["delta"] if kind == "response.function_call_arguments.delta" else ""
    final = said(last["response"]["output"])
    assert (content, arguments) == (final[1], "".join(given for _, given in final[2]))
    assert thought in (final[0], final[0] * 2)
    return [whole], [final]


def messages(client: httpx.Client, limits: dict[str, Any]) -> tuple[list[Said], list[Said]]:
    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS
    ]
    body: dict[str, Any] = {
        "model": "scripted",
        "max_tokens": limits.get("max_tokens", 4000),
        "messages": [{"role": "user", "content": "write:it:"}],
        "tools": tools,
    }
    if body["max_tokens"] > 1024:
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    if "stop" in limits:
        body["stop_sequences"] = [limits["stop"]]

    def said(blocks: list[dict[str, Any]]) -> Said:
        return (
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"],
        )

    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()["content"]
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events(client, "/v1/messages", body):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[event["index"]] += (
                delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            )
    for block, text in zip(blocks, texts, strict=True):
        field = {"thinking": "thinking", "text": "text"}.get(block["type"])
        if field is not None:
            block[field] = text
        else:
            try:
                block["input"] = json.loads(text or "{}")
            except ValueError:  # cut off: whole answers have what can be read of it
                block["input"] = whole[len(blocks) - 1]["input"]
    return [said(whole)], [said(blocks)]


def ollama(client: httpx.Client, limits: dict[str, Any]) -> tuple[list[Said], list[Said]]:
    options = {"num_predict": limits["max_tokens"]} if "max_tokens" in limits else {}
    if "stop" in limits:
        options["stop"] = [limits["stop"]]
    asked = [{"role": "user", "content": "write:it:"}]
    body: dict[str, Any] = {
        "model": "scripted",
        "messages": asked,
        "tools": TOOLS,
        "options": options,
        "think": True,
    }

    def said(message: dict[str, Any]) -> Said:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        return (
            message.get("thinking") or "",
            message.get("content") or "",
            [(call["name"], json.dumps(call["arguments"])) for call in calls],
        )

    whole = client.post("/api/chat", json={**body, "stream": False}).json()["message"]
    parts = [said(event["message"]) for event in events(client, "/api/chat", body)]
    joined = (
        "".join(p[0] for p in parts),
        "".join(p[1] for p in parts),
        [call for p in parts for call in p[2]],
    )
    return [said(whole)], [joined]


DIALECTS: tuple[Callable[[httpx.Client, dict[str, Any]], tuple[list[Said], list[Said]]], ...] = (
    *(chat, responses, messages, ollama),
)


@pytest.mark.parametrize("name", by_day(NAMES, "Qwen 3", "gpt-oss"))
def test_a_stream_says_what_the_whole_answer_says(name: str) -> None:
    row, rng = ROW[name], random.Random(name)
    engine = WritingEngine(tokenizer_with(row.tokens, row.template), {"it": row.text})
    size = len(engine.tokenizer.encode(row.text, add_special_tokens=False))
    with live_server(engine) as server, server.http() as client:
        for dialect in DIALECTS:
            check(dialect(client, {}), row, whole=True)
        for trial in range(TRIALS):
            engine.step = rng.choice((1, 2, 9))
            limits: dict[str, Any] = {}
            if rng.random() < 0.7:
                limits["max_tokens"] = rng.randint(1, size)
            if rng.random() < 0.4:
                at = rng.randrange(len(row.text) - 4)
                limits["stop"] = row.text[at : at + rng.randint(1, 4)].strip() or "one"
            dialect = DIALECTS[trial % len(DIALECTS)]
            given = {**limits, "n": rng.randint(1, 3)} if dialect is chat else limits
            check(dialect(client, given), row, whole=False)


def check(said: tuple[list[Said], list[Said]], row: Row, *, whole: bool) -> None:
    """Hold a stream against the whole answer, and both against what the model has written."""
    one, other = said
    assert one == other
    for thought, content, calls in one:
        read = [(name, json.loads(given)) for name, given in calls] if whole else []
        if whole:
            assert (thought, content, read) == (row.thought, row.said, [*row.calls])
        # Cut off in a mark, up to two characters of it may still be text.
        for read_text, written in ((thought, row.thought), (content, row.said)):
            assert written.startswith(read_text.strip()[: max(0, len(read_text.strip()) - 2)].strip())
            assert len(read_text.strip()) <= len(written) + 2
        assert [name for name, _ in calls] == [name for name, _ in row.calls][: len(calls)]
