# SPDX-License-Identifier: Apache-2.0
"""SlowClientAbort: a deadline for clients that read nothing, for both of uvicorn's protocols."""

from __future__ import annotations

import asyncio

from radixkv_server.settings import ServerSettings


class SlowClientAbort(asyncio.Protocol):
    """Abort a connection whose full output buffer is not taken in `slow_client_timeout_s`.

    A base of protocols of uvicorn's, before uvicorn's own class.
    """

    settings: ServerSettings
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _stalled: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.settings.slow_client_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._clear_stalled()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_stalled()
        super().connection_lost(exc)

    def _clear_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
