# SPDX-License-Identifier: Apache-2.0
"""RoutedAnswer: an upstream's answer: its beginning and end, and the decision to pass it on."""

from __future__ import annotations

import re

import h11

from radixkv_server.proxy.fleet import Sent
from radixkv_server.proxy.messages import RequestHead, answer_parser
from radixkv_server.proxy.passage import Passage
from radixkv_server.proxy.routed_prompt import reported_share

_TAIL_BYTES = 64 * 1024
_PING = re.compile(rb"\s*(:|event: ping)")  # of a stream whose first token has not come
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,200})"')
_ID_BYTES = 4096  # of an answer, in which it says what it is called


class RoutedAnswer:
    """Parser of an answer's bytes that decides which to pass on.

    Args:
        head, body: head and body of the request.
        may_go_elsewhere: try another upstream if the answer says that this one can't serve the request.

    Attributes:
        has_begun: True once data of the answer has come.
        held: bytes of its head that were not passed on yet.
        is_whole: True once it is complete.
        is_over: True once it is complete, has left HTTP, or must not be passed on.
        is_switched: True once it has left HTTP.
        goes_elsewhere: True if the request goes to another upstream.
    """

    def __init__(
        self,
        head: RequestHead,
        body: bytes | bytearray,
        passage: Passage,
        sent: Sent,
        *,
        may_go_elsewhere: bool,
    ) -> None:
        self.sent = sent
        self.has_begun = False
        self.held = b""
        self.is_whole = False
        self.is_switched = False
        self.goes_elsewhere = False
        self._head = head
        self._may_go_elsewhere = may_go_elsewhere
        self._passage = passage
        self._parser = answer_parser(head)
        if body:
            self._parser.send_with_data_passthrough(h11.Data(data=body))  # type: ignore[arg-type]  # any buffer will do
        self._parser.send_with_data_passthrough(h11.EndOfMessage())
        self._tail = bytearray()
        self._has_body = False
        self._ended_with_connection = False
        self._is_known = False  # whether it is the one to hand on

    @property
    def is_over(self) -> bool:
        return self.is_whole or self.is_switched or self.goes_elsewhere

    @property
    def keeps_connection(self) -> bool:
        """True if another request may follow on both connections."""
        is_clean = self._parser.their_state is h11.DONE and not self._parser.trailing_data[0]
        return self.is_whole and is_clean and self._head.version == b"1.1" and not self._ended_with_connection

    @property
    def _worked(self) -> bool:
        return 200 <= self._passage.status < 300

    def take(self, data: bytes) -> bytes:
        """Take in bytes, or none at the connection's end; return the bytes to pass on now.

        A head is held until it is whole: it may say that the request is for another upstream.
        """
        self.has_begun = self.has_begun or bool(data)
        self._ended_with_connection = not data
        if not self._is_known:
            self.held += data
        self._look(data)
        if self._is_known:
            data, self.held = self.held or data, b""
            return data
        return b""

    def _look(self, data: bytes) -> None:
        """Parse data; data other than an HTTP answer is passed on until the connection ends."""
        try:
            self._parser.receive_data(data)
            while True:
                event = self._parser.next_event()
                if isinstance(event, h11.Response):
                    self._passage.answered(event.status_code, list(event.headers))
                    if (
                        self._may_go_elsewhere
                        and self.sent.is_elsewhere(event.status_code)
                        and not self._is_known
                    ):
                        self.goes_elsewhere = True
                        return
                    self._is_known = True
                elif isinstance(event, h11.Data):
                    self._add(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    self.is_whole = True
                    return
                elif isinstance(event, h11.InformationalResponse):
                    self._is_known = True
                else:
                    self.is_switched = event is h11.PAUSED
                    return
        except h11.ProtocolError:
            self._is_known = True
            self.is_whole = not data
            self._passage.cut_off()

    def _add(self, data: bytes) -> None:
        if not self._has_body and self._worked and not _PING.match(data):
            self._has_body = True
            self.sent.begun()
            if found := _ID.search(data[:_ID_BYTES]):
                self.sent.keeps(found[1].decode("latin-1"))
        self._passage.add_answer(data)
        self._tail += data
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]

    def finish(self) -> None:
        """Finish the accounting of the request."""
        worked = self.is_whole and self._worked and not self._passage.is_cut_off
        self.sent.ended(reported_share(bytes(self._tail)) if worked else None)
        if not self.is_whole and not self.is_switched and not self.goes_elsewhere:
            self._passage.cut_off()
