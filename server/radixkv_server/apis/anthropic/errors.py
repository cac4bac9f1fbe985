# SPDX-License-Identifier: Apache-2.0
"""Anthropic's dialect: errors that its SDKs turn into exception classes, framing of events, limits."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from radixkv_server.dialect import Json, dump
from radixkv_server.errors import ApiError
from radixkv_server.tenants.registry import LimitState

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def event(name: str, **fields: object) -> bytes:
    """Frame an event of a stream: its name, and data whose first field repeats the name."""
    return b"event: " + name.encode("ascii") + b"\ndata: " + dump({"type": name, **fields}) + b"\n\n"


class AnthropicDialect:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`; a ping is an event of that name."""

    ping = event("ping")

    def error_body(self, error: ApiError, request_id: str | None) -> Json:
        kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        message = error.message
        if error.param is not None and error.param not in message:
            message = f"{error.param}: {message}"
        error_body: Json = {"type": kind, "message": message}
        if error.code is not None and error.code.startswith("thread_"):
            error_body["details"] = {"error_code": error.code}  # SDKs begin anew by it
        return {"type": "error", "error": error_body, "request_id": request_id}

    def error_event(self, error: ApiError, request_id: str | None) -> bytes:
        body = self.error_body(error, request_id)
        del body["type"]
        return event("error", **body)

    def limit_headers(self, limits: Sequence[LimitState]) -> dict[str, str]:
        headers = {}
        for state in limits:
            headers[f"anthropic-ratelimit-{state.kind}-limit"] = str(state.limit)
            headers[f"anthropic-ratelimit-{state.kind}-remaining"] = str(state.remaining)
            headers[f"anthropic-ratelimit-{state.kind}-reset"] = _timestamp(time.time() + state.reset_s)
        return headers


def _timestamp(seconds: float) -> str:
    """Format a time by RFC 3339, in UTC, rounded up to seconds.

    >>> _timestamp(0.5)
    '1970-01-01T00:00:01Z'
    """
    return datetime.fromtimestamp(math.ceil(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
