# SPDX-License-Identifier: Apache-2.0
"""Middleware, from the outside in: access log, metrics and traces; answers for exceptions; access checks.

The checks come before a body is read: foreign hosts and origins, API keys, room in the queue. The Host check
stops DNS rebinding: a web page whose name has been pointed at 127.0.0.1 reaches a local server with the
page's own name in the Host header. The Origin check stops pages of other sites from calling a server that
happens to run on the visitor's machine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv_server.dialect import Dialects, dump
from radixkv_server.errors import ApiError, is_expected, shutting_down, to_api_error
from radixkv_server.http.background_requests import background_caller
from radixkv_server.http.fields import warning_header
from radixkv_server.http.request_record import (
    STATUS_CLIENT_GONE,
    RequestRecord,
    attach_record,
    record_of,
    session_of,
)
from radixkv_server.http.unserved_routes import hint_of
from radixkv_server.metrics.request_metrics import ServerMetrics
from radixkv_server.metrics.tracing import Tracing
from radixkv_server.tenants.registry import TenantRegistry
from radixkv_server.tenants.tenant import EVERYBODY, Tenant

logger = logging.getLogger("radixkv.server")
access_logger = logging.getLogger("radixkv.access")

#: Status of a connection that has become a WebSocket.
STATUS_SWITCHED = 101
# OpenAI's SDKs read the first, Anthropic's the second.
REQUEST_ID_HEADERS = ("x-request-id", "request-id")
#: Routes that balancers and scrapers ask all the time.
_PROBES = frozenset({"/health", "/health/ready", "/metrics", "/ping"})
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
        self._report(scope, route, record)

    def work_ended(self, scope: Scope, record: RequestRecord) -> None:
        """Count background work after the request of `scope`, which has been counted itself."""
        self.metrics.observe_usage(record)
        self._report({**scope, "method": "BACKGROUND"}, scope["route"].path, record)

    def _report(self, scope: Scope, route: str, record: RequestRecord) -> None:
        record.end()
        if self.tracing is not None:
            self.tracing.request_ended(scope, route, record)
        if self.access_log and route not in _PROBES:
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
        record.session, record.ends_session = session_of(Headers(scope=scope))
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


_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


def _as_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def split_host(value: str) -> str | None:
    """Return the lower-case host of a Host header without port and brackets; None when malformed."""
    try:
        parts = urlsplit("//" + value)
        parts.port  # noqa: B018 (raises on a malformed port)
        host = parts.hostname
    except ValueError:
        return None
    if not host or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        return None
    return host.rstrip(".")


def _is_loopback(host: str) -> bool:
    address = _as_ip(host)
    return host in _LOOPBACK_NAMES or (address is not None and address.is_loopback)


class HostOriginMiddleware:
    """ASGI middleware: 403 for foreign hosts and origins, CORS answers for allowed origins.

    Listening on a loopback address, the Host must be a loopback name or address. Listening elsewhere, it
    may be any IP address (a rebinding attack needs a name), this machine's name, or an allowed name. Browsers
    send the Origin with WebSockets, too, and leave its check to the server.
    """

    def __init__(
        self, app: ASGIApp, host: str, allowed_hosts: Iterable[str], allowed_origins: Iterable[str]
    ) -> None:
        self.app = app
        self.local_only = _is_loopback(host.lower())
        self.allowed_hosts = {name.lower().rstrip(".") for name in allowed_hosts}
        self.allowed_origins = {origin.lower().rstrip("/") for origin in allowed_origins}
        if not self.local_only:
            self.allowed_hosts |= {host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = self._check_host(headers)
        origin = headers.get("origin")
        if origin is not None:
            self._check_origin(origin, host)
        if origin is None or scope["type"] == "websocket":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "OPTIONS" and headers.get("access-control-request-method"):
            await self._preflight(headers, origin)(scope, receive, send)
            return

        async def cors_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered["Access-Control-Allow-Origin"] = origin
                answered["Access-Control-Expose-Headers"] = "x-request-id"
                answered.add_vary_header("Origin")
            await send(message)

        await self.app(scope, receive, cors_send)

    def _check_host(self, headers: Headers) -> str:
        value = headers.get("host") or ""
        host = split_host(value)
        if host is None:
            raise ApiError(400, "The Host header is missing or malformed.", code="invalid_host")
        if "*" in self.allowed_hosts or host in self.allowed_hosts or _is_loopback(host):
            return value.lower()
        if not self.local_only and _as_ip(host) is not None:
            return value.lower()
        raise ApiError(
            403,
            f"The host {host[:100]!r} is not served here; allow it with --allowed-host.",
            code="host_not_allowed",
        )

    def _check_origin(self, origin: str, host: str) -> None:
        wanted = origin.lower()
        if "*" in self.allowed_origins or wanted in self.allowed_origins:
            return
        try:
            parts = urlsplit(wanted)
        except ValueError:
            parts = urlsplit("")
        name = parts.hostname if parts.scheme in ("http", "https") else None
        if name and (parts.netloc == host or name in self.allowed_hosts):
            return
        if name and self.local_only and _is_loopback(name):
            return
        raise ApiError(
            403,
            f"Pages of {origin[:100]!r} may not call this server. Allow them with "
            f"--allowed-origin {origin[:100]}.",
            code="origin_not_allowed",
        )

    @staticmethod
    def _preflight(headers: Headers, origin: str) -> Response:
        answered = {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": headers.get("access-control-request-headers") or "*",
            "Access-Control-Max-Age": "600",
            "Vary": "Origin",
        }
        return Response(status_code=204, headers=answered)


def presented_key(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return the key of a request: `Authorization: Bearer KEY` (OpenAI) or `x-api-key: KEY` (Anthropic)."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, secret = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer" and secret.strip():
                return secret.strip()
        elif name == b"x-api-key" and value.strip():
            return value.decode("latin-1").strip()
    return None


class AuthMiddleware:
    """ASGI middleware: 401 without a valid key, on every route (known or not) but `open_paths`."""

    def __init__(self, app: ASGIApp, keys: TenantRegistry, open_paths: Collection[str]) -> None:
        self.app = app
        self.keys = keys
        self.open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope["path"] not in self.open_paths:
            record, own = record_of(scope), background_caller(scope)
            record.caller = own or authenticate(scope, self.keys)
            record.is_background = own is not None
        await self.app(scope, receive, send)


def authenticate(scope: Scope, keys: TenantRegistry) -> Tenant:
    """Return the tenant of a request's key, or everybody's if no keys are set.

    Raises:
        ApiError: 401; the request has no key, or one that is not known.
    """
    if keys.is_open:
        return EVERYBODY
    secret = presented_key(scope["headers"])
    challenge = {"WWW-Authenticate": "Bearer"}
    if secret is None:
        message = (
            "You didn't provide an API key: send it as the header Authorization: Bearer YOUR_KEY, "
            "or x-api-key: YOUR_KEY."
        )
        raise ApiError(401, message, code="missing_api_key", headers=challenge)
    tenant = keys.tenant_of(secret)
    if tenant is None:
        raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers=challenge)
    return tenant


def require_admin(scope: Scope) -> None:
    """Let only admins pass, for routes that show or change the data of other tenants or of all.

    Raises:
        ApiError: 403; the key is a user's.
    """
    if not record_of(scope).caller.is_admin:
        raise ApiError(403, "This needs an admin's API key; yours is a user's.", code="admin_only")


class AdmissionMiddleware:
    """ASGI middleware: calls `check` for each POST to one of `routes`, before routing and reading.

    A flood must not hold up other requests: a refusal here costs a fraction of a route's work.

    Args:
        routes: with plain paths; the access log and the metrics name them.
        check: raises the error that refuses a request. O(1).
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute], check: Callable[[], None]) -> None:
        self.app = app
        self.check = check
        self.routes = {route.path: route for route in routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self.routes.get(scope["path"])
            if route is not None:
                scope["route"] = route
                self.check()
        await self.app(scope, receive, send)
