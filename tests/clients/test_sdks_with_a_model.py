# SPDX-License-Identifier: Apache-2.0
"""OpenAI's and Anthropic's SDKs over the embedded model and its real cache: conversations, pins, tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, live_server

from radixkv import EngineConfig
from radixkv.entrypoints.async_engine import AsyncEngine

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "description": "Weather.", "parameters": SCHEMA},
}
OPTIONS: Any = {"temperature": 0, "max_tokens": 40}
ADA, BOB, ADMIN = "key-of-ada", "key-of-bob", "key-of-the-operator"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = AsyncEngine.from_config(
        EngineConfig(num_blocks=512, max_model_len=2048, dtype="float32", warm_up="off")
    )
    keys = {"api_keys": (f"ada={ADA}", f"bob={BOB}"), "admin_keys": (f"operator={ADMIN}",)}
    with live_server(engine, **keys) as running:
        yield running

    def idle(inner: Any) -> bool:
        inner.cache.check()
        return not inner.has_work and inner.cache.stats.held_blocks == inner.cache.stats.pinned_blocks

    assert asyncio.run(engine.call(idle)), "something is still held"
    asyncio.run(engine.close())


def cached(usage: Any) -> int:
    return usage.prompt_tokens_details.cached_tokens


def test_an_agents_turns_grow_in_the_cache(server: LiveServer) -> None:
    """Chat completions: a forced call, its result, and a further question; each turn finds the one before."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    known, found = 0, []
    with server.openai(ADA) as client:
        for choice in ("required", "none", "none"):
            answer = client.chat.completions.create(
                model=server.engine.model_name, messages=messages, tools=[TOOL], tool_choice=choice, **OPTIONS
            )
            found.append(cached(answer.usage))
            if choice == "none" and messages[-1]["role"] == "user":
                assert cached(answer.usage) >= known - 1, "all of the turn before but its last token"
            known = answer.usage.prompt_tokens + answer.usage.completion_tokens
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if message.tool_calls:
                assert answer.choices[0].finish_reason == "tool_calls"
                call = message.tool_calls[0]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."})
            else:
                messages.append({"role": "user", "content": "And tomorrow?"})
    assert any("tool_calls" in message for message in messages)
    assert found[0] == 0
    assert found[2] > found[1]


def test_messages_find_what_they_wrote(server: LiveServer) -> None:
    tool: Any = {"name": "look", "description": "Weather.", "input_schema": SCHEMA}
    system: Any = [
        {"type": "text", "text": "You answer briefly. " * 20, "cache_control": {"type": "ephemeral"}}
    ]
    ask: Any = {"model": server.engine.model_name, "max_tokens": 40, "system": system}
    ask["extra_body"] = {"temperature": 0}  # the SDK has no argument for it
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    with server.anthropic(ADA) as client:
        first = client.messages.create(messages=messages, tools=[tool], tool_choice=choice, **ask)
        counted = client.messages.count_tokens(
            model=ask["model"], system=system, messages=messages, tools=[tool]
        )
        (call,) = [block for block in first.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        with client.messages.stream(messages=messages, tools=[tool], **ask) as stream:
            second = stream.get_final_message()
    assert call.input["city"] in ("Paris", "Rome")
    assert first.stop_reason == "tool_use"
    prompt = first.usage.input_tokens + first.usage.cache_creation_input_tokens
    assert prompt + first.usage.cache_read_input_tokens == counted.input_tokens
    assert first.usage.cache_creation_input_tokens > 60
    assert second.usage.cache_read_input_tokens >= counted.input_tokens
    with server.http(headers={"x-api-key": ADA}) as http:
        assert http.get("/v1/cache/pins").json()["data"], "the breakpoint is a pin"


def test_a_chain_of_responses(server: LiveServer) -> None:
    ask: Any = {"model": server.engine.model_name, "max_output_tokens": 16, "temperature": 0}
    with server.openai(ADA) as client:
        first = client.responses.create(input="Name three rivers of Europe.", **ask)
        stream = client.responses.create(input="One more.", previous_response_id=first.id, stream=True, **ask)
        second = list(stream)[-1].response
        third = client.responses.create(input="And another.", previous_response_id=second.id, **ask)
    sizes = [answer.usage.input_tokens + answer.usage.output_tokens for answer in (first, second)]
    found = [answer.usage.input_tokens_details.cached_tokens for answer in (second, third)]
    assert all(cached >= size - 2 for cached, size in zip(found, sizes, strict=True)), (sizes, found)


def test_a_parsed_answer(server: LiveServer) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    messages: Any = [{"role": "user", "content": "The capital of Italy, as JSON."}]
    with server.openai(ADA) as client:
        answer = client.chat.completions.create(
            model=server.engine.model_name, messages=messages, response_format=form, **OPTIONS
        )
    assert answer.choices[0].message.content in ('{"city":"Paris"}', '{"city":"Rome"}')


def test_the_cache_of_an_engine_that_runs(server: LiveServer) -> None:
    """Explained, listed, pinned and forgotten over HTTP, with real K/V behind it."""
    text = "The harbour master counts the ships every evening and writes their number into the book. " * 4
    text = text.rstrip()
    asked = {"prompt": text + " Monday", "max_tokens": 1}
    with server.http(headers={"x-api-key": ADA}) as ada, server.http(headers={"x-api-key": ADMIN}) as admin:
        ada.post("/v1/completions", json=asked).raise_for_status()
        other = ada.post("/v1/cache/explain", json={"prompt": text + " Tuesday, the day after it"}).json()
        same = ada.post("/v1/cache/explain", json={"prompt": text + " Monday"}).json()
        assert (same["reason"], other["reason"]) == ("hit", "diverged")
        assert other["position"] == other["cached_tokens"] > 40
        assert "Monday" in other["around"]["cached"]
        tree = ada.get("/v1/cache/tree", params={"search": "harbour master"}).json()
        assert tree["found"] >= 1
        heaviest = ada.get("/v1/cache/tree").json()
        assert heaviest["complete"]
        assert heaviest["totals"]["tokens"] == sum(node["tokens"] for node in heaviest["nodes"])
        pin = ada.post("/v1/cache/pins", json={"prompt": text, "ttl": 60}).json()
        assert pin["pinned_tokens"] == pin["prompt_tokens"]
        state = admin.get("/v1/cache").json()["pool"]
        assert state["pinned_blocks"] >= pin["pinned_tokens"] // 16
        assert ada.request("DELETE", "/v1/cache/pins", json={"id": pin["id"]}).json()["deleted"]
        admin.post("/v1/cache/reset").raise_for_status()
        assert ada.post("/v1/cache/explain", json={"prompt": text}).json()["cached_tokens"] == 0
        requests = ada.get("/v1/cache/requests", params={"limit": 1}).json()["data"]
        assert requests[0]["state"] == "finished"


def test_tenants_find_nothing_of_each_other(server: LiveServer) -> None:
    messages: Any = [{"role": "user", "content": "A secret of one tenant, and of nobody else at all. " * 5}]
    ask: Any = {"model": server.engine.model_name, "messages": messages, "max_tokens": 1}
    ask["extra_body"] = {"cache_salt": "new"}  # nothing of earlier tests
    found = []
    for key in (ADA, BOB, ADA, BOB):
        with server.openai(key) as openai, server.anthropic(key) as anthropic:
            found.append(cached(openai.chat.completions.create(**ask).usage))
            # The other dialect renders the same prompt.
            again = anthropic.messages.create(**ask).usage
            assert again.cache_read_input_tokens > 40
    assert found[:2] == [0, 0]
    assert min(found[2:]) > 40
