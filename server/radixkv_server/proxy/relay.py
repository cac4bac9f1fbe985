# SPDX-License-Identifier: Apache-2.0
"""Relay between a client's connection and an upstream's: bytes are passed on both ways as they come.

    client  --RequestStream-->  heads are addressed to the upstream, bodies go on byte for byte  -->  upstream
    client  <-----------------  every byte as it came  --AnswerWatch-------------------------------  upstream

Each client's connection has an upstream connection of its own, so that everything between two hops (keeping
alive, switching protocols, closing) holds end to end: closing or resetting one does so to the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from radixkv_server.proxy.connections import ClientSide, UpstreamSide, refusal
from radixkv_server.proxy.messages import AnswerWatch, RequestHead, RequestStream
from radixkv_server.proxy.passage import Passage, RelaySettings
from radixkv_server.proxy.upstream import Upstream

logger = logging.getLogger(__name__)

#: For a side to finish after the other one has, where no answer is open.
_LINGER_S = 30.0


class Relay:
    """Relay that joins a client's connection with one to the upstream while both last.

    Args:
        client: the connection; `run` closes it.
    """

    def __init__(self, upstream: Upstream, client: ClientSide, settings: RelaySettings) -> None:
        self._upstream = upstream
        self._client = client
        self._settings = settings
        self._to_upstream = UpstreamSide(self._answered, self._upstream_failed)
        self._requests = RequestStream()
        self._asking: Passage | None = None  # its body has not ended
        self._answers = AnswerWatch(self._ended, self._switched)
        self._body_bytes = 0  # of the current request
        self._is_refused = False
        self._is_faulty = False

    async def run(self) -> None:
        """Relay until both sides have ended, or either fails; then close both."""
        upstream = self._to_upstream
        sending = asyncio.create_task(self._send_requests())
        try:
            await asyncio.wait([sending, upstream.ended], return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                await self._finish_request(sending)
            elif sending.exception() is None and not self._is_refused and upstream.write_eof():
                await asyncio.wait([upstream.ended], timeout=None if self._answers.is_open else _LINGER_S)
            if sending.done() and (error := sending.exception()) is not None:
                self._is_faulty = True
                if not isinstance(error, OSError):
                    logger.error("a connection failed: %s", type(error).__name__)
        finally:
            sending.cancel()
            if upstream.ended.done() and not self._is_faulty:
                self._answers.feed(b"")
            upstream.close(is_faulty=self._is_faulty)
            self._client.close(is_faulty=self._is_faulty)
            self._answers.end()

    async def _finish_request(self, sending: asyncio.Task[None]) -> None:
        """End the client's side after the upstream has; pass on the rest of the client's data."""
        if self._is_faulty:
            return
        with contextlib.suppress(OSError):
            self._client.write_eof()
            await asyncio.wait([sending], timeout=_LINGER_S)

    # ------------------------------------------------------------------ to the upstream

    async def _send_requests(self) -> None:
        while data := await self._client.read():
            for piece in self._requests.feed(data):
                if isinstance(piece, RequestHead):
                    self._asked()
                    self._body_bytes = piece.content_length
                    if self._is_too_large():
                        return await self._refuse_body()
                    self._body_bytes = 0
                    await self._connect()
                    piece = self._begin(piece)
                else:
                    self._body_bytes += len(piece)
                    if self._is_too_large() and not self._requests.is_opaque:
                        return await self._refuse_body()
                    await self._connect()
                await self._to_upstream.write(piece)
                await asyncio.sleep(0)  # other connections go on between two pieces
            if self._requests.is_between:
                self._asked()

        held = self._requests.give_up()  # of a head that is not whole
        if held and self._to_upstream.transport is not None:
            await self._to_upstream.write(held)

    def _asked(self) -> None:
        """Report that the current request is complete, unless its answer has already ended."""
        passage, self._asking = self._asking, None
        if passage is not None and passage.seconds is None:
            self._settings.on_begin(passage)

    def _begin(self, head: RequestHead) -> bytes:
        """Return the head to send to the upstream, and expect its answer."""
        passage = Passage.of(head.target, head.headers, str(self._upstream), self._settings.max_kept_bytes)
        self._requests.body = passage.add_request
        self._asking = passage
        self._answers.expect(head, passage)
        return self._upstream.addressed(head.raw)

    def _is_too_large(self) -> bool:
        most = self._settings.max_body_bytes
        return most is not None and self._body_bytes > most

    async def _refuse_body(self) -> None:
        self._is_refused = True
        text = b"the body is longer than %d bytes" % (self._settings.max_body_bytes or 0)
        await self._client.refuse(refusal(413, b"Content Too Large", text, b"invalid_request_error"))

    async def _connect(self) -> None:
        """Connect to the upstream, once there is data to send."""
        if self._to_upstream.transport is not None:
            return
        try:
            await self._upstream.connect(self._to_upstream)
        except OSError as error:
            logger.warning("%s can't be reached: %s", self._upstream, error.strerror or type(error).__name__)
            raise

    # ------------------------------------------------------------------ to the client

    def _answered(self, data: bytes) -> None:
        """Pass on bytes of the upstream at once, then parse them."""
        self._client.hand_on(data, self._to_upstream)
        self._answers.feed(data)
        if self._client.is_gone:
            self._upstream_failed()  # the answer has no reader

    def _upstream_failed(self) -> None:
        """Close the client's side after the upstream has failed."""
        self._is_faulty = True
        self._client.close(is_faulty=True)
        self._to_upstream.close(is_faulty=True)

    def _switched(self) -> None:
        """Pass on the rest without parsing, as the answer has left HTTP."""
        held = self._requests.give_up()
        if held and self._to_upstream.transport is not None:
            self._to_upstream.transport.write(held)

    def _ended(self, passage: Passage) -> None:
        passage.end()
        self._settings.on_passage(passage)
