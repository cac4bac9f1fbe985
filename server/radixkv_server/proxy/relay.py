"""One client's connection to the proxy and the one to its upstream: bytes go on as they come, both ways.

    client  --RequestStream-->  heads are addressed to the upstream, bodies go on byte for byte  -->  upstream
    client  <-----------------  every byte as it came  --AnswerWatch-------------------------------  upstream

Each client's connection has an upstream connection of its own, so that everything between two hops (keeping
alive, switching protocols, closing) holds end to end: whoever closes or resets one does so to the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable

from radixkv_server.proxy.messages import AnswerWatch, RequestHead, RequestStream
from radixkv_server.proxy.passage import Passage
from radixkv_server.proxy.upstream import READ_BYTES, Upstream

logger = logging.getLogger(__name__)

_LINGER_S = 2.0
_TOO_LARGE = (
    b"HTTP/1.1 413 Content Too Large\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"Connection: close\r\n\r\n%b"
)


class Relay:
    """Joins a client's connection with one to the upstream, for as long as both last.

    Args:
        on_passage: called with each request whose answer has ended; must not wait.
        max_body_bytes: longer request bodies are refused; None: any length.
        max_kept_bytes: of a body, for who looks at it.
    """

    def __init__(
        self,
        upstream: Upstream,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        on_passage: Callable[[Passage], None],
        *,
        max_body_bytes: int | None,
        max_kept_bytes: int,
    ) -> None:
        self._upstream = upstream
        self._from_client, self._to_client = client
        self._to_upstream: asyncio.StreamWriter | None = None
        self._on_passage = on_passage
        self._max_body_bytes = max_body_bytes
        self._max_kept_bytes = max_kept_bytes
        self._requests = RequestStream()
        self._answers = AnswerWatch(self._ended, self._switched)
        self._body_bytes = 0  # of the current request
        self._answering: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until one of both sides ends; closes both."""
        sending = asyncio.create_task(self._send_requests())
        try:
            await asyncio.wait([sending])  # it ends the other one, or is ended by it
            error = None if sending.cancelled() else sending.exception()
            if error is not None:
                reset(self._to_client)
                if not isinstance(error, OSError):
                    logger.error("a connection failed: %s", type(error).__name__)
        finally:
            sending.cancel()
            if self._answering is not None:
                self._answering.cancel()
            for writer in (self._to_upstream, self._to_client):
                if writer is not None:
                    writer.close()
            self._answers.end()

    # ------------------------------------------------------------------ to the upstream

    async def _send_requests(self) -> None:
        while data := await self._from_client.read(READ_BYTES):
            for piece in self._requests.feed(data):
                if isinstance(piece, RequestHead):
                    self._body_bytes = piece.content_length
                    if self._is_too_large():
                        return await self._refuse_body()
                    self._body_bytes = 0
                    writer = await self._connected()
                    writer.write(self._begin(piece))
                else:
                    self._body_bytes += len(piece)
                    if self._is_too_large() and not self._requests.is_opaque:
                        return await self._refuse_body()
                    writer = await self._connected()
                    writer.write(piece)
                await writer.drain()

    def _begin(self, head: RequestHead) -> bytes:
        """The head as it is sent on; its answer is expected."""
        passage = Passage.of(head.target, head.headers, str(self._upstream), self._max_kept_bytes)
        self._requests.body = passage.add_request
        self._answers.expect(head, passage)
        return self._upstream.addressed(head.raw)

    def _is_too_large(self) -> bool:
        return self._max_body_bytes is not None and self._body_bytes > self._max_body_bytes

    async def _refuse_body(self) -> None:
        text = b'{"error": {"message": "the body is longer than %d bytes", "type": "invalid_request_error"}}'
        body = text % (self._max_body_bytes or 0)
        self._to_client.write(_TOO_LARGE % (len(body), body))
        with contextlib.suppress(OSError, TimeoutError):
            self._to_client.write_eof()
            async with asyncio.timeout(_LINGER_S):  # closed with bytes unread, it would be reset
                while await self._from_client.read(READ_BYTES):
                    pass

    async def _connected(self) -> asyncio.StreamWriter:
        """The connection to the upstream, which is made when there is something to send."""
        if self._to_upstream is None:
            try:
                reader, self._to_upstream = await self._upstream.connect()
            except OSError as error:
                reason = error.strerror or type(error).__name__
                logger.warning("%s can't be reached: %s", self._upstream, reason)
                raise
            self._answering = asyncio.create_task(self._send_answers(reader, asyncio.current_task()))
        return self._to_upstream

    # ------------------------------------------------------------------ to the client

    async def _send_answers(self, reader: asyncio.StreamReader, sending: asyncio.Task[None] | None) -> None:
        try:
            while data := await reader.read(READ_BYTES):
                self._to_client.write(data)
                self._answers.feed(data)
                await self._to_client.drain()
            self._answers.feed(b"")
        except OSError:  # either side was reset: so is the client, if it is still there
            reset(self._to_client)
        finally:
            assert sending is not None
            sending.cancel()

    def _switched(self) -> None:
        """The answer left HTTP: the rest goes by without a look."""
        held = self._requests.give_up()
        if held and self._to_upstream is not None:
            self._to_upstream.write(held)

    def _ended(self, passage: Passage) -> None:
        passage.end()
        self._on_passage(passage)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection as a fault does: the other side sees a reset, and no end."""
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
