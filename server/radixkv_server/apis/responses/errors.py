# SPDX-License-Identifier: Apache-2.0
"""ResponsesDialect: OpenAI's errors, and streams of typed, numbered events."""

from __future__ import annotations

from collections.abc import Callable

from radixkv_server.apis.common.openai_errors import OpenAIDialect
from radixkv_server.dialect import Json, dump
from radixkv_server.errors import ApiError

#: Makes the `error` event; the number of the event is set where it is sent.
ErrorForm = Callable[[ApiError], Json]


def frame(event: Json) -> bytes:
    """Frame an event as a server-sent event of its type."""
    return f"event: {event['type']}\n".encode() + b"data: " + dump(event) + b"\n\n"


def events_in(frames: bytes) -> list[bytes]:
    """Return the JSON of each event in what `frame` made; text without frames is one event."""
    return [one.rpartition(b"\ndata: ")[2] for one in frames.split(b"\n\n") if one]


def error_json(error: ApiError) -> Json:
    """Make the `error` event of a stream."""
    return {
        "type": "error",
        "sequence_number": 0,
        "code": error.code,
        "message": error.message,
        "param": error.param,
    }


class ResponsesDialect(OpenAIDialect):
    """The OpenAI API's errors, with an `error` event inside a stream."""

    def error_event(self, error: ApiError, request_id: str | None) -> bytes:
        return frame(error_json(error))
