# SPDX-License-Identifier: Apache-2.0
"""Traffic over a Redis that fails: two replicas of two tenants, with hardly any room, cancels and resets.

    replicas    engines over one Redis, in this process or (`elsewhere`) in processes of their own
    Redis       hangs, goes on, is killed and started again, is flushed; values are damaged, truncated,
                swapped, and deleted in the middle of texts

Every answer is compared with what the model says without any cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
from paged_language_model import LetterTokenizer, make_engine, next_logits
from redis_server import RedisServer, redis_server
from seeing_hash_model import NUM_PICTURES, HashImages, SeesImages

from radixkv.cluster.remote.process import start_engine
from radixkv.engine.client import EngineClient
from radixkv.engine.engine import Engine
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.request import Request
from radixkv.tiers.record import BlockKind
from radixkv.tiers.redis.owner_keys import OwnerKeys
from radixkv.tiers.redis.redis_tier import RedisTier
from radixkv.tiers.selection import Selection
from radixkv.tiers.tier import TierStack

BLOCK_SIZE = 8
TENANTS = ("ada", "eve")
SECRET = b"the same on all replicas"


@dataclass
class BrokenOutcome:
    """What became of a run."""

    answers: int = 0
    cancelled: int = 0
    cached_tokens: int = 0
    loaded_blocks: int = 0
    failed_loads: int = 0
    late_loads: int = 0
    preemptions: int = 0
    steps_ahead: int = 0
    checksums: int = 0
    longest_wait_s: float = 0.0

    def add(self, other: BrokenOutcome) -> None:
        """Sum up another run."""
        for item in fields(self):
            pair = getattr(self, item.name), getattr(other, item.name)
            setattr(self, item.name, max(pair) if item.name == "longest_wait_s" else sum(pair))


class LateClock:
    """Real seconds, and those that a model says it has taken."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class SlowModel(SeesImages):
    """A model that takes two milliseconds for a token, by the clock: loading is quicker. It sees pictures."""

    def __init__(self, clock: LateClock, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.clock = clock

    def execute(self, batch: Batch) -> Any:
        self.clock.ahead += 0.002 * batch.num_tokens
        return super().execute(batch)


def make_replica(url: str, num_blocks: int, encrypts: bool, ahead: bool, sees: int) -> Engine:
    """An engine with a Redis tier; its pool holds two or three of the prompts, whose pictures have a seed."""
    kind = BlockKind("paged-hash", "", BLOCK_SIZE, 24 * BLOCK_SIZE)
    owners = OwnerKeys(kind, SECRET, encrypts=encrypts)
    tier = RedisTier(url, kind, owners, ttl_s=100, selection=Selection(0))
    clock = LateClock()
    model, images = SlowModel(clock, num_blocks, BLOCK_SIZE), HashImages(sees, True)
    model.see(images, 400)
    engine, _ = make_engine(
        model=model,
        image_processor=images,
        clock=clock,
        num_blocks=num_blocks,
        budget=48,
        tokenizer=LetterTokenizer(),
        tier=TierStack([tier]),
        load_deadline_s=1.0,
        async_scheduling=ahead,
    )
    return engine


def replica_elsewhere(**options: Any) -> EngineClient:
    """The same in a process of its own."""
    return start_engine(partial(async_replica, **options), method="forkserver")


def async_replica(**options: Any) -> AsyncEngine:
    """The same on a thread of its own."""
    return AsyncEngine(make_replica(**options))


class BrokenRedis:
    """Does to a Redis what may happen to one."""

    def __init__(self, server: RedisServer, source: random.Random) -> None:
        self.server, self.source = server, source
        self._hangs = self._is_dead = False

    def act(self) -> None:
        """One thing, or nothing."""
        chance = self.source.random()
        if self._hangs or self._is_dead:
            if chance < 0.5:
                self.mend()
            return
        if chance < 0.08:
            self.server.hang()
            self._hangs = True
        elif chance < 0.14:
            self.server.kill()
            self._is_dead = True
        elif chance < 0.18:
            self.server.client.flushall()
        elif chance < 0.7:
            self._damage()

    def mend(self) -> None:
        """It is there, and answers."""
        if self._hangs:
            self.server.go_on()
        if self._is_dead:
            self.server.start()
        self._hangs = self._is_dead = False

    def _damage(self) -> None:
        client, source = self.server.client, self.source
        keys = sorted(client.keys())
        if len(keys) < 2:
            return
        key, other = source.sample(keys, 2)
        value = bytearray(client.get(key) or b"gone")
        how = source.randrange(4)
        if how == 0:
            client.delete(key)
        elif how == 1:
            client.set(key, bytes(value[: source.randrange(len(value))]))
        elif how == 2:
            client.set(key, client.get(other) or b"")
        else:
            value[source.randrange(len(value))] ^= 1 << source.randrange(8)
            client.set(key, bytes(value))


class _Run:
    """One seed."""

    def __init__(
        self, seed: int, redis: BrokenRedis, replicas: Sequence[EngineClient], images: HashImages
    ) -> None:
        self.source, self.redis, self.replicas = random.Random(seed), redis, replicas
        self.outcome = BrokenOutcome()
        self._answers: dict[tuple[int, ...], list[int]] = {}
        families = [[self.source.randrange(1, 90) for _ in range(150)] for _ in range(4)]
        prompts = [
            self.source.choice(families)[: self.source.randrange(20, 120)]
            + [self.source.randrange(1, 90) for _ in range(self.source.randrange(6))]
            for _ in range(12)
        ]
        # Every third shows a picture, at a place that is the same in all of a family.
        self.shown = [
            images.place([*prompt[:18], images.pictures[prompt[0] % NUM_PICTURES], *prompt[18:95]])
            if prompt[0] % 3 == 0
            else (prompt, [])
            for prompt in prompts
        ]

    async def ask(self) -> None:
        """A request of somebody to some replica, who may go away before it has its answer."""
        source = self.source
        (prompt, images), tenant = source.choice(self.shown), source.choice(TENANTS)
        length, is_cancelled = source.choice((1, 4, 30)), source.random() < 0.15
        replica, patience = source.choice(self.replicas), source.random() * 0.02
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        asked = asyncio.create_task(replica.generate(Request(prompt, params, tenant=tenant, images=images)))
        if is_cancelled:
            await asyncio.wait([asked], timeout=patience)
            asked.cancel()
        try:
            output = await asked
        except asyncio.CancelledError:
            self.outcome.cancelled += 1
            return
        sample = output.outputs[0]
        assert sample.finish_reason == "length", output
        expected = self._expected(prompt, length)
        assert list(sample.token_ids) == expected, f"{prompt} of {tenant}: {sample.token_ids}"
        self.outcome.answers += 1
        self.outcome.cached_tokens += output.num_cached_tokens
        for hit in output.tier_hits:
            self.outcome.longest_wait_s = max(self.outcome.longest_wait_s, hit.seconds)

    def _expected(self, prompt: list[int], length: int) -> list[int]:
        tokens = self._answers.setdefault(tuple(prompt), list(prompt))
        while len(tokens) < len(prompt) + length:
            tokens.append(int(next_logits(np.asarray(tokens)).argmax()))
        return tokens[len(prompt) : len(prompt) + length]

    async def go(self, num_requests: int) -> None:
        """Some at a time, until there were so many."""
        while num_requests > 0:
            some = self.source.randrange(1, 13)
            num_requests -= some
            self.redis.act()
            if self.source.random() < 0.05:
                await self.source.choice(self.replicas).cache.reset()
            await asyncio.gather(*[self.ask() for _ in range(some)])

    async def end(self) -> None:
        """Redis is there again; nothing may be held."""
        self.redis.mend()
        for replica in self.replicas:
            end = time.monotonic() + 60
            while (stats := replica.stats()).cache.num_leases:
                assert time.monotonic() < end, f"leases are left: {stats}"
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(replica.cache.quotas(), 1)
                await asyncio.sleep(0)
            assert stats.transfers is not None
            assert (stats.cache.held_blocks, stats.num_rebuilds) == (0, 0), stats
            self.outcome.preemptions += stats.num_preemptions
            self.outcome.steps_ahead += stats.steps_ahead
            for name in ("loaded_blocks", "failed_loads", "late_loads"):
                setattr(self.outcome, name, getattr(self.outcome, name) + getattr(stats.transfers, name))
            self.outcome.checksums += sum(tier.refused.get("checksum", 0) for tier in stats.tiers)


def run_over_redis(
    seed: int, num_requests: int, *, elsewhere: bool = False, ahead: bool = False
) -> BrokenOutcome:
    """Serve one seed's traffic; raises AssertionError where something is wrong.

    Args:
        elsewhere: the second replica is in a process of its own.
        ahead: steps are launched ahead.
    """
    source = random.Random(seed + 10**6)
    with redis_server() as server:
        options = {
            "url": server.url,
            "num_blocks": source.randrange(20, 32),
            "encrypts": source.random() < 0.5,
            "ahead": ahead,
            "sees": seed,
        }
        engine = make_replica(**options)
        replicas = [AsyncEngine(engine), (replica_elsewhere if elsewhere else async_replica)(**options)]
        one = _Run(seed, BrokenRedis(server, source), replicas, HashImages(seed, True))

        async def life() -> None:
            try:
                await one.go(num_requests)
                await one.end()
            finally:
                one.redis.mend()
                for replica in replicas:
                    await replica.close()

        asyncio.run(life())
        engine.check()
        assert not engine.runner.violations  # type: ignore[attr-defined]
    return one.outcome
