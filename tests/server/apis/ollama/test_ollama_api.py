# SPDX-License-Identifier: Apache-2.0
"""Ollama's routes over HTTP: chats and completions in lines of JSON, and the routes that list models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

Json = dict[str, Any]
TOOL: Json = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ARGUMENTS = '{"city":  "Paris"}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
FIGURES = {
    *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count"),
    "eval_duration",
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(num_blocks=256), console=False) as running:
        yield running


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def chat(text: str, **fields: Any) -> Json:
    return {"model": "scripted", "messages": [{"role": "user", "content": "say:" + text}], **fields}


def lines(answer: httpx.Response) -> list[Json]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_chat_comes_in_lines_and_ends_with_the_figures(http: httpx.Client) -> None:
    pieces = lines(http.post("/api/chat", json=chat("<think>Hm.</think>Hello")))
    *said, last = pieces
    assert "".join(piece["message"]["content"] for piece in said) == "Hello"
    assert "".join(piece["message"].get("thinking", "") for piece in said) == "Hm."
    assert all(piece["message"]["role"] == "assistant" and not piece["done"] for piece in said)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last.keys() >= FIGURES
    assert last["prompt_eval_count"] > 10
    assert last["eval_count"] > 5


def test_a_whole_chat_is_the_same(http: httpx.Client) -> None:
    answer = http.post("/api/chat", json=chat("<think>Hm.</think>Hello", stream=False)).json()
    assert answer["message"] == {"role": "assistant", "content": "Hello", "thinking": "Hm."}
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("scripted", True, "stop")
    assert answer.keys() >= FIGURES
    cut = http.post("/api/chat", json=chat("Hello", stream=False, options={"num_predict": 2})).json()
    assert (cut["message"]["content"], cut["done_reason"], cut["eval_count"]) == ("He", "length", 2)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_have_objects_and_the_next_turn_the_words_of_the_model(
    server: LiveServer, http: httpx.Client, stream: bool
) -> None:
    body = chat(f"Look: {CALL}\n{CALL}", tools=[TOOL], stream=stream)
    answer = http.post("/api/chat", json=body)
    messages = [piece["message"] for piece in lines(answer)] if stream else [answer.json()["message"]]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Paris"}] * 2
    assert [call["function"]["index"] for call in calls] == [0, 1]
    # Ollama's own clients send no ids back.
    back = {
        "role": "assistant",
        "content": "Look:",
        "tool_calls": [{"function": {"name": "look", "arguments": {"city": "Paris"}}}],
    }
    result = {"role": "tool", "tool_name": "look", "content": "sunny"}
    http.post("/api/chat", json=chat("x", messages=[*body["messages"], back, result], tools=[TOOL]))
    asked = server.engine.requests[-1].text
    assert "tool\nsunny" in asked
    assert "call look({'city': 'Paris'})" in asked


def test_generate_goes_through_the_template_unless_it_is_raw(server: LiveServer, http: httpx.Client) -> None:
    body = {"model": "scripted:latest", "prompt": "say:hi", "system": "Be brief."}
    *said, last = lines(http.post("/api/generate", json=body))
    assert "".join(piece["response"] for piece in said) == "hi"
    assert (last["response"], last["done"]) == ("", True)
    assert server.engine.requests[-1].text == "system\nBe brief.user\nsay:hiassistant\n"
    raw = {"model": "scripted", "prompt": "say:<think>hi</think>", "raw": True, "stream": False}
    answer = http.post("/api/generate", json={**raw, "options": {"seed": 5, "num_predict": 5}}).json()
    assert answer["response"] == "<thin"
    asked = server.engine.requests[-1]
    assert (asked.text, asked.params.seed) == ("say:<think>hi</think>", 5)


@pytest.mark.parametrize(
    ("format_", "good"),
    [("json", "{"), ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, '{"a')],
)
@pytest.mark.parametrize("raw", [False, True])
def test_a_format_is_enforced(http: httpx.Client, format_: Any, good: str, raw: bool) -> None:
    body = {"prompt": "say:no", "raw": raw, "format": format_, "stream": False, "options": {"num_predict": 9}}
    answer = http.post("/api/generate", json={"model": "scripted", **body})
    assert answer.status_code == 200, answer.text
    assert answer.json()["response"].replace(" ", "").startswith(good)


def test_options_reach_the_engine(server: LiveServer, http: httpx.Client) -> None:
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3, "repeat_penalty": 1.5}
    answer = http.post(
        "/api/chat", json=chat("x", options={**options, "num_ctx": 4096}, keep_alive="5m", think=True)
    )
    params = server.engine.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.9, 0.1)
    assert (params.seed, params.repetition_penalty) == (3, 1.5)
    assert "options.num_ctx" in answer.headers["warning"]
    assert "keep_alive" in answer.headers["warning"]
    assert "('enable_thinking', True)" in server.engine.requests[-1].text
    http.post("/api/chat", json=chat("x", think="high"))
    assert "('reasoning_effort', 'high')" in server.engine.requests[-1].text


def test_logprobs_are_told(http: httpx.Client) -> None:
    answer = http.post("/api/chat", json=chat("ab", logprobs=True, top_logprobs=2, stream=False)).json()
    assert [entry["token"] for entry in answer["logprobs"]] == ["a", "b"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in answer["logprobs"])


def test_images_are_treated_as_elsewhere(server: LiveServer, http: httpx.Client) -> None:
    seen = {"role": "user", "content": "see", "images": ["AAAA"]}
    refused = http.post("/api/chat", json=chat("x", messages=[seen]))
    assert refused.status_code == 400
    assert "messages[0].content[1]" in refused.json()["error"]
    history = [seen, {"role": "assistant", "content": "nice"}, {"role": "user", "content": "and?"}]
    answer = http.post("/api/chat", json=chat("x", messages=history))
    assert (answer.status_code, "images" in answer.headers["warning"]) == (200, True)
    assert "[image " in server.engine.requests[-1].text


def test_an_empty_request_only_loads_the_model(server: LiveServer, http: httpx.Client) -> None:
    before = len(server.engine.requests)
    loaded = http.post("/api/generate", json={"model": "scripted"}).json()
    assert (loaded["response"], loaded["done"], loaded["done_reason"]) == ("", True, "load")
    unloaded = http.post("/api/chat", json={"model": "scripted", "messages": [], "keep_alive": 0}).json()
    assert (unloaded["message"]["content"], unloaded["done_reason"]) == ("", "unload")
    assert len(server.engine.requests) == before


def test_clients_find_the_model(http: httpx.Client) -> None:
    (model,) = http.get("/api/tags").json()["models"]
    assert (model["name"], model["model"]) == ("scripted", "scripted")
    assert len(model["digest"]) == 64
    (running,) = http.get("/api/ps").json()["models"]
    assert running["context_length"] == 4096
    shown = http.post("/api/show", json={"model": "scripted:latest"}).json()
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 4096
    assert {"completion", "tools", "thinking"} <= set(shown["capabilities"])
    assert http.head("/").status_code == 200, "clients ask whether somebody is there, with no console, too"
    assert http.get("/api/version").json()["version"].count(".") == 2
    assert http.head("/").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/chat", chat("x", model="other"), 404, "'other' does not exist"),
        ("/api/show", {"model": "other"}, 404, "'other' does not exist"),
        ("/api/show", {}, 400, "model"),
        ("/api/chat", chat("x", options={"mirostat": 2}), 400, "mirostat"),
        ("/api/chat", chat("x", options={"temprature": 1}), 400, "temperature"),
        ("/api/chat", chat("x", format={"type": "nothing"}), 400, "json_schema"),
        ("/api/chat", chat("x", messages=[{"role": "wizard", "content": "x"}]), 400, "messages[0].role"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/api/generate", {"prompt": "x", "context": [1]}, 400, "/api/chat"),
        ("/api/embed", {"input": "x"}, 404, "no vectors"),
    ],
)
def test_errors_are_in_ollamas_shape(
    http: httpx.Client, path: str, body: Json, status: int, words: str
) -> None:
    answer = http.post(path, json={"model": "scripted", **body} if path != "/api/show" else body)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert words in answer.json()["error"]


def test_an_error_in_a_stream_is_its_last_line() -> None:
    engine = ScriptedEngine(fail=lambda asked, given: "error" if given == 2 else None)
    with live_server(engine) as server, server.http() as client:
        pieces = lines(client.post("/api/chat", json=chat("Hello")))
    assert pieces[-1].keys() == {"error"}
    assert not any(piece.get("done") for piece in pieces)
