"""API keys: who is calling. The tenant is bound here, on the server, to the name of the key."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv_server.errors import ApiError
from radixkv_server.http.request_record import record_of
from radixkv_server.tenants.registry import TenantRegistry


def presented_key(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """The key of a request: `Authorization: Bearer KEY` (OpenAI) or `x-api-key: KEY` (Anthropic)."""
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
        if scope["type"] == "http" and not self.keys.is_open and scope["path"] not in self.open_paths:
            self._authenticate(scope)
        await self.app(scope, receive, send)

    def _authenticate(self, scope: Scope) -> None:
        secret = presented_key(scope["headers"])
        challenge = {"WWW-Authenticate": "Bearer"}
        if secret is None:
            message = (
                "You didn't provide an API key: send it as the header Authorization: Bearer YOUR_KEY, "
                "or x-api-key: YOUR_KEY."
            )
            raise ApiError(401, message, code="missing_api_key", headers=challenge)
        tenant = self.keys.tenant_of(secret)
        if tenant is None:
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers=challenge)
        record_of(scope).caller = tenant


def require_admin(scope: Scope) -> None:
    """Let only admins on: for routes that show or change what belongs to others, or to all.

    Raises:
        ApiError: 403; the key is a user's.
    """
    if not record_of(scope).caller.is_admin:
        raise ApiError(403, "This needs an admin's API key; yours is a user's.", code="admin_only")
