# SPDX-License-Identifier: Apache-2.0
"""Both ends of the proxied traffic: an upstream's connection, and a client's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable

from radixkv_server.proxy.upstream import READ_BYTES

#: Bytes that may wait for a client; above, the upstream is not read.
WAITING_BYTES = 64 * 1024
_REFUSED_S = 2.0  # in which a refused client may finish its request


def _ignore(data: bytes) -> None:
    """Drop data that belongs to no request."""


class UpstreamSide(asyncio.Protocol):
    """Connection to an upstream, which passes bytes on as soon as they come.

    Args:
        on_fault: called when the connection is lost, and was not closed.

    Attributes:
        on_data: called with received bytes.
        transport: None until it is connected.
        ended: done when nothing more comes.
        is_faulty: the connection was lost.
    """

    def __init__(
        self, on_data: Callable[[bytes], None] = _ignore, on_fault: Callable[[], None] | None = None
    ) -> None:
        self.on_data = on_data
        self.transport: asyncio.Transport | None = None
        self.is_faulty = False
        self._on_fault = on_fault
        self._can_write = asyncio.Event()
        self._can_write.set()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.on_data(data)

    def eof_received(self) -> bool:
        """Tell the transport whether to stay open for writing."""
        self._end()
        return self.transport is not None and self.transport.can_write_eof()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_faulty = error is not None
        if error is not None and self._on_fault is not None:
            self._on_fault()
        self._end()
        self._can_write.set()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    async def write(self, data: bytes | memoryview) -> None:
        """Send data, and wait while the write buffer is too full.

        Raises:
            ConnectionResetError: the connection is closed.
        """
        assert self.transport is not None
        if not self.transport.is_closing():
            self.transport.write(data)
            await self._can_write.wait()
        if self.transport.is_closing():
            raise ConnectionResetError("the upstream has gone")

    def write_eof(self) -> bool:
        """End the sending side; return True if that is possible and answers still come."""
        if self.transport is None or not self.transport.can_write_eof():
            return False
        with contextlib.suppress(OSError):
            self.transport.write_eof()
        return not self.ended.done()

    @property
    def is_idle(self) -> bool:
        """True if the connection is open and its write buffer empty."""
        return (
            not self.ended.done()
            and self.transport is not None
            and not self.transport.get_write_buffer_size()
        )

    def close(self, *, is_faulty: bool = False) -> None:
        """Close the connection after its pending writes; reset it at once if it is faulty."""
        if self.transport is not None:
            _reset(self.transport) if is_faulty else self.transport.close()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class ClientSide:
    """A client's connection.

    Args:
        reader, writer: of it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._transport = writer.transport
        self._resuming: asyncio.Task[None] | None = None

    async def read(self) -> bytes:
        """Read data from the client; empty: it has ended its side.

        Raises:
            OSError: the connection was lost.
        """
        return await self._reader.read(READ_BYTES)

    def write(self, data: bytes) -> None:
        """Send data to the client."""
        self._transport.write(data)

    def hand_on(self, data: bytes, source: UpstreamSide) -> None:
        """Send an upstream's data at once; pause reading the upstream while the write buffer is too full."""
        self._transport.write(data)
        waiting = self._transport.get_write_buffer_size()
        if waiting > WAITING_BYTES and self._resuming is None and source.transport is not None:
            self._resuming = asyncio.create_task(self._resume(source.transport))

    async def _resume(self, transport: asyncio.Transport) -> None:
        with contextlib.suppress(OSError):
            transport.pause_reading()
            await self._writer.drain()
        self._resuming = None
        if not transport.is_closing():
            transport.resume_reading()

    @property
    def is_gone(self) -> bool:
        """True if the client has left."""
        return self._transport.is_closing()

    def write_eof(self) -> None:
        """End the sending side.

        Raises:
            OSError: the connection was lost.
        """
        self._writer.write_eof()

    async def refuse(self, answer: bytes) -> None:
        """Send the last answer, and drain unread bytes, which would cause a reset on closing."""
        self._writer.write(answer)
        with contextlib.suppress(OSError, TimeoutError):
            self._writer.write_eof()
            async with asyncio.timeout(_REFUSED_S):
                while await self.read():
                    pass

    def close(self, *, is_faulty: bool = False) -> None:
        """Close the connection after its pending writes; reset it at once if it is faulty."""
        if self._resuming is not None:
            self._resuming.cancel()
        _reset(self._transport) if is_faulty else self._transport.close()


def _reset(transport: asyncio.WriteTransport) -> None:
    """Close a connection so that the other side sees a reset."""
    with contextlib.suppress(OSError, AttributeError):
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
    transport.abort()


def refusal(status: int, reason: bytes, message: bytes, kind: bytes, headers: bytes = b"") -> bytes:
    """Make an answer of the proxy itself, after which the connection is closed."""
    body = b'{"error": {"message": "%b", "type": "%b"}}' % (message, kind)
    length = b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
    head = b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\n" % (status, reason)
    return head + headers + length + body
