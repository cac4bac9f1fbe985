# SPDX-License-Identifier: Apache-2.0
"""What breaks a prompt, in every view of the cache: compared with the request before, by kind and message."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from broken_prompts import KINDS_MADE, Pair, make_pairs
from live_server import LiveServer, live_server
from long_context_model import save_long_context_model
from nightly import by_day

from radixkv import EngineConfig
from radixkv.entrypoints.async_engine import AsyncEngine

PAIRS = make_pairs("measure", 11, 2 * len(KINDS_MADE))


#: Pairs that one engine's advice can look into at once; each then needs 64 more lookups.
PAIRS_OF_A_SERVER = 12


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server; with a parameter, one for each of its values."""
    folder = save_long_context_model(tmp_path_factory.mktemp("model") / "noise")
    engine = AsyncEngine.from_config(EngineConfig(str(folder), num_blocks=8192))
    keys = tuple(f"t{n}=key-{n}" for n in range(len(PAIRS) + 9))
    with live_server(engine, normalize_clients="off", api_keys=keys, admin_keys=("ops=admin",)) as running:
        yield running
    asyncio.run(engine.close())


def client_of(server: LiveServer, number: int) -> httpx.Client:
    """A tenant of its own, so that nothing else is in its cache."""
    return server.http(headers={"Authorization": f"Bearer key-{number}"})


def plain(chat: Any) -> Any:
    """A chat without what APIs have no field for."""
    messages = copy.deepcopy(chat["messages"])
    return {"messages": messages, "tools": chat["tools"]}


def send(client: httpx.Client, chat: Any) -> Any:
    """Ask, and tell how the request is explained."""
    body = {**plain(chat), "max_tokens": 1}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return client.get(f"/v1/cache/requests/{answer.json()['id']}").json()["explanation"]


def check(told: Any, pair: Pair) -> None:
    found = told["breaker"]
    if pair.kind is None:
        assert found is None or found["kind"] == "unknown", (pair.how, found)
        return
    assert found is not None, (pair.kind, pair.how, told)
    assert found["kind"] == pair.kind, (pair.how, found)
    assert (found["tool"] if found["message"] is None else found["message"]) == pair.place, (pair.how, found)
    assert found["detail"] in told["advice"]
    assert found["remedy"]


CASES = [(number // PAIRS_OF_A_SERVER, number) for number in range(len(PAIRS))]


@pytest.mark.parametrize(("server", "number"), by_day(CASES, *CASES[::6]), indirect=["server"])
def test_every_view_names_it(server: LiveServer, number: int) -> None:
    pair = PAIRS[number]
    with client_of(server, number) as client:
        send(client, pair.old)
        explained = client.post("/v1/cache/explain", json=plain(pair.new)).json()
        compared = client.post(
            "/v1/cache/explain", json={"compare": {"prompt": plain(pair.new), "with": plain(pair.old)}}
        ).json()
        views = [explained, send(client, pair.new)]
        # The template writes no such field: the prompts are equal, and only the answer in the cache differs.
        is_shown = not any("reasoning_content" in message for message in pair.old["messages"])
        if is_shown:
            views.append(compared)
        for told in views:
            check(told, pair)
        if pair.kind is not None and is_shown:
            points = client.get("/v1/cache/advice").json()["data"]
            assert any(point["breaker"] and point["breaker"]["kind"] == pair.kind for point in points), (
                pair.how
            )


def test_texts_are_compared_as_texts(server: LiveServer) -> None:
    rules = "Count the ships every evening, be brief, and never promise a pilot to anybody who asks. " * 4
    with client_of(server, len(PAIRS)) as client:
        for minute in (12, 47):
            body = {"prompt": f"It is 2026-11-21 09:{minute}. {rules}", "max_tokens": 1}
            name = client.post("/v1/completions", json=body).json()["id"]
        told = client.get(f"/v1/cache/requests/{name}").json()["explanation"]["breaker"]
        assert told["kind"] == "timestamp"
        assert told["place"] == "the prompt"
        questions = [f"{rules} What was on 2026-11-0{n}?" for n in (1, 2)]
        body = {"compare": {"prompt": questions[1], "with": questions[0]}}
        assert client.post("/v1/cache/explain", json=body).json()["breaker"] is None


def test_a_reset_is_named(server: LiveServer) -> None:
    chat = {
        "messages": [{"role": "user", "content": "How many ships are there tonight, and where?"}],
        "tools": [],
    }
    with client_of(server, len(PAIRS) + 1) as client, server.http(headers={"x-api-key": "admin"}) as admin:
        send(client, chat)
        admin.post("/v1/cache/reset").raise_for_status()
        told = client.post("/v1/cache/explain", json=chat).json()
        assert told["reason"] == "reset"
        assert told["breaker"]["kind"] == "reset"


def test_admins_are_not_told_what_breaks_prompts_of_others(server: LiveServer) -> None:
    pair = PAIRS[0]
    with client_of(server, len(PAIRS) + 2) as client, server.http(headers={"x-api-key": "admin"}) as admin:
        send(client, pair.old)
        send(client, pair.new)
        name = client.get("/v1/cache/requests").json()["data"][0]["id"]
        assert admin.get(f"/v1/cache/requests/{name}").json()["explanation"]["breaker"] is None
        points = admin.get("/v1/cache/advice").json()["data"]
        assert all(point["breaker"] is None for point in points)
