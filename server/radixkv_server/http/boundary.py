# SPDX-License-Identifier: Apache-2.0
"""The outermost layer of each request: access log, metrics and traces, and answers for exceptions."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv_server.dialect import Dialects, dump
from radixkv_server.errors import ApiError, is_expected, shutting_down, to_api_error
from radixkv_server.http.fields import warning_header
from radixkv_server.http.request_record import STATUS_CLIENT_GONE, RequestRecord, attach_record, record_of
from radixkv_server.http.unserved_routes import hint_of
from radixkv_server.metrics.request_metrics import ServerMetrics
from radixkv_server.metrics.tracing import Tracing

access_logger = logging.getLogger("radixkv.access")

#: Status of a connection that has become a WebSocket.
STATUS_SWITCHED = 101
# OpenAI's SDKs read the first, Anthropic's the second.
REQUEST_ID_HEADERS = ("x-request-id", "request-id")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value.decode("ascii"))
    return f"req_{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class RequestObserver:
    """Observer that counts, traces and logs requests that have ended.

    Args:
        access_log: write a line for each.
    """

    metrics: ServerMetrics
    tracing: Tracing | None
    access_log: bool

    def ended(self, scope: Scope, record: RequestRecord) -> None:
        """Count a request whose answer is complete."""
        route = getattr(scope.get("route"), "path", "unmatched")
        self.metrics.observe_request(route, record)
        self._tell(scope, route, record)

    def work_ended(self, scope: Scope, record: RequestRecord) -> None:
        """Count background work after the request of `scope`, which has been counted itself."""
        self.metrics.observe_usage(record)
        self._tell({**scope, "method": "BACKGROUND"}, scope["route"].path, record)

    def _tell(self, scope: Scope, route: str, record: RequestRecord) -> None:
        record.end()
        if self.tracing is not None:
            self.tracing.request_ended(scope, route, record)
        if self.access_log and route not in ("/health", "/metrics"):
            extra = {"fields": access_fields(scope, record)}
            access_logger.info("%s", access_line(scope, record), extra=extra)


@dataclass(eq=False)
class ObserveMiddleware:
    """Outermost ASGI middleware: opens the record, adds the request's id, and reports the end.

    The messages of a WebSocket are reported by its route; the connection itself counts with status 101.
    """

    app: ASGIApp
    observer: RequestObserver
    dialects: Dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        scope.setdefault("method", "WEBSOCKET")
        record = RequestRecord(_request_id(scope))
        attach_record(scope, record)

        finished = False

        def finish() -> None:
            nonlocal finished
            if not finished:
                finished = True
                self.observer.ended(scope, record)

        async def observed_send(message: Message) -> None:
            kind = message["type"].removeprefix("websocket.")
            if kind in ("http.response.start", "accept"):
                record.status = message.get("status", STATUS_SWITCHED)
                headers = MutableHeaders(scope={"headers": list(message.get("headers", ()))})
                for name in REQUEST_ID_HEADERS:
                    headers[name] = record.request_id
                if record.ignored or record.notes:
                    headers["warning"] = warning_header(record.ignored, record.notes)
                limits = record.limits()
                if limits:
                    headers.update(self.dialects.of(scope["path"]).limit_headers(limits))
                message = {**message, "headers": headers.raw}
            elif kind == "http.response.body" and not message.get("more_body", False):
                finish()  # before the client can see the end, so that its next look at the metrics has it
            await send(message)

        try:
            await self.app(scope, receive, observed_send)
        except ClientDisconnect:
            record.status = STATUS_CLIENT_GONE
        finally:
            finish()


def access_fields(scope: Scope, record: RequestRecord) -> dict[str, Any]:
    """Return the facts of `access_line` by name, for JSON logs."""
    client = scope.get("client")
    return {
        "client": client[0] if client else None,
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": record.status,
        "failed": record.failed,
        "seconds": round(record.age_s, 3),
        "prompt_tokens": record.usage.prompt_tokens,
        "cached_tokens": record.usage.cached_tokens,
        "completion_tokens": record.usage.completion_tokens,
        "tenant": record.tenant,
        "error_code": record.error_code or None,
        "request_id": record.request_id,
    }


def access_line(scope: Scope, record: RequestRecord) -> str:
    """Return one short line; the path is escaped, so that a client can't forge lines."""
    client = scope.get("client")
    status = "-" if record.status is None else str(record.status)
    words = [
        client[0] if client else "-",
        scope["method"],
        ascii(scope["path"])[1:-1][:200],
        status + ("!" if record.failed else ""),
        f"{record.age_s:.3f}s",
    ]
    usage = record.usage
    if usage.prompt_tokens:
        words.append(
            f"prompt={usage.prompt_tokens} cached={usage.cached_tokens} output={usage.completion_tokens}"
        )
    if record.tenant:
        words.append(f"key={record.tenant}")
    if record.error_code:
        words.append(f"error={record.error_code}")
    words.append(f"id={record.request_id}")
    return " ".join(words)


logger = logging.getLogger("radixkv.server")


async def raise_router_error(request: Request, error: Exception) -> Response:
    """Reword the router's own errors (no such route, wrong method) with the path, for the boundary."""
    assert isinstance(error, HTTPException)
    api_error = to_api_error(error)
    path = request.url.path[:200]
    if error.status_code == 404:
        hint = hint_of(path)
        api_error.message = f"Invalid URL ({request.method} {path})" + (f": {hint}." if hint else "")
    elif error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        api_error.message = f"{path} takes {allow or 'another method'}, not {request.method}."
    raise api_error


class ErrorBoundary:
    """ASGI middleware that turns every exception below it into an error response, once.

    After the response has started, or a WebSocket has opened, an answer is no longer possible: the exception
    propagates and the server closes the connection.
    """

    def __init__(self, app: ASGIApp, dialects: Dialects) -> None:
        self.app = app
        self.dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "websocket.close" and not started:  # the router's way to say 404
                raise ApiError(404, f"There is no WebSocket at {scope['path'][:200]}.", code="not_found")
            started = started or message["type"].endswith((".accept", ".response.start"))
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        except ClientDisconnect:
            raise
        except asyncio.CancelledError:
            # Only the server's shutdown cancels a request's task; a stream has sent its error already.
            if not started:
                await self._response(scope, shutting_down())(scope, receive, send)
        except Exception as error:
            if not is_expected(error):
                logger.exception("unexpected error in %s %s", scope["method"], ascii(scope["path"]))
            if started:
                raise
            await self._response(scope, error)(scope, receive, send)

    def _response(self, scope: Scope, error: BaseException) -> Response:
        api_error = to_api_error(error)
        record = record_of(scope)
        record.error_code = api_error.code or ""
        body = self.dialects.of(scope["path"]).error_body(api_error, record.request_id)
        return Response(
            dump(body), api_error.status, headers=api_error.headers, media_type="application/json"
        )
