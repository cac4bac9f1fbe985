"""Real clients through the proxy, and what it writes of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from anthropic import Anthropic, AsyncAnthropic
from live_server import live_server
from openai import AsyncOpenAI, OpenAI
from running_proxy import RunningProxy, running_proxy
from scripted_engine import ScriptedEngine

from radixkv.audit.exchange import make_record
from radixkv_server.proxy.redaction import Redaction

KEY = "sk-secret-0123456789abcdef"
QUESTION = "Which ships are in the harbour of Bergen at 08:01?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ask(url: str, model: str) -> list[str]:
    """The same question by each SDK, whole and streamed, and by asynchronous clients; the answers' texts."""
    texts = []
    options: dict[str, Any] = {"api_key": KEY, "max_retries": 0}
    chat: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 8}
    with OpenAI(base_url=f"{url}/v1", **options) as openai:
        assert [one.id for one in openai.models.list()] == [model]
        texts.append(openai.chat.completions.create(**chat).choices[0].message.content or "")
        stream = openai.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
        texts.append("".join(c.choices[0].delta.content or "" for c in stream if c.choices))
        texts.append(openai.responses.create(model=model, input=QUESTION, max_output_tokens=16).output_text)
    with Anthropic(base_url=url, **options) as anthropic:
        answer = anthropic.messages.create(**chat)
        texts.append("".join(block.text for block in answer.content if block.type == "text"))
        with anthropic.messages.stream(**chat) as events:
            texts.append(events.get_final_text())

    async def concurrently() -> list[str]:
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", **options) as one,
            AsyncAnthropic(base_url=url, **options) as two,
        ):
            answer = await one.chat.completions.create(**chat)
            async with two.messages.stream(**chat) as events:
                return [answer.choices[0].message.content or "", await events.get_final_text()]

    return texts + asyncio.run(concurrently())


def test_sdks_get_the_same_answers_and_are_recorded(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    engine = ScriptedEngine()
    with live_server(engine) as server:
        direct = ask(server.url, engine.model_name)
        with running_proxy(server.url, "--record", str(record)) as proxy:
            assert ask(proxy.url, engine.model_name) == direct
    lines = lines_of(record)
    assert len(lines) == len(direct)
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert KEY not in record.read_text() + "".join(proxy.lines)
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    for line, text in zip(lines[:5], direct, strict=False):
        made = make_record(line["request"], line["response"], path=line["path"])
        assert QUESTION in "".join(block.text for block in made.blocks)
        assert "".join(block.text for block in made.answer) == text
        assert made.usage.prompt
        assert line["key"].startswith("key-")
        assert line["status"] == 200
        assert 0 <= line["first_seconds"] <= line["seconds"]


def converse(url: str, turns: list[str]) -> None:
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        body = {"model": "scripted", "messages": messages, "max_tokens": 6, "stream": len(messages) > 2}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"x-api-key": KEY})
        made = make_record(body, answer.text if body["stream"] else answer.json())
        messages.append({"role": "assistant", "content": made.answer[0].text})


def test_redacted_texts_keep_what_they_share(tmp_path: Path) -> None:
    """Turns begin with all of the turn before, streamed answers and tools included, and no word is told."""
    record, plain = tmp_path / "hashes.jsonl", tmp_path / "plain.jsonl"
    turns = ["Where is the pilot today?", "And tomorrow, if the wind turns?", "Thanks, captain."]
    with live_server(ScriptedEngine()) as server:
        with running_proxy(server.url, "--record", str(record), "--redact") as proxy:
            converse(proxy.url, turns)
            call: dict[str, Any] = {
                "model": "scripted",
                "max_tokens": 4,
                "system": "You are the harbour master.",
                "metadata": {"user_id": "captain-ahab"},
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": turns[0]}]},
                    {
                        "role": "assistant",
                        "content": [
                            {
                                "type": "tool_use",
                                "id": "call_1",
                                "name": "find_ship",
                                "input": {"mast": "three"},
                            }
                        ],
                    },
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "Pequod"}],
                    },
                ],
                "tools": [
                    {
                        "name": "find_ship",
                        "description": "Finds ships.",
                        "input_schema": {"type": "object", "properties": {"mast": {"type": "string"}}},
                    }
                ],
            }
            httpx.post(f"{proxy.url}/v1/messages", json=call, headers={"x-api-key": KEY})
        with running_proxy(server.url, "--record", str(plain)) as proxy:
            converse(proxy.url, turns)
    text = record.read_text()
    for word in (
        "pilot",
        "tomorrow",
        "captain",
        "harbour",
        "mast",
        "three",
        "Pequod",
        "find_ship",
        "ahab",
        KEY,
    ):
        assert word not in text, word
    hashed = [make_record(line["request"], line["response"]) for line in lines_of(record)]
    told = [make_record(line["request"], line["response"]) for line in lines_of(plain)]
    for one, other in zip(hashed, told, strict=False):
        assert [len(block.text) for block in one.blocks] == [len(block.text) for block in other.blocks]
        assert one.usage == other.usage
    for before, after in pairwise(hashed[:3]):
        shared = [*before.blocks, *before.answer]
        assert [(block.role, block.text) for block in shared] == [
            (block.role, block.text) for block in after.blocks[: len(shared)]
        ]
    assert [block.kind for block in hashed[3].blocks] == ["tool", "text", "text", "call", "text"]
    assert hashed[3].blocks[3].name == hashed[3].blocks[0].name, "equal names stay equal"


def test_keys_are_not_recorded_wherever_they_stand(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    body = {
        "model": "scripted",
        "api_key": "another-secret",
        "messages": [{"role": "user", "content": f"my key is {KEY}"}],
        "tools": [{"type": "mcp", "authorization": "mcp-secret", "server_url": "https://e.org"}],
    }
    with live_server(ScriptedEngine()) as server, running_proxy(server.url, "--record", str(record)) as proxy:
        for headers in (
            {"Authorization": f"Bearer {KEY}"},
            {"x-api-key": KEY},
            {"Cookie": f"a=b; session={KEY}"},
        ):
            httpx.post(f"{proxy.url}/v1/chat/completions?api_key={KEY}", json=body, headers=headers)
    text = record.read_text() + "".join(proxy.lines)
    assert len(lines_of(record)) == 3
    for secret in (KEY, "another-secret", "mcp-secret"):
        assert secret not in text


def test_records_rotate(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    options = ("--record", str(record), "--record-size", "20000", "--record-files", "3")
    with live_server(ScriptedEngine()) as server, running_proxy(server.url, *options) as proxy:
        for number in range(40):
            body = {"model": "scripted", "messages": [{"role": "user", "content": f"{number} " + "x" * 2000}]}
            httpx.post(f"{proxy.url}/v1/chat/completions", json=body)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["record.jsonl", "record.jsonl.1", "record.jsonl.2"]
    for name in files:
        assert (tmp_path / name).stat().st_size <= 20_000
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    newest = lines_of(record)[-1]["request"]["messages"][0]["content"]
    assert newest.startswith("39 ")


def observer_of(proxy: RunningProxy) -> int:
    """The process that the proxy has started."""
    children = Path(f"/proc/{proxy.process.pid}/task/{proxy.process.pid}/children").read_text().split()
    (child,) = children
    return int(child)


def test_traffic_goes_on_without_the_observer(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    body = {"model": "scripted", "messages": MESSAGES, "max_tokens": 4}
    with live_server(ScriptedEngine()) as server, running_proxy(server.url, "--record", str(record)) as proxy:

        def post() -> int:
            return httpx.post(f"{proxy.url}/v1/chat/completions", json=body).status_code

        assert post() == 200
        os.kill(observer_of(proxy), signal.SIGSTOP)
        assert [post() for _ in range(5)] == [200] * 5, "while it stalls"
        os.kill(observer_of(proxy), signal.SIGKILL)
        assert [post() for _ in range(5)] == [200] * 5, "without it"
    assert any("traffic goes on" in line for line in proxy.lines)


def test_hashes_of_responses_keep_their_form_and_numbers_of_texts_are_hashed() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"age": 4711}'}
    body = {
        "model": "m",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Where is Ishmael, aged 4711?"}]},
            call,
            {"type": "function_call_output", "call_id": "c1", "output": "ishmael@pequod.example"},
        ],
        "tools": [
            {"type": "function", "name": "find", "parameters": {"properties": {"age": {"minimum": 4711}}}}
        ],
        "logit_bias": {"4711": 1},
    }
    redaction = Redaction()
    hashed = redaction.value(body)
    told, made = make_record(body, path="/v1/responses"), make_record(hashed, path="/v1/responses")
    assert [block[1:4] for block in made.blocks] == [block[1:4] for block in told.blocks]
    assert made.blocks[1].text == redaction.text(told.blocks[1].text)
    tokens = {"model": "m", "prompt": [4711, 815, 4711], "messages": []}
    choice = {"logprobs": {"content": [{"token": "Ahab", "bytes": [65, 104]}]}, "arguments": {"age": 4711}}
    hashes = redaction.value(tokens)["prompt"]
    assert hashes[0] == hashes[2] != hashes[1]
    text = json.dumps([hashed, hashes, redaction.value(choice)])
    for word in ("4711", "Ishmael", "pequod", "Ahab", "[65", "104]", "815,"):
        assert word not in text, word


def test_a_record_that_cant_be_written_is_told_once_and_traffic_goes_on() -> None:
    body = {"model": "scripted", "messages": MESSAGES, "max_tokens": 2}
    with (
        live_server(ScriptedEngine()) as server,
        running_proxy(server.url, "--record", "/dev/full") as proxy,
    ):
        answers = [httpx.post(f"{proxy.url}/v1/chat/completions", json=body) for _ in range(5)]
        assert [one.status_code for one in answers] == [200] * 5
    assert len([line for line in proxy.lines if "--record" in line]) == 1, proxy.lines
