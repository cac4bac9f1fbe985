# SPDX-License-Identifier: Apache-2.0
"""A second API: another body, other framing and other errors, over the same generation and middlewares."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Request, Response
from live_server import LiveServer, live_server, raw_request, read_all
from scripted_engine import Asked, ScriptedEngine

from radixkv.engine.outputs import OutputDelta, RequestOutput
from radixkv.errors import EngineOverloadedError, RequestFailedError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request as EngineRequest
from radixkv_server.app import APIS
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Api, Dialects
from radixkv_server.errors import ApiError
from radixkv_server.generation.generation import Generation, Renderer, respond
from radixkv_server.generation.progress import Usage
from radixkv_server.generation.request import new_id
from radixkv_server.http.body import StrictModel
from radixkv_server.http.request_record import RequestRecord
from radixkv_server.tenants.registry import LimitState

ASK = "/tiny/ask"


class TinyDialect:
    """Errors as `{"wrong": ...}`; events as lines of JSON; pings as empty lines."""

    ping = b"\n"

    def error_body(self, error: ApiError, request_id: str | None) -> dict[str, Any]:
        return {"wrong": error.message, "why": error.code, "id": request_id}

    def error_event(self, error: ApiError, request_id: str | None) -> bytes:
        return json.dumps(self.error_body(error, request_id)).encode() + b"\n"

    def limit_headers(self, limits: Sequence[LimitState]) -> dict[str, str]:
        return {f"tiny-{limit.kind}": str(limit.remaining) for limit in limits}


TINY = TinyDialect()


class Question(StrictModel):
    words: list[str]
    live: bool = False


class TinyRenderer(Renderer):
    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> dict[str, Any]:
        return {
            "said": [output.outputs[0].text for output in outputs],
            "read": usage.prompt_tokens,
            "known": usage.cached_tokens,
            "wrote": usage.completion_tokens,
        }

    def chunk(self, prompt_index: int, delta: OutputDelta, usage: Usage) -> bytes:
        return json.dumps([prompt_index, delta.text]).encode() + b"\n" if delta.text else b""

    def ending(self, usage: Usage) -> bytes:
        return json.dumps({"wrote": usage.completion_tokens}).encode() + b"\n"


async def prepare_question(
    context: ServerContext, body: Question, record: RequestRecord
) -> Generation[TinyRenderer]:
    prompts = [await context.prompts.encode(text, param="words") for text in body.words]
    asked = [EngineRequest(ids, SamplingParams(max_tokens=99)) for ids in prompts]
    return Generation(
        context, record, new_id("tiny-"), asked, TinyRenderer(), stream=body.live, prompt_param="words"
    )


router = APIRouter()


@router.post(ASK)
async def ask(request: Request) -> Response:
    return await respond(request, TINY, Question, prepare_question)


TINY_API = Api(router, {"/tiny": TINY})


def fail(asked: Asked, given: int) -> BaseException | None:
    if "overload" in asked.text:
        return EngineOverloadedError("full", retry_after_s=2)
    return RequestFailedError("broke") if "break" in asked.text and given == 2 else None


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = ScriptedEngine(max_model_len=256, fail=fail)
    with live_server(
        engine,
        apis=[*APIS, TINY_API],
        api_keys=("ada=key-a",),
        max_body_bytes=2000,
        body_timeout_s=0.7,
        ping_interval_s=0.02,
    ) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http(headers={"x-api-key": "key-a"}) as one:
        yield one


def test_whole_answers(server: LiveServer, client: httpx.Client) -> None:
    answer = client.post(ASK, json={"words": ["say:one", "say:two"]}).json()
    assert answer == {"said": ["one", "two"], "read": 14, "known": 6, "wrote": 8}
    asked = server.engine.requests[-1]
    assert asked.request_id.startswith("tiny-")
    assert asked.owner == ("ada", ""), "the tenant is the key's in every dialect"


def test_streams(client: httpx.Client) -> None:
    answer = client.post(ASK, json={"words": ["say:ab", "say:c"], "live": True})
    *chunks, ending = [json.loads(line) for line in answer.text.splitlines()]
    texts = ["", ""]
    for prompt_request, text in chunks:
        texts[prompt_request] += text
    assert texts == ["ab", "c"]
    assert ending == {"wrote": 5}


@pytest.mark.parametrize(
    ("request_of", "status", "why"),
    [
        pytest.param({"headers": {"x-api-key": "no"}}, 401, "invalid_api_key", id="key"),
        pytest.param({"content": b"x" * 3000}, 413, "request_too_large", id="size"),
        pytest.param(
            {"headers": {"content-encoding": "gzip"}}, 415, "unsupported_content_encoding", id="gzip"
        ),
        pytest.param({"headers": {"host": "evil.example"}}, 403, "host_not_allowed", id="host"),
        pytest.param({"content": b"{"}, 400, "invalid_json", id="json"),
        pytest.param({"json": {"words": 5}}, 400, "invalid_type", id="type"),
        pytest.param({"json": {"words": ["x"], "word": 1}}, 400, "unknown_parameter", id="unknown"),
        pytest.param({"json": {"words": ["x" * 300]}}, 400, "context_length_exceeded", id="long"),
        pytest.param({"url": "/tiny/nothing"}, 404, "not_found", id="route"),
        pytest.param({"method": "DELETE"}, 405, "method_not_allowed", id="method"),
        pytest.param({"json": {"words": ["overload"]}}, 503, "engine_overloaded", id="full"),
        pytest.param(
            {"json": {"words": ["overload"], "live": True}}, 503, "engine_overloaded", id="full live"
        ),
        pytest.param({"json": {"words": ["say:break"]}}, 500, "request_failed", id="fails"),
    ],
)
def test_errors_have_the_dialects_shape(
    client: httpx.Client, request_of: dict[str, Any], status: int, why: str
) -> None:
    headers = {"content-type": "application/json", **request_of.get("headers", {})}
    answer = client.request(**{"method": "POST", "url": ASK, **request_of, "headers": headers})
    assert answer.status_code == status
    assert set(answer.json()) == {"wrong", "why", "id"}
    assert answer.json()["why"] == why
    assert answer.json()["id"] == answer.headers["x-request-id"]


def test_errors_inside_a_stream(client: httpx.Client) -> None:
    answer = client.post(ASK, json={"words": ["say:break"], "live": True})
    assert answer.status_code == 200
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[:2] == [[0, "b"], [0, "r"]]
    assert (lines[2]["wrong"], lines[2]["why"]) == ("broke", "request_failed")
    assert len(lines) == 3


def with_key(request: bytes) -> bytes:
    return request.replace(b"\r\n", b"\r\nx-api-key: key-a\r\n", 1)


def test_pings(server: LiveServer) -> None:
    server.engine.gate.clear()
    with server.connect() as sock:
        sock.sendall(with_key(raw_request(ASK, {"words": ["x"], "live": True})))
        received = b""
        while not received.endswith(b"\r\n1\r\n\n\r\n"):  # a chunk of one byte: an empty line
            received += sock.recv(65536)
        server.engine.release()


def test_errors_before_the_app(server: LiveServer) -> None:
    with server.connect() as sock:
        sock.sendall(with_key(raw_request(ASK, {"words": ["x"]}))[:-3])
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["why"] == "request_timeout"


def test_other_paths_speak_as_before(client: httpx.Client) -> None:
    for path in ("/tinylike", "/v1/nothing"):
        assert set(client.get(path).json()["error"]) == {"message", "type", "param", "code"}
    answer = client.post("/v1/completions", json={"prompt": "say:yes"})
    assert answer.json()["choices"][0]["text"] == "yes"


def test_the_longest_prefix_decides() -> None:
    root, outer, inner = TinyDialect(), TinyDialect(), TinyDialect()
    dialects = Dialects({"/": root, "/v1": outer, "/v1/messages": inner})
    assert dialects.of("/v1/messages") is inner
    assert dialects.of("/v1/messages/count_tokens") is inner
    assert dialects.of("/v1/messages2") is outer
    assert dialects.of("/v11") is root
    assert dialects.of("/") is root
