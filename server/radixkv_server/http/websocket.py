# SPDX-License-Identifier: Apache-2.0
"""GuardedSocket: uvicorn's WebSocket protocol, with our answers to its shutdown and to slow clients.

It reads attributes of its base class that are no public interface of uvicorn's.
"""

from __future__ import annotations

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from radixkv_server.http.protocol import SlowClientAbort
from radixkv_server.settings import ServerSettings

#: Code that a route receives when the server is to end: finish, and close with it.
SERVICE_RESTART = 1012


class GuardedSocket(SlowClientAbort, WebSocketsSansIOProtocol):
    """A connection; `guarded_socket` subclasses it with the server's settings."""

    def shutdown(self) -> None:
        """Tell the route of an open connection; uvicorn itself would cut off its answers."""
        if self.handshake_complete and not self.close_sent:
            self.queue.put_nowait({"type": "websocket.disconnect", "code": SERVICE_RESTART})
        else:
            super().shutdown()


def guarded_socket(settings: ServerSettings) -> type[GuardedSocket]:
    """Make the protocol class for uvicorn, bound to `settings`."""
    return type("GuardedSocket", (GuardedSocket,), {"settings": settings})
