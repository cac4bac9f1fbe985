# SPDX-License-Identifier: Apache-2.0
"""What tiers brought, in the usage of every API and in /metrics, with a real disk below a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server
from prometheus_client.parser import text_string_to_metric_families
from tiny_models import save_tiny_model

from radixkv.engine.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.entrypoints.async_engine import AsyncEngine

TENANTS = tuple(f"t{number}" for number in range(6))  # each has a cache of its own
KEYS = {"api_keys": tuple(f"{name}={name}-key" for name in TENANTS), "admin_keys": ("a=admin-key",)}
QUESTION = [{"role": "user", "content": "Which ships passed the cape at night, and under which flags?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads may take their time: the machine may be busy."""
    monkeypatch.setitem(Engine.__init__.__kwdefaults__, "load_deadline_s", 30.0)


@contextmanager
def serving(model: str, tier: str) -> Iterator[LiveServer]:
    config = EngineConfig(model=model, kv_tier=(tier,), num_blocks=128, block_size=8, threads=1)
    engine = AsyncEngine.from_config(config)
    try:
        with live_server(engine, **KEYS) as server:
            yield server
    finally:
        asyncio.run(engine.close())


def chat(server: LiveServer, key: str) -> Any:
    with server.openai(key) as client:
        return client.chat.completions.create(
            model=server.engine.model_name, messages=QUESTION, max_tokens=2
        ).usage.prompt_tokens_details


def chat_stream(server: LiveServer, key: str) -> Any:
    with server.openai(key) as client:
        *_, last = client.chat.completions.create(
            model=server.engine.model_name,
            messages=QUESTION,
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        return last.usage.prompt_tokens_details


def response(server: LiveServer, key: str) -> Any:
    with server.openai(key) as client:
        return client.responses.create(
            model=server.engine.model_name, input=QUESTION, max_output_tokens=2
        ).usage.input_tokens_details


def response_stream(server: LiveServer, key: str) -> Any:
    with server.openai(key) as client:
        *_, last = client.responses.create(
            model=server.engine.model_name, input=QUESTION, max_output_tokens=2, stream=True
        )
        return last.response.usage.input_tokens_details


def message(server: LiveServer, key: str) -> Any:
    with server.anthropic(key) as client:
        return client.messages.create(model=server.engine.model_name, messages=QUESTION, max_tokens=2).usage


def message_stream(server: LiveServer, key: str) -> Any:
    """The last usage of a stream."""
    with server.anthropic(key) as client:
        events = client.messages.create(
            model=server.engine.model_name, messages=QUESTION, max_tokens=2, stream=True
        )
        return [event.usage for event in events if event.type == "message_delta"][-1]


ASK: tuple[Callable[[LiveServer, str], Any], ...] = (
    *(chat, chat_stream, response, response_stream, message, message_stream),
)


def figures(server: LiveServer) -> dict[str, float]:
    """What /metrics says of the disk: by name, and what else is told apart."""
    found = {}
    with server.http(headers={"x-api-key": "admin-key"}) as client:
        text = client.get("/metrics").raise_for_status().text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("tier") == "disk":
                labels = {name: value for name, value in sample.labels.items() if name != "tier"}
                name = sample.name.removeprefix("radixkv_tier_")
                found[" ".join((name, *labels.values()))] = sample.value
    return found


def test_every_api_tells_what_the_disk_brought(model: str, tmp_path: Path) -> None:
    with serving(model, f"disk:{tmp_path},long=0") as server:
        for name, ask in zip(TENANTS, ASK, strict=True):
            told = ask(server, f"{name}-key")
            assert told.cached_tokens_by_tier == {"memory": 0}, name
            assert told.tier_wait_ms == {}
    with serving(model, f"disk:{tmp_path},long=0") as server:
        usages = [ask(server, f"{name}-key") for name, ask in zip(TENANTS, ASK, strict=True)]
        brought = [usage.cached_tokens_by_tier["disk"] for usage in usages]
        assert min(brought) >= 32
        assert all(set(usage.tier_wait_ms) == {"disk"} for usage in usages)
        for usage in usages:
            cached = getattr(usage, "cached_tokens", None)
            if cached is None:
                cached = usage.cache_read_input_tokens
            assert cached == sum(usage.cached_tokens_by_tier.values())
        found = figures(server)
        again = chat(server, f"{TENANTS[0]}-key")
        assert again.cached_tokens_by_tier == {"memory": again.cached_tokens}
    # Of a prompt that is there as a whole the last token is computed all the same.
    assert 0 <= 8 * found["loaded_blocks_total"] - sum(brought) <= len(ASK)
    assert found["up"] == 1
    assert found["hits_total"] == found["loads_total"] >= len(ASK)
    assert found["misses_total"] == 0
    assert found["loaded_bytes_total"] % found["loaded_blocks_total"] == 0
    assert (
        0 < found["load_seconds_total"] <= sum(usage.tier_wait_ms["disk"] for usage in usages) / 1000 + 0.001
    )
    assert not [name for name in found if "errors" in name or "refused" in name]


@pytest.mark.nightly
def test_what_was_damaged_and_a_disk_that_fails_show(model: str, tmp_path: Path) -> None:
    with serving(model, f"disk:{tmp_path},long=0") as server:
        for name in TENANTS[:3]:
            chat(server, f"{name}-key")
    for path in tmp_path.glob("*.seg"):
        content = bytearray(path.read_bytes())
        content[200] ^= 8  # in the block that was saved first
        path.write_bytes(content)
    with serving(model, f"disk:{tmp_path},long=0") as server:
        told = [chat(server, f"{name}-key") for name in TENANTS[:2]]
        missed = [usage.cache_miss for usage in told if usage.cache_miss["reason"] == "checksum"]
        assert missed
        assert all((miss["tier"], miss["tier_tokens"]) == ("disk", 0) for miss in missed)
        assert figures(server)["refused_total checksum"] == len(missed)
        assert figures(server)["up"] == 1
    with serving(model, f"disk:{tmp_path},long=0") as server:
        for path in tmp_path.glob("*.seg"):
            path.unlink()
            path.mkdir()  # to read it is an error
        asked = chat(server, f"{TENANTS[2]}-key")
        assert asked.cached_tokens_by_tier == {"memory": 0, "disk": 0}
        found = figures(server)
        assert (found["up"], found["errors_total load"]) == (0, 1)
