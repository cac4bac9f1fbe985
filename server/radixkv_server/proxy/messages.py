# SPDX-License-Identifier: Apache-2.0
"""What goes by on a connection: where its requests begin and end, and what its answers are.

Parsing is h11's. Bytes are handed on as they came; what can't be parsed is handed on, too, and no longer
looked at: whoever sent it is answered by the other side, as without a proxy.
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
    """The head of a request: as it came, and what it says."""

    raw: bytes
    method: bytes
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]  # names in lower case
    version: bytes = b"1.1"

    def has(self, name: bytes) -> bool:
        """Whether a header of this name, in lower case, is there."""
        return any(found == name for found, _ in self.headers)

    @property
    def content_length(self) -> int:
        """Length of the body in bytes; 0: not told, or `Transfer-Encoding` frames it, which overrides it."""
        if self.has(b"transfer-encoding"):
            return 0
        return next((int(value) for name, value in self.headers if name == b"content-length"), 0)


class RequestStream:
    """Cuts what a client sends into heads and what follows them.

    A piece is at most `PARSED_BYTES` of what h11 must look through: its parser takes milliseconds for that,
    and who reads the pieces lets others run in between.

    Args:
        only_one: `feed` ends with the first request.

    Attributes:
        is_opaque: the rest is handed on without a look.
        num_ended: requests that are whole.
        body: takes the content of the current request's body, without its framing.
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
        """Whether anything was fed."""
        return self._parser is not None or self.num_ended > 0

    @property
    def is_between(self) -> bool:
        """Whether all requests are whole whose heads are."""
        return self._parser is None or self._parser.their_state is h11.IDLE

    def give_up(self) -> bytes:
        """Look no more; return what was held back, to be handed on."""
        self.is_opaque = True
        held, self._head, self._waiting = self._head + self._waiting, b"", b""
        return held

    def _next_head(self) -> RequestHead | None:
        """The head, once it is whole."""
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
        """Take what there is of the body; whether it has ended."""
        assert self._parser is not None
        try:
            while isinstance(event := self._parser.next_event(), h11.Data):
                self.body(event.data)
            return isinstance(event, h11.EndOfMessage)
        except h11.RemoteProtocolError:
            self.is_opaque = True
            return False


class AnswerWatch:
    """Follows the answers to requests that were handed on; changes nothing.

    Args:
        on_end: called with a request's passage once its answer is whole.
        on_switch: called when the connection leaves HTTP, or what comes is none.
    """

    def __init__(self, on_end: Callable[[Passage], None], on_switch: Callable[[], None]) -> None:
        self.is_opaque = False
        self._on_end = on_end
        self._on_switch = on_switch
        self._open: deque[tuple[RequestHead, Passage]] = deque()
        self._parser: h11.Connection | None = None

    @property
    def is_open(self) -> bool:
        """Whether more of an answer may come."""
        return self.is_opaque or bool(self._open)

    def expect(self, head: RequestHead, passage: Passage) -> None:
        """An answer to this request will come."""
        self._open.append((head, passage))

    def feed(self, data: bytes) -> None:
        """Bytes that went by; empty: the connection's end. O(data)."""
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
        """Nothing more comes: what is open ended without the rest of its answer."""
        while self._open:
            _, passage = self._open.popleft()
            passage.cut_off()
            self._on_end(passage)

    def _read_answer(self, passage: Passage) -> bool:
        """Take what there is of an answer; whether it has ended."""
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
    """A parser for the answer to a request: that decides where it ends."""
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
    parser.send(h11.Request(method=head.method, target=head.target, headers=list(head.headers)))
    return parser
