# SPDX-License-Identifier: Apache-2.0
"""A proxy before several servers finds every prompt where it is: in all dialects, of all tenants."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_process import paged_engine
from free_ports import free_ports
from live_server import live_server
from running_proxy import FleetHere, fleet_here
from waiting import until

pytest.importorskip("zmq", reason="block events need the extra radixkv[events]")
pytest.importorskip("msgspec", reason="block events need the extra radixkv[events]")

MODEL = "paged-hash"
Body = dict[str, Any]


def letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(count))


@contextlib.contextmanager
def two_servers(secret: Path | None = None, **options: Any) -> Iterator[tuple[list[str], FleetHere]]:
    """Addresses of two servers, and a proxy that follows the events of both."""
    with contextlib.ExitStack() as stack:
        urls, upstreams = [], []
        for _ in range(2):
            stream, replay = free_ports(2)
            events = f"tcp://127.0.0.1:{stream},replay=tcp://127.0.0.1:{replay}"
            events += "" if secret is None else f",secret={secret}"
            engine = paged_engine(num_blocks=2048, block_size=16, budget=256, kv_events=events)
            stack.callback(lambda engine=engine: asyncio.run(engine.close()))
            urls.append(stack.enter_context(live_server(engine, **options)).url)
            upstreams.append(f"{urls[-1]},events={events}")
        yield urls, stack.enter_context(fleet_here(upstreams))


def wait_for_events(proxy: FleetHere, urls: list[str]) -> None:
    """Until the proxy knows of every block that the servers hold."""

    def knows_all() -> bool:
        for state, url in zip(proxy.fleet.states(), urls, strict=True):
            pool = httpx.get(f"{url}/v1/cache").json()["pool"]
            if state.knows != "exact" or state.blocks != pool["cached_blocks"] or not state.blocks:
                return False
        return True

    until(knows_all)


def chat(text: str) -> Body:
    messages = [{"role": "system", "content": text[:200]}, {"role": "user", "content": text[200:]}]
    return {"model": MODEL, "messages": messages, "max_tokens": 1}


def message(text: str) -> Body:
    return {
        "model": MODEL,
        "system": [{"type": "text", "text": text[:200]}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": text[200:]}]}],
        "max_tokens": 1,
    }


def response(text: str) -> Body:
    return {"model": MODEL, "instructions": text[:200], "input": text[200:], "max_output_tokens": 1}


def completion(text: str) -> Body:
    return {"model": MODEL, "prompt": text, "max_tokens": 1}


def completion_of_tokens(text: str) -> Body:
    return {"model": MODEL, "prompt": [1 + ord(letter) % 90 for letter in text], "max_tokens": 1}


DIALECTS: Mapping[str, tuple[str, Callable[[str], Body]]] = {
    "chat": ("/v1/chat/completions", chat),
    "messages": ("/v1/messages", message),
    "responses": ("/v1/responses", response),
    "completions": ("/v1/completions", completion),
    "token ids": ("/v1/completions", completion_of_tokens),
}


def cached_tokens(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return usage["cache_read_input_tokens"] if details is None else details["cached_tokens"]


def ask(url: str, dialect: str, text: str, headers: Mapping[str, str] = {}, **more: Any) -> int:
    """Tokens that were cached."""
    path, body = DIALECTS[dialect]
    return cached_tokens(httpx.post(url + path, json={**body(text), **more}, headers=headers, timeout=60))


def test_each_dialect_is_found_where_its_blocks_are() -> None:
    rng = random.Random(5)
    with two_servers() as (urls, proxy):
        prompts = [(dialect, letters(rng, 400), rng.randrange(2)) for dialect in DIALECTS for _ in range(6)]
        for dialect, text, place in prompts:  # past the proxy: only events can tell it
            ask(urls[place], dialect, text)
        wait_for_events(proxy, urls)
        for dialect, text, _ in rng.sample(prompts, len(prompts)):
            assert ask(proxy.url, dialect, text + letters(rng, 10)) >= 384, dialect


def test_each_tenant_is_found_where_its_own_blocks_are(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret of both streams")
    keys = ["alice=key-alice", "bob=key-bob", "carol=key-carol"]
    rng = random.Random(6)
    with two_servers(secret, api_keys=keys) as (urls, proxy):
        prompts = []
        for number in range(12):
            text, dialect = letters(rng, 300), rng.choice(list(DIALECTS))
            salt = {"cache_salt": f"salt{number}"} if number % 3 == 0 else {}
            # Both have the same text, each at another server.
            for name, place in zip(rng.sample(["alice", "bob"], 2), (0, 1), strict=True):
                prompts.append((dialect, text, {"authorization": f"Bearer key-{name}"}, salt))
                ask(urls[place], dialect, text, prompts[-1][2], **salt)
        whole_blocks = 12 * (300 // 16)
        until(lambda: all(state.blocks >= whole_blocks for state in proxy.fleet.states()))
        for dialect, text, headers, salt in rng.sample(prompts, len(prompts)):
            assert ask(proxy.url, dialect, text + letters(rng, 10), headers, **salt) >= 288
        for dialect, text, _, salt in prompts[:12:2]:  # what others hold is nobody else's
            assert ask(proxy.url, dialect, text, {"x-api-key": "key-carol"}, **salt) == 0


def test_a_response_goes_where_the_one_before_it_is_kept() -> None:
    rng = random.Random(7)
    with two_servers() as (urls, proxy):
        for number in range(6):
            first = httpx.post(f"{urls[number % 2]}/v1/responses", json=response(letters(rng, 300))).json()
            body = {
                "model": MODEL,
                "input": "go on",
                "previous_response_id": first["id"],
                "max_output_tokens": 1,
            }
            assert httpx.post(f"{proxy.url}/v1/responses", json=body).status_code == 200
        body["previous_response_id"] = "resp_nowhere"
        assert httpx.post(f"{proxy.url}/v1/responses", json=body).status_code == 404


@pytest.mark.parametrize("events", [True, False], ids=["with events", "without events"])
def test_what_is_kept_is_found_again(events: bool) -> None:
    with two_servers() as (urls, routed), contextlib.ExitStack() as stack:
        proxy = routed if events else stack.enter_context(fleet_here(urls))
        rng = random.Random(8)
        # Some given by the proxy, some before it was there.
        names = []
        for number in range(6):
            where = [proxy.url, *urls][number % 3]
            given = httpx.post(f"{where}/v1/responses", json=response(letters(rng, 300)))
            names.append(given.json()["id"])
        for name in rng.sample(names, 6):
            path = f"{proxy.url}/v1/responses/{name}"
            assert httpx.get(path).json()["id"] == name
            assert httpx.get(f"{path}/input_items").status_code == 200
            body = {"model": MODEL, "input": "go on", "previous_response_id": name, "max_output_tokens": 1}
            after = httpx.post(f"{proxy.url}/v1/responses", json=body)
            assert after.json()["previous_response_id"] == name
            assert httpx.delete(path).status_code == 200
            assert httpx.get(path).status_code == 404
            assert httpx.get(f"{proxy.url}/v1/responses/{after.json()['id']}").status_code == 200
        until(lambda: not any(state.running or state.queue_s for state in proxy.fleet.states()))


def test_what_a_prompt_is_told_to_its_sender_alone() -> None:
    keys = ["alice=key-alice"]
    engine = paged_engine(num_blocks=64, block_size=16)
    try:
        with live_server(engine, api_keys=keys) as server, server.http() as client:
            body = {**chat("hello"), "cache_salt": "mine"}
            path = "/tokenize/v1/chat/completions"
            assert client.post(path, json=body).status_code == 401
            told = client.post(path, json=body, headers={"x-api-key": "key-alice"}).json()
            assert told["namespace"] == ["alice", "mine", ""]
            assert told["count"] == len(told["tokens"]) == 5
            refused = client.post(
                path, json={**body, "no": 1, "max_tokens": -1}, headers={"x-api-key": "key-alice"}
            )
            assert refused.status_code == 400
            # Nothing ran, and nothing was cached.
            assert (
                client.get("/v1/cache", headers={"x-api-key": "key-alice"}).json()["pool"]["cached_blocks"]
                == 0
            )
    finally:
        asyncio.run(engine.close())
