# SPDX-License-Identifier: Apache-2.0
"""API keys: bind each request, on the server, to the tenant of its key."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv_server.errors import ApiError
from radixkv_server.http.request_record import record_of
from radixkv_server.tenants.registry import TenantRegistry
from radixkv_server.tenants.tenant import EVERYBODY, Tenant


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
            record_of(scope).caller = authenticate(scope, self.keys)
        await self.app(scope, receive, send)


def authenticate(scope: Scope, keys: TenantRegistry) -> Tenant:
    """Return the tenant of a request's key; everybody's where no keys are asked for.

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
