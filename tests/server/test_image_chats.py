# SPDX-License-Identifier: Apache-2.0
"""Chats with images, over HTTP with the providers' own libraries, answered by a tiny model that sees.

Each API: cold, the next turn hits through the image, another image misses at its first token.
"""

from __future__ import annotations

import asyncio
import base64
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server, raw_request
from scripted_images import base64_of, data_url, file_of, picture
from tiny_vision_models import save_tiny_vision_model
from transformers import AutoTokenizer
from waiting import until

from radixkv.engine.config import EngineConfig
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.model.loading.loader import load_image_processor, load_tokenizer
from radixkv.observe.audit.exchange import make_record
from radixkv.observe.audit.rule_sets import rule_set
from radixkv.observe.audit.rules import Rules
from radixkv_server.recorded_prompts import ServedModelCoding

Body = dict[str, Any]
SIZE = (96, 64)  # 24 tokens of 16 x 16 pixels
NUM_TOKENS = 24
SYSTEM = "You look at pictures of a harbour and say in few words what is there. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision_model(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    engine = AsyncEngine.from_config(
        EngineConfig(str(folder), num_blocks=512, max_model_len=1024, warm_up="off", dtype="float32")
    )
    try:
        limits = {"max_image_bytes": 100_000, "max_image_pixels": 100_000}
        with live_server(engine, served_model_names=("qwen",), **limits) as running:
            yield running
    finally:
        asyncio.run(engine.close())


class Chat:
    """A conversation in one API: the tokens of the prompts that it sends, and the cached ones."""

    def __init__(self, server: LiveServer, seed: int) -> None:
        self.server = server
        self.image = picture(seed, SIZE)

    def turn(self, *more: str) -> tuple[int, int]:
        """Ask about the image, with further turns; tokens of the prompt, and cached ones."""
        raise NotImplementedError


class ChatCompletions(Chat):
    def turn(self, *more: str) -> tuple[int, int]:
        image = {"type": "image_url", "image_url": {"url": data_url(self.image), "detail": "high"}}
        said: list[Any] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": [{"type": "text", "text": "See"}, image]},
        ]
        for text in more:
            said += [{"role": "assistant", "content": "a ship"}, {"role": "user", "content": text}]
        answer = self.server.openai().chat.completions.create(
            model="qwen", messages=said, max_tokens=4, temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0


class Streamed(Chat):
    """An image in the result of a tool, and a stream."""

    def turn(self, *more: str) -> tuple[int, int]:
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        image = {"type": "image_url", "image_url": {"url": data_url(self.image)}}
        said: list[Any] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [image]},
        ]
        for text in more:
            said += [{"role": "assistant", "content": "a ship"}, {"role": "user", "content": text}]
        stream = self.server.openai().chat.completions.create(
            model="qwen", messages=said, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
        usage = [chunk.usage for chunk in stream if chunk.usage is not None][-1]
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0


class Responses(Chat):
    def turn(self, *more: str) -> tuple[int, int]:
        image = {"type": "input_image", "image_url": data_url(self.image), "detail": "auto"}
        items: list[Any] = [
            {"role": "user", "content": "Look"},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [image]},
        ]
        for text in more:
            items += [{"role": "assistant", "content": "a ship"}, {"role": "user", "content": text}]
        answer = self.server.openai().responses.create(
            model="qwen", instructions=SYSTEM, input=items, max_output_tokens=16
        )
        assert answer.usage is not None
        return answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens


class Messages(Chat):
    def turn(self, *more: str) -> tuple[int, int]:
        source = {"type": "base64", "media_type": "image/png", "data": base64_of(self.image)}
        result = {
            "type": "tool_result",
            "tool_use_id": "c1",
            "content": [{"type": "image", "source": source}],
        }
        said: list[Any] = [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
            {"role": "user", "content": [result]},
        ]
        for text in more:
            said += [{"role": "assistant", "content": "a ship"}, {"role": "user", "content": text}]
        client = self.server.anthropic()
        answer = client.messages.create(model="qwen", system=SYSTEM, messages=said, max_tokens=4)
        counted = client.messages.count_tokens(model="qwen", system=SYSTEM, messages=said)
        cached, written = (
            answer.usage.cache_read_input_tokens or 0,
            answer.usage.cache_creation_input_tokens or 0,
        )
        assert counted.input_tokens == answer.usage.input_tokens + cached + written
        return counted.input_tokens, cached


APIS = pytest.mark.parametrize("api", [ChatCompletions, Streamed, Responses, Messages])


@APIS
def test_the_next_turn_hits_through_the_image_and_another_misses_at_its_first_token(
    server: LiveServer, api: type[Chat]
) -> None:
    seed = 20 + 10 * [ChatCompletions, Streamed, Responses, Messages].index(api)
    first, _ = api(server, seed).turn()
    again, cached = api(server, seed).turn("and now?")
    assert cached >= first - 16, "all but the header of the answer"
    assert again > first
    other, cached = api(server, seed + 1).turn("and now?")
    assert other == again
    assert len(SYSTEM) < cached < first - NUM_TOKENS, "up to the image"


def test_screenshots_of_a_computer_are_shown_and_stored(server: LiveServer) -> None:
    """OpenAI's computer use: the next turn goes on from the stored one, and finds its screenshot."""
    client = server.openai().responses
    shown = {"type": "computer_screenshot", "image_url": data_url(picture(65, SIZE))}
    call = {"type": "computer_call", "id": "cu_1", "call_id": "c1", "action": {"type": "screenshot"}}
    items: list[Any] = [
        {"role": "user", "content": "Look"},
        {**call, "status": "completed", "pending_safety_checks": []},
        {"type": "computer_call_output", "call_id": "c1", "output": shown},
    ]
    options: dict[str, Any] = {"model": "qwen", "instructions": SYSTEM, "max_output_tokens": 16}
    first = client.create(input=items, **options)
    words = client.create(input=items[:2], **options)
    assert first.usage is not None
    assert words.usage is not None
    assert first.usage.input_tokens > words.usage.input_tokens + NUM_TOKENS
    again = client.create(input="And now?", previous_response_id=first.id, **options)
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
    with server.http() as http:
        stored = http.get(f"/v1/responses/{first.id}/input_items").json()["data"]
    (output,) = [item["output"] for item in stored if item["type"] == "computer_call_output"]
    assert (output["type"], output["image_url"]) == ("computer_screenshot", shown["image_url"])
    by_file = {**items[2], "output": {"type": "computer_screenshot", "file_id": "file_1"}}
    named = client.with_raw_response.create(input=[*items[:2], by_file], **options)
    assert "short text" in named.headers["warning"]


def test_images_that_a_provider_made_are_shown_and_stored(server: LiveServer) -> None:
    """OpenAI's image generation and code interpreter: the next turn goes on from the stored ones."""
    client = server.openai().responses
    made, plotted = base64_of(picture(66, SIZE)), data_url(picture(67, SIZE))
    items: list[Any] = [
        {"role": "user", "content": "Draw"},
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": made},
        {
            "type": "code_interpreter_call",
            "id": "ci_1",
            "status": "completed",
            "code": "plot()",
            "container_id": "c",
            "outputs": [{"type": "logs", "logs": "done"}, {"type": "image", "url": plotted}],
        },
    ]
    options: dict[str, Any] = {"model": "qwen", "instructions": SYSTEM, "max_output_tokens": 16}
    first = client.with_raw_response.create(input=items, **options)
    assert "warning" not in first.headers
    begun = first.parse()
    words = client.create(input=items[:1], **options)
    assert begun.usage is not None
    assert words.usage is not None
    assert begun.usage.input_tokens > words.usage.input_tokens + 2 * NUM_TOKENS
    again = client.create(input="And now?", previous_response_id=begun.id, **options)
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens >= begun.usage.input_tokens - 1
    with server.http() as http:
        stored = http.get(f"/v1/responses/{begun.id}/input_items").json()["data"]
    by_type = {item["type"]: item for item in stored}
    assert by_type["image_generation_call"]["result"] == made
    assert by_type["code_interpreter_call"]["outputs"][1] == {"type": "image", "url": plotted}
    (damaged,) = [{**items[1], "result": base64.b64encode(b"no image").decode()}]
    assert client.create(input=[items[0], damaged, {"role": "user", "content": "So?"}], **options).id


@pytest.fixture(scope="module")
def forgetful(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of a model whose template shows no images in results of tools."""
    copy = tmp_path_factory.mktemp("forgetful") / "model"
    shutil.copytree(folder, copy)
    tokenizer = AutoTokenizer.from_pretrained(copy)
    shows = "{% if part['type'] == 'image' %}"
    assert shows in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(
        shows, "{% if part['type'] == 'image' and message['role'] != 'tool' %}"
    )
    tokenizer.save_pretrained(copy)
    engine = AsyncEngine.from_config(
        EngineConfig(str(copy), num_blocks=512, max_model_len=1024, warm_up="off", dtype="float32")
    )
    try:
        with live_server(engine, served_model_names=("qwen",)) as running:
            yield running
    finally:
        asyncio.run(engine.close())


@pytest.mark.parametrize("api", [Streamed, Responses, Messages])
def test_images_of_results_follow_in_the_users_words_where_the_template_has_no_place_for_them(
    forgetful: LiveServer, server: LiveServer, api: type[Chat]
) -> None:
    seed = 90 + 2 * [Streamed, Responses, Messages].index(api)
    there, _ = api(server, seed).turn()
    first, _ = api(forgetful, seed).turn()
    assert first > there, "the message that shows the image"
    again, cached = api(forgetful, seed).turn("and now?")
    assert cached >= first - 16
    other, cached = api(forgetful, seed + 1).turn("and now?")
    assert other == again
    assert len(SYSTEM) < cached < first - NUM_TOKENS


def test_ollamas_images(server: LiveServer) -> None:
    with server.http() as http:
        said = {"role": "user", "content": "See", "images": [base64_of(picture(70, SIZE))]}
        body = {"model": "qwen", "messages": [said], "stream": False, "options": {"num_predict": 4}}
        with_image = http.post("/api/chat", json=body).json()["prompt_eval_count"]
        del said["images"]
        without = http.post("/api/chat", json=body).json()["prompt_eval_count"]
    assert with_image == without + NUM_TOKENS + 2


def test_ollamas_generate_takes_images_but_not_raw(server: LiveServer) -> None:
    with server.http() as http:
        body = {"model": "qwen", "images": [base64_of(picture(71, SIZE))], "stream": False}
        answer = http.post("/api/generate", json={**body, "options": {"num_predict": 2}})
        assert answer.json()["prompt_eval_count"] > NUM_TOKENS
        refused = http.post("/api/generate", json={**body, "prompt": "See", "raw": True})
        assert (refused.status_code, "leave raw out" in refused.text) == (400, True)


def test_an_audit_with_the_model_predicts_what_was_cached(server: LiveServer, folder: Path) -> None:
    """Tokens of images by the model's own rule, without its weights."""
    config = EngineConfig(str(folder))
    coding = ServedModelCoding.of(load_tokenizer(config), load_image_processor(config))
    rules = Rules(rule_set("radixkv"), coding)
    image = {"type": "image_url", "image_url": {"url": data_url(picture(60, SIZE))}}
    said: list[Body] = [{"role": "user", "content": [{"type": "text", "text": "A first look"}, image]}]
    with server.http() as http:
        for turn in range(3):
            body = {
                "model": "qwen",
                "messages": said,
                "max_tokens": 1,
                "temperature": 0,
                "cache_salt": "audit",
            }
            answer = http.post("/v1/chat/completions", json=body).json()
            seen = rules.observe(make_record(body, answer, time=float(turn), seconds=0.5))
            assert seen.prompt_tokens == answer["usage"]["prompt_tokens"]
            assert seen.cached_tokens == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (seen.cached_tokens > NUM_TOKENS) is (turn > 0)
            said = [
                *said,
                {"role": "assistant", "content": "a ship"},
                {"role": "user", "content": "and now?"},
            ]


def test_work_on_images_is_counted(server: LiveServer) -> None:
    """An image is decoded once and encoded once, however often it comes."""

    def counts() -> dict[str, float]:
        with server.http() as http:
            lines = http.get("/metrics").text.splitlines()
        return {
            name: float(value)
            for name, _, value in (
                line.partition(" ") for line in lines if "image" in line or "encoder" in line
            )
            if value and name[0] != "#"
        }

    before = counts()
    for _ in range(3):
        ChatCompletions(server, 75).turn()
    after = counts()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["radixkv_images_encoded_total"] == 1
    assert grown["radixkv_encoder_cache_misses_total"] == 1
    assert grown["radixkv_encoder_cache_hits_total"] == grown["radixkv_encoder_cache_evictions_total"] == 0
    assert grown["radixkv_images_decoded_total"] == 1
    assert grown["radixkv_images_reused_total"] == 2
    assert grown["radixkv_image_decode_seconds_total"] > 0
    assert after["radixkv_decoded_images_bytes"] >= 96 * 64 * 3


def test_ollama_is_told_that_the_model_sees(server: LiveServer) -> None:
    with server.http() as http:
        assert "vision" in http.post("/api/show", json={"model": "qwen"}).json()["capabilities"]


def test_the_answer_depends_on_the_image(server: LiveServer) -> None:
    client = server.openai()

    def logprobs(seed: int) -> list[float]:
        image = {"type": "image_url", "image_url": {"url": data_url(picture(seed, SIZE))}}
        said: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "See"}, image]}]
        answer = client.chat.completions.create(
            model="qwen", messages=said, max_tokens=4, temperature=0, logprobs=True
        )
        assert answer.choices[0].logprobs is not None
        return [token.logprob for token in answer.choices[0].logprobs.content or ()]

    cold, hot, other = logprobs(80), logprobs(80), logprobs(81)
    assert hot == pytest.approx(cold, abs=1e-5)
    assert other != pytest.approx(cold, abs=1e-5)


def test_explanations_and_prompt_logprobs_pass_over_images(server: LiveServer) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url(picture(90, SIZE))}}
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "See"}, image]}]}
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json={**chat, "max_tokens": 2, "prompt_logprobs": 1})
        assert answer.status_code == 200, answer.text
        explained = http.post("/v1/cache/explain", json=chat).json()
        assert explained["cached_tokens"] >= explained["prompt_tokens"] - 16
        tree = http.get("/v1/cache/tree").json()
        assert any("[image " in (node["text"] or "") for node in tree["nodes"])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (base64_of(picture(1, (400, 300))), "max_image_pixels"),
        (base64_of(picture(1, (200, 400)), compress_level=0) + "A" * 80_000, "max_image_bytes"),
        (base64_of(picture(1), "TIFF"), "no PNG, JPEG, WebP or GIF"),
        (base64.b64encode(file_of(picture(1, (90, 90)), "JPEG")[:1500]).decode(), "cut off or damaged"),
        ("%%%%", "no base64"),
        (base64_of(picture(1, (4, 900))), "can't be shown to this model"),
    ],
)
def test_bad_images_are_errors_of_the_client_and_harm_nobody(server: LiveServer, data: str, why: str) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [image]}]})
        assert answer.status_code == 400, answer.text
        assert why in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "invalid_image"
        said = [{"role": "user", "content": [image]}, {"role": "assistant", "content": "a ship"}]
        later = {"messages": [*said, {"role": "user", "content": "and now?"}], "max_tokens": 2}
        assert http.post("/v1/chat/completions", json=later).status_code == 200, "it does not end the session"
        assert http.get("/health").status_code == 200


def test_uploads_that_end_leave_nothing(server: LiveServer) -> None:
    """Clients that leave in the middle of a body, or while their images are decoded."""
    image = {"type": "image_url", "image_url": {"url": data_url(picture(3, (300, 300)))}}
    body = {"messages": [{"role": "user", "content": [image] * 20}], "max_tokens": 200, "stream": True}
    request = raw_request("/v1/chat/completions", body)

    def leave(after: int) -> None:
        with server.connect() as connection:
            connection.sendall(request[:after])
            connection.shutdown(socket.SHUT_RDWR)

    with ThreadPoolExecutor(4) as clients:
        list(clients.map(leave, [len(request) // 2, len(request) - 1, len(request), len(request)]))
    until(lambda: server.engine.stats().num_running == server.engine.stats().num_waiting == 0)
    assert ChatCompletions(server, 4).turn()[0] > NUM_TOKENS
