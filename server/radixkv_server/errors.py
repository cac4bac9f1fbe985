# SPDX-License-Identifier: Apache-2.0
"""ApiError: an error with the contents of its HTTP answer, and its conversion from radixkv's exceptions.

The dialect decides the form of the answer's body (see `radixkv_server.dialect`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from starlette.exceptions import HTTPException

from radixkv.errors import (
    ContextLengthExceededError,
    EngineOverloadedError,
    EngineStoppedError,
    InvalidRequestError,
    OutOfBlocks,
    RequestFailedError,
)
from radixkv_server.response_store import StoreError

#: By their codes, requests that failed while they ran and through no fault of the server's: statuses.
_FAILED = {
    "timeout": 504,
    "grammar_failed": 400,
    "no_token_left": 400,
    "context_length_exceeded": 400,
    "out_of_kv_blocks": 503,
}
_RETRY = {"Retry-After": "1"}


class ApiError(Exception):
    """Error with the contents of its HTTP answer.

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


def bad_request(message: str, *, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """Make a 400 about a field."""
    return ApiError(400, message, param=param, code=code)


def shutting_down() -> ApiError:
    """Make the error of requests that the server's shutdown ends."""
    headers = {"Retry-After": "1"}  # another server, or this one's successor, may be there by then
    return ApiError(503, "The server is shutting down.", code="shutting_down", headers=headers)


def to_api_error(error: BaseException) -> ApiError:
    """Convert any exception; an unknown one becomes a 500 that reveals no internals.

    Callers log unknown ones; `is_expected` tells which they are.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthExceededError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, InvalidRequestError):
        if error.code == "model_not_found":  # its adapter was unloaded while the request was read
            return ApiError(404, str(error), param="model", code=error.code)
        return ApiError(400, str(error), param=error.param, code=error.code or "invalid_value")
    if isinstance(error, EngineOverloadedError):
        seconds = max(1, math.ceil(error.retry_after_s))
        headers = {"Retry-After": str(seconds)}
        return ApiError(503, str(error), code="engine_overloaded", headers=headers)
    if isinstance(error, EngineStoppedError):
        wait = error.retry_after_s
        headers = {} if wait is None else {"Retry-After": str(max(1, math.ceil(wait)))}
        return ApiError(503, str(error) or "the engine has stopped", code="engine_stopped", headers=headers)
    if isinstance(error, OutOfBlocks):
        return ApiError(503, str(error), code="out_of_kv_blocks", headers=_RETRY)
    if isinstance(error, StoreError):
        code = "response_store_busy" if error.may_pass else "response_store_failed"
        return ApiError(503, str(error), code=code, headers=_RETRY if error.may_pass else None)
    if isinstance(error, RequestFailedError):
        failed = error.code or "request_failed"
        status = _FAILED.get(failed, 500)
        return ApiError(status, str(error), code=failed, headers=_RETRY if status == 503 else None)
    if isinstance(error, HTTPException):
        known = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(error.status_code, str(error.detail), code=known, headers=error.headers)
    return ApiError(500, "The server failed on this request; its log has the details.", code="internal_error")


def is_expected(error: BaseException) -> bool:
    """True for errors that are part of normal service, so that no traceback is logged for them."""
    api_error = to_api_error(error)
    return api_error.code != "internal_error"
