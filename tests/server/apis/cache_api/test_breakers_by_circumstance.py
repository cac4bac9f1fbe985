# SPDX-License-Identifier: Apache-2.0
"""What breaks a prompt that did not change: room, and requests at the same time."""

from __future__ import annotations

import threading
from typing import Any

from live_server import live_server
from scripted_engine import Asked, ScriptedEngine

from radixkv.engine.outputs import PromptOutcome

RULES = "You are the assistant of the harbour office. Count the ships every evening, and be brief. " * 14
KEYS = ("ada=ada-key", "bob=bob-key")


def chat(text: str) -> dict[str, Any]:
    system = {"role": "system", "content": text}
    return {"messages": [system, {"role": "user", "content": "How many ships?"}], "max_tokens": 4}


def send(client: Any, body: dict[str, Any]) -> Any:
    name = client.post("/v1/chat/completions", json=body).json()["id"]
    return client.get(f"/v1/cache/requests/{name}").json()["explanation"]


def evicted(floods: list[str]) -> Any:
    """How Ada's second prompt is explained after floods of her own and of Bob's."""
    engine = ScriptedEngine(max_model_len=8192, num_blocks=100, caches=True)
    with (
        live_server(engine, api_keys=KEYS) as server,
        server.http(headers={"x-api-key": "ada-key"}) as ada,
        server.http(headers={"x-api-key": "bob-key"}) as bob,
    ):
        send(ada, chat(RULES))
        for number, whose in enumerate(floods):
            send(ada if whose == "ada" else bob, chat(f"{number}, another prompt. " + RULES[::-1]))
        explained = ada.post("/v1/cache/explain", json=chat(RULES)).json()
        told = send(ada, chat(RULES))
    assert explained["breaker"] == told["breaker"]
    return told


def test_eviction_by_other_tenants_is_told_from_ones_own() -> None:
    others, own = evicted(["bob"] * 5), evicted(["ada"] * 5)
    assert others["reason"] == own["reason"] == "evicted"
    assert others["breaker"]["kind"] == "evicted_by_others"
    assert "other tenants" in others["advice"]
    assert "bob" not in str(others), "whose they were is not told"
    assert own["breaker"]["kind"] == "evicted"


def test_a_pin_that_ran_out_is_told_from_mere_eviction() -> None:
    """Pinned for a minute, asked for again after two, when others' prompts had taken its place."""
    now = [1000.0]
    engine = ScriptedEngine(max_model_len=8192, num_blocks=200, caches=True, clock=lambda: now[0])
    with live_server(engine) as server, server.http() as client:
        send(client, chat(RULES))
        assert client.post("/v1/cache/pins", json={**chat(RULES), "ttl": 60}).status_code == 201
        now[0] += 120.0
        for number in range(5):
            send(client, chat(f"{number}, another prompt. " + RULES[::-1]))
        explained = client.post("/v1/cache/explain", json=chat(RULES)).json()
        told = send(client, chat(RULES))
    assert told["reason"] == "expired"
    assert explained["breaker"] == told["breaker"]
    assert told["breaker"]["kind"] == "ttl_passed"
    assert "longer" in told["breaker"]["remedy"]


class LateCache(ScriptedEngine):
    """Its cache has a prompt once its answer has ended, as those of hosted providers."""

    def _look_up(self, asked: Asked) -> PromptOutcome:
        space, count = self.cache.namespace(*asked.owner), len(asked.prompt)
        lease = self.prefix_cache.acquire(asked.prompt, space)
        cached, report = lease.num_cached_tokens, lease.report
        lease.release()
        return PromptOutcome(count, cached, count - cached, None, report, None)


def test_a_request_beside_another_one_is_told_that_it_came_too_early() -> None:
    engine = LateCache(max_model_len=8192, caches=True)
    with live_server(engine) as server, server.http() as client:
        engine.gate.clear()
        asking = []
        for count in (1, 2):
            asking.append(threading.Thread(target=send, args=(client, chat(RULES))))
            asking[-1].start()
            engine.wait_until(lambda count=count: len(engine.requests) == count)
        engine.gate.set()
        for thread in asking:
            thread.join()
        latest = client.get("/v1/cache/requests").json()["data"]
        second, first = (
            client.get(f"/v1/cache/requests/{one['id']}").json()["explanation"] for one in latest
        )
        assert second["reason"] == first["reason"] == "first_seen"
        assert second["breaker"]["kind"] == "concurrent"
        assert first["breaker"] is None, "nothing was there before it"
        later = send(client, chat(RULES))["breaker"]
        assert later["kind"] == "unknown", "they had been computed: why they are not there is not known"
