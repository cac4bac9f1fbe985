"""Server-sent events, and the watch for clients that leave.

A request whose client is gone must not hold blocks: the work runs in a task of its own beside a watcher of
the connection, and is cancelled when the connection closes. Cancelling the task closes the engine's
iterator, which aborts the request there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixkv_server.apis.openai.rendering import SSE_DONE, SSE_PING, sse
from radixkv_server.http.errors import is_expected, shutting_down, to_api_error
from radixkv_server.http.observation import RequestRecord
from radixkv_server.settings import ServerSettings

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


async def gather_or_cancel(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once; when one fails, cancel the others and raise its error."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def merge(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, each with its stream's index; the first error ends them all."""
    if len(streams) == 1:
        async with closing_stream(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[T]) -> None:
        try:
            async with closing_stream(stream) as items:
                async for item in items:
                    queue.put_nowait((index, item))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    pumps = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(pumps)
        while left:
            got = await queue.get()
            if got is None:
                left -= 1
            elif isinstance(got, BaseException):
                raise got
            else:
                yield got
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class closing_stream:
    """`aclosing` for iterators that may not have an `aclose`."""

    def __init__(self, stream: AsyncIterator[T]) -> None:
        self.stream = stream

    async def __aenter__(self) -> AsyncIterator[Any]:
        return self.stream

    async def __aexit__(self, *exc_info: object) -> None:
        close = getattr(self.stream, "aclose", None)
        if close is not None:
            await close()


class EventStream(Response):
    """A response of server-sent events out of an iterator of ready-made frames.

    The status line waits for the first frame, so that a request which the engine refuses gets a real
    error status. If that takes longer than `ping_interval_s` (a long queue), or later frames do, comment
    lines keep proxies and clients from giving up. An error after the start becomes an event with an
    `error` object, without `[DONE]`.
    """

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncGenerator[bytes, None], settings: ServerSettings, record: RequestRecord
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._settings = settings
        self._record = record
        self._started = False
        self._last_sent = 0.0
        self._write_lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        self._last_sent = asyncio.get_running_loop().time()
        pings = asyncio.ensure_future(self._ping(send))
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await self._write(send, frame)
            await self._write(send, SSE_DONE)
            await self._end(send)
        except (Exception, asyncio.CancelledError) as error:
            if not self._started:
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
        """End a started stream with an error event; for a client that has left this sends nothing."""
        if isinstance(error, asyncio.CancelledError):
            error = shutting_down()
        else:
            self._record.failed = True
            if not is_expected(error):
                logger.error("unexpected error in a stream", exc_info=error)
        await self._write(send, sse(to_api_error(error).body()))
        await self._end(send)

    async def _ping(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        interval = self._settings.ping_interval_s
        while True:
            idle = loop.time() - self._last_sent
            if idle >= interval:
                await self._write(send, SSE_PING)
                idle = 0.0
            await asyncio.sleep(interval - idle)
