# SPDX-License-Identifier: Apache-2.0
"""Stop strings and stop tokens end answers; a model's thoughts, and the marks around them, are no answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from family_templates import CHATML, HARMONY, template
from live_server import live_server
from writing_engine import WritingEngine, tokenizer_with

PLAIN = template(*CHATML, tools="{{ '' }}")
#: The template opens the thoughts.
OPENED = template(*CHATML, tools="{{ '' }}", opened="<think>\n")
THOUGHT = "The end.\n\nI think: Q?\nA < B."
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
#: Name -> template, special tokens, what the model writes before its answer.
FORMATS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "think": (PLAIN, (), f"<think>\n{THOUGHT}\n</think>\n\n"),
    "think_tokens": (PLAIN, ("<think>", "</think>"), f"<think>\n{THOUGHT}\n</think>\n\n"),
    "opened": (OPENED, ("<think>", "</think>"), f"{THOUGHT}\n</think>\n\n"),
    "harmony": (
        HARMONY,
        ("<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
        f"<|channel|>analysis<|message|>{THOUGHT}{FINAL}",
    ),
}
ANSWER = "It is 4.\n\nQ? No more."
#: Stop strings -> the answer that is left.
STOPS: dict[str, str] = {
    "\n\n": "It is 4.",
    "Q?": "It is 4.\n\n",
    "<": ANSWER,
    "think": ANSWER,
    "assistant": ANSWER,
    ">\n\nIt": ANSWER,  # from a mark into the answer
    "B.\n</think>": ANSWER,
    "It": "",
    ".": "It is 4",
}


@pytest.fixture(scope="module", params=[(name, step) for name in FORMATS for step in (1, 3)], ids=str)
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    name, step = request.param
    text, special, before = FORMATS[name]
    engine = WritingEngine(tokenizer_with(special, chat_template=text), {"it": before + ANSWER}, step=step)
    with live_server(engine) as server, server.http() as http:
        yield http


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = client.post(path, json={**body, "stream": True}).text.splitlines()
    found = (line.removeprefix("data: ") for line in lines)
    return [json.loads(data) for data in found if data.startswith("{")]


def chat(client: httpx.Client, **fields: Any) -> tuple[str, str, str]:
    """Return thoughts, content and finish reason of a whole answer, which a stream tells too."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": "write:it:"}], **fields}
    (whole,) = client.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"]
    message = whole["message"]
    told = message.get("reasoning_content") or "", message["content"] or "", whole["finish_reason"]
    choices = [
        choice for event in events(client, "/v1/chat/completions", body) for choice in event["choices"]
    ]
    parts = [
        "".join(choice["delta"].get(name) or "" for choice in choices)
        for name in ("reasoning_content", "content")
    ]
    assert (*parts, choices[-1]["finish_reason"]) == told
    return told


@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_string_ends_the_answer_alone(client: httpx.Client, stop: str) -> None:
    thought, content, reason = chat(client, stop=[stop, "never"])
    assert (thought, content, reason) == (THOUGHT, STOPS[stop], "stop")


def test_it_may_be_left_in_and_min_tokens_go_on(client: httpx.Client) -> None:
    assert chat(client, stop="4.", include_stop_str_in_output=True)[1] == "It is 4."
    assert chat(client, stop=[" 4", "more"], min_tokens=9)[1] == "It is"
    assert chat(client, stop=["4.", "\n", "more"], min_tokens=200)[:2] == (THOUGHT, ANSWER)


def test_messages_and_ollama(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "write:it:"}]
    body: dict[str, Any] = {
        "model": "scripted",
        "max_tokens": 2000,
        "messages": messages,
        "stop_sequences": ["\n\n"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    answer = client.post("/v1/messages", json=body).raise_for_status().json()
    thought, text = answer["content"]
    assert (thought["thinking"], text["text"]) == (THOUGHT, "It is 4.")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "\n\n")
    deltas = [event["delta"] for event in events(client, "/v1/messages", body) if "delta" in event]
    assert "".join(delta.get("text", "") for delta in deltas) == "It is 4."
    assert "".join(delta.get("thinking", "") for delta in deltas) == THOUGHT
    asked = {"model": "scripted", "messages": messages, "stream": False, "options": {"stop": ["\n\n"]}}
    message = client.post("/api/chat", json=asked).raise_for_status().json()["message"]
    assert (message["thinking"], message["content"]) == (THOUGHT, "It is 4.")


@pytest.mark.parametrize("text", ["Q", ".", "\n"])
def test_a_stop_token_of_plain_text_ends_the_answer_alone(client: httpx.Client, text: str) -> None:
    (token,) = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    thought, content, reason = chat(client, stop_token_ids=[token])
    assert (thought, content, reason) == (THOUGHT, ANSWER[: ANSWER.index(text)], "stop")


@pytest.mark.parametrize("client", [("think_tokens", 1)], indirect=True)
def test_a_stop_token_that_is_a_mark_ends_thoughts(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": "</think>", "add_special_tokens": False}).json()["tokens"]
    assert len(ids) == 1
    assert chat(client, stop_token_ids=ids) == (THOUGHT + "\n", "", "stop")
