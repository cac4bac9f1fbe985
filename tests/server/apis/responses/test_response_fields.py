# SPDX-License-Identifier: Apache-2.0
"""Fields of the Responses API: how long a prompt stays cached, what is refused, what changes nothing."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer
from openai import OpenAI
from response_prompts import last_asked

URL = "/v1/responses"


def test_retention_is_a_pin_within_the_budget(server: LiveServer, ada: OpenAI) -> None:
    cache = server.engine.prefix_cache
    question = "say:" + "long " * 20
    for options in (
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_options": {"ttl": "12h"}},
        {"prompt_cache_options": {"ttl": "12h"}, "stream": True},
    ):
        answer: Any = ada.responses.create(model="scripted", input=question, **options)
        if "stream" in options:
            answer = list(answer)[-1].response
        assert answer.usage.input_tokens_details.pinned_tokens == 0, "the scripted engine caches nothing"
    ids = last_asked(server).prompt
    lease = cache.acquire(ids, server.engine.cache.namespace("ada"))
    lease.commit(len(ids))
    lease.release()
    chat = [{"role": "user", "content": question}]
    one = ada.chat.completions.create(model="scripted", messages=chat, prompt_cache_retention="24h")
    assert one.usage.prompt_tokens_details.pinned_tokens == len(ids)
    [pin] = cache.pins()
    assert 86000 < pin.expires_in_s <= 86400
    cache.reset()
    two = ada.chat.completions.create(model="scripted", messages=chat, prompt_cache_retention="in_memory")
    assert not hasattr(two.usage.prompt_tokens_details, "pinned_tokens")
    assert not cache.pins()


def test_cache_options_are_told(ada: OpenAI) -> None:
    options: Any = {"ttl": "12h", "comparison_response_id": "resp_1"}
    answer = ada.responses.create(model="scripted", input="x", prompt_cache_options=options)
    assert answer.prompt_cache_options is not None
    assert answer.prompt_cache_options.to_dict() == {"mode": "implicit", **options}
    assert ada.responses.create(model="scripted", input="x").prompt_cache_options is None


def test_a_cache_key_names_the_family_of_a_request(server: LiveServer, ada: OpenAI) -> None:
    ada.responses.create(model="scripted", input="x", prompt_cache_key="agent-7")
    assert last_asked(server).cache_key_hint == "agent-7"
    chat: Any = {"model": "scripted", "messages": [{"role": "user", "content": "x"}]}
    ada.chat.completions.create(**chat, prompt_cache_key="agent-8")
    assert last_asked(server).cache_key_hint == "agent-8"
    ada.chat.completions.create(**chat)
    assert last_asked(server).cache_key_hint == ""


@pytest.mark.parametrize("url", [URL, "/v1/chat/completions"])
@pytest.mark.parametrize(
    "field",
    [
        {"prompt_cache_retention": "1h"},
        {"prompt_cache_key": 5},
        {"prompt_cache_options": {"ttl": "1h"}},
        {"prompt_cache_options": {"prewarm": 2}},
        {"prompt_cache_options": {"mode": "both"}},
        {"prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}},
        {"prompt_cache_retention": "in_memory", "prompt_cache_options": {"ttl": "12h"}},
        {"generate": "no"},
    ],
)
def test_retention_outside_what_there_is_is_refused(
    http: httpx.Client, url: str, field: dict[str, Any]
) -> None:
    prompt = {"input": "x"} if url == URL else {"messages": [{"role": "user", "content": "x"}]}
    answer = http.post(url, json={"model": "scripted", **prompt, **field})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(next(iter(field)))


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        pytest.param({"input": None}, "missing_required_parameter", "input", id="no input"),
        pytest.param({"input": 5}, "invalid_type", "input", id="type"),
        pytest.param({"input": []}, "invalid_value", "input", id="empty"),
        pytest.param({"input": ["x"]}, "invalid_type", "input[0]", id="item"),
        pytest.param({"input": [{"type": "web_crawl_call"}]}, "unsupported_content", "input[0]", id="kind"),
        pytest.param(
            {"input": [{"type": "web_search_call"}]}, "missing_required_parameter", "input[0]", id="bare call"
        ),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "unsupported_content",
            "input[0].content[0]",
            id="image",
        ),
        pytest.param(
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "invalid_value",
            "input",
            id="arguments",
        ),
        pytest.param({"tools": [{"type": "x"}]}, "unsupported_parameter", "tools[0]", id="tool"),
        pytest.param({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0]", id="name"),
        pytest.param(
            {"text": {"format": {"type": "grammar"}}}, "unsupported_parameter", "text.format", id="json"
        ),
        pytest.param({"tool_choice": "required"}, "invalid_value", "tool_choice", id="choice"),
        pytest.param({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt", id="prompt"),
        pytest.param({"include": ["everything"]}, "invalid_value", "include", id="include"),
        pytest.param({"metadata": {"k" * 65: "v"}}, "invalid_value", "metadata", id="metadata key"),
        pytest.param({"metadata": {"k": 5}}, "invalid_type", "metadata.k", id="metadata value"),
        pytest.param({"max_output_tokens": 0}, "invalid_value", "max_output_tokens", id="tokens"),
        pytest.param({"top_logprobs": 21}, "invalid_value", "top_logprobs", id="logprobs"),
        pytest.param({"max_tokens": 5}, "unknown_parameter", "max_tokens", id="unknown"),
        pytest.param({"input": "x" * 5000}, "context_length_exceeded", "input", id="long"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, body: dict[str, Any], code: str, param: str) -> None:
    answer = http.post(URL, json={"model": "scripted", "input": "say:x", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)
    assert error["message"]


def test_a_foreground_response_is_neither_cancelled_nor_streamed_again(
    ada: OpenAI, http: httpx.Client
) -> None:
    answer = ada.responses.create(model="scripted", input="say:x")
    with pytest.raises(openai.BadRequestError, match="background"):
        ada.responses.cancel(answer.id)
    assert http.get(f"{URL}/{answer.id}?stream=true").status_code == 400


def test_a_harmless_field_changes_nothing(http: httpx.Client) -> None:
    body = {
        "model": "scripted",
        "input": "say:x",
        "service_tier": "auto",
        "safety_identifier": "s",
        "max_tool_calls": 3,
        "include": ["reasoning.encrypted_content"],
        "stream_options": {"include_obfuscation": False},
        "stream": True,
        "background": False,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "none",
    }
    answer = http.post(URL, json=body)
    frames = [frame.split("\n") for frame in answer.text.strip().split("\n\n")]
    assert [name.removeprefix("event: ") for name, _ in frames] == [
        json.loads(data.removeprefix("data: "))["type"] for _, data in frames
    ]
