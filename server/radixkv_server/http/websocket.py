# SPDX-License-Identifier: Apache-2.0
"""GuardedSocket: uvicorn's WebSocket protocol, with our answers to its shutdown and to slow clients.

It reads attributes of its base class that are no public interface of uvicorn's.
"""

from __future__ import annotations

import logging
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from radixkv_server.http.protocol import SlowClientAbort
from radixkv_server.settings import ServerSettings

#: Code that a route receives when the server is to end: finish, and close with it.
SERVICE_RESTART = 1012
#: Code of the protocol for text that is not UTF-8.
NOT_UTF8 = 1007

# Of a refused handshake and other mistakes of clients websockets logs a traceback.
_quiet = logging.getLogger("radixkv.server.websockets")
_quiet.setLevel(logging.CRITICAL)


class GuardedSocket(SlowClientAbort, WebSocketsSansIOProtocol):
    """A connection; `guarded_socket` subclasses it with the server's settings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn.logger = _quiet

    def send_receive_event_to_app(self) -> None:
        """Close the connection of a client whose text is no UTF-8; uvicorn itself would log a traceback."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.fail(NOT_UTF8, "text that is not UTF-8")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def shutdown(self) -> None:
        """Report the shutdown to an open route, as uvicorn itself would cut off its answers."""
        if self.handshake_complete and not self.close_sent:
            self.queue.put_nowait({"type": "websocket.disconnect", "code": SERVICE_RESTART})
        else:
            super().shutdown()


def guarded_socket(settings: ServerSettings) -> type[GuardedSocket]:
    """Make the protocol class for uvicorn, bound to `settings`."""
    return type("GuardedSocket", (GuardedSocket,), {"settings": settings})
