# SPDX-License-Identifier: Apache-2.0
"""Relay of a client's connection to several upstreams, chosen for each request.

    read the whole request -> choose an upstream -> send it there -> pass on the answer as it comes

An upstream that fails before the first byte of its answer is replaced by another one. From then on the client
sees the same as without the proxy. A side that leaves during an answer ends it.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import ClassVar

from radixkv.errors import EngineOverloadedError
from radixkv_server.proxy.connections import ClientSide, UpstreamSide, refusal
from radixkv_server.proxy.fleet import Fleet
from radixkv_server.proxy.messages import RequestHead, RequestStream
from radixkv_server.proxy.passage import Passage, RelaySettings
from radixkv_server.proxy.routed_answer import RoutedAnswer
from radixkv_server.proxy.upstream import READ_BYTES, Upstream

#: Longest body of a request, which is read whole before it is sent on, without a given limit.
MAX_BODY_BYTES = 256 * 1024 * 1024
#: Bytes of all requests that are being read or answered; above, new ones are refused.
MAX_OPEN_BYTES = 1024 * 1024 * 1024
_EXPECT = re.compile(rb"^expect:[^\r\n]*\r?\n", re.IGNORECASE | re.MULTILINE)
#: Upstreams that may end without an answer to one request, which may be the cause.
MAX_FAILED_SENDS = 2
_TEXTS = {
    400: (b"Bad Request", b"this is no HTTP request"),
    413: (b"Content Too Large", b"the body is too long"),
    502: (b"Bad Gateway", b"no upstream answered"),
    503: (b"Service Unavailable", b"no upstream takes requests now; try again later"),
}


class _NoAnswer(Exception):
    """An upstream failed before the first byte of its answer.

    Args:
        was_sent: True if it had received the request, which may have caused the failure.
    """

    def __init__(self, *, was_sent: bool) -> None:
        super().__init__()
        self.was_sent = was_sent


class _Elsewhere(Exception):
    """An upstream takes no requests now, or does not store what this one continues."""


class _ClientLeft(Exception):
    """The client has closed its connection."""


@dataclass(slots=True, eq=False)
class _Asked:
    """Complete request.

    Attributes:
        sent_body: body with its framing, as received.
        body: body without its framing.
    """

    head: RequestHead
    sent_body: bytearray
    body: bytearray


class RoutedRelay:
    """Relay of a client's connection, request after request.

    Args:
        client: the connection; `run` closes it.

    Attributes:
        open_bytes: bytes of all requests that are being read or answered.
    """

    open_bytes: ClassVar[int] = 0

    def __init__(self, fleet: Fleet, client: ClientSide, settings: RelaySettings) -> None:
        self._fleet = fleet
        self._client = client
        self._settings = settings
        most = settings.max_body_bytes
        self._max_body_bytes = MAX_BODY_BYTES if most is None else most
        self._open_bytes = 0  # of the current request
        self._read_ahead = b""  # of the request after the current one
        self._kept: dict[Upstream, UpstreamSide] = {}  # for the next request there

    async def run(self) -> None:
        """Serve until the client leaves, or an answer ends with its connection."""
        is_faulty = False
        try:
            while (asked := await self._read_request()) is not None:
                if not await self._route(asked):
                    break
                self._account(-self._open_bytes)
        except (OSError, _ClientLeft):
            is_faulty = True
        finally:
            self._account(-self._open_bytes)
            for side in self._kept.values():
                side.close()
            self._client.close(is_faulty=is_faulty)

    # ------------------------------------------------------------------ the request

    async def _read_request(self) -> _Asked | None:
        """Read the next request; None: there is none, or it was refused."""
        requests, pieces, body, head = RequestStream(only_one=True), bytearray(), bytearray(), None
        requests.body = body.extend
        while not requests.num_ended:
            data = self._read_ahead or await self._client.read()
            self._read_ahead = b""
            if not data:
                return None
            self._account(len(data))
            if head is None and not requests.has_begun:
                data = data.lstrip(b"\r\n")  # some clients end a body so
            for piece in requests.feed(data):
                if isinstance(piece, RequestHead):
                    head = piece
                    if not head.has(b"transfer-encoding"):
                        requests.body = _ignore  # it comes as it is
                    if head.has(b"expect") and head.content_length <= self._max_body_bytes:
                        self._client.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                else:
                    pieces += piece
                await asyncio.sleep(0)  # other connections go on between two pieces
            status = 0
            if requests.is_opaque and not requests.num_ended:
                status = 400
            elif max(len(pieces), head.content_length if head else 0) > self._max_body_bytes:
                status = 413
            elif RoutedRelay.open_bytes > MAX_OPEN_BYTES:
                status = 503
            if status:
                await self._refuse(status)
                return None
        assert head is not None
        self._read_ahead = requests.give_up()
        return _Asked(head, pieces, body if head.has(b"transfer-encoding") else pieces)

    def _account(self, count: int) -> None:
        self._open_bytes += count
        RoutedRelay.open_bytes += count

    async def _route(self, asked: _Asked) -> bool:
        """Send a request to upstreams in turn until one answers; return True if another may follow."""
        head = asked.head
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        passage = Passage.of(head.target, head.headers, "", self._settings.max_kept_bytes)
        passage.keep_request(asked.body)
        reading = await self._fleet.read(passage.path, headers, asked.body)
        tried, failed, num_sent = set(reading.impossible), list[str](), 0
        try:
            while True:
                try:
                    sent = self._fleet.send(reading, tried, failed)
                except EngineOverloadedError:
                    status = 502 if failed else 503
                    passage.answered(status, [])
                    await self._refuse(status)
                    return False
                passage.upstream, passage.choice = str(sent.member.upstream), sent.choice
                if not failed:
                    self._settings.on_begin(passage)
                tried.add(str(sent.member.upstream))
                may_go_elsewhere = self._fleet.has_others(tried)
                answer = RoutedAnswer(head, asked.body, passage, sent, may_go_elsewhere=may_go_elsewhere)
                try:
                    return await self._ask(asked, answer)
                except _Elsewhere:
                    passage.status = 0  # whether it takes requests is seen by its health
                except _NoAnswer as error:
                    self._fleet.failed(sent)
                    num_sent += error.was_sent
                    if num_sent == MAX_FAILED_SENDS:
                        tried.update(self._fleet.addresses)  # it is not tried on them all
                finally:
                    failed.append(str(sent.member.upstream))
                    answer.finish()
        finally:
            passage.end()
            self._settings.on_passage(passage)

    async def _refuse(self, status: int) -> None:
        """Answer in an upstream's place."""
        reason, message = _TEXTS[status]
        again = b"Retry-After: 1\r\n" if status == 503 else b""
        await self._client.refuse(refusal(status, reason, message, b"proxy_error", again))

    # ------------------------------------------------------------------ its answer

    async def _ask(self, asked: _Asked, answer: RoutedAnswer) -> bool:
        """Send the request to the chosen upstream, over an open connection if there is one."""
        upstream = answer.sent.member.upstream
        kept, was_sent = self._kept.pop(upstream, None), False
        if kept is not None and kept.is_idle:
            try:
                return await self._ask_on(kept, asked, answer)
            except _NoAnswer:
                was_sent = True  # if it can be reached now, the connection was closed while nothing was asked
        elif kept is not None:
            kept.close()
        side = UpstreamSide()
        try:
            await upstream.connect(side)
        except OSError as error:
            raise _NoAnswer(was_sent=was_sent) from error
        return await self._ask_on(side, asked, answer)

    async def _ask_on(self, side: UpstreamSide, asked: _Asked, answer: RoutedAnswer) -> bool:
        assert side.transport is not None
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def conclude(_: object = None) -> None:
            if not over.done():
                over.set_result(None)

        def take(data: bytes) -> None:
            if passed := answer.take(data):
                self._client.hand_on(passed, side)
            if answer.is_over or self._client.is_gone:
                conclude()

        side.on_data = take
        side.ended.add_done_callback(conclude)
        leaving = asyncio.create_task(self._client.read())
        leaving.add_done_callback(lambda task: conclude() if _has_left(task) else None)
        head = answer.sent.member.upstream.addressed(_EXPECT.sub(b"", asked.head.raw))
        sending = asyncio.create_task(_send(side, head, asked.sent_body))
        keeps = False
        try:
            await over
            if _has_left(leaving) or self._client.is_gone:
                raise _ClientLeft
            if answer.goes_elsewhere:
                raise _Elsewhere
            if not answer.has_begun:
                raise _NoAnswer(was_sent=True)
            if answer.is_switched:
                await self._join(side, leaving)
            elif not answer.is_over:
                self._client.write(answer.held if side.is_faulty else answer.take(b""))
            if side.is_faulty and not answer.is_whole:
                raise ConnectionResetError("the upstream left half way through its answer")
            keeps = answer.keeps_connection and sending.done()
            return answer.keeps_connection
        finally:
            # Before anything is awaited, where the relay may be cancelled: the connection is kept or closed.
            side.ended.remove_done_callback(conclude)
            side.on_data = lambda data: side.close(is_faulty=True)  # data that belongs to no request
            if keeps and side.is_idle:
                self._kept[answer.sent.member.upstream] = side
            else:
                side.close(is_faulty=not (answer.is_whole or answer.is_switched))
            sending.cancel()
            if leaving.done() and not _has_left(leaving):
                self._read_ahead += b"" if answer.is_switched else leaving.result()
            else:
                leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _join(self, side: UpstreamSide, leaving: asyncio.Task[bytes]) -> None:
        """Pass bytes both ways until either side ends, after the connection has left HTTP."""

        async def send_on() -> None:
            data = await leaving
            while data:
                await side.write(data)
                data = await self._client.read()

        sending = asyncio.create_task(send_on())
        try:
            await asyncio.wait([sending, side.ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def _send(side: UpstreamSide, head: bytes, body: bytearray) -> None:
    """Send a request: a short one at once, a long one with flow control."""
    if len(body) < READ_BYTES:
        await side.write(head + body)
        return
    await side.write(head)
    view = memoryview(body)
    for start in range(0, len(body), READ_BYTES):
        await side.write(view[start : start + READ_BYTES])


def _has_left(leaving: asyncio.Task[bytes]) -> bool:
    """Tell whether a client's connection was closed or lost."""
    if not leaving.done() or leaving.cancelled():
        return False
    return leaving.exception() is not None or not leaving.result()


def _ignore(data: bytes) -> None:
    """Drop a copy of a body that is not needed: its request is not served, or passed on unchanged."""
