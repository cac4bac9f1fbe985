# SPDX-License-Identifier: Apache-2.0
"""Clients that leave and engines that fail: nothing goes on for nobody, everyone else is served."""

from __future__ import annotations

import json
import socket
import struct

import openai
import pytest
from live_server import LiveServer, chat, live_server, raw_request
from scripted_engine import Asked, ScriptedEngine

from radixkv.errors import (
    EngineOverloadedError,
    EngineStoppedError,
    InvalidRequestError,
    RequestFailedError,
)
from radixkv.scheduling.request import FinishReason

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def reset(sock: socket.socket) -> None:
    """Close with a TCP reset, as a crashed client's kernel does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("hold_at", [0, 2], ids=["waiting", "midway"])
def test_a_client_that_leaves_aborts_its_request(
    server: LiveServer, engine: ScriptedEngine, how: str, stream: bool, hold_at: int
) -> None:
    engine.hold_at = hold_at
    engine.gate.clear()
    sock = server.connect()
    sock.sendall(raw_request(CHAT, chat("say:hello", stream=stream)))
    engine.wait_until(lambda: len(engine.requests) == 1)
    if stream and hold_at:
        received = b""
        while b'"content":"e"' not in received:
            received += sock.recv(65536)
    reset(sock) if how == "reset" else sock.close()
    engine.wait_until(lambda: engine.requests[0].aborted)
    engine.release()
    with server.openai() as client:
        answer = client.chat.completions.create(model="scripted", **chat("say:fine"))
    assert answer.choices[0].message.content == "fine"


def test_leaving_aborts_every_prompt_of_the_request(server: LiveServer, engine: ScriptedEngine) -> None:
    for stream in (True, False):
        engine.requests.clear()
        engine.gate.clear()
        sock = server.connect()
        sock.sendall(raw_request(TEXT, {"prompt": ["a", "b", "c"], "stream": stream}))
        engine.wait_until(lambda: len(engine.requests) == 3)
        sock.close()
        engine.wait_until(lambda: all(asked.aborted for asked in engine.requests))
        engine.release()


def test_closing_the_openai_stream_aborts(server: LiveServer, engine: ScriptedEngine) -> None:
    engine.hold_at = 3
    engine.gate.clear()
    with server.openai() as client:
        stream = client.chat.completions.create(model="scripted", stream=True, **chat("say:hello"))
        text = ""
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if text == "hel":
                break
        stream.close()
        engine.wait_until(lambda: engine.requests[0].aborted)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_disconnects_are_counted(server: LiveServer, engine: ScriptedEngine, stream: bool) -> None:
    engine.hold_at = 2
    engine.gate.clear()
    sock = server.connect()
    sock.sendall(raw_request(CHAT, chat("say:hello", stream=stream)))
    engine.wait_until(lambda: len(engine.requests) == 1)
    received = b""
    while stream and b'"content":"e"' not in received:
        received += sock.recv(65536)
    sock.close()
    engine.wait_until(lambda: engine.requests[0].aborted)
    with server.http() as client:
        # The engine hears of an abort before the request's record is closed.
        while (
            f'radixkv_http_requests_total{{route="{CHAT}",status="499"}} 1.0'
            not in client.get("/metrics").text
        ):
            pass


ERRORS = [
    (InvalidRequestError("bad", param="prompt"), 400, "invalid_value", openai.BadRequestError),
    (RequestFailedError("NaN in the logits"), 500, "request_failed", openai.InternalServerError),
    (RequestFailedError("too late", code="timeout"), 504, "timeout", openai.InternalServerError),
    (EngineOverloadedError("full", retry_after_s=2.5), 503, "engine_overloaded", openai.InternalServerError),
    (EngineStoppedError("stopped"), 503, "engine_stopped", openai.InternalServerError),
    (EngineStoppedError("again", retry_after_s=2.5), 503, "engine_stopped", openai.InternalServerError),
    (ZeroDivisionError("secret detail"), 500, "internal_error", openai.InternalServerError),
]


@pytest.mark.parametrize(("error", "status", "code", "kind"), ERRORS, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_errors_before_the_first_token_have_a_status(
    error: Exception, status: int, code: str, kind: type[openai.APIStatusError], stream: bool, path: str
) -> None:
    failing = ScriptedEngine(fail=lambda asked, given: error if "say:fail" in asked.text else None)
    with live_server(failing) as server, server.http() as client, server.openai() as sdk:
        body = chat("say:fail") if path == CHAT else {"prompt": "say:fail"}
        answer = client.post(path, json={**body, "stream": stream})
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code
        assert "secret detail" not in answer.text
        waits = getattr(error, "retry_after_s", None) is not None
        assert answer.headers.get("retry-after") == ("3" if waits else None)
        with pytest.raises(kind):
            sdk.chat.completions.create(model="scripted", stream=stream, **chat("say:fail"))
        fine = client.post(path, json=chat("say:fine") if path == CHAT else {"prompt": "say:fine"})
        assert fine.status_code == 200


@pytest.mark.parametrize("fault", [RequestFailedError("NaN"), ZeroDivisionError("secret"), "error", "abort"])
def test_errors_inside_a_stream_are_events(fault: BaseException | FinishReason) -> None:
    def fail(asked: Asked, given: int) -> BaseException | FinishReason | None:
        return fault if given == 3 and "say:hello" in asked.text else None

    with live_server(ScriptedEngine(fail=fail)) as server, server.http() as client, server.openai() as sdk:
        answer = client.post(CHAT, json=chat("say:hello", stream=True))
        assert answer.status_code == 200
        events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
        assert "[DONE]" not in events
        assert set(json.loads(events[-1])) == {"error"}
        assert "secret" not in events[-1]
        stream = sdk.chat.completions.create(model="scripted", stream=True, **chat("say:hello"))
        # A role, three letters: what was generated before the fault is delivered.
        contents = [next(stream).choices[0].delta.content for _ in range(4)]
        assert contents == ["", "h", "e", "l"]
        with pytest.raises(openai.APIError):
            next(stream)
        whole = client.post(CHAT, json=chat("say:hello"))
        assert whole.status_code in (500, 503)
        assert client.post(CHAT, json=chat("say:fine")).status_code == 200


def test_one_failing_prompt_aborts_the_others_of_its_request() -> None:
    def fail(asked: Asked, given: int) -> BaseException | None:
        return RequestFailedError("this one") if "bad" in asked.text else None

    failing = ScriptedEngine(fail=fail)
    failing.hold_at = 1
    failing.gate.clear()
    with live_server(failing) as server, server.http() as client:
        for stream in (False, True):
            failing.requests.clear()
            answer = client.post(TEXT, json={"prompt": ["say:good", "bad"], "stream": stream})
            assert "this one" in answer.text
            failing.wait_until(
                lambda: len(failing.requests) == 2 and all(r.aborted for r in failing.requests)
            )


def test_streams_that_wait_are_kept_alive() -> None:
    waiting = ScriptedEngine()
    waiting.gate.clear()
    with live_server(waiting, ping_interval_s=0.02) as server, server.connect() as sock:
        sock.sendall(raw_request(CHAT, chat("say:hello", stream=True)))
        received = b""
        while received.count(b": ping\n\n") < 2:
            received += sock.recv(65536)
        assert received.startswith(b"HTTP/1.1 200 ")
        waiting.release()
        while b"[DONE]" not in received:
            received += sock.recv(65536)
        assert b'"content":"h"' in received


def test_a_client_that_reads_nothing_is_aborted_and_gets_few_tokens() -> None:
    given = 0

    def count(asked: Asked, so_far: int) -> None:
        nonlocal given
        given = so_far

    endless = ScriptedEngine(max_model_len=10**9, fail=count)
    with live_server(endless, slow_client_timeout_s=0.2) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        with sock:
            sock.sendall(
                raw_request(TEXT, {"prompt": "say:" + "x" * 100_000, "max_tokens": 99_999, "stream": True})
            )
            endless.wait_until(lambda: bool(endless.requests) and endless.requests[0].aborted, timeout=60)
    assert given < 3000, "what nobody reads is not generated"


def test_the_access_log_names_the_request_and_the_error(caplog: pytest.LogCaptureFixture) -> None:
    def fail(asked: Asked, given: int) -> BaseException | None:
        return RequestFailedError("NaN", code="nan_logits") if "bad" in asked.text and given else None

    caplog.set_level("INFO", logger="radixkv.access")
    with live_server(ScriptedEngine(fail=fail), access_log=True) as server, server.http() as client:
        for name, body in (
            ("fine", chat("say:fine")),
            ("wrong", chat("x", temperature=-1)),
            ("broken", chat("bad", stream=True)),
        ):
            client.post(CHAT, json=body, headers={"x-request-id": name})
        for probe in ("/health", "/health/ready", "/ping", "/metrics"):  # asked all the time: not logged
            client.get(probe)
    fine, wrong, broken = (
        record.getMessage() for record in caplog.records if record.name == "radixkv.access"
    )
    assert fine.endswith("id=fine")
    assert "error=" not in fine
    assert wrong.endswith(" error=invalid_value id=wrong")
    assert " 200! " in broken
    assert broken.endswith(" error=nan_logits id=broken")


def learn_how_the_engine_is(server: LiveServer) -> None:
    """An engine in another process tells how it is with every answer."""
    with server.http() as client:
        client.post("/tokenize", json={"prompt": "x"}).raise_for_status()


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/v1/messages"])
def test_a_full_queue_refuses_before_the_body_is_there(
    server: LiveServer, engine: ScriptedEngine, path: str
) -> None:
    engine.is_full = True
    learn_how_the_engine_is(server)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        "X-Request-Id: mine\r\nContent-Length: 1000000\r\n\r\n"
    ).encode()
    with server.connect() as sock, server.http() as client:
        sock.sendall(head)
        received = b""
        while b"engine_overloaded" not in received and b"overloaded_error" not in received:
            received += sock.recv(65536)
        assert received.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in received
        assert b"\r\nx-request-id: mine\r\n" in received
        line = f'radixkv_http_requests_total{{route="{path}",status="503"}} 1.0'
        assert line in client.get("/metrics").text
        # What the client sends nevertheless is thrown away, and the connection serves on.
        engine.is_full = False
        learn_how_the_engine_is(server)
        sock.sendall(b"x" * 1_000_000 + raw_request(TEXT, {"prompt": "say:fine"}))
        received = b""
        while b'"text":"fine"' not in received:
            chunk = sock.recv(65536)
            assert chunk, received
            received += chunk


def test_unhealthy_engine(server: LiveServer, engine: ScriptedEngine) -> None:
    with server.http() as client:
        assert client.get("/health").json() == {"status": "ok"}
        engine.is_healthy = False
        learn_how_the_engine_is(server)
        assert client.get("/health").status_code == 503
        assert client.head("/health").status_code == 503
        assert client.get("/health/ready").status_code == 503
