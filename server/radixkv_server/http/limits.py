"""How large a request's body may be, and that it comes uncompressed. A pure ASGI middleware."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv_server.errors import ApiError
from radixkv_server.http.body import too_large


class BodyLimitMiddleware:
    """413 for a body over the limit, declared or not; 415 for a compressed one (it could be a bomb)."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        encoding = (headers.get("content-encoding") or "identity").lower()
        if encoding != "identity":
            message = f"Content-Encoding {encoding[:40]!r} is not supported: send the body uncompressed."
            raise ApiError(415, message, code="unsupported_content_encoding")
        declared = headers.get("content-length")
        if declared is not None and declared.isdigit() and int(declared) > self.max_body_bytes:
            raise too_large(self.max_body_bytes)
        taken = 0

        async def limited_receive() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.max_body_bytes:
                raise too_large(self.max_body_bytes)
            return message

        await self.app(scope, limited_receive, send)
