# SPDX-License-Identifier: Apache-2.0
"""Several streams as one, and several waits as one: all end when one of them fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from radixkv_server.concurrency import Merged, gather_or_cancel


async def numbers(count: int, log: list[str], name: str, fail_at: int = -1) -> AsyncGenerator[int]:
    try:
        for i in range(count):
            if i == fail_at:
                raise ValueError(name)
            await asyncio.sleep(0)
            yield i
    finally:
        log.append(f"{name} closed")


async def test_all_items_come_once_and_each_streams_in_order() -> None:
    log: list[str] = []
    async with aclosing(Merged([numbers(5, log, "a"), numbers(3, log, "b"), numbers(0, log, "c")])) as merged:
        got = [pair async for pair in merged]
    for index, count in ((0, 5), (1, 3), (2, 0)):
        assert [item for stream, item in got if stream == index] == list(range(count))
    assert sorted(log) == ["a closed", "b closed", "c closed"]


async def test_an_error_and_a_close_end_all_streams() -> None:
    log: list[str] = []
    async with aclosing(Merged([numbers(1000, log, "a"), numbers(1000, log, "b", fail_at=2)])) as failing:
        with pytest.raises(ValueError, match="b"):
            async for _ in failing:
                pass
    assert sorted(log) == ["a closed", "b closed"]
    log.clear()
    left_early = Merged([numbers(1000, log, "a"), numbers(1000, log, "b")])
    assert (await anext(left_early))[1] == 0
    await left_early.aclose()
    assert sorted(log) == ["a closed", "b closed"]


async def test_gather_or_cancel() -> None:
    ended: list[str] = []

    async def forever() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")
        return 0

    async def fail() -> int:
        raise ValueError("one")

    async def answer(value: int) -> int:
        return value

    assert await gather_or_cancel([answer(1), answer(2)]) == [1, 2]
    with pytest.raises(ValueError, match="one"):
        await gather_or_cancel([forever(), fail(), forever()])
    assert ended == ["cancelled", "cancelled"]
