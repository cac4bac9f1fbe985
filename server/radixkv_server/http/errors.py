"""Errors as HTTP answers: ApiError, the mapping from radixkv's exceptions, and the boundary that renders.

Every error of the OpenAI routes has the body `{"error": {"message", "type", "param", "code"}}`, which is
what the OpenAI SDKs turn into their exception classes.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv.errors import (
    ContextLengthExceededError,
    EngineOverloadedError,
    EngineStoppedError,
    InvalidRequestError,
    OutOfBlocks,
    RequestFailedError,
)

logger = logging.getLogger("radixkv.server")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An error with everything its HTTP answer needs.

    Attributes:
        status: HTTP status code.
        message: one or two sentences for the user.
        param: the offending field, or None.
        code: machine-readable reason, or None.
        headers: extra response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's `error.type`."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's JSON object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The error as an HTTP response."""
        content = json.dumps(self.body(), ensure_ascii=True).encode("ascii")
        return Response(content, self.status, headers=self.headers, media_type="application/json")


def bad_request(message: str, *, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A 400 about one field."""
    return ApiError(400, message, param=param, code=code)


def shutting_down() -> ApiError:
    """The answer to requests that the end of the server cuts off."""
    return ApiError(503, "The server is shutting down.", code="shutting_down")


def to_api_error(error: BaseException) -> ApiError:
    """The answer to any exception; an unknown one becomes a 500 that tells nothing of the inside.

    Callers log unknown ones; `is_expected` tells which they are.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthExceededError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.param, code=error.code or "invalid_value")
    if isinstance(error, EngineOverloadedError):
        seconds = max(1, math.ceil(error.retry_after_s))
        headers = {"Retry-After": str(seconds)}
        return ApiError(503, str(error), code="engine_overloaded", headers=headers)
    if isinstance(error, EngineStoppedError):
        return ApiError(503, str(error) or "the engine has stopped", code="engine_stopped")
    if isinstance(error, OutOfBlocks):
        return ApiError(503, str(error), code="out_of_kv_blocks", headers={"Retry-After": "1"})
    if isinstance(error, RequestFailedError):
        status = 504 if error.code == "timeout" else 500
        return ApiError(status, str(error), code=error.code or "request_failed")
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
    return ApiError(500, "The server failed on this request; its log has the details.", code="internal_error")


def is_expected(error: BaseException) -> bool:
    """True for errors that are part of normal service, so that no traceback is logged for them."""
    api_error = to_api_error(error)
    return api_error.code != "internal_error"


async def http_exception_response(request: Request, error: Exception) -> Response:
    """Answer for the router's own errors (no such route, wrong method), in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    api_error = to_api_error(error)
    if error.status_code == 404:
        api_error.message = f"Invalid URL ({request.method} {request.url.path})"
    elif error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        api_error.message = f"{request.url.path} takes {allow or 'another method'}, not {request.method}."
    return api_error.response()


class ErrorBoundary:
    """ASGI middleware that turns every exception below it into an error response, once.

    After the response has started nothing can be answered any more: the exception goes on up and the
    server closes the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        except ClientDisconnect:
            raise
        except Exception as error:
            if not is_expected(error):
                logger.exception("unexpected error in %s %s", scope["method"], ascii(scope["path"]))
            if started:
                raise
            await to_api_error(error).response()(scope, receive, send)
