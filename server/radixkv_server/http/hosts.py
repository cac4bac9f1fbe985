# SPDX-License-Identifier: Apache-2.0
"""HostOriginMiddleware: refuse requests for foreign hosts and from foreign origins.

The Host check stops DNS rebinding: a web page whose name has been pointed at 127.0.0.1 reaches a local
server with the page's own name in the Host header. The Origin check stops pages of other sites from
calling a server that happens to run on the visitor's machine.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv_server.errors import ApiError

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
