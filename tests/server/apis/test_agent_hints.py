# SPDX-License-Identifier: Apache-2.0
"""Other servers' words for sessions, priorities and kept prompts, in bodies and headers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, live_server
from scripted_engine import Asked, ScriptedEngine

LONG = "All agents share these rules. " * 40
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5},
}
ROUTE = pytest.mark.parametrize("route", list(BODIES))


@pytest.fixture
def server() -> Iterator[LiveServer]:
    engine = ScriptedEngine(caches=True, num_blocks=1000)
    with live_server(engine, api_keys=("ada=key-a", "bob=key-b")) as running:
        yield running


def ask(
    server: LiveServer, route: str, *, key: str = "key-a", headers: Any = (), status: int = 200, **fields: Any
) -> Asked:
    with server.http(headers={"Authorization": f"Bearer {key}", **dict(headers)}) as client:
        answer = client.post(route, json={"model": "scripted", **BODIES[route], **fields})
    assert answer.status_code == status, answer.text
    return server.engine.requests[-1] if status == 200 else answer.json()


def close(server: LiveServer, name: str, key: str = "key-a") -> dict[str, Any]:
    with server.http(headers={"Authorization": f"Bearer {key}"}) as client:
        answer = client.post("/close_session", json={"session_id": name})
    assert answer.status_code == 200, answer.text
    return answer.json()


@ROUTE
@pytest.mark.parametrize(
    "named",
    [
        {"session_id": "s1"},
        {"session_params": {"id": "s1"}},
        {"nvext": {"agent_context": {"session_id": "s1"}}},
    ],
    ids=["session_id", "session_params", "nvext"],
)
def test_a_session_named_in_a_body_is_ended_by_its_tenant(
    server: LiveServer, route: str, named: dict[str, Any]
) -> None:
    asked = ask(server, route, **named)
    assert (asked.cache_key_hint, asked.session_done) == ("s1", False)
    assert close(server, "s1", "key-b") == {"session_id": "s1", "done": False, "cached_tokens": 0}
    ended = close(server, "s1")
    assert ended["done"]
    assert ended["cached_tokens"] > len(LONG) // 2
    assert not close(server, "s1")["done"], "it is forgotten"


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"X-Dynamo-Session-ID": "d", "X-Claude-Code-Session-Id": "c"}, "d"),
        ({"X-Claude-Code-Session-Id": "c"}, "c"),
        ({"X-Claude-Code-Session-Id": "c", "X-Claude-Code-Agent-Id": "sub"}, "sub"),
        ({"session-id": "codex"}, "codex"),
        ({"X-Session-Id": "opencode"}, "opencode"),
        ({"X-Session-Id": "x" * 257}, ""),
    ],
)
def test_a_session_is_named_by_headers(server: LiveServer, headers: dict[str, str], name: str) -> None:
    assert ask(server, "/v1/chat/completions", headers=headers).cache_key_hint == name
    own = ask(server, "/v1/chat/completions", headers=headers, session_id="own", prompt_cache_key="key")
    assert own.cache_key_hint == "key"
    assert close(server, "own")["done"]


def test_a_new_session_of_a_client_ends_no_earlier_one(server: LiveServer) -> None:
    for name in ("first", "second"):
        ask(server, "/v1/messages", headers={"X-Claude-Code-Session-Id": name})
    assert close(server, "first")["done"]


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"X-Dynamo-Session-Final": "true"}, {}),
        ({}, {"nvext": {"agent_context": {"session_final": True}}}),
        ({}, {"radixkv": {"session_done": True}}),
    ],
)
def test_the_last_request_ends_its_session_and_what_came_before(
    server: LiveServer, headers: dict[str, str], fields: dict[str, Any]
) -> None:
    ask(server, "/v1/chat/completions", session_id="s")
    assert ask(server, "/v1/chat/completions", session_id="s", headers=headers, **fields).session_done
    assert not close(server, "s")["done"]


@ROUTE
def test_dynamos_hints_are_priority_and_pin(server: LiveServer, route: str) -> None:
    hints = {"priority": 5, "osl": 1024, "speculative_prefill": True, "latency_sensitivity": 1.0}
    asked = ask(server, route, nvext={"agent_hints": hints, "cache_control": {"ttl": "10m"}})
    assert asked.priority == -5
    assert [(pin.num_tokens, pin.ttl) for pin in asked.pins][-1] == (len(asked.prompt), 600.0)
    assert ask(server, route, nvext={"agent_hints": {"strict_priority": 1}}).priority < -(2**15)
    assert ask(server, route, priority=3, nvext={"agent_hints": hints}).priority == 3


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"nvext": {"agent_hints": {"osi": 5}}}, "nvext.agent_hints.osi"),
        ({"nvext": {"backend_instance_id": 5}}, "nvext.backend_instance_id"),
        ({"nvext": {"cache_control": {"ttl": "forever"}}}, "nvext.cache_control.ttl"),
        ({"session_params": {"id": "s", "rid": "r"}}, "session_params.rid"),
        ({"session_id": ""}, "session_id"),
    ],
)
def test_what_would_mean_something_else_is_refused_by_its_path(
    server: LiveServer, fields: dict[str, Any], path: str
) -> None:
    error = ask(server, "/v1/chat/completions", status=400, **fields)["error"]
    assert error["param"] == path
    assert path in error["message"]


def test_opening_a_session_gives_its_name(server: LiveServer) -> None:
    with server.http(headers={"Authorization": "Bearer key-a"}) as client:
        assert (
            client.post("/open_session", json={"capacity_of_str_len": 1000, "session_id": "s"}).json() == "s"
        )
        assert client.post("/open_session", json={"capacity_of_str_len": 1000}).json().startswith("session-")
