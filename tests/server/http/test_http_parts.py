# SPDX-License-Identifier: Apache-2.0
"""Parts of HTTP that have rules of their own, without a connection around them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import httpx
import pytest
from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixkv.engine.outputs import PromptOutcome
from radixkv_server.errors import ApiError
from radixkv_server.generation.progress import PromptProgress, Usage
from radixkv_server.http.body import HUGE_BYTES, BodyReader, StrictModel
from radixkv_server.http.middleware import HostOriginMiddleware, access_line, split_host
from radixkv_server.http.request_record import RequestRecord, attach_record
from radixkv_server.http.streaming import run_until_disconnect
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
    used = Usage([PromptProgress(9, outcome=PromptOutcome(9, num_cached_tokens=8))])
    record = RequestRecord("req_1", caller=Tenant("alice"), status=200, usage=used)
    scope = {"client": ("10.0.0.1", 5), "method": "GET", "path": "/x\n10.0.0.2 GET /y 200"}
    line = access_line(scope, record)
    assert "\n" not in line
    assert line.startswith("10.0.0.1 GET /x\\n10.0.0.2 GET /y 200 200 ")
    assert line.endswith("prompt=9 cached=8 output=0 key=alice id=req_1")


async def test_work_that_is_done_wins_over_a_disconnect() -> None:
    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def quick() -> str:
        return "done"

    assert await run_until_disconnect(gone, quick()) == "done"
