# SPDX-License-Identifier: Apache-2.0
"""GuardedSocket: uvicorn's WebSocket protocol, with our answers to its shutdown and to slow clients.

It reads attributes of its base class that are no public interface of uvicorn's.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from radixkv_server.settings import ServerSettings

#: Code that a route receives when the server is to end: finish, and close with it.
SERVICE_RESTART = 1012


class GuardedSocket(WebSocketsSansIOProtocol):
    """A connection; `guarded_socket` subclasses it with the server's settings."""

    settings: ServerSettings

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stalled: asyncio.TimerHandle | None = None

    def shutdown(self) -> None:
        """Tell the route of an open connection; uvicorn itself would cut off its answers."""
        if self.handshake_complete and not self.close_sent:
            self.queue.put_nowait({"type": "websocket.disconnect", "code": SERVICE_RESTART})
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_stalled()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.settings.slow_client_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._clear_stalled()
        super().resume_writing()

    def _clear_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def guarded_socket(settings: ServerSettings) -> type[GuardedSocket]:
    """Make the protocol class for uvicorn, bound to `settings`."""
    return type("GuardedSocket", (GuardedSocket,), {"settings": settings})
