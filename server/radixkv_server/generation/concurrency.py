"""Several coroutines or streams as one: all end together, whichever way the first of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

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


async def merge(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, each with its stream's index; the first error ends them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(stream) as items:
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
