# SPDX-License-Identifier: Apache-2.0
"""Concurrency: work that leaves the event loop for a thread, and coroutines or streams joined into one.

While work runs on the event loop, every stream of the server stands still. Work on little input takes less
time than a thread costs; all other work goes to a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: Largest inputs of work on the loop: tokens to describe, characters to render, bytes of JSON to read.
INLINE_TOKENS = 1024
INLINE_CHARS = 4096
INLINE_BYTES = 32 * 1024


async def off_loop(
    work: Callable[[], T],
    *,
    tokens: int | None = None,
    chars: int | None = None,
    num_bytes: int | None = None,
) -> T:
    """Return the result of `work`, done in a thread unless its input is known to be small."""
    sizes = ((tokens, INLINE_TOKENS), (chars, INLINE_CHARS), (num_bytes, INLINE_BYTES))
    known = [(size, most) for size, most in sizes if size is not None]
    if known and all(size <= most for size, most in known):
        return work()
    return await asyncio.to_thread(work)


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


class Merged(Generic[T]):
    """Iterator over the items of several streams, each with its stream's index; an error ends all.

    To be closed, whether or not it was read to its end.
    """

    def __init__(self, streams: Sequence[AsyncGenerator[T]]) -> None:
        self._only = streams[0] if len(streams) == 1 else None
        self._queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()
        self._pumps: list[asyncio.Task[None]] = []
        if self._only is None:
            self._pumps = [asyncio.ensure_future(self._pump(*item)) for item in enumerate(streams)]
        self._left = len(streams)

    def __aiter__(self) -> Merged[T]:
        return self

    async def __anext__(self) -> tuple[int, T]:
        if self._only is not None:
            return 0, await anext(self._only)
        while self._left:
            got = await self._queue.get()
            if isinstance(got, BaseException):
                raise got
            if got is not None:
                return got
            self._left -= 1
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End all streams."""
        if self._only is not None:
            await self._only.aclose()
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pump(self, index: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    self._queue.put_nowait((index, item))
        except Exception as error:
            self._queue.put_nowait(error)
        else:
            self._queue.put_nowait(None)
