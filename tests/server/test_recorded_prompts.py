# SPDX-License-Identifier: Apache-2.0
"""What `radixkv audit` predicts of a log, beside what the server told that it was recorded from."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server

from radixkv import EngineConfig
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.observe.audit.readers.recording import Recording
from radixkv.observe.audit.rule_sets import rule_set
from radixkv.observe.audit.rules import Rules
from radixkv_server.recorded_prompts import ServedModelCoding

pytestmark = pytest.mark.slow

SYSTEM = "You keep the berths of a harbour. " + " ".join(
    f"Berth {n} takes ships of class {n % 5}." for n in range(9)
)
FUNCTION = {
    "name": "berth",
    "description": "Find a berth for a ship.",
    "parameters": {"type": "object", "properties": {"ship": {"type": "string"}}, "required": ["ship"]},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    loaded = AsyncEngine.from_config(EngineConfig(num_blocks=512, max_model_len=2048, dtype="float32"))
    yield loaded
    asyncio.run(loaded.close())


@pytest.fixture(scope="module")
def server(engine: AsyncEngine) -> Iterator[LiveServer]:
    with live_server(engine) as running:
        yield running


class Recorder:
    """Sends requests over HTTP and writes them down as they went."""

    def __init__(self, http: httpx.Client, path: Path) -> None:
        self._http, self._path = http, path

    def send(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer, whole or as the events of its stream."""
        began = time.time()
        response = self._http.post(path, json=body, timeout=120)
        assert response.status_code == 200, response.text
        record = {"time": began, "path": path, "request": body, "response": response.text}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if not body.get("stream"):
            return dict(response.json())
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        return {"events": [json.loads(line) for line in lines]}


def talk(recorder: Recorder, rng: random.Random) -> None:
    """Conversations in every dialect, whole and streamed, with and without tools, some of them broken."""
    for number in range(2, 4):
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM if number else f"Day {number}. {SYSTEM}"}
        ]
        tools = {"tools": [{"type": "function", "function": FUNCTION}]} if number % 2 else {}
        for turn in range(3):
            messages.append({"role": "user", "content": f"Where does ship {rng.randrange(10**6)} go?"})
            stream = {"stream": True, "stream_options": {"include_usage": True}} if rng.random() < 0.5 else {}
            body = {
                "messages": messages,
                "max_tokens": rng.randint(3, 24),
                "temperature": 0.0,
                **tools,
                **stream,
            }
            answer = recorder.send("/v1/chat/completions", body)
            if stream:
                deltas = [choice["delta"] for event in answer["events"] for choice in event["choices"]]
                said = {"role": "assistant", "content": "".join(d.get("content") or "" for d in deltas)}
            else:
                said = answer["choices"][0]["message"]
            messages.append(said)
            if turn == 1 and number == 3:
                messages[1] = {"role": "user", "content": "Another question stood here."}
    messages = []
    for _ in range(3):
        messages.append(
            {"role": "user", "content": [{"type": "text", "text": f"And ship {rng.randrange(99)}?"}]}
        )
        system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
        body = {"model": "smollm2-135m-instruct", "max_tokens": 12, "system": system, "messages": messages}
        answer = recorder.send("/v1/messages", {**body, "temperature": 0.0})
        messages.append({"role": "assistant", "content": answer["content"]})
    before: dict[str, Any] = {}
    for _ in range(3):
        body = {
            "instructions": SYSTEM,
            "input": f"Ship {rng.randrange(99)}?",
            "max_output_tokens": 12,
            **before,
        }
        before = {"previous_response_id": recorder.send("/v1/responses", {**body, "temperature": 0.0})["id"]}
    text = "The ship sails. " * 30
    for more in ("", "It comes back."):
        recorder.send("/v1/completions", {"prompt": text + more, "max_tokens": 6, "temperature": 0.0})


@pytest.mark.nightly
def test_predicted_tokens_are_those_that_the_server_reported(
    server: LiveServer, engine: AsyncEngine, tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    with server.http() as http:
        talk(Recorder(http, path), random.Random(11))
    rules = Rules(rule_set("radixkv"), ServedModelCoding.of(engine.tokenizer))
    recording = Recording([path])
    seen = [(record, rules.observe(record)) for record in recording]
    assert not recording.problems.named
    assert len(seen) == 2 * 3 + 3 + 3 + 2
    for record, observed in seen:
        assert record.usage.prompt == observed.prompt_tokens
        assert observed.cached_tokens == record.usage.cached, record.place
    assert sum(observed.cached_tokens for _, observed in seen) > 1000
