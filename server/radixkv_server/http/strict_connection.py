# SPDX-License-Identifier: Apache-2.0
"""StrictConnection: h11's state machine with two further refusals."""

from __future__ import annotations

from typing import Any

import h11


class StrictConnection(h11.Connection):
    """The server's side of a connection.

    - The size limit of a request's head also holds for a head that arrives in one read; h11 applies it only
      to heads in several reads.
    - A request with both Content-Length and Transfer-Encoding is refused. In HTTP/1.1 the second wins, but a
      proxy that goes by the first would take part of the body for the next request, or the other way round.

    Attributes:
        path: path of the request that is read or answered; "/" before it is known.
    """

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self.path = "/"
        self._max_head_bytes = max_head_bytes

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            h11.RemoteProtocolError: the client broke the protocol, or sent a request refused as above.
        """
        beginning = self.their_state is h11.IDLE
        if beginning:
            self.path = "/"
        try:
            event = super().next_event()
        except h11.RemoteProtocolError:
            if beginning:  # the answer to a head that is too large should be in the path's dialect, too
                words = self.trailing_data[0].partition(b"\r\n")[0].split(b" ")
                self.path = _path_of(words[1]) if len(words) == 3 else "/"
            raise
        if isinstance(event, h11.Request):
            self.path = _path_of(event.target)
            self._check(event)
        return event

    def _check(self, request: h11.Request) -> None:
        size = (
            len(request.method) + len(request.target) + sum(len(k) + len(v) + 4 for k, v in request.headers)
        )
        if size > self._max_head_bytes:
            raise h11.RemoteProtocolError("the request's head is too large", error_status_hint=431)
        names = {name for name, _ in request.headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding exclude each other")


def _path_of(target: bytes) -> str:
    return target.partition(b"?")[0].decode("latin-1")
