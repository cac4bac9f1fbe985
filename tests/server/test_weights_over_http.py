# SPDX-License-Identifier: Apache-2.0
"""Weights, pauses and sleep over HTTP, as training loops ask for them, while chats run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_process import served_in_a_thread
from live_server import LiveServer, live_server
from tiny_models import save_tiny_model

from radixkv import AsyncEngine, SamplingParams
from radixkv.engine.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.entrypoints.builder import build_engine
from radixkv.entrypoints.engine_thread import RestartPolicy
from radixkv.errors import EngineStoppedError, InvalidRequestError, RequestFailedError, WeightUpdateError
from radixkv.scheduling.request import Request

PROMPT = [7 * i % 250 for i in range(70)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
KEYS = {"api_keys": ("alice=alices-own-key-123",), "admin_keys": ("root=roots-own-key-1234",)}
ALICE, ROOT = ({"Authorization": f"Bearer {key}"} for key in ("alices-own-key-123", "roots-own-key-1234"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("weights")
    return save_tiny_model(root / "0", "llama", 0), save_tiny_model(root / "1", "llama", 1)


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), num_blocks=64, warm_up="off", device="cpu")


@pytest.fixture
def server(folders: tuple[Path, Path]) -> Iterator[LiveServer]:
    with live_server(AsyncEngine.from_config(config_of(folders[0])), **KEYS) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=ROOT, timeout=120) as client:
        yield client


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "0", "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "ignore_eos": True} | fields
    response = client.post("/v1/completions", json={**body, "return_token_ids": True})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def ids(client: httpx.Client) -> list[int]:
    return list(complete(client)["choices"][0]["token_ids"])


async def tokens(engine: Any, params: SamplingParams = GREEDY) -> list[int]:
    output = await engine.generate(Request(list(PROMPT), params))
    return list(output.outputs[0].token_ids)


def answers(folder: Path) -> list[int]:
    async def run() -> list[int]:
        async with AsyncEngine.from_config(config_of(folder)) as engine:
            return await tokens(engine)

    return asyncio.run(run())


def test_an_update_at_once_and_one_in_three_requests(client, folders):
    old = ids(client)
    done = client.post("/update_weights", json={"update_info": {"path": str(folders[1])}})
    assert done.status_code == 200, done.text
    first = complete(client)
    assert first["choices"][0]["token_ids"] == answers(folders[1]) != old
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert client.post("/start_weight_update").status_code == 200
    path = {"update_info": {"path": str(folders[0])}}
    assert client.post("/update_weights", json=path).status_code == 200
    assert ids(client) == first["choices"][0]["token_ids"]  # not yet
    assert client.post("/finish_weight_update", json={}).status_code == 200
    assert ids(client) == old


def test_refusals_leave_the_weights(client, folders, tmp_path):
    old = ids(client)

    def refused(route: str, status: int, code: str, **body: Any) -> None:
        response = client.post(route, json=body) if body else client.post(route)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text

    refused("/update_weights", 400, "weights_not_changed", update_info={"path": str(tmp_path)})
    nccl = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
    refused("/update_weights", 400, "unsupported_weight_transfer", update_info=nccl)
    refused("/init_weight_transfer_engine", 400, "unsupported_weight_transfer", init_info={})
    refused("/finish_weight_update", 409, "no_weight_update")
    client.post("/start_weight_update")
    refused("/finish_weight_update", 400, "weights_not_changed")
    refused("/sleep?level=3", 400, "invalid_value")
    refused("/wake_up?tags=adapters", 400, "invalid_value")
    refused("/pause?mode=later", 400, "invalid_value")
    assert ids(client) == old


def test_users_may_not(server):
    with httpx.Client(base_url=server.url, headers=ALICE) as client:
        for method, path in (
            *(("POST", path) for path in ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache")),
            *(("POST", f"/{verb}_weight_update") for verb in ("start", "finish")),
            ("POST", "/update_weights"),
            *(("GET", path) for path in ("/is_paused", "/is_sleeping", "/server_info", "/get_world_size")),
        ):
            assert client.request(method, path).status_code == 403, path
        assert httpx.post(f"{server.url}/sleep").status_code == 401


def test_pause_sleep_and_what_loops_ask(client):
    old = ids(client)
    assert client.get("/get_world_size").json() == {"world_size": 1}
    asked = client.get("/server_info", params={"config_format": "json"}).json()
    assert asked["vllm_config"]["weight_transfer_config"] is None
    client.post("/pause")
    assert client.get("/is_paused").json() == {"is_paused": True}
    refused = client.post("/v1/completions", json={"model": "0", "prompt": PROMPT})
    assert refused.status_code == 503
    assert "Retry-After" in refused.headers
    client.post("/resume")
    assert ids(client) == old
    assert client.post("/reset_prefix_cache").json() == {"success": True}
    assert client.post("/sleep", params={"level": 2}).json() == {"status": "sleeping", "level": 2}
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    half = client.post("/wake_up", params={"tags": ["weights"]}).json()
    assert half == {"status": "sleeping", "tags": ["weights"]}
    assert client.post("/wake_up").json()["status"] == "awake"
    assert ids(client) == old


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_updates_while_requests_run(folders, mode):
    async with AsyncEngine.from_config(config_of(folders[0])) as engine:
        whole = await tokens(engine, LONG)
        begun = asyncio.Event()

        async def read() -> tuple[list[int], str | None]:
            got: list[int] = []
            async for delta in engine.stream(Request(list(PROMPT), LONG)):
                got += delta.token_ids
                begun.set()
            return got, delta.finish_reason

        reading = asyncio.ensure_future(read())
        await begun.wait()
        fingerprint = await engine.update_weights(str(folders[1]), mode=mode)
        got, reason = await reading
        assert engine.model_fingerprint == fingerprint
        if mode == "keep":
            assert len(got) == 200
        elif mode == "wait":
            assert got == whole
        else:
            assert got == whole[: len(got)]
        assert reason == ("abort" if mode == "abort" and len(got) < 200 else "length")
        assert await tokens(engine) == await asyncio.to_thread(answers, folders[1])
        await engine.call(Engine.check)


async def test_the_clients_cache_is_that_of_the_new_weights(folders):
    async with AsyncEngine.from_config(config_of(folders[0])) as engine, served_in_a_thread(engine) as far:
        await tokens(far)
        assert await far.cache.match(PROMPT) == len(PROMPT)
        await far.update_weights(str(folders[1]))
        for one in (engine, far):
            assert await one.cache.match(PROMPT) == 0
        await tokens(far)
        for one in (engine, far):
            assert await one.cache.match(PROMPT) == len(PROMPT)
        with pytest.raises(WeightUpdateError, match="no file or folder"):
            await far.update_weights("/none/at/all")
        with pytest.raises(InvalidRequestError, match="mode"):
            await far.update_weights(str(folders[0]), mode="never")  # type: ignore[arg-type]
        assert await tokens(far) == await asyncio.to_thread(answers, folders[1])


async def test_an_engine_that_takes_over_has_the_new_weights(folders):
    engine = AsyncEngine(
        lambda: build_engine(config_of(folders[0])), restart=RestartPolicy(pause_s=0.01, healthy_s=0.0)
    )
    async with engine:
        await engine.update_weights(str(folders[1]))
        fingerprint, expected = engine.model_fingerprint, await tokens(engine)

        def fail(engine: Engine) -> None:
            raise EngineStoppedError("lost")

        def break_down(engine: Engine) -> None:
            engine.step = lambda: fail(engine)  # type: ignore[method-assign]

        await engine.call(break_down)
        with pytest.raises((EngineStoppedError, RequestFailedError)):
            await tokens(engine)
        while True:
            try:
                found = await tokens(engine)
                break
            except EngineStoppedError:
                await asyncio.sleep(0.02)
        assert found == expected
        assert engine.model_fingerprint == fingerprint
