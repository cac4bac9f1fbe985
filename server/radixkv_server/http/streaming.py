# SPDX-License-Identifier: Apache-2.0
"""Responses of server-sent events, and work that ends when its client leaves.

A stream has pings, and errors in the dialect of the request. A request without a client must not hold blocks:
its work runs in a task of its own beside a watcher of the connection, and is cancelled when the connection
closes. Cancelling the task closes the engine's iterator, which aborts the request there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from radixkv_server.dialect import Dialect
from radixkv_server.errors import is_expected, shutting_down, to_api_error
from radixkv_server.http.request_record import RequestRecord

logger = logging.getLogger("radixkv.server")

T = TypeVar("T")


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, cancelling it when the client leaves first.

    Raises:
        ClientDisconnect: the client left; `work` has ended by then.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, watcher):
            if not each.done():
                each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Response of server-sent events from an iterator of ready frames.

    The status line waits for the first frame, so that a request refused by the engine gets a real error
    status. If that takes longer than `ping_interval_s` (a long queue), or later frames do, the
    dialect's pings keep proxies and clients from giving up. An error after the start becomes the dialect's
    error event, and nothing follows it.

    Args:
        frames: events, framed by the dialect; closed at the end of the response, however it ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        dialect: Dialect,
        record: RequestRecord,
        ping_interval_s: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._dialect = dialect
        self._record = record
        self._ping_interval_s = ping_interval_s
        self._client_left = False
        self._started = False
        self._last_sent = 0.0
        self._write_lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched_receive() -> Message:
            message = await receive()
            self._client_left = self._client_left or message["type"] == "http.disconnect"
            return message

        await run_until_disconnect(watched_receive, self._run(send))

    async def _run(self, send: Send) -> None:
        self._last_sent = asyncio.get_running_loop().time()
        pings = asyncio.ensure_future(self._ping(send))
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await self._write(send, frame)
            await self._end(send)
        except (Exception, asyncio.CancelledError) as error:
            if not self._started or self._client_left:
                raise
            await self._fail(send, error)
        finally:
            pings.cancel()
            await asyncio.gather(pings, return_exceptions=True)

    async def _write(self, send: Send, frame: bytes) -> None:
        async with self._write_lock:
            if not self._started:
                self._started = True
                headers = self.raw_headers
                await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        self._last_sent = asyncio.get_running_loop().time()

    async def _end(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, send: Send, error: BaseException) -> None:
        """End a started stream with an error event."""
        if isinstance(error, asyncio.CancelledError):
            error = shutting_down()
        else:
            self._record.failed = True
            if not is_expected(error):
                logger.error("unexpected error in a stream", exc_info=error)
        api_error = to_api_error(error)
        self._record.error_code = api_error.code or ""
        await self._write(send, self._dialect.error_event(api_error, self._record.request_id))
        await self._end(send)

    async def _ping(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        interval = self._ping_interval_s
        while True:
            idle = loop.time() - self._last_sent
            if idle >= interval:
                await self._write(send, self._dialect.ping)
                idle = 0.0
            await asyncio.sleep(interval - idle)
