# SPDX-License-Identifier: Apache-2.0
"""OpenAI's dialect: errors that its SDKs turn into exception classes, and its framing of events."""

from __future__ import annotations

import math
from collections.abc import Sequence

from radixkv_server.dialect import Json, dump
from radixkv_server.errors import ApiError
from radixkv_server.tenants.registry import LimitState

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class OpenAIDialect:
    """`{"error": {"message", "type", "param", "code"}}`; pings are comment lines, which SDKs skip.

    An error event takes the place of `[DONE]`.
    """

    ping = b": ping\n\n"

    def error_body(self, error: ApiError, request_id: str | None) -> Json:
        kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
        return {
            "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code},
        }

    def error_event(self, error: ApiError, request_id: str | None) -> bytes:
        return b"data: " + dump(self.error_body(error, request_id)) + b"\n\n"

    def limit_headers(self, limits: Sequence[LimitState]) -> dict[str, str]:
        """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}` for the limits there are."""
        headers = {}
        for state in limits:
            headers[f"x-ratelimit-limit-{state.kind}"] = str(state.limit)
            headers[f"x-ratelimit-remaining-{state.kind}"] = str(state.remaining)
            headers[f"x-ratelimit-reset-{state.kind}"] = duration(state.reset_s)
        return headers


OPENAI = OpenAIDialect()


def duration(seconds: float) -> str:
    """Format seconds as OpenAI does, rounded up to milliseconds below a second and to seconds above.

    >>> duration(0), duration(0.0171), duration(1.2), duration(360)
    ('0s', '18ms', '2s', '6m0s')
    """
    if seconds <= 0:
        return "0s"
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(math.ceil(seconds - 1e-6), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
