"""Parts of the server that have rules of their own, without HTTP around them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixkv_server.errors import ApiError
from radixkv_server.generation.concurrency import gather_or_cancel, merge
from radixkv_server.http.body import HUGE_BYTES, BodyReader, StrictModel
from radixkv_server.http.disconnect import run_until_disconnect
from radixkv_server.http.hosts import HostOriginMiddleware, split_host
from radixkv_server.http.observation import access_line
from radixkv_server.http.request_record import RequestRecord, attach_record
from radixkv_server.tenants.tenant import Tenant


async def test_huge_bodies_are_parsed_one_at_a_time_and_off_the_event_loop() -> None:
    active = 0
    most = 0
    pause = threading.Event()
    threads: set[str] = set()

    class Slow(StrictModel):
        text: str

        @model_validator(mode="after")
        def _watch(self) -> Slow:
            nonlocal active, most
            active += 1
            most = max(most, active)
            pause.wait(0.05)  # long enough for another one to come in, if it may
            active -= 1
            threads.add(threading.current_thread().name)
            return self

    def request_of(body: bytes) -> Request:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        headers = [(b"content-type", b"application/json")]
        scope: Scope = {"type": "http", "method": "POST", "headers": headers}
        attach_record(scope, RequestRecord("req_1"))
        return Request(scope, receive)

    reader = BodyReader(max_depth=64, max_parts=1000)
    body = json.dumps({"text": "x" * (HUGE_BYTES + 1)}).encode()
    read = await asyncio.gather(*(reader.read(request_of(body), Slow, len(body)) for _ in range(4)))
    assert [len(item.text) for item in read] == [HUGE_BYTES + 1] * 4
    assert most == 1
    assert threading.current_thread().name not in threads
    with pytest.raises(ApiError, match="larger than 10 bytes"):
        await reader.read(request_of(body), Slow, 10)


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("example.com", "example.com"),
        ("Example.com.:8080", "example.com"),
        ("[::1]:80", "::1"),
        ("127.0.0.1", "127.0.0.1"),
        ("", None),
        (":80", None),
        ("a:b", None),
        ("u@h", None),
        ("h/p", None),
        ("[::1", None),
    ],
)
def test_split_host(header: str, host: str | None) -> None:
    assert split_host(header) == host


async def status_for(host: str, listening_on: str, *, allowed: tuple[str, ...] = (), origin: str = "") -> int:
    """Status that a request with this Host (and Origin) gets from a server that listens there."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("in")(scope, receive, send)

    guarded = HostOriginMiddleware(app, listening_on, allowed, ())
    headers = {"host": host, **({"origin": origin} if origin else {})}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://unused") as client:
        try:
            return (await client.get("/", headers=headers)).status_code
        except ApiError as error:
            return error.status


@pytest.mark.parametrize(
    ("host", "listening_on", "status"),
    [
        ("127.0.0.1:8000", "127.0.0.1", 200),
        ("localhost", "127.0.0.1", 200),
        ("[::1]:8000", "::1", 200),
        ("192.168.1.5", "127.0.0.1", 403),
        ("192.168.1.5:8000", "0.0.0.0", 200),
        ("[fe80::1]:8000", "::", 200),
        (socket.gethostname(), "0.0.0.0", 200),
        ("rebound.example", "0.0.0.0", 403),
        ("models.internal", "models.internal", 200),
    ],
)
async def test_hosts_by_where_the_server_listens(host: str, listening_on: str, status: int) -> None:
    assert await status_for(host, listening_on) == status


async def test_allowed_hosts_and_origins() -> None:
    assert await status_for("a.example", "0.0.0.0", allowed=("a.example",)) == 200
    assert await status_for("b.example", "0.0.0.0", allowed=("a.example",)) == 403
    assert await status_for("b.example", "0.0.0.0", allowed=("*",)) == 200
    assert await status_for("10.0.0.1:80", "0.0.0.0", origin="http://10.0.0.1:80") == 200, "its own page"
    assert await status_for("10.0.0.1:80", "0.0.0.0", origin="http://10.0.0.2") == 403
    assert await status_for("10.0.0.1:80", "0.0.0.0", origin="http://localhost:3000") == 403
    assert await status_for("localhost", "127.0.0.1", origin="http://localhost:3000") == 200


def test_access_lines_can_not_be_forged() -> None:
    record = RequestRecord("req_1", caller=Tenant("alice"), status=200, prompt_tokens=9, cached_tokens=8)
    scope = {"client": ("10.0.0.1", 5), "method": "GET", "path": "/x\n10.0.0.2 GET /y 200"}
    line = access_line(scope, record)
    assert "\n" not in line
    assert line.startswith("10.0.0.1 GET /x\\n10.0.0.2 GET /y 200 200 ")
    assert line.endswith("prompt=9 cached=8 output=0 key=alice id=req_1")


async def numbers(count: int, log: list[str], name: str, fail_at: int = -1) -> AsyncGenerator[int]:
    try:
        for i in range(count):
            if i == fail_at:
                raise ValueError(name)
            await asyncio.sleep(0)
            yield i
    finally:
        log.append(f"{name} closed")


async def test_merge_gives_every_item_once_and_in_order() -> None:
    log: list[str] = []
    got = [pair async for pair in merge([numbers(5, log, "a"), numbers(3, log, "b"), numbers(0, log, "c")])]
    for index, count in ((0, 5), (1, 3), (2, 0)):
        assert [item for stream, item in got if stream == index] == list(range(count))
    assert sorted(log) == ["a closed", "b closed", "c closed"]


async def test_merge_ends_all_streams_on_an_error_and_on_close() -> None:
    log: list[str] = []
    failing = merge([numbers(1000, log, "a"), numbers(1000, log, "b", fail_at=2)])
    with pytest.raises(ValueError, match="b"):
        async for _ in failing:
            pass
    assert sorted(log) == ["a closed", "b closed"]
    log.clear()
    left_early = merge([numbers(1000, log, "a"), numbers(1000, log, "b")])
    assert (await anext(left_early))[1] == 0
    await left_early.aclose()
    assert sorted(log) == ["a closed", "b closed"]


async def test_gather_or_cancel() -> None:
    ended: list[str] = []

    async def forever() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")
        return 0

    async def fail() -> int:
        raise ValueError("one")

    async def answer(value: int) -> int:
        return value

    assert await gather_or_cancel([answer(1), answer(2)]) == [1, 2]
    with pytest.raises(ValueError, match="one"):
        await gather_or_cancel([forever(), fail(), forever()])
    assert ended == ["cancelled", "cancelled"]


async def test_work_that_is_done_wins_over_a_disconnect() -> None:
    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def quick() -> str:
        return "done"

    assert await run_until_disconnect(gone, quick()) == "done"
