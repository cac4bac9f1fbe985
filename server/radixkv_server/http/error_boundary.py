# SPDX-License-Identifier: Apache-2.0
"""ErrorBoundary: turns exceptions into answers, in the dialect of the request's path."""

from __future__ import annotations

import asyncio
import logging

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv_server.dialect import Dialects, dump
from radixkv_server.errors import ApiError, is_expected, shutting_down, to_api_error
from radixkv_server.http.request_record import record_of
from radixkv_server.http.unserved_routes import hint_of

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
