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

#: For a client to finish after the upstream has, and for one that was refused.
_LINGER_S = 30.0
_REFUSED_S = 2.0
#: What waits for a client: above, the upstream is not read.
WAITING_BYTES = 64 * 1024
_TOO_LARGE = (
    b"HTTP/1.1 413 Content Too Large\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"Connection: close\r\n\r\n%b"
)


class _UpstreamSide(asyncio.Protocol):
    """The connection to the upstream, whose bytes are handed over in the moment in which they come.

    Attributes:
        ended: nothing more comes; its exception: the connection failed.
    """

    transport: asyncio.Transport

    def __init__(self, on_data: Callable[[bytes], None], on_fault: Callable[[], None]) -> None:
        self._on_data = on_data
        self._on_fault = on_fault
        self._can_write = asyncio.Event()
        self._can_write.set()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._on_data(data)

    def eof_received(self) -> bool:
        """Whether it can be written to all the same."""
        self._end()
        return self.transport.can_write_eof()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._on_fault()
        self._end()
        self._can_write.set()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    async def write(self, data: bytes) -> None:
        """Send it, and wait while too much waits to be sent.

        Raises:
            ConnectionResetError: the connection is no more.
        """
        if not self.transport.is_closing():
            self.transport.write(data)
            await self._can_write.wait()
        if self.transport.is_closing():
            raise ConnectionResetError("the upstream has gone")

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Relay:
    """Joins a client's connection with one to the upstream, for as long as both last.

    Args:
        on_begin: called with each request once it is whole; must not wait.
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
        on_begin: Callable[[Passage], None],
        max_body_bytes: int | None,
        max_kept_bytes: int,
    ) -> None:
        self._upstream = upstream
        self._from_client, self._to_client = client
        self._client: asyncio.WriteTransport = self._to_client.transport
        self._to_upstream: _UpstreamSide | None = None
        self._on_begin = on_begin
        self._on_passage = on_passage
        self._max_body_bytes = max_body_bytes
        self._max_kept_bytes = max_kept_bytes
        self._requests = RequestStream()
        self._asking: Passage | None = None  # its body has not ended
        self._answers = AnswerWatch(self._ended, self._switched)
        self._body_bytes = 0  # of the current request
        self._is_refused = False
        self._is_faulty = False
        self._connecting = asyncio.get_running_loop().create_future()
        self._resuming: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until both sides have ended, or one of them fails; closes both."""
        sending = asyncio.create_task(self._send_requests())
        answering = asyncio.create_task(self._wait_for_end())
        try:
            await asyncio.wait([sending, answering], return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                await self._finish_request(sending)
            elif sending.exception() is None and not self._is_refused and self._to_upstream is not None:
                await self._finish_answer(self._to_upstream)
            if sending.done() and (error := sending.exception()) is not None:
                self._is_faulty = True
                if not isinstance(error, OSError):
                    logger.error("a connection failed: %s", type(error).__name__)
        finally:
            sending.cancel()
            answering.cancel()
            if self._resuming is not None:
                self._resuming.cancel()
            upstream = None if self._to_upstream is None else self._to_upstream.transport
            for transport in (upstream, self._client):
                if transport is not None:
                    reset(transport) if self._is_faulty else transport.close()
            self._answers.end()

    async def _finish_request(self, sending: asyncio.Task[None]) -> None:
        """The upstream has ended its side: so does the proxy, and hands on what the client still sends."""
        if self._is_faulty:
            return
        with contextlib.suppress(OSError):
            self._to_client.write_eof()
            await asyncio.wait([sending], timeout=_LINGER_S)

    async def _finish_answer(self, upstream: _UpstreamSide) -> None:
        """The client has ended its side: so does the proxy, and hands back what still comes."""
        if upstream.transport.can_write_eof():
            with contextlib.suppress(OSError):
                upstream.transport.write_eof()
                await upstream.ended

    # ------------------------------------------------------------------ to the upstream

    async def _send_requests(self) -> None:
        while data := await self._from_client.read(READ_BYTES):
            for piece in self._requests.feed(data):
                if isinstance(piece, RequestHead):
                    self._asked()
                    self._body_bytes = piece.content_length
                    if self._is_too_large():
                        return await self._refuse_body()
                    self._body_bytes = 0
                    upstream = await self._connected()
                    piece = self._begin(piece)
                else:
                    self._body_bytes += len(piece)
                    if self._is_too_large() and not self._requests.is_opaque:
                        return await self._refuse_body()
                    upstream = await self._connected()
                await upstream.write(piece)
            if self._requests.is_between:
                self._asked()

        held = self._requests.give_up()  # of a head that is not whole
        if held and self._to_upstream is not None:
            await self._to_upstream.write(held)

    def _asked(self) -> None:
        """The current request is whole; not told where its answer has ended already."""
        passage, self._asking = self._asking, None
        if passage is not None and passage.seconds is None:
            self._on_begin(passage)

    def _begin(self, head: RequestHead) -> bytes:
        """The head as it is sent on; its answer is expected."""
        passage = Passage.of(head.target, head.headers, str(self._upstream), self._max_kept_bytes)
        self._requests.body = passage.add_request
        self._asking = passage
        self._answers.expect(head, passage)
        return self._upstream.addressed(head.raw)

    def _is_too_large(self) -> bool:
        return self._max_body_bytes is not None and self._body_bytes > self._max_body_bytes

    async def _refuse_body(self) -> None:
        self._is_refused = True
        text = b'{"error": {"message": "the body is longer than %d bytes", "type": "invalid_request_error"}}'
        body = text % (self._max_body_bytes or 0)
        self._to_client.write(_TOO_LARGE % (len(body), body))
        with contextlib.suppress(OSError, TimeoutError):
            self._to_client.write_eof()
            async with asyncio.timeout(_REFUSED_S):  # closed with bytes unread, it would be reset
                while await self._from_client.read(READ_BYTES):
                    pass

    async def _connected(self) -> _UpstreamSide:
        """The connection to the upstream, which is made when there is something to send."""
        if self._to_upstream is None:
            side = _UpstreamSide(self._answered, self._upstream_failed)
            try:
                await self._upstream.connect_to(side)
            except OSError as error:
                reason = error.strerror or type(error).__name__
                logger.warning("%s can't be reached: %s", self._upstream, reason)
                raise
            self._to_upstream = side
            self._connecting.set_result(side)
        return self._to_upstream

    # ------------------------------------------------------------------ to the client

    async def _wait_for_end(self) -> None:
        """Of the upstream's answers."""
        side: _UpstreamSide = await self._connecting
        await side.ended
        self._answers.feed(b"")

    def _answered(self, data: bytes) -> None:
        """Bytes of the upstream: they go on at once, and are looked at then."""
        client = self._client
        client.write(data)
        self._answers.feed(data)
        if client.get_write_buffer_size() > WAITING_BYTES and self._resuming is None:
            self._resuming = asyncio.create_task(self._wait_for_client())
        if client.is_closing() and self._to_upstream is not None:
            self._upstream_failed()  # nobody takes it

    async def _wait_for_client(self) -> None:
        """Read no more of the upstream until the client has taken what there is."""
        side: _UpstreamSide = await self._connecting
        with contextlib.suppress(OSError):
            side.transport.pause_reading()
            await self._to_client.drain()
        self._resuming = None
        if not side.transport.is_closing():
            side.transport.resume_reading()

    def _upstream_failed(self) -> None:
        """One side is no more: neither is the other."""
        self._is_faulty = True
        reset(self._client)
        if self._to_upstream is not None:
            reset(self._to_upstream.transport)

    def _switched(self) -> None:
        """The answer left HTTP: the rest goes by without a look."""
        held = self._requests.give_up()
        if held and self._to_upstream is not None:
            self._to_upstream.transport.write(held)

    def _ended(self, passage: Passage) -> None:
        passage.end()
        self._on_passage(passage)


def reset(connection: asyncio.StreamWriter | asyncio.WriteTransport) -> None:
    """Close a connection as a fault does: the other side sees a reset, and no end."""
    transport = connection.transport if isinstance(connection, asyncio.StreamWriter) else connection
    with contextlib.suppress(OSError, AttributeError):
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
    transport.abort()
