# SPDX-License-Identifier: Apache-2.0
"""GuardedProtocol: uvicorn's HTTP/1.1 protocol on h11, with deadlines and answers for bad clients.

A client that sends its request one byte at a time would hold a connection forever; one that sends a
megabyte of headers would get a plain-text 400. Here the first gets 408, the second 431, both in the dialect
of the path (where it has been read), and both connections are closed once the client has had time to read
the answer.

    connection made --header_timeout_s--> request line + headers complete
    headers complete --body_timeout_s--> body complete
    output buffer full --slow_client_timeout_s--> output buffer taken
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from radixkv_server.dialect import Dialects, dump
from radixkv_server.errors import ApiError
from radixkv_server.settings import ServerSettings


class StrictConnection(h11.Connection):
    """The server's side of a connection.

    - The size limit of a request's head also holds for a head that arrives in one read; h11 applies it only
      to heads in several reads.
    - A request with both Content-Length and Transfer-Encoding is refused. In HTTP/1.1 the second wins, but a
      proxy that goes by the first would take part of the body for the next request, or the other way round.

    Attributes:
        path: path of the request that is read or answered; "/" before it is known.
    """

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self.path = "/"
        self._max_head_bytes = max_head_bytes

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            h11.RemoteProtocolError: the client broke the protocol, or sent a request refused as above.
        """
        beginning = self.their_state is h11.IDLE
        if beginning:
            self.path = "/"
        try:
            event = super().next_event()
        except h11.RemoteProtocolError:
            if beginning:  # the answer to a head that is too large should be in the path's dialect, too
                words = self.trailing_data[0].partition(b"\r\n")[0].split(b" ")
                self.path = _path_of(words[1]) if len(words) == 3 else "/"
            raise
        if isinstance(event, h11.Request):
            self.path = _path_of(event.target)
            self._check(event)
        return event

    def _check(self, request: h11.Request) -> None:
        size = (
            len(request.method) + len(request.target) + sum(len(k) + len(v) + 4 for k, v in request.headers)
        )
        if size > self._max_head_bytes:
            raise h11.RemoteProtocolError("the request's head is too large", error_status_hint=431)
        names = {name for name, _ in request.headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding exclude each other")


def _path_of(target: bytes) -> str:
    return target.partition(b"?")[0].decode("latin-1")


# After an early error the client may still be sending. Closing at once would reset the connection and lose
# the answer, so its bytes are discarded for a moment first.
LINGER_S = 2.0

# Most bytes of an answer that the server keeps for a client that reads nothing, here and once more in the
# kernel: beyond them its request waits, and `slow_client_timeout_s` runs.
MAX_UNSENT_BYTES = 64 * 1024


class SlowClientAbort(asyncio.Protocol):
    """Abort a connection whose full output buffer is not taken in `slow_client_timeout_s`.

    A base of protocols of uvicorn's, before uvicorn's own class.
    """

    settings: ServerSettings
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _stalled: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.settings.slow_client_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._clear_stalled()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_stalled()
        super().connection_lost(exc)

    def _clear_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class GuardedProtocol(SlowClientAbort, H11Protocol):
    """A connection; `guarded_protocol` subclasses it with the server's settings and dialects."""

    dialects: Dialects

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = self._connection = StrictConnection(self.settings.max_header_bytes)
        self._deadline: asyncio.TimerHandle | None = None
        self._phase = "idle"
        self._lingering = False
        self._upgraded = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        super().connection_made(transport)
        self._enter("headers")

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter("idle")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        super().data_received(data)
        self._update_phase(received=True)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over to the WebSocket protocol, which has limits of its own."""
        self._upgraded = True
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_phase(received=False)

    def eof_received(self) -> None:
        if self._lingering:
            self.transport.close()

    def shutdown(self) -> None:
        if self._lingering:
            self.transport.close()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Called by the base class from its `except` clause for a request that h11 can't parse."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        if status == 431:
            limit = self.settings.max_header_bytes
            message = f"The request line and headers are larger than {limit:,} bytes."
            self._refuse(ApiError(431, message, code="headers_too_large"))
        else:
            self._refuse(ApiError(400, f"Not a valid HTTP/1.1 request: {error}.", code="invalid_http"))

    def _update_phase(self, received: bool) -> None:
        if self._lingering or self._upgraded or self.transport.is_closing():
            self._enter("idle")
        elif self.conn.their_state is h11.IDLE:
            # Between requests of a kept-alive connection, uvicorn's own timer rules until bytes arrive.
            if received or self.conn.trailing_data[0]:
                self._enter("headers")
            elif self._phase == "body":
                self._enter("idle")
        elif self.conn.their_state is h11.SEND_BODY:
            self._enter("body")
        else:
            self._enter("idle")

    def _enter(self, phase: str) -> None:
        if phase == self._phase:
            return
        self._phase = phase
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if phase != "idle":
            settings = self.settings
            seconds = settings.header_timeout_s if phase == "headers" else settings.body_timeout_s
            self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._phase == "headers" and not self.conn.trailing_data[0]:
            self.transport.close()  # nothing was asked, so there is nothing to answer
            return
        what = self._phase
        self._refuse(ApiError(408, f"The request's {what} took too long to arrive.", code="request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer without the app, if no answer has begun, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            dialect = self.dialects.of(self._connection.path)
            body = dump(dialect.error_body(error, None))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode("ascii")),
                (b"connection", b"close"),
            ]
            response = h11.Response(status_code=error.status, headers=headers)
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        self._lingering = True
        self._enter("idle")
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def guarded_protocol(settings: ServerSettings, dialects: Dialects) -> type[GuardedProtocol]:
    """Make the protocol class for uvicorn, bound to `settings` and `dialects`."""
    return type("GuardedProtocol", (GuardedProtocol,), {"settings": settings, "dialects": dialects})
