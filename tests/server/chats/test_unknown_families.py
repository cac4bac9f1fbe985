# SPDX-License-Identifier: Apache-2.0
"""Models of unknown families: the notice in log, `/v1/models` and answers, and how their calls are read."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from family_templates import CHATML, OBJECT, TOOLS, W, template
from live_server import live_server
from writing_engine import WritingEngine, tokenizer_with

CALL = f'{{"name": "get_weather", "arguments": {W}}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
ACME = f"<|use|>{CALL}<|/use|>"
BARE = template(*CHATML, tools="{{ '' }}")
RESPONSE_TEMPLATE: dict[str, Any] = {
    "start_anchor": "assistant\n",
    "fields": {
        "thinking": {"open": "<|muse|>", "close": "<|/muse|>"},
        "tool_calls": {
            "open": "<|use|>",
            "close": "<|/use|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}
MARKS = ("<|use|>", "<|/use|>", "<|muse|>", "<|/muse|>")


def asked(tokenizer: Any, text: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any], str, str]:
    """Return the whole message, the model's `chat_format`, its warning with tools, and all later ones."""
    with live_server(WritingEngine(tokenizer, {"it": text})) as server, server.http() as client:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "write:it:"}], **fields}
        told = client.post("/v1/chat/completions", json={**body, "tools": TOOLS})
        later = [client.post("/v1/chat/completions", json=body | more) for more in ({}, {"tools": TOOLS})]
        (card,) = client.get("/v1/models").json()["data"]
    warned = "".join(answer.headers.get("warning", "") for answer in later)
    message = told.json()["choices"][0]["message"]
    return message, card["chat_format"], told.headers.get("warning", ""), warned


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = (call["function"] for call in message.get("tool_calls") or ())
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def test_a_family_without_signs_is_read_as_hermes_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "radixkv.server"):
        message, card, warning, later = asked(tokenizer_with(chat_template=BARE), HERMES)
    assert called(message) == [("get_weather", json.loads(W))]
    assert card == {"name": "hermes", "is_known": False}
    assert "chat format of this model is not known" in warning
    assert "Hermes" in warning
    assert not later, "it is said once"
    told = [record.message for record in caplog.records if "chat format" in record.message]
    assert len(told) == 1
    assert "--chat-format" in told[0]


def test_a_derived_form_says_that_it_is_one(caplog: pytest.LogCaptureFixture) -> None:
    source = template(*CHATML, call="{{- '<|use|>' }}" + OBJECT + "{{- '<|/use|>' }}")
    with caplog.at_level(logging.WARNING, "radixkv.server"):
        message, card, warning, later = asked(tokenizer_with(MARKS, source), ACME)
    assert called(message) == [("get_weather", json.loads(W))], "its marks are special tokens, and stay"
    assert card == {"name": "derived", "is_known": False}
    assert "its chat template writes" in warning
    assert not later
    assert sum("chat template writes them in" in record.message for record in caplog.records) == 1


def test_a_response_template_of_the_tokenizer_is_used() -> None:
    tokenizer = tokenizer_with(MARKS, BARE, response_template=RESPONSE_TEMPLATE)
    message, card, warning, _ = asked(tokenizer, f"<|muse|>Hm.<|/muse|>One moment.{ACME}")
    assert called(message) == [("get_weather", json.loads(W))]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "One moment.")
    assert card == {"name": "response-template", "is_known": True}
    assert not warning


def test_a_broken_response_template_is_named_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tokenizer_with(chat_template=BARE, response_template={"fields": {}})
    with caplog.at_level(logging.WARNING, "radixkv.server"):
        message, card, _, _ = asked(tokenizer, HERMES)
    assert (len(called(message)), card["name"]) == (1, "hermes")
    assert any("response_template is not used" in record.message for record in caplog.records)


def test_the_vocabulary_tells_the_family_where_the_template_does_not() -> None:
    marks = ("<minimax:tool_call>", "</minimax:tool_call>")
    call = '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>'
    text = f"{marks[0]}\n{call}\n{marks[1]}"
    message, card, warning, _ = asked(tokenizer_with(marks, BARE), text)
    assert called(message) == [("get_weather", {"city": "Paris"})]
    assert card == {"name": "minimax-m2", "is_known": True}
    assert not warning
