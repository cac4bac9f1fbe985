# SPDX-License-Identifier: Apache-2.0
"""The WebSocket of the Responses API, as OpenAI's SDK speaks it, and as hostile clients do."""

from __future__ import annotations

import contextlib
import json
import logging
import socket as socket_module
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from openai import OpenAI
from response_prompts import last_asked, messages_in
from scripted_engine import Asked, ScriptedEngine
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from radixkv.errors import RequestFailedError
from radixkv_server.apis.responses.socket import MAX_RUNNING, MAX_WAITING
from radixkv_server.tenants.api_keys import stored_form

PATH = "/v1/responses"
LONG = "Be brief. " * 20


def fail(asked: Asked, given: int) -> BaseException | None:
    return (
        RequestFailedError("broke") if "break" in asked.text.rpartition("user\n")[2] and given == 2 else None
    )


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = ScriptedEngine(max_model_len=4096, fail=fail, caches=True, num_blocks=1000)
    with live_server(
        engine, api_keys=("ada=key-a", "bob=key-b"), max_websockets=3, max_body_bytes=100_000
    ) as running:
        yield running


@pytest.fixture
def held(server: LiveServer) -> Iterator[ScriptedEngine]:
    """The engine, which stops each answer after two tokens until the test releases it."""
    engine: ScriptedEngine = server.engine
    engine.hold_at = 2
    engine.gate.clear()
    yield engine
    engine.release()


def socket(
    server: LiveServer, key: str = "key-a", *, path: str = PATH, host: str = "127.0.0.1", headers: Any = ()
) -> ClientConnection:
    sent = {"Authorization": f"Bearer {key}", **dict(headers)}
    return connect(f"ws://{host}:{server.port}{path}", sock=server.connect(), additional_headers=sent)


@pytest.fixture
def raw(server: LiveServer) -> Iterator[ClientConnection]:
    with socket(server) as connection:
        yield connection


def create(text: str, **fields: Any) -> str:
    return json.dumps({"type": "response.create", "model": "scripted", "input": text, **fields})


def events(connection: ClientConnection, number: int = 1) -> list[Any]:
    """Events up to the end of so many responses."""
    seen: list[Any] = []
    while number:
        seen.append(json.loads(connection.recv(30)))
        number -= seen[-1]["type"] in ("response.completed", "response.failed", "response.incomplete")
    return seen


def error_of(connection: ClientConnection, message: str | bytes) -> Any:
    connection.send(message)
    answer = json.loads(connection.recv(30))
    assert answer["type"] == "error", answer
    return answer


def test_the_sdk_goes_on_over_one_connection(ada: OpenAI, server: LiveServer) -> None:
    with ada.responses.connect() as connection:
        connection.response.create(
            model="scripted", input="say:one", instructions="Be brief. " * 20, store=False
        )
        seen = []
        for event in connection:
            seen.append(event)
            if event.type == "response.completed":
                break
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        first = seen[-1].response
        assert first.output_text == "one"
        connection.response.create(
            model="scripted",
            input="say:two",
            instructions=LONG,
            previous_response_id=first.id,
            stream_id="lane",
        )
        for event in connection:
            assert event.stream_id == "lane"
            if event.type == "response.completed":
                break
    assert messages_in(last_asked(server))[2] == "assistant\none<|im_end|>", (
        "what was not stored is remembered"
    )
    assert event.response.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
    assert ada.responses.retrieve(event.response.id).output_text == "two"


async def test_the_asynchronous_sdk_and_the_events_of_a_stream(server: LiveServer, ada: OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    said = 'say:{"n":5}'
    streamed = [
        event.type for event in ada.responses.create(model="scripted", input=said, text=text, stream=True)
    ]
    async with server.async_openai("key-a") as client, client.responses.connect() as connection:
        await connection.response.create(model="scripted", input=said, text=text)
        seen = []
        async for event in connection:
            seen.append(event.type)
            if event.type == "response.completed":
                break
    assert (seen, event.response.output_text) == (streamed, '{"n":5}')


def test_lanes_run_side_by_side_and_each_in_order(raw: ClientConnection, held: ScriptedEngine) -> None:
    began = len(held.requests)
    for lane, text in (("a", "say:one"), ("a", "say:two"), ("b", "say:three")):
        raw.send(create(text, stream_id=lane))
    held.wait_until(lambda: len(held.requests) == began + 2)
    asked = {asked.text.partition("say:")[2][:3] for asked in held.requests[began:]}
    assert asked == {"one", "thr"}, "the second of a lane waits for the first"
    held.release()
    ended = [event for event in events(raw, 3) if event["type"] == "response.completed"]
    lane = [
        event["response"]["output"][0]["content"][0]["text"] for event in ended if event["stream_id"] == "a"
    ]
    assert lane == ["one", "two"]


def test_a_client_that_leaves_aborts_its_responses(server: LiveServer, held: ScriptedEngine) -> None:
    with socket(server) as connection:
        connection.send(create("say:hello"))
        while json.loads(connection.recv(30))["type"] != "response.output_text.delta":
            pass
    held.wait_until(lambda: held.requests[-1].aborted)
    with socket(server) as connection:
        connection.send(create("say:hello"))
        held.wait_until(lambda: len(held.requests) > 1 and not held.requests[-1].aborted)
        connection.socket.close()  # without a word
        connection.close_socket()
    held.wait_until(lambda: held.requests[-1].aborted)


def test_errors_leave_the_connection_open(raw: ClientConnection) -> None:
    refused = error_of(raw, create("say:x", temperature=-1, stream_id="lane"))
    assert (refused["status"], refused["error"]["param"], refused["stream_id"]) == (
        400,
        "temperature",
        "lane",
    )
    missing = error_of(raw, create("say:x", previous_response_id="resp_none"))
    assert (missing["status"], missing["error"]["code"]) == (404, "previous_response_not_found")
    raw.send(create("say:break"))
    *_, failure, end = events(raw)
    assert (failure["type"], failure["error"]["message"]) == ("error", "broke")
    assert (end["type"], end["response"]["status"]) == ("response.failed", "failed")
    assert end["sequence_number"] == failure["sequence_number"] + 1
    raw.send(create("say:still here"))
    assert events(raw)[-1]["response"]["status"] == "completed"


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ("no json", None, "invalid_json"),
        (b"\xff\xfe", None, "invalid_json"),
        ("[1]", None, "invalid_json"),
        ("[" * 1000, None, "invalid_json"),
        ("{}", "type", "invalid_value"),
        ('{"type": "session.update"}', "type", "invalid_value"),
        ('{"type": ["response.create"]}', "type", "invalid_value"),
        (create("x", unknown=1), "unknown", "unknown_parameter"),
        (create("x", stream=False), "stream", "invalid_value"),
        (create("x", background=True), "background", "invalid_value"),
        (create("x", stream_id=5), "stream_id", "invalid_type"),
        (create("\ud800"), None, "invalid_json"),
    ],
)
def test_hostile_messages_get_clear_errors(
    raw: ClientConnection, message: str | bytes, param: str | None, code: str
) -> None:
    error = error_of(raw, message)["error"]
    assert (error["param"], error["code"]) == (param, code)
    raw.send(create("say:ok"))
    assert events(raw)[-1]["type"] == "response.completed"


def test_a_message_that_is_too_large_closes_the_connection(raw: ClientConnection) -> None:
    raw.send(create("x" * 200_000))
    with pytest.raises(ConnectionClosed) as caught:
        raw.recv(30)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1009


def test_a_broken_frame_closes_the_connection(raw: ClientConnection) -> None:
    raw.socket.sendall(b"\xf1\x00")  # reserved bits, no mask
    with pytest.raises(ConnectionClosed) as caught:
        raw.recv(30)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1002


def test_too_many_responses_of_a_connection(raw: ClientConnection, held: ScriptedEngine) -> None:
    for _ in range(MAX_WAITING):
        raw.send(create("say:x", stream_id="lane"))
    raw.send(create("say:x"))
    while (event := json.loads(raw.recv(30)))["type"] != "error":
        pass
    assert (event["status"], event["error"]["code"]) == (429, "too_many_responses")


def test_steering_is_refused_in_its_own_words(raw: ClientConnection) -> None:
    steer = {"input": "left", "previous_response_id": "resp_x"}
    raw.send(json.dumps({"type": "response.steer", **steer}))
    failed = json.loads(raw.recv(30))
    assert (failed["type"], failed["error"]["code"], failed["steer"]) == (
        "response.steer.failed",
        "steering_not_supported",
        steer,
    )


def test_a_prompt_is_computed_ahead(raw: ClientConnection, server: LiveServer) -> None:
    raw.send(create("say:later", generate=False))
    prepared = events(raw)[-1]["response"]
    assert prepared["output"] == []
    raw.send(create("say:now", previous_response_id=prepared["id"]))
    assert events(raw)[-1]["response"]["output"][0]["content"][0]["text"] == "now"
    assert messages_in(last_asked(server))[0] == "user\nsay:later<|im_end|>"


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"key": "wrong"}, 401, "invalid_api_key"),
        ({"headers": {"Origin": "https://evil.example"}}, 403, "origin_not_allowed"),
        ({"host": "evil.example"}, 403, "host_not_allowed"),
        ({"path": "/v1/chat/completions"}, 404, "not_found"),
    ],
)
def test_refusals_before_it_opens(server: LiveServer, options: Any, status: int, code: str) -> None:
    with pytest.raises(InvalidStatus) as caught:
        socket(server, **options)
    assert caught.value.response.status_code == status
    assert json.loads(caught.value.response.body)["error"]["code"] == code


def test_no_tenant_has_too_many_and_none_takes_those_of_another(server: LiveServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket(server))
        with pytest.raises(InvalidStatus) as caught:
            socket(server)
        assert caught.value.response.status_code == 429
        with socket(server, "key-b") as other:
            other.send(create("say:bob"))
            stored = events(other)[-1]["response"]["id"]
            mine = stack.enter_context(socket(server, "key-b"))
            mine.send(create("say:x", previous_response_id=stored))
            assert events(mine)[-1]["type"] == "response.completed"
    with socket(server) as again:
        missing = error_of(again, create("say:x", previous_response_id=stored))
        assert missing["error"]["code"] == "previous_response_not_found"


def test_a_bad_handshake(server: LiveServer) -> None:
    head = {"Connection": "Upgrade", "Upgrade": "websocket", "x-api-key": "key-a"}
    with server.http() as http:
        assert http.get(PATH, headers=head).status_code == 400
        assert http.get(f"{PATH}/resp_x", headers={"x-api-key": "key-a"}).status_code == 404, (
            "it still serves"
        )


def test_each_response_is_counted_and_limited_as_a_request() -> None:
    def counted(http: httpx.Client) -> dict[str, float]:
        counter = f'radixkv_http_requests_total{{route="{PATH}"'
        lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(counter)]
        return {line.partition('status="')[2][:3]: float(line.rpartition(" ")[2]) for line in lines}

    with live_server(ScriptedEngine()) as server, server.http() as http, socket(server) as connection:
        connection.send(create("say:one"))
        usage = events(connection)[-1]["response"]["usage"]
        error_of(connection, create("x", temperature=-1))
        error_of(connection, "no json")
        assert counted(http) == {"200": 1, "400": 2}
        tokens = http.get("/metrics").text.partition("\nradixkv_prompt_tokens_total ")[2]
        assert float(tokens.partition("\n")[0]) == usage["input_tokens"]
        connection.close()
        deadline = time.monotonic() + 30
        while "101" not in counted(http):
            assert time.monotonic() < deadline


def test_a_tenants_limits_hold_for_each_response(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[tenants.ada]\nkeys = ["{stored_form("key-a")}"]\nrequests_per_minute = 1\n')
    with live_server(ScriptedEngine(), keys_file=str(keys)) as server, socket(server) as connection:
        connection.send(create("say:one"))
        assert events(connection)[-1]["type"] == "response.completed"
        refused = error_of(connection, create("say:two"))
        assert (refused["status"], refused["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused["error"]["headers"]["Retry-After"]) > 0


def test_shutdown_finishes_what_runs_and_closes(server: LiveServer) -> None:
    engine = ScriptedEngine()
    engine.hold_at = 2
    engine.gate.clear()
    engine.release = lambda: None  # type: ignore[method-assign]
    with contextlib.ExitStack() as stack:
        with live_server(engine, shutdown_grace_s=60) as ending:
            connection = stack.enter_context(socket(ending))
            connection.send(create("say:hello"))
            while json.loads(connection.recv(30))["type"] != "response.output_text.delta":
                pass
            threading.Timer(0.1, engine.gate.set).start()  # after the end of the server has begun
            reader: list[Any] = []
            thread = threading.Thread(target=lambda: reader.extend(events(connection)))
            thread.start()
        thread.join(30)
        assert reader[-1]["type"] == "response.completed"
        with pytest.raises(ConnectionClosed) as caught:
            connection.recv(30)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1012


def test_clients_that_leave_or_break_the_protocol_log_no_tracebacks(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            with socket(server) as connection:  # leaves before its refusals are written
                for _ in range(20):
                    connection.send("{")
                connection.socket.shutdown(socket_module.SHUT_RDWR)
        with socket(server) as connection:
            connection.socket.sendall(b"\x81\x82\x00\x00\x00\x00\xff\xfe")  # two bytes, masked with 0
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv(30)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1007
        head = (
            "GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        )
        for more in (
            "Sec-WebSocket-Version: 12\r\n",
            "Sec-WebSocket-Version: 13\r\n",
            "Sec-WebSocket-Key: x\r\n",
        ):
            with server.connect() as sock:
                sock.sendall(f"{head}{more}\r\n".encode())
                assert sock.recv(4096).startswith(b"HTTP/1.1 4")
    with server.http() as http:
        assert http.get("/health").status_code == 200
    ours = [record for record in caplog.records if record.name != "websockets.client"]  # runs in here, too
    assert not [record for record in ours if record.exc_info], caplog.text


def test_few_responses_of_a_connection_run_at_once(server: LiveServer, held: ScriptedEngine) -> None:
    before = len(held.requests)
    with socket(server) as connection:
        for number in range(MAX_RUNNING + 4):
            connection.send(create("say:wait", stream_id=f"lane {number}"))
        held.wait_until(lambda: len(held.requests) == before + MAX_RUNNING)
        connection.send("{")
        while json.loads(connection.recv(30))["type"] != "error":  # then all before it were read
            pass
        assert len(held.requests) == before + MAX_RUNNING
        held.release()
        events(connection, MAX_RUNNING + 4)
