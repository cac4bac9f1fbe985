"""OpenAI's dialect: errors as its SDKs turn them into exception classes, and its framing of events."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv_server.apis.common.limit_headers import limit_headers
from radixkv_server.dialect import Json, dump
from radixkv_server.errors import ApiError
from radixkv_server.tenants.rate_limits import LimitState

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
        return limit_headers(limits)


OPENAI = OpenAIDialect()
