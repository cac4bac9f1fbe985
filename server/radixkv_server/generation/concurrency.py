# SPDX-License-Identifier: Apache-2.0
"""Several coroutines or streams joined into one: the end of any ends all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

T = TypeVar("T")


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
