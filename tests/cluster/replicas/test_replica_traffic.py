# SPDX-License-Identifier: Apache-2.0
"""Seeded traffic over several engines with hardly enough blocks, which come, fail, are drained and leave.

A few seeds here; RADIXKV_FUZZ=50 for more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from contextlib import aclosing
from typing import Any

import pytest
from paged_language_model import LetterTokenizer, make_engine
from pool_traffic import FREE, POLICIES, Ask, Oracle, Parrot, Pictures, SeeingParrot, Traffic, placed
from seeing_hash_model import check_nothing_is_left, encode_layer_by_layer

from radixkv.cache.accounts import Quota
from radixkv.cache.keys import Owner
from radixkv.cluster.replicas.engine import ReplicatedEngine
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.errors import ContextLengthExceededError, EngineStoppedError, RequestFailedError
from radixkv.scheduling.request import PrefixPin, Request

SEEDS = int(os.environ.get("RADIXKV_FUZZ", "1"))
BLOCK_SIZE = 8
LONGEST = 150  # tokens; the smallest pool holds a few more
# Always of both: a tenant gets its quota before its first block.
QUOTAS = tuple(
    {"ada": ada, "bob": bob}
    for ada, bob in (
        (Quota(0, None), Quota(0, None)),
        (Quota(4, 22), Quota(0, 26)),
        (Quota(0, None), Quota(6, None)),
    )
)

Samples = list[list[int]]


class Fleet:
    """Engines that were made, and those that are there now.

    Args:
        pictures: what they see; None: they see nothing.
    """

    def __init__(self, numbers: random.Random, pictures: Pictures | None) -> None:
        self._numbers = numbers
        self._pictures = pictures
        self._made: dict[str, AsyncEngine] = {}
        self.names: list[str] = []
        self._gone: set[str] = set()
        first = self._make()
        self.engine = ReplicatedEngine({first: self._made[first]})

    def _make(self) -> str:
        numbers, name = self._numbers, f"r{len(self._made)}"
        blocks = numbers.randrange(22, 60)
        pictures, model = self._pictures, Parrot(blocks, BLOCK_SIZE)
        if pictures is not None:
            model = SeeingParrot(blocks, BLOCK_SIZE)
            model.see(pictures.shown, pictures.max_bytes)
        engine, _ = make_engine(
            model=model,
            num_blocks=blocks,
            block_size=BLOCK_SIZE,
            max_model_len=LONGEST,
            budget=numbers.choice([8, 32, 200]),
            max_num_seqs=numbers.choice([2, 8]),
            scheduling_policy=numbers.choice(POLICIES),
            speculation=numbers.choice(["off", "auto"]),
            step_costs=FREE,
            tokenizer=LetterTokenizer(),
            image_processor=pictures and pictures.shown,
        )
        if pictures is not None and pictures.in_pieces:
            encode_layer_by_layer(engine)
        self._made[name] = AsyncEngine(engine)
        self.names.append(name)
        return name

    def add(self) -> None:
        name = self._make()
        self.engine.add(name, self._made[name])

    def drain(self) -> None:
        self.engine.drain(self.names.pop(0))

    async def fail(self) -> None:
        name = self.names.pop(0)
        await self._made[name].close()
        self._gone.add(name)
        self.engine.remove(name)

    async def check(self) -> None:
        """Nothing runs: nothing is held, charged or lost."""
        async with asyncio.timeout(60):
            while sorted(self.engine.names) != sorted(self.names):
                await asyncio.sleep(0.01)
        for one in self.engine.stats().replicas:
            assert (one.running, one.queue_s) == (0, 0.0), one
        for pin in await self.engine.cache.pins():
            await self.engine.cache.unpin_id(pin.id, Owner(pin.namespace[0], pin.namespace[1]))
        await self.engine.cache.reset()
        for name in self.names:
            cache = await self._made[name].call(_whole)
            assert (cache.num_leases, cache.free_blocks) == (0, cache.total_blocks), (name, cache)
            if self._pictures is not None:
                most = self._pictures.max_bytes
                await self._made[name].call(lambda engine, most=most: check_nothing_is_left(engine, most))


def _whole(engine: Any) -> Any:
    engine.check()
    return engine.stats().cache


async def ask_for(
    engine: ReplicatedEngine, ask: Ask, pictures: Pictures | None, numbers: random.Random, name: str
) -> tuple[str, Samples]:
    """How it ended, and what there was of each sample."""
    samples: Samples = [[] for _ in range(ask.params.n)]
    tenant, salt = ask.namespace if isinstance(ask.namespace, tuple) else (ask.namespace, "")
    pins = (PrefixPin(len(ask.prompt), 30.0),) if numbers.random() < 0.15 else ()
    options = {"tenant": tenant, "salt": salt, "priority": ask.priority, "request_id": name, "pins": pins}
    prompt, options["images"] = placed(ask, pictures)
    is_broken = pictures is not None and pictures.is_broken(options["images"])
    try:
        if ask.aborted_after is None and numbers.random() < 0.5:
            output = await engine.generate(Request(prompt, ask.params, **options))
            return "whole", [sample.token_ids for sample in output.outputs]
        left = ask.aborted_after
        leaves = numbers.random() < 0.5
        async with aclosing(engine.stream(Request(prompt, ask.params, **options))) as deltas:
            async for delta in deltas:
                samples[delta.index] += delta.token_ids
                if left is not None:
                    left -= 1
                    if left < 0 and leaves:
                        return "left", samples
                    if left == -1:
                        await engine.abort(name)
        return "whole" if ask.aborted_after is None else "aborted", samples
    except ContextLengthExceededError:
        return "refused", samples
    except RequestFailedError as error:
        if is_broken and error.code == "step_failed":
            return "broken", samples
        if error.code != "out_of_kv_blocks":  # others' floors leave no room in so small a pool
            raise
        return "refused", samples
    except EngineStoppedError:
        assert any(samples), "before its first token it had to go elsewhere"
        return "cut", samples


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_every_answer_is_one_engines_and_nothing_is_held_in_the_end(seed: int) -> None:
    numbers = random.Random(seed)
    has_quotas = seed % 2 == 1
    pictures = Pictures(seed, LONGEST) if seed % 4 < 2 else None
    traffic, oracle = Traffic(seed, LONGEST), Oracle(BLOCK_SIZE, pictures)
    fleet, ends, number = Fleet(numbers, pictures), Counter[str](), 0
    engine = fleet.engine
    try:
        if has_quotas:
            await engine.cache.set_quotas(QUOTAS[0])
        for _ in range(12):
            asks = [traffic.next() for _ in range(10)]
            tasks = []
            for ask in asks:
                tasks.append(asyncio.ensure_future(ask_for(engine, ask, pictures, numbers, f"q{number}")))
                number += 1
            await asyncio.sleep(0.02 * numbers.random())
            if len(fleet.names) < 2 or (len(fleet.names) < 4 and numbers.random() < 0.4):
                fleet.add()
            elif numbers.random() < 0.7:
                await fleet.fail() if numbers.random() < 0.5 else fleet.drain()
            if numbers.random() < 0.3:
                await engine.cache.reset()
            if has_quotas and numbers.random() < 0.3:
                await engine.cache.set_quotas(numbers.choice(QUOTAS))
            cancelled = numbers.choice(tasks) if numbers.random() < 0.5 else None
            if cancelled is not None:
                cancelled.cancel()
            for ask, task in zip(asks, tasks, strict=True):
                try:
                    async with asyncio.timeout(120):
                        end, samples = await task
                except asyncio.CancelledError:
                    assert task is cancelled
                    continue
                ends[end] += 1
                assert has_quotas or end != "refused"
                expected = [tokens for tokens, _ in oracle.answer(ask)]
                if end == "whole" and not has_quotas:  # else some end early, for want of room
                    assert samples == expected, (seed, ask)
                else:
                    for tokens, whole in zip(samples, expected, strict=True):
                        assert tokens == whole[: len(tokens)], (seed, ask, end)
        await fleet.check()
        assert ends["whole"] + ends["broken"] > 40, ends
    finally:
        with contextlib.suppress(EngineStoppedError):
            await engine.close()
    print(seed, dict(ends))
