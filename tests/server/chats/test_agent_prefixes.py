# SPDX-License-Identifier: Apache-2.0
"""Agents keep their prefix: clients' own text is held constant in every dialect, tools can be sorted."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import live_server
from scripted_engine import ScriptedEngine

HEADER = "x-anthropic-billing-header: cc_version=2.1.39.{session}; cc_entrypoint=cli; cch={checksum};"
RULES = "You are an agent of the harbour office. Count the ships every evening, and be brief."
QUESTION = "How many ships are in the harbour tonight?"


def server(**options: Any) -> Any:
    return live_server(ScriptedEngine(max_model_len=8192, num_blocks=4000, caches=True), **options)


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with server() as running, running.http() as made:
        yield made


def chat(header: str, question: str) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "system", "content": f"{header}\n{RULES}"}, {"role": "user", "content": question}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 4}


def messages(header: str, question: str) -> tuple[str, dict[str, Any]]:
    cached = {"type": "ephemeral"}
    system = [{"type": "text", "text": header}, {"type": "text", "text": RULES, "cache_control": cached}]
    asked = [{"role": "user", "content": question}]
    return "/v1/messages", {"model": "scripted", "system": system, "messages": asked, "max_tokens": 4}


def responses(header: str, question: str) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {
        "instructions": f"{header}\n{RULES}",
        "input": question,
        "max_output_tokens": 16,
    }


DIALECTS = pytest.mark.parametrize("dialect", [chat, messages, responses])


def cached_and_total(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """Tokens of a prompt that were found, and all."""
    client.post(path, json=body).raise_for_status()
    latest = client.get("/v1/cache/requests").json()["data"][0]
    return latest["cached_tokens"], latest["prompt_tokens"]


def headers() -> list[str]:
    return [HEADER.format(session=f"{n:03x}", checksum=f"{n * 7919:05x}") for n in range(1, 4)]


@DIALECTS
def test_a_header_that_changes_costs_nothing(client: httpx.Client, dialect: Any) -> None:
    first, *others = headers()
    cached_and_total(client, *dialect(first, QUESTION))
    for header in others:
        found, total = cached_and_total(client, *dialect(header, QUESTION))
        assert found == total - 1
    name = client.get("/v1/cache/requests").json()["data"][0]["id"]
    told = client.get(f"/v1/cache/requests/{name}").json()["explanation"]["normalized"]
    assert told["client"] == "Claude Code"
    assert "x-anthropic-billing-header" in told["detail"]


@DIALECTS
def test_a_question_that_quotes_it_stays_as_it_is(client: httpx.Client, dialect: Any) -> None:
    one, other, _ = headers()
    cached_and_total(client, *dialect(one, f"What is this? {one}"))
    found, total = cached_and_total(client, *dialect(one, f"What is this? {other}"))
    assert found < total - 10, "the question is another one"


@DIALECTS
def test_it_can_be_switched_off(dialect: Any) -> None:
    with server(normalize_clients="off") as running, running.http() as client:
        one, other, _ = headers()
        cached_and_total(client, *dialect(one, QUESTION))
        found, _ = cached_and_total(client, *dialect(other, QUESTION))
        assert found < len(HEADER)
        name = client.get("/v1/cache/requests").json()["data"][0]["id"]
        assert client.get(f"/v1/cache/requests/{name}").json()["explanation"]["normalized"] is None


def test_the_log_says_it_once(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "radixkv.server"):
        for header in headers():
            cached_and_total(client, *messages(header, QUESTION))
    told = [record.message for record in caplog.records if "Claude Code" in record.message]
    assert len(told) == 1
    assert "--normalize-clients off" in told[0]


def test_what_is_kept_by_a_breakpoint_is_as_long_as_what_is_shared(client: httpx.Client) -> None:
    one, other, _ = headers()
    path, body = messages(one, QUESTION)
    kept = client.post(path, json=body).json()["usage"]
    path, body = messages(other, "And ferries?")
    again = client.post(path, json=body).json()["usage"]
    assert kept["cache_creation_input_tokens"] > len(RULES)
    assert again["cache_read_input_tokens"] >= len(RULES) + len("cc_version=2.1.39.000; cc_entrypoint=cli;")


def test_explain_shows_what_was_held_constant(client: httpx.Client) -> None:
    _, body = chat(headers()[0], QUESTION)
    told = client.post("/v1/cache/explain", json={"messages": body["messages"]}).json()
    assert told["normalized"]["client"] == "Claude Code"
    told = client.post("/v1/cache/explain", json={"messages": body["messages"][1:]}).json()
    assert told["normalized"] is None


# ---------------------------------------------------------------------- tools


def schema(*names: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": [*names],
    }


TOOLS = {"look": schema("place", "day"), "count": schema("what", "since"), "apply": schema("to")}


def listed(names: list[str], turned: bool) -> list[dict[str, Any]]:
    """The tools in this order, with the keys of their schemas the other way round."""

    def turn(value: Any) -> Any:
        if isinstance(value, dict):
            items = reversed(value.items()) if turned else value.items()
            return {name: turn(item) for name, item in items}
        return value

    return [
        {"type": "function", "function": {"name": name, "description": "d", "parameters": turn(TOOLS[name])}}
        for name in names
    ]


def with_tools(dialect: Any, names: list[str], turned: bool) -> tuple[str, dict[str, Any]]:
    path, body = dialect("", QUESTION)
    tools = listed(names, turned)
    if dialect is chat:
        return path, {**body, "tools": tools}
    plain = [tool["function"] for tool in tools]
    if dialect is responses:
        return path, {**body, "tools": [{"type": "function", **function} for function in plain]}
    given = [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in plain
    ]
    given[-1]["cache_control"] = {"type": "ephemeral"}
    return path, {**body, "tools": given}


@DIALECTS
@pytest.mark.parametrize("sorts", [True, False])
def test_tools_in_another_order_are_found_if_they_are_sorted(dialect: Any, sorts: bool) -> None:
    with server(canonical_tools=sorts) as running, running.http() as client:
        cached_and_total(client, *with_tools(dialect, ["look", "count", "apply"], turned=False))
        found, total = cached_and_total(client, *with_tools(dialect, ["count", "apply", "look"], turned=True))
    assert (found == total - 1) is sorts


def test_calls_are_as_the_client_listed_the_tools() -> None:
    arguments = '{"what":"ships","since":"noon"}'
    call = f'<tool_call>\n{{"name": "count", "arguments": {arguments}}}\n</tool_call>'
    engine = ScriptedEngine(max_model_len=8192, caches=True, script=lambda prompt: call)
    with live_server(engine, canonical_tools=True) as running, running.http() as client:
        path, body = with_tools(chat, ["look", "count"], turned=False)
        answer = client.post(path, json={**body, "tool_choice": "required", "max_tokens": 400}).json()
    (made,) = answer["choices"][0]["message"]["tool_calls"]
    assert made["function"]["name"] == "count"
    assert list(json.loads(made["function"]["arguments"])) == ["what", "since"], "the order of its own schema"
