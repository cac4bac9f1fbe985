# SPDX-License-Identifier: Apache-2.0
"""Ranks and a tier are killed under streams: right answers or clear errors, and saves go on."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import httpx
import pytest
from live_server import live_server
from redis_server import redis_server
from test_tensor_parallel_faults import ranks
from tiny_models import save_tiny_model

from radixkv.engine.config import EngineConfig
from radixkv.entrypoints.async_engine import AsyncEngine

pytestmark = [pytest.mark.injects_faults, pytest.mark.nightly]

PROMPTS = [f"{number} is the number of this prompt. " + "The quick brown fox. " * 12 for number in range(6)]


def ask(http: httpx.Client, prompt: str) -> str | None:
    """Return what a stream tells; None: it was refused, or ended with an error, because of a killed rank."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "ignore_eos": True, "logprobs": 1}
    tokens: list[str] = []
    with http.stream("POST", "/v1/completions", json={**body, "temperature": 0, "stream": True}) as response:
        if response.status_code != 200:
            assert response.status_code == 503, response.read()
            assert "was ended by SIGKILL" in response.read().decode()
            return None
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return "".join(tokens)
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                assert "was ended by SIGKILL" in event["error"]["message"]
                return None
            tokens += [token for choice in event["choices"] for token in choice["logprobs"]["tokens"]]
    raise AssertionError("a stream was cut off")


def test_ranks_and_a_tier_that_are_killed_under_streams(tmp_path: Path) -> None:
    shape = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2}
    model = str(save_tiny_model(tmp_path / "tiny", "llama", **shape))
    key = tmp_path / "key"
    key.write_bytes(bytes(40))
    key.chmod(0o600)
    with redis_server() as redis:
        config = EngineConfig(
            model=model,
            num_blocks=60,  # fewer than the prompts need: blocks come back from the tiers
            tensor_parallel=2,
            tensor_parallel_timeout_s=30.0,
            speculation="off",
            warm_up="quick",
            kv_tier=(f"disk:{tmp_path / 'kv'},max=1GiB", f"{redis.url},secret={key}"),
        )
        with live_server(AsyncEngine.from_config(config)) as server:
            with server.http() as http:
                expected = {prompt: ask(http, prompt) for prompt in PROMPTS}
            assert len(set(expected.values())) > 1
            right: list[bool] = []
            stop = threading.Event()

            def keep_asking(first: int) -> None:
                with server.http() as http:
                    for number in range(first, 1_000_000):
                        if stop.is_set():
                            return
                        prompt = PROMPTS[number % len(PROMPTS)]
                        told = ask(http, prompt)
                        right.append(told is None or told == expected[prompt])
                        if told is None:
                            time.sleep(0.2)
                            continue
                        answered.set()

            answered = threading.Event()
            clients = [threading.Thread(target=keep_asking, args=(first,)) for first in range(3)]
            for client in clients:
                client.start()
            try:
                for kill in (lambda: [rank.kill() for rank in ranks()], redis.kill, redis.start) * 2:
                    kill()
                    time.sleep(0.5)  # streams under way end
                    answered.clear()
                    assert answered.wait(120), "no answer comes any more"
            finally:
                stop.set()
                for client in clients:
                    client.join(60)
            assert not any(client.is_alive() for client in clients)
            assert all(right)
            with server.http() as http:
                saved = {
                    line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
                    for line in http.get("/metrics").text.splitlines()
                    if line.startswith("radixkv_tier_")
                }
                assert saved['radixkv_tier_saved_blocks_total{tier="disk"}'] > 0
                assert saved['radixkv_tier_loaded_blocks_total{tier="disk"}'] > 0
                assert http.get("/v1/cache").json()["pool"]["held_blocks"] == 0
