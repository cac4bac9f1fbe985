"""The Responses API's dialect: OpenAI's errors, and streams of typed, numbered events."""

from __future__ import annotations

from radixkv_server.apis.common.openai_errors import OpenAIDialect
from radixkv_server.dialect import Json, dump
from radixkv_server.errors import ApiError


def frame(event: Json) -> bytes:
    """An event as server-sent event of its type."""
    return f"event: {event['type']}\n".encode() + b"data: " + dump(event) + b"\n\n"


def error_json(error: ApiError, sequence_number: int) -> Json:
    """The `error` event."""
    return {
        "type": "error",
        "sequence_number": sequence_number,
        "code": error.code,
        "message": error.message,
        "param": error.param,
    }


class ResponsesDialect(OpenAIDialect):
    """Errors as everywhere in OpenAI's API, but an `error` event inside a stream."""

    def error_event(self, error: ApiError, request_id: str | None) -> bytes:
        return frame(error_json(error, 0))
