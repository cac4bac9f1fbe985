# SPDX-License-Identifier: Apache-2.0
"""A server of bytes: it reads one request after the other, and answers each with what its path says."""

from __future__ import annotations

import contextlib
import gzip
import re
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator

Script = Callable[["Conversation"], None]

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Conversation(socketserver.BaseRequestHandler):
    """One connection."""

    server: ScriptedUpstream

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while head := self.read_until(b"\r\n\r\n"):
                length = _LENGTH.search(head)
                body = self.read_chunked() if b"chunked" in head.lower() else b""
                body += self.read(int(length[1])) if length else b""
                self.server.received.append(head + body)
                name = head.split(b" ")[1].rpartition(b"/")[2].partition(b"?")[0].decode()
                SCRIPTS[name](self)
                self.server.finished.append(name)
                if name.startswith("last_"):
                    return

    def setup(self) -> None:
        self.kept = b""

    def more(self) -> bytes:
        data = self.request.recv(65536)
        if not data:
            raise ConnectionAbortedError
        self.kept += data
        return data

    def read(self, length: int) -> bytes:
        while len(self.kept) < length:
            self.more()
        data, self.kept = self.kept[:length], self.kept[length:]
        return data

    def read_until(self, end: bytes) -> bytes:
        while end not in self.kept:
            self.more()
        return self.read(self.kept.index(end) + len(end))

    def read_chunked(self) -> bytes:
        body = b""
        while not body.endswith(b"0\r\n\r\n"):
            body += self.read_until(b"\r\n")
        return body

    def send(self, data: bytes) -> None:
        self.request.sendall(data)

    def reset(self) -> None:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.request.close()
        raise ConnectionResetError

    def wait_for_end(self) -> None:
        """Until the other side has gone."""
        with contextlib.suppress(OSError):
            while self.request.recv(65536):
                pass


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Odd-Case: 1\r\nx-odd-case: 2\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
PACKED = gzip.compress(b'{"answer": 42}' * 1000, mtime=0)


def _drip(conversation: Conversation) -> None:
    for byte in CHUNKED + chunk(b"data: x\n\n") + chunk(b"") + b"":
        conversation.send(bytes([byte]))


def _websocket(conversation: Conversation) -> None:
    conversation.send(
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Accept: x\r\n\r\n\x81\x02hi"
    )
    frame = conversation.read(6)
    conversation.send(frame[::-1])
    raise ConnectionAbortedError


def _cut(conversation: Conversation) -> None:
    conversation.send(CHUNKED + b"ff\r\nhalf a chunk")
    raise ConnectionAbortedError


def _reset(conversation: Conversation, before: bytes) -> None:
    conversation.send(before)
    conversation.read_until(b"\r\n\r\n")  # another request: what was sent has been read
    conversation.reset()


def _after_end(conversation: Conversation) -> None:
    while conversation.request.recv(65536):
        pass
    conversation.send(HEAD + b"Content-Length: 4\r\n\r\nlate")
    raise ConnectionAbortedError


def _ended(conversation: Conversation) -> None:
    conversation.send(HEAD + b"Content-Length: 2\r\n\r\nok")
    conversation.request.shutdown(socket.SHUT_WR)
    rest = b""
    while data := conversation.request.recv(65536):
        rest += data
    conversation.server.received.append(rest)


def _two_parts(conversation: Conversation) -> None:
    """The second one when another request has come."""
    conversation.send(CHUNKED + chunk(b"data: 1\n\n"))
    conversation.read_until(b"\r\n\r\n")
    conversation.send(chunk(b"data: 2\n\n") + b"0\r\n\r\n")


def _endless(conversation: Conversation) -> None:
    """As much as is taken; what was sent is counted."""
    conversation.send(CHUNKED)
    piece = chunk(b"z" * 100_000)
    while True:
        conversation.request.sendall(piece)
        conversation.server.num_sent += len(piece)


SCRIPTS: dict[str, Script] = {
    "ready": lambda it: it.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),  # no such route
    "health": lambda it: it.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
    "length": lambda it: it.send(HEAD + b"Content-Length: 5\r\n\r\nhello"),
    "none": lambda it: it.send(b"HTTP/1.1 204 No Content\r\nx: y\r\n\r\n"),
    "head": lambda it: it.send(HEAD + b"Content-Length: 5000\r\n\r\n"),
    "chunks": lambda it: it.send(CHUNKED + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + b"0\r\n\r\n"),
    "trailers": lambda it: it.send(CHUNKED + chunk(b"x") + b"0\r\nX-Sum: 7\r\nx-other:  8\r\n\r\n"),
    "odd_chunks": lambda it: it.send(CHUNKED + b"0003;ext=1\r\nabc\r\n00\r\n\r\n"),
    "packed": lambda it: it.send(
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(PACKED) + PACKED
    ),
    "early": lambda it: it.send(
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
        + HEAD
        + b"Content-Length: 2\r\n\r\nok"
    ),
    "huge": lambda it: it.send(CHUNKED + chunk(b"z" * 3_000_000) + b"0\r\n\r\n"),
    "big_head": lambda it: it.send(
        b"HTTP/1.1 200 OK\r\nX: " + b"h" * 90_000 + b"\r\nContent-Length: 0\r\n\r\n"
    ),
    "drip": _drip,
    "websocket": _websocket,
    "last_unknown_length": lambda it: it.send(HEAD + b"\r\nuntil the end"),
    "last_old": lambda it: it.send(b"HTTP/1.0 200 Fine\r\n\r\nold"),
    "last_garbage": lambda it: it.send(b"\x00\x01 no HTTP at all \xff\r\n\r\n"),
    "last_half_head": lambda it: it.send(b"HTTP/1.1 200 OK\r\nContent-Le"),
    "last_empty": lambda it: None,
    "last_two_lengths": lambda it: it.send(HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc"),
    "last_closed": lambda it: it.send(HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\nok"),
    "cut": _cut,
    "reset": lambda it: it.reset(),
    "reset_head": lambda it: _reset(it, b"HTTP/1.1 200 OK\r\n"),
    "reset_body": lambda it: _reset(it, CHUNKED + chunk(b"data: 1\n\n")),
    "after_end": _after_end,
    "last_ended": _ended,
    "hang": lambda it: it.wait_for_end(),
    "endless_huge": _endless,
    "two_parts": _two_parts,
    "endless": lambda it: (it.send(CHUNKED + chunk(b"data: 1\n\n")), it.wait_for_end())[0],
}


class ScriptedUpstream(socketserver.ThreadingTCPServer):
    """Attributes:
    received: the requests, as they came.
    finished: names of the scripts that have ended.
    num_sent: bytes of endless answers that were taken.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Conversation)
        self.received: list[bytes] = []
        self.finished: list[str] = []
        self.num_sent = 0

    @property
    def port(self) -> int:
        return int(self.server_address[1])


@contextlib.contextmanager
def scripted_upstream() -> Iterator[ScriptedUpstream]:
    """One that runs."""
    with ScriptedUpstream() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
