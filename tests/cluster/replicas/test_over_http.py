# SPDX-License-Identifier: Apache-2.0
"""The server over several engines: the same routes, with all of them behind."""

from __future__ import annotations

import json
import re

import pytest
from live_server import chat, live_server
from scripted_engine import ScriptedEngine

from radixkv.cluster.replicas.engine import ReplicatedEngine
from radixkv.errors import EngineStoppedError

KEYS = {"api_keys": ("ada=ada-key-0123456789",), "admin_keys": ("root=root-key-0123456789",)}
ADA = {"Authorization": "Bearer ada-key-0123456789"}
ROOT = {"Authorization": "Bearer root-key-0123456789"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_stream_whose_replica_fails_ends_with_an_error_event_and_a_new_one_is_answered(path):
    engines = {name: ScriptedEngine(caches=True) for name in "ab"}
    with live_server(ReplicatedEngine(engines)) as server, server.http() as client:
        for one in engines.values():
            one.fail = lambda asked, given: EngineStoppedError("it has ended") if given == 4 else None
        body = chat("say:a long answer", stream=True, max_tokens=50, model="scripted")
        answer = client.post(path, json=body)
        assert answer.status_code == 200
        events = [json.loads(data) for data in re.findall(r"^data: (\{.*)$", answer.text, re.MULTILINE)]
        assert "error" in events[-1]
        assert not any("error" in event for event in events[:-1])
        assert sum(len(one.requests) for one in engines.values()) == 1, "nobody could go on with it"
        for one in engines.values():
            one.fail = lambda asked, given: None
        engines["a"].fail = lambda asked, given: EngineStoppedError("the process has ended")
        for i in range(4):
            answer = client.post(path, json=chat(f"{i} say:fine", max_tokens=9, model="scripted"))
            assert answer.status_code == 200
            assert "fine" in answer.text


def test_cache_metrics_pins_reset_explain_and_tenants_are_over_all():
    engines = {name: ScriptedEngine(caches=True) for name in "ab"}
    replicated = ReplicatedEngine(engines)
    with live_server(replicated, **KEYS) as server, server.http() as client:
        for i in range(8):
            body = chat(f"{i} a prompt of some length to be kept say:x")
            assert client.post("/v1/chat/completions", json=body, headers=ADA).status_code == 200
        shown = client.get("/v1/cache", headers=ROOT).json()
        assert [one["name"] for one in shown["replicas"]] == ["a", "b"]
        assert sum(one["requests"] for one in shown["replicas"]) == 8
        assert shown["pool"]["total_blocks"] == 200
        assert "replicas" not in client.get("/v1/cache", headers=ADA).json()
        metrics = client.get("/metrics", headers=ROOT).text
        for name in ("a", "b"):
            assert f'radixkv_replica_up{{replica="{name}"}} 1.0' in metrics
            requests = len(engines[name].requests)
            assert f'radixkv_replica_requests_total{{replica="{name}"}} {requests}.0' in metrics
        prompt = chat("3 a prompt of some length to be kept say:x")["messages"]
        told = client.post("/v1/cache/explain", json={"messages": prompt}, headers=ADA).json()
        assert told["cached_tokens"] > 30
        pinned = client.post("/v1/cache/pins", json={"messages": prompt, "ttl": 60}, headers=ADA)
        assert pinned.status_code in (200, 201), pinned.text
        (pin,) = client.get("/v1/cache/pins", headers=ADA).json()["data"]
        ended = client.request("DELETE", "/v1/cache/pins", json={"id": pin["id"]}, headers=ADA)
        assert ended.status_code == 200
        assert client.post("/v1/cache/reset", headers=ROOT).status_code == 200
        told = client.post("/v1/cache/explain", json={"messages": prompt}, headers=ADA).json()
        assert (told["cached_tokens"], told["reason"]) == (0, "reset")
