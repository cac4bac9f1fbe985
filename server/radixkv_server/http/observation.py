"""One record per HTTP request: what the access log and the request metrics say about it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv_server.http.errors import shutting_down

if TYPE_CHECKING:
    from radixkv_server.http.metrics import ServerMetrics

access_logger = logging.getLogger("radixkv.access")

STATUS_CLIENT_GONE = 499
_RECORD = "radixkv.record"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request so far; filled in as it goes through the server.

    Attributes:
        request_id: the `x-request-id` of the response: the client's own if it sent a sound one.
        tenant: name of the API key, or "" when no keys are configured.
        started: `time.perf_counter` at arrival.
        status: HTTP status sent; 499 when the client left first; None before either.
        prompt_tokens, cached_tokens, completion_tokens: as in `usage`.
        failed: an error was sent inside a stream that had begun with status 200.
    """

    request_id: str
    tenant: str = ""
    started: float = field(default_factory=time.perf_counter)
    status: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    failed: bool = False

    @property
    def age_s(self) -> float:
        return time.perf_counter() - self.started


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request that `scope` belongs to."""
    record = scope[_RECORD]
    assert isinstance(record, RequestRecord)
    return record


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value.decode("ascii"))
    return f"req_{uuid.uuid4().hex}"


class ObserveMiddleware:
    """Outermost ASGI middleware: opens the record, adds `x-request-id`, logs and counts at the end."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, access_log: bool) -> None:
        self.app = app
        self.metrics = metrics
        self.access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = scope[_RECORD] = RequestRecord(_request_id(scope))

        finished = False

        def finish() -> None:
            nonlocal finished
            if not finished:
                finished = True
                self._finish(scope, record)

        async def observed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            elif not message.get("more_body", False):
                finish()  # before the client can see the end, so that its next look at the metrics has it
            await send(message)

        try:
            await self.app(scope, receive, observed_send)
        except ClientDisconnect:
            record.status = STATUS_CLIENT_GONE
        except asyncio.CancelledError:
            # Only the server's own end cancels a request's task; a stream has said so already.
            if record.status is None:
                await shutting_down().response()(scope, receive, observed_send)
        finally:
            finish()

    def _finish(self, scope: Scope, record: RequestRecord) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self.metrics.observe_request(route, record)
        if self.access_log and route not in ("/health", "/metrics"):
            access_logger.info("%s", access_line(scope, record))


def access_line(scope: Scope, record: RequestRecord) -> str:
    """One short line; the path is escaped, so that a client can't forge lines."""
    client = scope.get("client")
    status = "-" if record.status is None else str(record.status)
    words = [
        client[0] if client else "-",
        scope["method"],
        ascii(scope["path"])[1:-1][:200],
        status + ("!" if record.failed else ""),
        f"{record.age_s:.3f}s",
    ]
    if record.prompt_tokens:
        words.append(
            f"prompt={record.prompt_tokens} cached={record.cached_tokens} output={record.completion_tokens}"
        )
    if record.tenant:
        words.append(f"key={record.tenant}")
    return " ".join(words)
