# SPDX-License-Identifier: Apache-2.0
"""Results of parallel calls are rendered in the order of their calls, in whatever order they arrive."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

Json = dict[str, Any]
NAMES = ("alpha", "beta", "gamma")
ASK = {"role": "user", "content": "ask"}
ORDERS = list(itertools.permutations(range(3)))


def chat(order: tuple[int, ...]) -> tuple[str, Json]:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": NAMES[i], "arguments": "{}"}}
        for i in range(3)
    ]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"from {NAMES[i]}"} for i in order]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    return "/v1/chat/completions", {"messages": [ASK, turn, *results, {"role": "user", "content": "go on"}]}


def custom(order: tuple[int, ...]) -> tuple[str, Json]:
    path, body = chat(order)
    for i, call in enumerate(body["messages"][1]["tool_calls"]):
        call |= {"type": "custom", "custom": {"name": NAMES[i], "input": "x"}}
        del call["function"]
    return path, body


def messages(order: tuple[int, ...]) -> tuple[str, Json]:
    calls = [{"type": "tool_use", "id": f"c{i}", "name": NAMES[i], "input": {}} for i in range(3)]
    results = [{"type": "tool_result", "tool_use_id": f"c{i}", "content": f"from {NAMES[i]}"} for i in order]
    if results:
        results[-1]["cache_control"] = {"type": "ephemeral"}
    told = [*results, {"type": "text", "text": "go on"}]
    turns = [ASK, {"role": "assistant", "content": calls}, {"role": "user", "content": told}]
    return "/v1/messages", {"max_tokens": 64, "messages": turns}


def responses(order: tuple[int, ...], kind: str = "function_call") -> tuple[str, Json]:
    given = "arguments" if kind == "function_call" else "input"
    calls = [{"type": kind, "call_id": f"c{i}", "name": NAMES[i], given: "{}"} for i in range(3)]
    results = [{"type": f"{kind}_output", "call_id": f"c{i}", "output": f"from {NAMES[i]}"} for i in order]
    return "/v1/responses", {"input": [ASK, *calls, *results, {"role": "user", "content": "go on"}]}


def custom_items(order: tuple[int, ...]) -> tuple[str, Json]:
    return responses(order, "custom_tool_call")


def ollama(order: tuple[int, ...], field: str = "tool_call_id", value: str = "c{}") -> tuple[str, Json]:
    calls = [{"id": f"c{i}", "function": {"name": NAMES[i], "arguments": {}}} for i in range(3)]
    results = [{"role": "tool", field: value.format(i), "content": f"from {NAMES[i]}"} for i in order]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    return "/api/chat", {
        "messages": [ASK, turn, *results, {"role": "user", "content": "go on"}],
        "stream": False,
    }


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(caches=True, num_blocks=4000)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


def prompt_of(client: httpx.Client, server: LiveServer, path: str, body: Json) -> str:
    client.post(path, json={"model": "scripted", **body}).raise_for_status()
    text: str = server.engine.requests[-1].text
    return text


@pytest.mark.parametrize("make", [chat, custom, messages, responses, custom_items, ollama])
def test_all_orders_are_one_prompt(
    client: httpx.Client, server: LiveServer, make: Callable[[tuple[int, ...]], tuple[str, Json]]
) -> None:
    prompts = {prompt_of(client, server, *make(order)) for order in ORDERS}
    (prompt,) = prompts
    places = [prompt.index(f"from {name}") for name in NAMES]
    assert places == sorted(places)


def test_a_breakpoint_on_the_last_result_covers_all_of_them(client: httpx.Client) -> None:
    told = []
    for question, order in (("1st question", (0, 1, 2)), ("2nd question", (2, 1, 0))):
        path, body = messages(order)
        body["messages"][0] = {"role": "user", "content": question}
        told.append(client.post(path, json={"model": "scripted", **body}).json()["usage"])
    assert told[0]["cache_creation_input_tokens"] == told[1]["cache_creation_input_tokens"] > 100
    assert told[0]["input_tokens"] == told[1]["input_tokens"]


def test_results_without_ids_go_to_calls_by_name_and_then_by_place(
    client: httpx.Client, server: LiveServer
) -> None:
    wanted = prompt_of(client, server, *ollama((0, 1, 2)))
    names = [(2, 0, 1), (1, 0, 2)]
    for order in names:
        path, body = ollama(order)
        for i, message in zip(order, body["messages"][2:5], strict=True):
            del message["tool_call_id"]
            message["tool_name"] = NAMES[i]
        assert prompt_of(client, server, path, body) == wanted
    path, body = ollama((0, 1, 2))
    for message in body["messages"][2:5]:
        del message["tool_call_id"]
    assert prompt_of(client, server, path, body) == wanted


def test_ids_may_come_again_in_another_turn(client: httpx.Client, server: LiveServer) -> None:
    path, body = chat((1, 2, 0))
    body["messages"] += chat((2, 0, 1))[1]["messages"][1:]
    told = prompt_of(client, server, path, body).split("from ")[1:]
    assert [text.split()[0][:4] for text in told] == ["alph", "beta", "gamm"] * 2


@pytest.mark.parametrize(
    ("results", "problem"),
    [
        (["c1"], "a call of 'alpha' has no result, though a later one has"),
        (["c0", "c2"], "a call of 'beta' has no result"),
        (["c0", "c1", "c1"], "'c1' has more than one result"),
        (["c0", "c1", "c2", "c0"], "'c0' has more than one result"),
        (["c0", "other"], "'other' is of no call before it"),
    ],
)
@pytest.mark.parametrize("make", [chat, messages, responses])
def test_results_that_do_not_fit_are_refused(
    client: httpx.Client,
    make: Callable[[tuple[int, ...]], tuple[str, Json]],
    results: list[str],
    problem: str,
) -> None:
    path, body = make(())
    if make is messages:
        told = body["messages"][2]["content"]
        told[:0] = [{"type": "tool_result", "tool_use_id": name, "content": "x"} for name in results]
    elif make is chat:
        body["messages"][2:2] = [{"role": "tool", "tool_call_id": name, "content": "x"} for name in results]
    else:
        body["input"][4:4] = [
            {"type": "function_call_output", "call_id": name, "output": "x"} for name in results
        ]
    answer = client.post(path, json={"model": "scripted", **body})
    assert answer.status_code == 400, answer.text
    assert problem in answer.json()["error"]["message"]


def test_later_results_may_still_be_missing(client: httpx.Client) -> None:
    path, body = chat((0, 1))
    assert client.post(path, json={"model": "scripted", **body}).status_code == 200
    path, body = chat(())
    assert client.post(path, json={"model": "scripted", **body}).status_code == 200
