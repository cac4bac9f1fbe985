# SPDX-License-Identifier: Apache-2.0
"""The small routes that clients of vLLM and llama.cpp ask: facts, templates, load; with keys and roles."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, chat, live_server
from scripted_engine import ScriptedEngine

KEYS: dict[str, Any] = {"api_keys": ("ada=a", "bob=b"), "admin_keys": ("operator=o",)}


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(), **KEYS) as running:
        yield running


@pytest.fixture
def client(shared: LiveServer) -> Iterator[httpx.Client]:
    with shared.http(headers={"Authorization": "Bearer a"}) as made:
        yield made


def refused(answer: httpx.Response, param: str | None, status: int = 400) -> None:
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/tokenizer_info"), ("GET", "/load"), ("GET", "/props"), ("POST", "/apply-template")],
)
def test_a_key_is_needed(shared: LiveServer, method: str, path: str) -> None:
    with shared.http() as client:
        body = chat("hi") if method == "POST" else None
        assert client.request(method, path, json=body).status_code == 401
        wrong = client.request(method, path, json=body, headers={"x-api-key": "c"})
        assert wrong.status_code == 401
        assert client.request(method, path, json=body, headers={"x-api-key": "b"}).status_code == 200


def test_ping_needs_none_and_follows_health(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine()
    with live_server(engine, **KEYS) as server, server.http() as client:
        for method in ("GET", "POST", "HEAD"):
            answer = client.request(method, "/ping")
            assert (answer.status_code, answer.content) == (200, b"")
        assert client.delete("/ping").status_code == 405
        monkeypatch.setattr(engine, "is_healthy", False)
        assert client.get("/ping").status_code == client.post("/ping").status_code == 503


class TestTokenizerInfo:
    def test_has_what_remote_tokenizers_read(self, client: httpx.Client) -> None:
        info = client.get("/tokenizer_info").json()
        assert isinstance(info["tokenizer_class"], str)
        for name in ("bos_token", "eos_token", "pad_token"):
            assert info[name] is None or isinstance(info[name], str)
        assert "chat_template" in info
        assert info["model_max_length"] == 4096
        # As lm-eval finds the end token's id: by its text.
        asked = {"prompt": info["eos_token"], "add_special_tokens": False}
        assert client.post("/tokenize", json=asked).json()["tokens"]

    def test_cannot_be_written(self, client: httpx.Client) -> None:
        assert client.post("/tokenizer_info", json={}).status_code == 405


class TestLoad:
    def test_counts_ones_own_requests_and_all_for_an_admin(self) -> None:
        engine = ScriptedEngine()

        def load(client: httpx.Client, key: str) -> int:
            answer = client.get("/load", headers={"x-api-key": key})
            assert set(answer.json()) == {"server_load"}
            return int(answer.json()["server_load"])

        async def ask(server: LiveServer, key: str) -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                answer = await client.post(
                    "/v1/chat/completions", json=chat("hi"), headers={"x-api-key": key}
                )
                assert answer.status_code == 200

        with live_server(engine, **KEYS) as server, server.http() as client:

            async def run() -> None:
                engine.gate.clear()
                asked = [asyncio.create_task(ask(server, key)) for key in ("a", "a", "b")]
                await asyncio.to_thread(engine.wait_until, lambda: len(engine.requests) == 3)
                loads = {key: await asyncio.to_thread(load, client, key) for key in ("a", "b", "o")}
                assert loads == {"a": 2, "b": 1, "o": 3}
                engine.gate.set()
                await asyncio.gather(*asked)

            asyncio.run(run())
            assert [load(client, key) for key in ("a", "b", "o")] == [0, 0, 0]

    def test_a_refused_request_does_not_stay(self, client: httpx.Client) -> None:
        for _ in range(3):
            assert client.post("/v1/chat/completions", json=chat("")).status_code in (200, 400)
            assert client.post("/v1/completions", json={"prompt": []}).status_code == 400
        assert client.get("/load").json() == {"server_load": 0}

    def test_without_keys_it_is_everybodys(self) -> None:
        with live_server(ScriptedEngine()) as server, server.http() as client:
            assert client.get("/load").json() == {"server_load": 0}


class TestProps:
    def test_tells_what_clients_read(self, client: httpx.Client) -> None:
        told = client.get("/props").json()
        settings = told["default_generation_settings"]
        assert settings["n_ctx"] == 4096
        assert settings["params"]["temperature"] == 1.0
        assert settings["params"]["top_k"] == 0
        assert told["total_slots"] >= 1
        assert told["model_alias"] == "scripted"
        assert isinstance(told["chat_template"], str)
        assert told["eos_token"] == "<|im_end|>"
        assert told["modalities"] == {"vision": False, "audio": False}
        assert isinstance(told["build_info"], str)

    def test_tells_nothing_of_what_runs(self, shared: LiveServer) -> None:
        with shared.http() as client:
            told = []
            for key in ("a", "b"):
                client.post("/v1/chat/completions", json=chat(f"{key}'s"), headers={"x-api-key": key})
                told.append(client.get("/props", headers={"x-api-key": key}).json())
        assert told[0] == told[1]

    def test_has_the_models_own_defaults(self) -> None:
        engine = ScriptedEngine(default_sampling={"temperature": 0.6, "top_k": 20})
        with live_server(engine) as server, server.http() as client:
            params = client.get("/props").json()["default_generation_settings"]["params"]
        assert (params["temperature"], params["top_k"], params["top_p"]) == (0.6, 20, 1.0)

    def test_can_not_be_changed(self, client: httpx.Client) -> None:
        assert client.post("/props", json={}).status_code == 405


class TestApplyTemplate:
    def test_gives_the_prompt_as_text(self, client: httpx.Client, shared: LiveServer) -> None:
        body = chat("hi", temperature=0.5, max_tokens=3, stream=True)
        assert client.post("/apply-template", json=body).json() == {
            "prompt": "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"
        }
        before = len(shared.engine.requests)
        client.post("/apply-template", json=chat("nothing is generated"))
        assert len(shared.engine.requests) == before

    def test_is_what_the_chat_is_answered_from(self, client: httpx.Client, shared: LiveServer) -> None:
        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        for fields in ({}, {"tools": tools}, {"chat_template_kwargs": {"enable_thinking": False}}):
            body = {**chat("a <|im_end|> in the text"), **fields}
            text = client.post("/apply-template", json=body).json()["prompt"]
            client.post("/v1/chat/completions", json=body)
            sent = shared.engine.requests[-1].prompt
            assert text == shared.engine.tokenizer.decode(sent, skip_special_tokens=False)

    def test_without_the_assistants_beginning(self, client: httpx.Client) -> None:
        told = client.post("/apply-template", json=chat("hi", add_generation_prompt=False)).json()
        assert told["prompt"] == "<|im_start|>user\nhi<|im_end|>"

    def test_bad_bodies_are_refused(self, client: httpx.Client) -> None:
        post = client.post
        refused(post("/apply-template", json={}), "messages")
        refused(post("/apply-template", json={"messages": []}), "messages")
        refused(post("/apply-template", json=chat("hi", chat_template="{{ x }}")), "chat_template")
        kwargs = {"chat_template_kwargs": {"tokenize": True}}
        refused(post("/apply-template", json=chat("hi", **kwargs)), "chat_template_kwargs")
        refused(post("/apply-template", json=chat("hi", model="other")), "model", 404)
        refused(
            post("/apply-template", json=chat("hi", continue_final_message=True)), "continue_final_message"
        )
        refused(post("/apply-template", json=chat("x" * 500_000)), "messages")
        refused(post("/apply-template", json=chat("refused by the template")), "messages")
        image = [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]
        body = {"messages": [{"role": "user", "content": image}]}
        assert post("/apply-template", json=body).status_code == 400
        assert post("/apply-template", content=b"{").status_code == 415
        assert client.get("/apply-template").status_code == 405


class TestTokenize:
    def test_content_is_answered_as_llama_cpp_does(self, client: httpx.Client) -> None:
        told = client.post("/tokenize", json={"content": "hé"}).json()
        assert told == {"tokens": list("hé".encode())}
        pieces = client.post("/tokenize", json={"content": "hé", "with_pieces": True}).json()
        assert pieces == {
            "tokens": [
                {"id": 104, "piece": "h"},
                {"id": 0xC3, "piece": [0xC3]},
                {"id": 0xA9, "piece": [0xA9]},
            ]
        }
        assert client.post("/tokenize", json={"content": ""}).json() == {"tokens": []}

    def test_chats_take_what_their_completions_take(self, client: httpx.Client, shared: LiveServer) -> None:
        for fields in (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"continue_final_message": True},
            {"add_generation_prompt": False},
        ):
            messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
            body = {"messages": messages, **fields}
            ids = client.post("/tokenize", json=body).json()["tokens"]
            client.post("/v1/chat/completions", json=body)
            assert ids == shared.engine.requests[-1].prompt

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, "prompt"),
            ({"prompt": "a", "content": "a"}, "prompt"),
            ({"content": 5}, "content"),
            ({"content": ["a"]}, "content"),
            ({"content": "a", "add_special_tokens": True}, "add_special_tokens"),
            ({"prompt": "a", "with_pieces": True}, "with_pieces"),
            ({"prompt": "a", "add_special": True}, "add_special"),
            ({"content": "a", "with_pieces": 1}, "with_pieces"),
            ({"content": "x" * 2_000_000}, None),
            (chat("hi", continue_final_message=True), "continue_final_message"),
            (chat("hi", chat_template="x"), "chat_template"),
        ],
    )
    def test_bad_bodies_are_refused(self, client: httpx.Client, body: dict[str, Any], param: str) -> None:
        answer = client.post("/tokenize", json=body)
        assert answer.status_code in (400, 413), answer.text
        if param is not None:
            assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/api/rerank", "/v1/rerank"),
        ("POST", "/classify", "computes no vectors"),
        ("POST", "/v1/messages/batches", "POST /v1/batches"),
        ("POST", "/api/pull", "the model that it was started with"),
        ("POST", "/completion", "POST /v1/completions"),
        ("GET", "/slots", "GET /load"),
        ("POST", "/generate", "POST /v1/completions"),
        ("POST", "/flush_cache", "POST /v1/cache/reset"),
        ("POST", "/reranking", "/v1/rerank"),
        ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),
        ("GET", "/models", "begins with /v1"),
        ("POST", "/v1/tokenize", "has no /v1"),
        ("GET", "/v1/chat/completions/chatcmpl-1", "POST /v1/responses stores"),
        ("POST", "/v1/complete", "POST /v1/messages"),
        ("POST", "/release_memory_occupation", "/sleep and /wake_up"),
        ("POST", "/api/web_search", "Ollama's cloud"),
    ],
)
def test_a_route_of_another_server_is_told_what_is_here_instead(
    client: httpx.Client, method: str, path: str, hint: str
) -> None:
    answer = client.request(method, path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]  # Ollama's errors are a text
    message = error if path.startswith("/api/") else error["message"]
    assert message.startswith(f"Invalid URL ({method} {path}): ")
    assert hint in message
    assert message.count("\n") == 0
    plain = client.get("/v1/cats").json()["error"]["message"]
    assert plain == "Invalid URL (GET /v1/cats)"
