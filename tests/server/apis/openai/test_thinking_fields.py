# SPDX-License-Identifier: Apache-2.0
"""Fields of chats that say how to think, and where reasoning goes; `cache_prompt`; breakpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, chat, live_server
from scripted_engine import ScriptedEngine
from tiny_models import byte_level_tokenizer

from radixkv.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
THOUGHT = "say:<think>\nHm.\n</think>\n\nHi."
SAID = "{% for m in messages %}{{ m.content }}{% endfor %}|"
#: Small equivalents of the families' templates: how each is told to think.
TEMPLATES = {
    "qwen": SAID + "{% if enable_thinking is defined and not enable_thinking %}off{% else %}on{% endif %}",
    "granite": SAID + "{% if thinking %}on{% else %}off{% endif %}",
    "minimax": SAID + "{{ thinking_mode | default('adaptive') }}",
    "gpt-oss": SAID + "{{ reasoning_effort | default('medium') }}",
    "hunyuan": (
        SAID + "{% set e = reasoning_effort | default('no_think') %}"
        "{% if e not in ['high', 'low', 'no_think'] %}{{ raise_exception('effort ' + e) }}{% endif %}{{ e }}"
    ),
    "kimi": (
        SAID + "{% if thinking is defined and not thinking %}off{% else %}{% set e = thinking_effort | "
        "default('max') %}{% if e not in ['low', 'high', 'max'] %}{{ raise_exception(e) }}{% endif %}{{ e }}"
        "{% endif %}"
    ),
    "seed": SAID + "{{ thinking_budget | default(-1) }}",
    "none": SAID,
}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("qwen", {}, "on"),
    ("qwen", {"enable_thinking": False}, "off"),
    ("qwen", {"thinking": {"type": "disabled"}}, "off"),
    ("qwen", {"thinking": False}, "off"),
    ("qwen", {"reasoning": {"enabled": False}}, "off"),
    ("qwen", {"reasoning_effort": "none"}, "off"),
    ("qwen", {"reasoning": {"effort": "none"}}, "off"),
    ("qwen", {"enable_thinking": True}, "on"),
    ("qwen", {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, "on"),
    ("granite", {}, "off"),
    ("granite", {"thinking": {"type": "enabled", "budget_tokens": 2048}}, "on"),
    ("granite", {"reasoning_effort": "low"}, "on"),
    ("minimax", {"enable_thinking": False}, "disabled"),
    ("minimax", {"thinking": True}, "enabled"),
    ("gpt-oss", {"reasoning_effort": "high"}, "high"),
    ("gpt-oss", {"reasoning": {"effort": "xhigh"}}, "high"),
    ("gpt-oss", {"enable_thinking": False}, "low"),
    ("hunyuan", {"enable_thinking": True}, "high"),
    ("hunyuan", {"reasoning_effort": "medium"}, "high"),
    ("hunyuan", {"reasoning_effort": "none"}, "no_think"),
    ("kimi", {"reasoning_effort": "minimal"}, "low"),
    ("kimi", {"enable_thinking": False, "reasoning_effort": "none"}, "off"),
    ("seed", {"thinking_budget": 512}, "512"),
    ("seed", {"reasoning": {"max_tokens": 256}}, "256"),
    ("seed", {"enable_thinking": False}, "0"),
]


@pytest.fixture(scope="module")
def templated() -> Iterator[LiveServer]:
    """A server whose requests bring the template."""
    tokenizer = Tokenizer(byte_level_tokenizer())
    with live_server(ScriptedEngine(tokenizer=tokenizer), trust_request_chat_template=True) as running:
        yield running


def ask(server: LiveServer, **body: Any) -> httpx.Response:
    with server.http() as client:
        return client.post(CHAT, json={**chat("x"), "max_tokens": 1, **body})


@pytest.mark.parametrize(("family", "fields", "told"), CASES)
def test_wishes_become_the_templates_own_variables(
    templated: LiveServer, family: str, fields: dict[str, Any], told: str
) -> None:
    answer = ask(templated, chat_template=TEMPLATES[family], **fields)
    assert answer.status_code == 200, answer.text
    prompt = templated.engine.tokenizer.decode(templated.engine.requests[-1].prompt)
    assert prompt.rpartition("|")[2] == told


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("none", {"enable_thinking": False}, "thinking (the chat template can't switch it)"),
        ("qwen", {"reasoning_effort": "low"}, "effort of thinking (the chat template knows no levels)"),
        ("qwen", {"thinking_budget": 9}, "budget of thinking (the chat template reads none)"),
    ],
)
def test_wishes_that_a_template_can_not_heed_are_named(
    templated: LiveServer, family: str, fields: dict[str, Any], words: str
) -> None:
    answer = ask(templated, chat_template=TEMPLATES[family], **fields)
    assert answer.status_code == 200
    assert words in answer.headers["warning"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "enable_thinking"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"thinking": False, "reasoning": {"effort": "high"}}, "reasoning_effort"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning_effort"),
        ({"include_reasoning": False, "separate_reasoning": False}, "separate_reasoning"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking_budget": -1}, "thinking_budget"),
    ],
)
def test_contradictions_are_refused(templated: LiveServer, fields: dict[str, Any], param: str) -> None:
    answer = ask(templated, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_reasoning_goes_where_the_request_wants_it(server: LiveServer) -> None:
    places = [
        ({}, ("Hi.", "Hm.")),
        ({"include_reasoning": False}, ("Hi.", "")),
        ({"reasoning": {"exclude": True}}, ("Hi.", "")),
        ({"separate_reasoning": False}, ("<think>\nHm.\n</think>\n\nHi.", "")),
        ({"separate_reasoning": True, "include_reasoning": True}, ("Hi.", "Hm.")),
    ]
    with server.openai() as client:
        for fields, said in places:
            create = client.chat.completions.create
            asked: Any = {"model": "scripted", **chat(THOUGHT), "extra_body": fields}
            message = create(**asked).choices[0].message
            assert (message.content, getattr(message, "reasoning_content", "")) == said
            deltas = [chunk.choices[0].delta for chunk in create(**asked, stream=True)]
            assert "".join(delta.content or "" for delta in deltas) == said[0]
            assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == said[1]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_prompt_is_computed_anew_and_not_kept_with_cache_prompt_off(path: str) -> None:
    engine = ScriptedEngine(caches=True)
    body: dict[str, Any] = {"prompt": "x" * 100} if path != CHAT else chat("x" * 100)
    cached = []
    with live_server(engine) as server, server.http() as client:
        for fields in ({"cache_prompt": False}, {}, {}, {"cache_prompt": False}, {"cache_prompt": True}):
            usage = client.post(path, json={"max_tokens": 2, **body, **fields}).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, False, True, False, True]
    assert len({asked.salt for asked in engine.requests}) == 3


MARK = {"type": "ephemeral"}
PART = {"type": "text", "text": "long", "cache_control": MARK}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "body",
    [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "long", "cache_control": MARK}]}
            ]
        },
        {"messages": [{"role": "user", "content": "long", "cache_control": MARK}]},
        {"tools": [{"type": "function", "function": FUNCTION, "cache_control": MARK}]},
        {"tools": [{"type": "function", "function": {**FUNCTION, "cache_control": MARK}}]},
        {"tools": [{"type": "custom", "custom": {"name": "f"}, "cache_control": MARK}]},
        {
            "messages": [
                {"role": "user", "content": "long"},
                {"role": "assistant", "content": None, "tool_calls": [{**CALL, "cache_control": MARK}]},
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            ]
        },
        {"cache_control": {**MARK, "ttl": "1h"}},
    ],
    ids=["part", "message", "tool", "function", "custom tool", "call", "body"],
)
def test_every_spelling_of_cache_control_is_a_breakpoint(server: LiveServer, body: dict[str, Any]) -> None:
    with server.http() as client:
        answer = client.post(CHAT, json={**chat("say:x"), **body})
    assert answer.status_code == 200, answer.text
    asked = server.engine.requests[-1]
    (pin,) = asked.pins
    assert pin.ttl == (3600 if "cache_control" in body else 300)
    assert (pin.num_tokens == len(asked.prompt)) == ("cache_control" in body)
    assert "cache_control" not in asked.text
    assert "cache_control" not in answer.headers.get("warning", "")
