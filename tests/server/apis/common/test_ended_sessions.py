# SPDX-License-Identifier: Apache-2.0
"""Sessions that are over: every dialect says so, and what only they have cached is evicted first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

TALK = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": TALK, "max_tokens": 5},
    "/api/chat": {"messages": TALK, "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = ScriptedEngine(caches=True, num_blocks=64)
    with live_server(engine, api_keys=("ada=a", "bob=b")) as running:
        yield running


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        client.headers["authorization"] = "Bearer a"
        yield client


@pytest.mark.parametrize("path", BODIES)
def test_the_last_request_of_a_session_says_so(server: LiveServer, http: httpx.Client, path: str) -> None:
    for said, means in (({"session_done": True}, True), ({"session_done": False}, False), ({}, False)):
        answer = http.post(path, json={"model": "scripted", **BODIES[path], "radixkv": said})
        assert answer.status_code == 200, answer.text
        assert server.engine.requests[-1].session_done is means
    wrong = http.post(path, json={"model": "scripted", **BODIES[path], "radixkv": {"session_over": True}})
    assert wrong.status_code == 400
    assert "session_over" in wrong.text


def test_a_session_is_ended_by_its_conversation_for_its_own_tenant_alone(
    server: LiveServer, http: httpx.Client
) -> None:
    talk = [{"role": "user", "content": "the long story of a crane " * 8}]
    other = [{"role": "user", "content": "another story, of a ship " * 8}]
    for messages in (talk, other):
        assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200

    def cached(messages: list[dict[str, str]]) -> int:
        found: int = http.post("/v1/cache/explain", json={"messages": messages}).json()["cached_tokens"]
        return found

    def ended(key: str, messages: list[dict[str, str]]) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        return http.request(
            "DELETE", "/v1/cache/sessions", json={"messages": messages}, headers=headers
        ).json()

    before = cached(other)
    nothing = {"object": "cache.session", "done": False, "cached_tokens": 0}
    assert ended("b", other) == nothing, "another tenant's"
    told = ended("a", other)
    assert told["done"]
    assert told["cached_tokens"] > 100
    server.engine.prefix_cache.evict(4)
    assert cached(talk) > 100
    assert cached(other) < before
    server.engine.prefix_cache.check()


def test_contexts_that_need_more_than_the_pool_are_told_to_admins_alone() -> None:
    engine = ScriptedEngine(caches=True)
    with (
        live_server(engine, api_keys=("ada=a", "bob=b"), admin_keys=("operator=root",)) as running,
        running.http() as http,
    ):

        def advice(key: str) -> Any:
            return http.get("/v1/cache/advice", headers={"authorization": f"Bearer {key}"}).json()["pool"]

        def ask(number: int, turns: int) -> None:
            headers = {"authorization": f"Bearer {'ab'[number % 2]}"}
            texts = [f"turn {turn} of agent {number}, " * 6 for turn in range(turns)]
            messages = [{"role": "user", "content": text} for text in texts]
            sent = {"messages": messages, "max_tokens": 1}
            assert http.post("/v1/chat/completions", json=sent, headers=headers).status_code == 200

        for turns in (1, 2):
            ask(0, turns)
        assert advice("root") is None, "two turns of one agent fit: what they share counts once"
        for number in range(1, 14):
            ask(number, 2)
        told = advice("root")
        assert told["kind"] == "pool_too_small"
        assert told["pool_tokens"] == 100 * 16
        longest = [len(asked.prompt) for asked in engine.requests][1:]
        assert 0.5 * sum(longest) < told["needed_tokens"] <= sum(longest)
        assert told["times"] > 1.5
        said = f"The contexts of your agents need {told['times']:.1f} times the pool"
        assert told["advice"].startswith(said)
        assert "--kv-tier" in told["advice"]
        assert advice("a") is None
