# SPDX-License-Identifier: Apache-2.0
"""Adapters over HTTP: models with a parent, chosen by `model` in every API, restricted by the keys file."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from fuzz_adapters import Fuzz
from tiny_adapters import greedy, peft_model, plain_model, save_adapter
from tiny_models import save_tiny_model

from radixkv import AsyncEngine, SamplingParams
from radixkv.channel import Channel
from radixkv.cluster.remote.engine import RemoteEngine
from radixkv.cluster.remote.host import serve_engine
from radixkv.cluster.replicas.engine import ReplicatedEngine
from radixkv.engine.config import EngineConfig
from radixkv.errors import AdapterLoadError
from radixkv.scheduling.request import Request
from radixkv_server.app import create_app
from radixkv_server.settings import ServerSettings
from radixkv_server.tenants.api_keys import stored_form

PROMPT = [11, 45, 200, 7, 31, 90, 15, 16]
COUNT = 6


class Served:
    """A tiny base and two adapters of it, with PEFT's answers."""

    def __init__(self, folder: Path) -> None:
        self.base = save_tiny_model(folder / "tiny", "llama")
        models: dict[str, Any] = {"tiny": plain_model(self.base)}
        self.folders: dict[str, Path] = {}
        for seed, name in enumerate(("sql", "chat")):
            models[name] = peft_model(self.base, seed)
            self.folders[name] = save_adapter(models[name], folder / "adapters" / name)
        self.answers = {name: greedy(model, PROMPT, COUNT) for name, model in models.items()}
        self.engine = AsyncEngine.from_config(
            EngineConfig(
                model=str(self.base),
                num_blocks=64,
                warm_up="off",
                lora=tuple(f"{name}={path}" for name, path in self.folders.items()),
                lora_dir=str(folder / "adapters"),
            )
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def client(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(
        f'[tenants.root]\nrole = "admin"\nkeys = ["{stored_form("root-secret")}"]\n'
        f'[tenants.ada]\nadapters = ["sql"]\nkeys = ["{stored_form("ada-secret")}"]\n'
    )
    app = create_app(served.engine, ServerSettings(keys_file=str(keys), allowed_hosts=("testserver",)))
    with TestClient(app, headers={"authorization": "Bearer root-secret"}) as client:
        yield client


ADA = {"authorization": "Bearer ada-secret"}


def complete(client: TestClient, model: str | None, **options: Any) -> httpx.Response:
    body = {
        "prompt": PROMPT,
        "max_tokens": COUNT,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return client.post("/v1/completions", json=body | ({"model": model} if model else {}), **options)


def test_models_have_a_parent(client: TestClient, served: Served) -> None:
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert list(cards) == ["tiny", "chat", "sql"]
    assert cards["sql"]["parent"] == "tiny"
    assert "parent" not in cards["tiny"]
    assert client.get("/v1/models/chat").json()["parent"] == "tiny"


@pytest.mark.parametrize("model", ["tiny", "sql", "chat", None])
def test_the_model_names_the_adapter(model: str | None, client: TestClient, served: Served) -> None:
    answer = complete(client, model).json()
    assert answer["model"] == (model or "tiny")
    assert answer["choices"][0]["token_ids"] == served.answers[model or "tiny"]


def test_every_api_chooses_by_model(client: TestClient) -> None:
    """The same chat to each model; each API gives the adapter's text, not the base's."""
    told = [{"role": "user", "content": "hello there"}]
    texts: dict[str, set[str]] = {}
    for model in ("sql", "tiny"):
        common = {"model": model, "temperature": 0, "stream": False}
        chat = client.post("/v1/chat/completions", json={**common, "messages": told, "max_tokens": 8})
        message = client.post("/v1/messages", json={**common, "messages": told, "max_tokens": 8})
        response = client.post(
            "/v1/responses", json={**common, "input": "hello there", "max_output_tokens": 8}
        )
        options = {"num_predict": 8, "temperature": 0}
        ollama = client.post(
            "/api/chat",
            json={"model": f"{model}:latest", "messages": told, "stream": False, "options": options},
        )
        texts[model] = {
            chat.json()["choices"][0]["message"]["content"],
            message.json()["content"][0]["text"],
            response.json()["output"][0]["content"][0]["text"],
            ollama.json()["message"]["content"],
        }
    assert len(texts["sql"]) == len(texts["tiny"]) == 1
    assert texts["sql"] != texts["tiny"]


def test_tenants_use_the_adapters_of_the_keys_file(client: TestClient, served: Served) -> None:
    assert complete(client, "sql", headers=ADA).json()["choices"][0]["token_ids"] == served.answers["sql"]
    refused = complete(client, "chat", headers=ADA)
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    names = [card["id"] for card in client.get("/v1/models", headers=ADA).json()["data"]]
    assert names == ["tiny", "sql"]
    assert client.get("/v1/models/chat", headers=ADA).status_code == 404


def test_prompts_of_adapters_are_told_with_their_namespace(client: TestClient, served: Served) -> None:
    body = {"model": "sql", "prompt": PROMPT}
    told = client.post("/tokenize/v1/completions", json=body).json()
    card = served.engine.adapters.card("sql")
    assert card is not None
    assert told["namespace"] == ["root", "", card.identity]


def test_admins_load_and_unload(client: TestClient, served: Served) -> None:
    body = {"lora_name": "new", "lora_path": "chat"}
    assert client.post("/v1/load_lora_adapter", json=body, headers=ADA).status_code == 403
    loaded = client.post("/v1/load_lora_adapter", json=body).json()
    assert (loaded["id"], loaded["parent"]) == ("new", "tiny")
    assert complete(client, "new").json()["choices"][0]["token_ids"] == served.answers["chat"]
    again = client.post("/v1/load_lora_adapter", json={**body, "lora_path": "sql"})
    assert again.status_code == 400
    assert "load_inplace" in again.json()["error"]["message"]
    replaced = {**body, "lora_path": "sql", "load_inplace": True}
    assert client.post("/v1/load_lora_adapter", json=replaced).status_code == 200
    assert complete(client, "new").json()["choices"][0]["token_ids"] == served.answers["sql"]
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "new"}).json()["deleted"]
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "new"}).status_code == 404
    assert complete(client, "new").status_code == 404


@pytest.mark.parametrize("path", ["..", "../tiny", "/etc", "sql/../../tiny", "nothing", "a\x00b"])
def test_only_adapters_below_the_folder_are_loaded(path: str, client: TestClient) -> None:
    refused = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "lora_path"
    assert client.get("/v1/models/x").status_code == 404


def test_an_adapter_that_is_unloaded_meanwhile_is_not_found(
    client: TestClient, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = served.engine.adapters.card("sql")
    monkeypatch.setattr(served.engine.adapters, "card", lambda name: card)  # of the moment before
    refused = complete(client, "gone")
    assert refused.status_code == 404
    assert refused.json()["error"]["param"] == "model"
    assert "chat" not in refused.text  # others' adapters are not told


def test_the_bases_name_is_taken(client: TestClient) -> None:
    body = {"lora_name": "tiny", "lora_path": "sql", "load_inplace": True}
    assert client.post("/v1/load_lora_adapter", json=body).status_code == 400


def test_adapters_show(client: TestClient, served: Served) -> None:
    """In overview, requests, tree, metrics and explanations; of others' adapters, tenants see nothing."""
    long = list(range(20, 60))
    for headers, model in ((ADA, "sql"), (ADA, "tiny"), (None, "chat")):
        body = {"model": model, "prompt": [*long, 7], "max_tokens": 1, "temperature": 0}
        assert client.post("/v1/completions", json=body, headers=headers).status_code == 200

    def get(path: str, **options: Any) -> Any:
        return client.get(f"/v1/cache{path}", **options).json()

    told = {card["name"]: card for card in get("")["adapters"]}
    assert list(told) == ["chat", "sql"]
    assert told["sql"]["prompt_tokens"] >= 41
    assert told["sql"]["in_memory"]
    (own,) = get("", headers=ADA)["adapters"]
    assert own["name"] == "sql"
    assert "identity" not in own
    assert {one["adapter"] for one in get("/requests", headers=ADA)["data"]} == {"sql", None}
    assert {node["adapter"] for node in get("/tree", headers=ADA)["nodes"]} == {"sql", None}
    assert {"sql", "chat"} <= {node["adapter"] for node in get("/tree")["nodes"]}
    name = next(one["id"] for one in get("/requests", headers=ADA)["data"] if one["adapter"] == "sql")
    assert get(f"/requests/{name}", headers=ADA)["nodes"]

    def explain(model: str, prompt: list[int], **options: Any) -> Any:
        return client.post("/v1/cache/explain", json={"model": model, "prompt": prompt}, **options)

    assert explain("sql", long, headers=ADA).json()["reason"] == "hit"
    assert explain("sql", long).json()["cached_under"] == {"model": "chat", "cached_tokens": 40}
    assert explain("chat", long, headers=ADA).status_code == 404
    unknown = client.post("/v1/cache/explain", json={"model": "sql", "prompt": [99, 98, 97]}, headers=ADA)
    assert unknown.json()["cached_under"] is None

    pinned = client.post("/v1/cache/pins", json={"model": "sql", "prompt": long}, headers=ADA)
    assert pinned.status_code == 201
    assert client.post("/v1/cache/pins", json={"model": "sql", "prompt": long}).status_code == 409
    assert client.request(
        "DELETE", "/v1/cache/pins", json={"id": pinned.json()["id"], "model": "sql"}, headers=ADA
    ).json()["deleted"]

    metrics = client.get("/metrics").text
    assert 'radixkv_adapter_prompts_total{adapter="sql"}' in metrics
    assert "radixkv_adapters_in_memory 2.0" in metrics
    assert "adapter" not in client.get("/metrics", headers=ADA).text


def test_an_adapters_prefix_is_public_for_that_adapter(client: TestClient) -> None:
    prompt = list(range(100, 140))
    body = {"model": "sql", "prompt": prompt}
    assert client.post("/v1/cache/public", json=body).status_code == 201
    for headers, model, cached in ((None, "sql", 0), (ADA, "sql", 32), (ADA, "tiny", 0)):
        asked = {"model": model, "prompt": [*prompt, 5], "max_tokens": 1}
        usage = client.post("/v1/completions", json=asked, headers=headers).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    assert client.request("DELETE", "/v1/cache/public", json=body).json()["deleted"]


@pytest.mark.nightly
def test_names_change_their_weights_under_traffic(tmp_path: Path) -> None:
    """The small form of `fuzz_adapters.py`, above a host and a disk tier, with a restart."""
    fuzz = Fuzz(tmp_path, num_names=6, num_sets=6, num_prompts=5, num_blocks=18, num_workers=6)
    asyncio.run(fuzz.run(60))
    told = (
        "hits",
        "reloaded",
        "reloads without a hit",
        "blocks loaded from tiers",
        "blocks told",
        "tokens guessed rightly",
    )
    assert all(fuzz.counts[name] for name in told), fuzz.counts


@pytest.mark.nightly
async def test_replicas_have_the_same_adapters(served: Served) -> None:
    """One engine here and one over a connection: each loads, unloads and answers as the other does."""
    config = replace(served.engine.config, lora=(f"sql={served.folders['sql']}",))
    engines = [AsyncEngine.from_config(config) for _ in range(2)]
    ours, theirs = multiprocessing.Pipe()
    host = threading.Thread(target=lambda: asyncio.run(serve_engine(engines[1], Channel(theirs))))
    host.start()
    far = await asyncio.to_thread(RemoteEngine, Channel(ours))
    engine = ReplicatedEngine({"near": engines[0], "far": far})
    try:
        for member in (engine, engines[0], far):
            assert [card.name for card in member.adapters.cards()] == ["sql"]
        await asyncio.to_thread(engine.adapters.load, "chat", str(served.folders["chat"]))
        assert await asyncio.to_thread(engine.adapters.unload, "sql")
        params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
        for member in (engine, far, engines[0]):
            assert [card.name for card in member.adapters.cards()] == ["chat"]
            output = await member.generate(Request(PROMPT, params, lora="chat"))
            assert list(output.outputs[0].token_ids) == served.answers["chat"]
        with pytest.raises(AdapterLoadError):
            await asyncio.to_thread(engine.adapters.load, "none", "/nowhere")
        assert far.adapters.card("none") is None
    finally:
        await engine.close()
        await asyncio.to_thread(host.join)
        await engines[1].close()
