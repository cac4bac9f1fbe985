"""One client's connection to a proxy with several upstreams: each request goes to the one that is chosen.

    a request is read whole -> an upstream is chosen -> it is sent there -> the answer goes back as it comes

Until the first byte of an answer has come, an upstream that fails is replaced by another one. From then on
the client sees what it would see without the proxy. Whoever leaves half way through an answer ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable

import h11

from radixkv.errors import EngineOverloadedError
from radixkv_server.proxy.fleet import Fleet, Sent
from radixkv_server.proxy.messages import RequestHead, RequestStream, answer_parser
from radixkv_server.proxy.passage import Passage
from radixkv_server.proxy.relay import reset
from radixkv_server.proxy.routed_prompt import reported_share
from radixkv_server.proxy.upstream import READ_BYTES, Upstream

logger = logging.getLogger(__name__)

#: Of a request that is read whole before it is sent on, where no limit is given.
MAX_BODY_BYTES = 256 * 1024 * 1024
_EXPECT = re.compile(rb"^expect:[^\r\n]*\r?\n", re.IGNORECASE | re.MULTILINE)
_TAIL_BYTES = 64 * 1024
_PING = re.compile(rb"\s*(:|event: ping)")  # of a stream whose first token has not come
_TEXTS = {
    400: (b"Bad Request", b"this is no HTTP request"),
    413: (b"Content Too Large", b"the body is too long"),
    502: (b"Bad Gateway", b"no upstream answered"),
    503: (b"Service Unavailable", b"no upstream takes requests now; try again later"),
}


_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _NoAnswer(Exception):
    """An upstream failed before the first byte of its answer."""


class _TakesNone(_NoAnswer):
    """An upstream says that it takes no requests now."""


class _ClientLeft(Exception):
    """Nobody reads the answer any more."""


class RoutedRelay:
    """Serves one client's connection, request after request.

    Args:
        on_passage: called with each request whose answer has ended; must not wait.
        max_body_bytes: longer request bodies are refused; None: those above `MAX_BODY_BYTES`.
        max_kept_bytes: of a body, for who looks at it.
    """

    def __init__(
        self,
        fleet: Fleet,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        on_passage: Callable[[Passage], None],
        *,
        max_body_bytes: int | None,
        max_kept_bytes: int,
    ) -> None:
        self._fleet = fleet
        self._from_client, self._to_client = client
        self._on_passage = on_passage
        self._max_body_bytes = MAX_BODY_BYTES if max_body_bytes is None else max_body_bytes
        self._max_kept_bytes = max_kept_bytes
        self._read_ahead = b""  # of the request after the current one
        self._kept: dict[Upstream, _Connection] = {}  # for the next request there

    async def run(self) -> None:
        """Until the client leaves, or an answer that ends with its connection has ended."""
        try:
            while await self._serve_request():
                pass
        except (OSError, _ClientLeft):
            reset(self._to_client)
        finally:
            for _, writer in self._kept.values():
                writer.close()
            self._to_client.close()

    # ------------------------------------------------------------------ a request

    async def _serve_request(self) -> bool:
        """Whether another one may follow."""
        requests, pieces, has_more = RequestStream(), bytearray(), False
        body, head = bytearray(), None
        requests.body = body.extend
        while head is None or not requests.is_between:
            data = self._read_ahead or await self._from_client.read(READ_BYTES)
            self._read_ahead = b""
            if not data:
                return False
            for piece in requests.feed(data):
                if requests.is_opaque:
                    break
                if has_more:
                    continue
                if not isinstance(piece, RequestHead):
                    pieces += piece
                elif head is None:
                    head = piece
                    if any(name == b"expect" for name, _ in head.headers):
                        self._to_client.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                else:  # another request, sent before this one was answered
                    has_more, requests.body = True, _ignore
            if requests.is_opaque:
                return await self._refuse(400)
            if max(len(pieces), head.content_length if head else 0) > self._max_body_bytes:
                return await self._refuse(413)
            if has_more:
                break
        assert head is not None
        # Who sends requests without waiting for answers sends the rest again on another connection.
        return await self._route(head, bytes(pieces), bytes(body)) and not has_more

    async def _route(self, head: RequestHead, sent_body: bytes, body: bytes) -> bool:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        path = head.target.decode("latin-1").partition("?")[0]
        prompt = await self._fleet.read(path, headers, body)
        tried, failed = set(() if prompt is None else prompt.impossible), list[str]()
        while True:
            try:
                sent = self._fleet.send(prompt, tried, failed)
            except EngineOverloadedError:
                return await self._refuse(502 if failed else 503)
            passage = Passage.of(head.target, head.headers, str(sent.upstream), self._max_kept_bytes)
            passage.choice = sent.choice
            passage.add_request(body)
            answer = _Answer(head, body, passage, sent)
            tried.add(str(sent.upstream))
            try:
                return await self._ask(head, sent_body, answer, tried)
            except _TakesNone:
                pass  # whether it will soon is seen by its health
            except _NoAnswer:
                self._fleet.failed(sent)
            finally:
                failed.append(str(sent.upstream))
                if answer.finish():
                    self._on_passage(passage)

    async def _ask(self, head: RequestHead, body: bytes, answer: _Answer, tried: set[str]) -> bool:
        """Ask the chosen upstream, on the connection that is kept to it, if there is one."""
        upstream = answer.sent.upstream
        kept = self._kept.pop(upstream, None)
        if kept is not None:
            try:
                return await self._ask_on(kept, head, body, answer, tried)
            except _TakesNone:
                raise
            except _NoAnswer:
                pass  # it was closed while nothing was asked
        try:
            connection = await upstream.connect()
        except OSError as error:
            raise _NoAnswer from error
        return await self._ask_on(connection, head, body, answer, tried)

    async def _ask_on(
        self, connection: _Connection, head: RequestHead, body: bytes, answer: _Answer, tried: set[str]
    ) -> bool:
        upstream, (reader, writer) = answer.sent.upstream, connection
        leaving = asyncio.create_task(self._from_client.read(READ_BYTES))
        leaving.add_done_callback(lambda task: writer.transport.abort() if _has_left(task) else None)
        sending = asyncio.create_task(_send(writer, upstream.addressed(_EXPECT.sub(b"", head.raw)) + body))
        keeps = False
        try:
            keeps = await self._hand_back(reader, answer, leaving, tried)
            return keeps
        finally:
            if keeps and sending.done() and not reader.at_eof():
                self._kept[upstream] = connection
            else:
                sending.cancel()
                writer.close() if answer.is_whole else writer.transport.abort()
            if leaving.done() and not _has_left(leaving):
                self._read_ahead += leaving.result()
            else:
                leaving.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await leaving

    async def _hand_back(
        self,
        reader: asyncio.StreamReader,
        answer: _Answer,
        leaving: asyncio.Task[bytes],
        tried: set[str],
    ) -> bool:
        has_begun = False
        while not answer.is_whole:
            try:
                data = await reader.read(READ_BYTES)
            except OSError as error:
                if has_begun or _has_left(leaving):
                    raise
                raise _NoAnswer from error
            if _has_left(leaving):
                raise _ClientLeft
            if not data and not has_begun:
                raise _NoAnswer
            answer.feed(data)
            if not has_begun and answer.status == 503 and self._fleet.has_others(tried):
                raise _TakesNone
            has_begun = True
            if data:
                self._to_client.write(data)
                await self._to_client.drain()
            elif not answer.is_whole:
                raise ConnectionResetError("the upstream left half way through its answer")
        return answer.keeps_connection

    async def _refuse(self, status: int) -> bool:
        reason, message = _TEXTS[status]
        body = b'{"error": {"message": "%b", "type": "proxy_error"}}' % message
        again = b"Retry-After: 1\r\n" if status == 503 else b""
        self._to_client.write(
            b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n"
            b"Connection: close\r\n\r\n%b" % (status, reason, again, len(body), body)
        )
        with contextlib.suppress(OSError):
            await self._to_client.drain()
        return False


def _has_left(leaving: asyncio.Task[bytes]) -> bool:
    """Whether a client has closed its connection, or it was lost."""
    if not leaving.done() or leaving.cancelled():
        return False
    return leaving.exception() is not None or not leaving.result()


def _ignore(data: bytes) -> None:
    """Of a request that is not served."""


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the answer tells
        writer.write(data)
        await writer.drain()


class _Answer:
    """One answer on its way.

    Attributes:
        is_whole: it has ended.
        keeps_connection: another request may follow on the client's connection.
    """

    def __init__(self, head: RequestHead, body: bytes, passage: Passage, sent: Sent) -> None:
        self.sent = sent
        self.is_whole = False
        self.keeps_connection = False
        self._passage = passage
        self._parser = answer_parser(head)
        if body:
            self._parser.send_with_data_passthrough(h11.Data(data=body))
        self._parser.send_with_data_passthrough(h11.EndOfMessage())
        self._tail = bytearray()
        self._has_begun = False

    @property
    def status(self) -> int:
        """What its head says; 0: that has not come."""
        return self._passage.status

    @property
    def _worked(self) -> bool:
        return 200 <= self._passage.status < 300

    def feed(self, data: bytes) -> None:
        """Bytes that go by; empty: the end of the connection. What is no answer lasts until then."""
        try:
            self._parser.receive_data(data)
            while True:
                event = self._parser.next_event()
                if isinstance(event, h11.Response):
                    self._passage.answered(event.status_code, list(event.headers))
                elif isinstance(event, h11.Data):
                    if not self._has_begun and self._worked and not _PING.match(event.data):
                        self._has_begun = True
                        self.sent.begun()
                    self._passage.add_answer(event.data)
                    self._tail += event.data
                    if len(self._tail) > 2 * _TAIL_BYTES:
                        del self._tail[:-_TAIL_BYTES]
                elif isinstance(event, h11.EndOfMessage):
                    self.is_whole = True
                    self.keeps_connection = self._parser.their_state is h11.DONE
                    return
                else:
                    return
        except h11.ProtocolError:
            self.is_whole = not data

    def finish(self) -> bool:
        """Close the books; whether there was an answer to tell of."""
        worked = self.is_whole and self._worked
        self.sent.ended(reported_share(bytes(self._tail)) if worked else None, worked=worked)
        if not self.is_whole:
            self._passage.cut_off()
        self._passage.end()
        return self._passage.status > 0
