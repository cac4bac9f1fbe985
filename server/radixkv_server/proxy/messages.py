# SPDX-License-Identifier: Apache-2.0
"""Messages on a connection: the boundaries of its requests, and its answers.

Parsing is h11's. Bytes are passed on unchanged. Data that can't be parsed is passed on, too, and parsing of
the connection stops: the other side answers the sender, as without a proxy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import h11

from radixkv_server.proxy.passage import Passage

MAX_HEAD_BYTES = 1024 * 1024
PARSED_BYTES = 4096  # at once, of heads and of bodies in chunks


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Head of a request: its bytes and its parsed fields."""

    raw: bytes
    method: bytes
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]  # names in lower case
    version: bytes = b"1.1"

    def has(self, name: bytes) -> bool:
        """Tell whether a header is present; its name is in lower case."""
        return any(found == name for found, _ in self.headers)

    @property
    def content_length(self) -> int:
        """Length of the body in bytes; 0: not given, or overridden by `Transfer-Encoding`."""
        if self.has(b"transfer-encoding"):
            return 0
        return next((int(value) for name, value in self.headers if name == b"content-length"), 0)


class RequestStream:
    """Parser that cuts a client's bytes into heads of requests and the bytes after them.

    h11 parses at most `PARSED_BYTES` per piece, which takes milliseconds, so that the reader of the pieces
    can let other tasks run in between.

    Args:
        only_one: stop `feed` at the end of the first request.

    Attributes:
        is_opaque: True if the rest is passed on without parsing.
        num_ended: number of complete requests.
        body: receives the content of the current request's body, without its framing.
    """

    def __init__(self, *, only_one: bool = False) -> None:
        self.is_opaque = False
        self.num_ended = 0
        self.body: Callable[[bytes], None] = lambda data: None
        self._only_one = only_one
        self._parser: h11.Connection | None = None
        self._head = b""  # of a head that is not whole
        self._is_counted = False  # the body comes in one piece, by its length
        self._waiting = b""  # not parsed yet

    def feed(self, data: bytes) -> Iterator[RequestHead | bytes]:
        """Yield pieces to hand on, in order. O(data)."""
        self._waiting += data
        while self._waiting and not self.is_opaque and not (self._only_one and self.num_ended):
            if self._parser is None:
                self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
                self._head, self._is_counted = b"", False
            size = len(self._waiting) if self._is_counted else PARSED_BYTES
            piece, self._waiting = self._waiting[:size], self._waiting[size:]
            in_head = self._parser.their_state is h11.IDLE
            self._parser.receive_data(piece)
            if in_head:
                self._head += piece
                head = self._next_head()
                if head is None:
                    continue  # it is held
                self._is_counted = not head.has(b"transfer-encoding")
                yield head
                piece = self._parser.trailing_data[0]
            ended = self._read_body()
            rest = self._parser.trailing_data[0] if ended else b""
            self._waiting = rest + self._waiting
            if ended:
                self._parser = None
                self.num_ended += 1
            if len(rest) < len(piece):
                yield piece[: len(piece) - len(rest)]
        if self.is_opaque and (self._head or self._waiting):
            yield self.give_up()

    @property
    def has_begun(self) -> bool:
        """True once data was fed."""
        return self._parser is not None or self.num_ended > 0

    @property
    def is_between(self) -> bool:
        """True if no request is incomplete after its head."""
        return self._parser is None or self._parser.their_state is h11.IDLE

    def give_up(self) -> bytes:
        """Stop parsing; return the bytes held back so far, to be passed on."""
        self.is_opaque = True
        held, self._head, self._waiting = self._head + self._waiting, b"", b""
        return held

    def _next_head(self) -> RequestHead | None:
        """Return the head once it is complete."""
        assert self._parser is not None
        try:
            event = self._parser.next_event()
        except h11.RemoteProtocolError:
            self.is_opaque = True
            return None
        if not isinstance(event, h11.Request):
            return None
        raw = self._head[: len(self._head) - len(self._parser.trailing_data[0])]
        self._head = b""
        return RequestHead(raw, event.method, event.target, list(event.headers), event.http_version)

    def _read_body(self) -> bool:
        """Read available data of the body; return True at its end."""
        assert self._parser is not None
        try:
            while isinstance(event := self._parser.next_event(), h11.Data):
                self.body(event.data)
            return isinstance(event, h11.EndOfMessage)
        except h11.RemoteProtocolError:
            self.is_opaque = True
            return False


class AnswerWatch:
    """Parser that follows the answers to requests without changing them.

    Args:
        on_end: called with a request's passage once its answer is complete.
        on_switch: called when the connection leaves HTTP, or the data is not HTTP.
    """

    def __init__(self, on_end: Callable[[Passage], None], on_switch: Callable[[], None]) -> None:
        self.is_opaque = False
        self._on_end = on_end
        self._on_switch = on_switch
        self._open: deque[tuple[RequestHead, Passage]] = deque()
        self._parser: h11.Connection | None = None

    @property
    def is_open(self) -> bool:
        """True while more of an answer may come."""
        return self.is_opaque or bool(self._open)

    def expect(self, head: RequestHead, passage: Passage) -> None:
        """Expect an answer to this request."""
        self._open.append((head, passage))

    def feed(self, data: bytes) -> None:
        """Take in passing bytes; empty: the connection's end. O(data)."""
        while self._open and not self.is_opaque:
            head, passage = self._open[0]
            try:
                if self._parser is None:
                    self._parser = answer_parser(head)
                self._parser.receive_data(data)
                if not self._read_answer(passage):
                    return
            except h11.ProtocolError:
                self.is_opaque = True
                self._on_switch()
                return
            data = self._parser.trailing_data[0]
            self._parser = None
            self._open.popleft()
            self._on_end(passage)
            if not data:
                return

    def end(self) -> None:
        """End all open answers as incomplete, since the connection has ended."""
        while self._open:
            _, passage = self._open.popleft()
            passage.cut_off()
            self._on_end(passage)

    def _read_answer(self, passage: Passage) -> bool:
        """Read available data of an answer; return True at its end."""
        assert self._parser is not None
        while True:
            event = self._parser.next_event()
            if isinstance(event, h11.Response):
                passage.answered(event.status_code, list(event.headers))
            elif isinstance(event, h11.Data):
                passage.add_answer(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return True
            elif event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                return False
            elif event is h11.PAUSED:
                self.is_opaque = True
                self._on_switch()
                return False


def answer_parser(head: RequestHead) -> h11.Connection:
    """Make a parser for the answer to a request, which decides the answer's end."""
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
    parser.send(h11.Request(method=head.method, target=head.target, headers=list(head.headers)))
    return parser
