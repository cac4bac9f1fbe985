# SPDX-License-Identifier: Apache-2.0
"""The WebSocket of the Responses API: many responses over one connection, one after another in each stream.

    client: response.create {body of POST /v1/responses, stream_id?}  --> its events, as in a stream
            response.steer                                            --> response.steer.failed
            anything else                                             --> error

Each response is counted, limited, logged and traced as a request of its own. The connection remembers its
latest responses, stored or not, for `previous_response_id`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Any, Literal

from pydantic import model_validator
from starlette.websockets import WebSocket, WebSocketDisconnect

from radixkv_server.apis.common.openai_errors import OPENAI
from radixkv_server.apis.responses.errors import events_in
from radixkv_server.apis.responses.render import ResponseRenderer
from radixkv_server.apis.responses.schemas import ResponseRequest
from radixkv_server.apis.responses.serving import prepare_response
from radixkv_server.apis.responses.stored import StoredResponse
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json, dump
from radixkv_server.errors import ApiError, bad_request, is_expected, shutting_down, to_api_error
from radixkv_server.generation.generation import Generation, begin
from radixkv_server.http.body import ParamError, StrictModel, set_text_owner
from radixkv_server.http.middleware import authenticate
from radixkv_server.http.request_record import STATUS_CLIENT_GONE, RequestRecord, record_of
from radixkv_server.http.websocket import SERVICE_RESTART

logger = logging.getLogger("radixkv.server")

#: Seconds after which a connection is closed; OpenAI's limit.
MAX_AGE_S = 3600.0
#: Most responses of a connection that run or wait, and most that it remembers.
MAX_WAITING = 64
#: Most that run at once; the others wait, so that other clients' requests do not.
MAX_RUNNING = 8
MAX_REMEMBERED = 16

STREAM_ID = "stream_id"


class CreateEvent(ResponseRequest):
    """`response.create`: the body of POST /v1/responses, and the stream to answer in."""

    type: Literal["response.create"]
    stream_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _streams(cls, value: Any) -> Any:
        if value.get("stream") is False:
            raise ParamError("stream: a WebSocket always streams; leave it out.", "stream")
        if value.get("background"):
            raise ParamError("background: a WebSocket answers in the foreground only.", "background")
        return {**value, "stream": True}


class SteerEvent(StrictModel):
    """`response.steer`, which is answered with a refusal."""

    type: Literal["response.steer"]
    input: Any
    previous_response_id: str


_EVENTS: dict[str, type[CreateEvent | SteerEvent]] = {
    "response.create": CreateEvent,
    "response.steer": SteerEvent,
}


def _event_of(message: Json) -> type[CreateEvent | SteerEvent]:
    kind = message.get("type")
    model = _EVENTS.get(kind) if isinstance(kind, str) else None
    if model is None:
        known = ", ".join(_EVENTS)
        shown = ascii(kind)[:80]
        raise bad_request(f"type: {shown} is no event of a client's; send one of {known}.", param="type")
    return model


class ResponsesSocket:
    """A connection; `run` serves it to its end.

    Args:
        max_age_s: seconds after which it is closed.
    """

    def __init__(self, socket: WebSocket, context: ServerContext, max_age_s: float = MAX_AGE_S) -> None:
        self._socket = socket
        self._context = context
        self._ends_at = time.monotonic() + max_age_s
        self._running: dict[str | None, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._latest: dict[str, StoredResponse] = {}
        self._turns = asyncio.Semaphore(MAX_RUNNING)
        self._is_cut = False

    async def run(self) -> None:
        """Serve the connection until its client leaves, it is too old, or the server ends.

        Raises:
            ApiError: 429; the tenant has too many connections. 503; the server is about to end.
        """
        context, tenant = self._context, record_of(self._socket.scope).tenant
        context.check_serving()
        with context.count_socket(tenant):
            await self._socket.accept()
            code = STATUS_CLIENT_GONE
            try:
                code = await self._read()
            except WebSocketDisconnect:  # the client has left before it was answered
                pass
            except asyncio.CancelledError:  # the time of the server's shutdown is over
                self._is_cut, code = True, SERVICE_RESTART
            finally:
                if code == STATUS_CLIENT_GONE or self._is_cut:
                    for task in self._tasks:
                        task.cancel()
                if self._tasks:
                    await asyncio.wait(self._tasks)
            if code != STATUS_CLIENT_GONE:
                await self._close(code)

    async def _read(self) -> int:
        """Take messages to the end; returns the code to close with, or STATUS_CLIENT_GONE."""
        while (left := self._ends_at - time.monotonic()) > 0:
            try:
                message = await asyncio.wait_for(self._socket.receive(), left)
            except TimeoutError:
                break
            if message["type"] == "websocket.disconnect":
                return SERVICE_RESTART if message.get("code") == SERVICE_RESTART else STATUS_CLIENT_GONE
            try:
                await self._take(message)
            except WebSocketDisconnect:
                raise
            except Exception as error:
                await self._refuse(error)
            await asyncio.sleep(0)  # messages that wait are taken without a turn of the others
        text = "This connection has reached its longest time: open another one."
        await self._send(error_form(ApiError(400, text, code="websocket_connection_limit_reached")))
        return 1000

    async def _take(self, message: Mapping[str, Any]) -> None:
        """Begin a message's work.

        Raises:
            ApiError: it is refused.
        """
        data = message.get("bytes") or (message.get("text") or "").encode("utf-8", "surrogatepass")
        event, _ = await self._context.bodies.parse(data, _event_of, self._context.max_body_bytes())
        if isinstance(event, SteerEvent):
            await self._send(_steer_failed(event))
            return
        assert isinstance(event, CreateEvent)
        if len(self._tasks) >= MAX_WAITING:
            text = f"{MAX_WAITING} responses of this connection run or wait: wait for one."
            raise ApiError(429, text, code="too_many_responses")
        before = self._running.get(event.stream_id)
        task = asyncio.create_task(self._answer(event, before))
        self._tasks.add(task)
        self._running[event.stream_id] = task
        task.add_done_callback(functools.partial(self._done, event.stream_id))

    def _done(self, stream: str | None, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._running.get(stream) is task:
            del self._running[stream]

    async def _answer(self, event: CreateEvent, before: asyncio.Task[None] | None) -> None:
        """Answer one event, after the stream's previous one."""
        scope = self._socket.scope
        record = RequestRecord(f"{record_of(scope).request_id}-{time.monotonic_ns():x}")
        extra = {} if event.stream_id is None else {STREAM_ID: event.stream_id}
        begun: Generation[ResponseRenderer] | None = None
        last: bytes | None = None
        try:
            if before is not None:
                await asyncio.wait([before])
            async with self._turns:
                begun = await self._begin(event, record, extra)
                async with aclosing(begun.frames()) as frames:
                    async for frame in frames:
                        if begun.renderer.has_ended:
                            last = frame
                        else:
                            record.status = 200
                            await self._send_frames(frame)
            record.status = 200
        except (WebSocketDisconnect, asyncio.CancelledError) as error:
            record.status = record.status or STATUS_CLIENT_GONE
            if self._is_cut and isinstance(error, asyncio.CancelledError):
                last = self._failed(shutting_down(), record, begun, extra)
        except Exception as error:
            if not is_expected(error):
                logger.error("unexpected error in a response of a WebSocket", exc_info=error)
            last = self._failed(to_api_error(error), record, begun, extra)
        self._context.observer.ended(scope, record)  # before the client can see the end
        if last is not None:
            with suppress(WebSocketDisconnect):
                await self._send_frames(last)

    async def _begin(
        self, event: CreateEvent, record: RequestRecord, extra: Mapping[str, Any]
    ) -> Generation[ResponseRenderer]:
        context = self._context
        record.caller = authenticate(self._socket.scope, context.tenants)
        set_text_owner(record.tenant, event)
        context.check_admission()
        while len(self._latest) > MAX_REMEMBERED:
            del self._latest[next(iter(self._latest))]
        prepare = functools.partial(prepare_response, local=self._latest, error_form=error_form, extra=extra)
        return await begin(context, record, functools.partial(_ready, event), prepare)

    def _failed(
        self,
        error: ApiError,
        record: RequestRecord,
        begun: Generation[ResponseRenderer] | None,
        extra: Mapping[str, Any],
    ) -> bytes:
        """Return the last events of a response that failed."""
        record.error_code = error.code or ""
        if begun is not None and record.status == 200:
            record.failed = True
            return begun.renderer.error_event(error, record.request_id)
        record.status = error.status
        return dump({**error_form(error), **extra})

    async def _refuse(self, error: Exception) -> None:
        """Answer a message that started no response."""
        if not is_expected(error):
            logger.error("unexpected error in a message of a WebSocket", exc_info=error)
        record = RequestRecord(record_of(self._socket.scope).request_id)
        record.caller = record_of(self._socket.scope).caller
        last = self._failed(to_api_error(error), record, None, {})
        self._context.observer.ended(self._socket.scope, record)
        await self._send_frames(last)

    async def _send_frames(self, frames: bytes) -> None:
        for event in events_in(frames):
            await self._socket.send_text(event.decode())

    async def _send(self, event: Json) -> None:
        await self._socket.send_text(dump(event).decode())

    async def _close(self, code: int) -> None:
        with suppress(RuntimeError, WebSocketDisconnect):  # it is closed already
            await self._socket.close(code)


async def _ready(event: CreateEvent) -> CreateEvent:
    return event


def error_form(error: ApiError) -> Json:
    """Make the `error` event of a WebSocket."""
    body = OPENAI.error_body(error, None)["error"]
    if error.headers:
        body["headers"] = error.headers
    return {"type": "error", "status": error.status, "error": body}


def _steer_failed(event: SteerEvent) -> Json:
    return {
        "type": "response.steer.failed",
        "sequence_number": 0,
        "error": {
            "type": "invalid_request_error",
            "code": "steering_not_supported",
            "message": "Models served here can't be steered: send the input with the next response.create.",
        },
        "steer": {"input": event.input, "previous_response_id": event.previous_response_id},
    }
