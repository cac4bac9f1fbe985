# SPDX-License-Identifier: Apache-2.0
"""A tiny model with states behind HTTP: next turns resume near their break, and states are shown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("numba")

from live_server import LiveServer, live_server
from tiny_models import save_tiny_model
from transformers import AutoTokenizer

from radixkv import EngineConfig
from radixkv.entrypoints.async_engine import AsyncEngine

# As Qwen3's: thoughts stay until the user speaks again.
TEMPLATE = """
{%- set ns = namespace(query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.query %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
SYSTEM = "You are the assistant of the harbour office. Count the ships, and be brief. "


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("hybrid")
    save_tiny_model(folder, "lfm2", max_position_embeddings=4096, vocab_size=336)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    options = {"num_blocks": 300, "max_num_seqs": 2, "device": "cpu", "warm_up": "quick", "threads": 1}
    engine = AsyncEngine.from_config(EngineConfig.from_options(str(folder), options))
    with live_server(engine) as running:
        yield running
    asyncio.run(engine.close())


def ask(server: LiveServer, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Send a chat; return its usage."""
    body = {"messages": messages, "max_tokens": 2, "temperature": 0, **options}
    with server.http() as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def shared_tokens(server: LiveServer, one: list[dict[str, Any]], other: list[dict[str, Any]]) -> int:
    """Leading tokens that two chats' prompts have in common."""
    with server.http() as client:
        first, second = (
            client.post("/tokenize", json={"messages": m}).json()["tokens"] for m in (one, other)
        )
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second))


def test_the_turn_after_an_agents_loop_replays_at_most_63_tokens(server: LiveServer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "count", "arguments": '{"port": "x"}'}}
    loop = [
        {"role": "system", "content": SYSTEM * 2},
        {"role": "user", "content": "How many ships are in the harbour today? " * 3},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I have to count. " * 9,
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "a brig, a bark, a sloop; " * 9},
    ]
    next_turn = [*loop, {"role": "assistant", "content": "Three."}, {"role": "user", "content": "And boats?"}]
    ask(server, loop)
    shared = shared_tokens(server, loop, next_turn)
    details = ask(server, next_turn)["prompt_tokens_details"]
    assert 64 <= shared - 63 <= details["cached_tokens"] <= shared
    assert details["cache_miss"]["position"] == details["cached_tokens"]


def test_a_declared_breakpoint_is_a_resume_point(server: LiveServer) -> None:
    text = "Rules of the lighthouse: keep the lamp lit, and greet the ferry. " * 5
    part = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    more = {"type": "text", "text": "Of the night watch: " + "stay awake. " * 30}
    first = [{"role": "system", "content": [part, more]}, {"role": "user", "content": "Who watches?"}]
    other = [{"role": "system", "content": [part]}, {"role": "user", "content": "Is it day? " * 20}]
    ask(server, first)
    shared = shared_tokens(server, first, other)
    assert 64 <= shared - 63 <= ask(server, other)["prompt_tokens_details"]["cached_tokens"] <= shared


def test_states_are_shown_where_blocks_are(server: LiveServer) -> None:
    ask(server, [{"role": "user", "content": "Which flag does the brig fly? " * 20}])
    with server.http() as client:
        states = client.get("/v1/cache").json()["states"]
        nodes = client.get("/v1/cache/tree").json()["nodes"]
        metrics = client.get("/metrics").text
        assert client.get("/v1/cache/advice").json()["states"] is None
    kept = [checkpoint for node in nodes for checkpoint in node.get("checkpoints", ())]
    assert states["checkpoints"] == len(kept) > 0
    assert {checkpoint["tokens"] % 64 for checkpoint in kept} == {0}
    assert f'radixkv_state_slots{{state="cached"}} {float(len(kept))}' in metrics
    assert f"radixkv_state_slots_capacity {float(states['total_slots'])}" in metrics
