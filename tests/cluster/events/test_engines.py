# SPDX-License-Identifier: Apache-2.0
"""Engines that publish: tiny pools, tenants, faults, restarts, other processes, servers."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="block events need the extra radixkv[events]")
pytest.importorskip("msgspec", reason="block events need the extra radixkv[events]")

import httpx
from engine_process import paged_engine, paged_engine_elsewhere
from event_traffic import SECRET, keys_of
from fuzzing import examples
from live_server import live_server
from paged_language_model import PagedHashModel, make_engine, run_all
from waiting import until

from radixkv.cache.keys import encode_tokens
from radixkv.cluster.events.block_keys import NO_CHAIN, BlockKeys, block_key, chains
from radixkv.cluster.events.follower import Follower
from radixkv.cluster.events.spec import parse_events
from radixkv.cluster.events.subscriber import Subscriber
from radixkv.engine.engine import Engine
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.entrypoints.engine_thread import RestartPolicy
from radixkv.errors import ConfigError, EngineStoppedError
from radixkv.observe.residency import Residency
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
KEYS = BlockKeys(SECRET)


@pytest.fixture
def address(tmp_path: Path) -> str:
    """A setting with two ports that were free, and the secret of the tests."""
    (tmp_path / "secret").write_bytes(SECRET)
    ports = []
    with ExitStack() as stack:
        for _ in range(2):
            found = stack.enter_context(closing(socket.socket()))
            found.bind(("127.0.0.1", 0))
            ports.append(found.getsockname()[1])
    return f"tcp://127.0.0.1:{ports[0]},replay=tcp://127.0.0.1:{ports[1]},secret={tmp_path / 'secret'}"


@contextmanager
def following(address: str) -> Iterator[Follower]:
    follower = Follower(KEYS)
    with closing(Subscriber({"one": (parse_events(address, reads=True), follower)}, replay_s=0.3)):
        yield follower


def held(engine: Engine) -> set[int]:
    """The keys of the blocks that the engine's cache holds now."""
    truth = Residency()
    engine.cache.subscribe(truth)()
    return keys_of(truth, KEYS, engine.cache.block_size)


@pytest.mark.injects_faults
@pytest.mark.parametrize("seed", range(examples(1)))
def test_exact_in_a_tiny_pool_with_tenants_faults_and_rebuilds(seed: int, address: str) -> None:
    rng = random.Random(seed)
    deadly = [False]
    model = PagedHashModel(24, 8, fail_if=lambda *_: rng.random() < 0.02)
    engine, _ = make_engine(num_blocks=24, model=model, kv_events=address, deterministic=bool(seed % 2))
    complete = engine.scheduler.complete

    def sometimes(batch: Any) -> None:
        if deadly[0]:
            deadly[0] = False
            raise AssertionError("a broken invariant, by the test")
        complete(batch)

    with following(address) as follower:
        for round_ in range(12):
            for _ in range(8):
                prompt = [*range(1, rng.choice((4, 20, 40))), *(rng.randrange(1, 4) for _ in range(20))]
                engine.add_request(prompt, GREEDY, namespace=(rng.choice(("", "ada", "bob")),))
            if round_ in (4, 8):
                engine.scheduler.complete = sometimes  # type: ignore[method-assign]
                deadly[0] = True
            run_all(engine)
            until(lambda: follower.is_exact and follower.hashes == held(engine))
        stats = engine.stats()
        assert stats.num_rebuilds >= 1
        assert stats.events is not None
        assert stats.events.blocks > 0
        engine.close()
        until(lambda: not follower.hashes)


@pytest.mark.injects_faults
@pytest.mark.nightly
def test_an_engine_that_is_made_anew_is_another_incarnation(address: str) -> None:
    deadly = [False]

    def die(*_: object) -> bool:
        if deadly[0]:
            deadly[0] = False
            raise SystemExit
        return False

    def make() -> Engine:
        return make_engine(kv_events=address, model=PagedHashModel(64, 8, fail_if=die))[0]

    async def use(follower: Follower) -> None:
        engine = AsyncEngine(make, restart=RestartPolicy(pause_s=0.001))
        await engine.generate(Request(list(range(1, 41)), GREEDY))
        await asyncio.to_thread(until, lambda: len(follower) == 5)
        first = follower.incarnation
        deadly[0] = True
        with pytest.raises(EngineStoppedError):
            await engine.generate(Request(list(range(1, 41)), GREEDY))
        await asyncio.to_thread(until, lambda: engine.is_healthy)
        await engine.generate(Request(list(range(50, 75)), GREEDY))
        await asyncio.to_thread(until, lambda: follower.is_exact and len(follower) == 4)
        assert follower.incarnation != first
        await engine.close()
        await asyncio.to_thread(until, lambda: not follower.hashes)

    with following(address) as follower:
        asyncio.run(use(follower))


def test_an_engine_in_another_process(address: str) -> None:
    prompt = list(range(1, 50))
    chain = chains(8).chain(NO_CHAIN, encode_tokens(prompt[:48]))

    async def use(follower: Follower) -> None:
        engine = paged_engine_elsewhere(kv_events=address)
        try:
            for tenant in ("", "ada"):
                await engine.generate(Request(prompt, GREEDY, tenant=tenant))
                wanted = {
                    block_key(KEYS.owner((tenant,)), bytes(chain[i : i + 16]))
                    for i in range(0, len(chain), 16)
                }
                assert len(wanted) == 6
                await asyncio.to_thread(until, lambda wanted=wanted: wanted <= follower.hashes)
            await engine.cache.reset()
            await asyncio.to_thread(until, lambda: not follower.hashes)
            events = engine.stats().events
            assert events is not None
            assert events.blocks > 0
        finally:
            await engine.close()

    with following(address) as follower:
        asyncio.run(use(follower))


def test_a_second_engine_on_the_same_port_is_told(address: str) -> None:
    engine, _ = make_engine(kv_events=address)
    with pytest.raises(ConfigError, match="is in use; each replica needs two ports"):
        make_engine(kv_events=address)
    engine.close()
    again, _ = make_engine(kv_events=address)
    again.close()
    again.close()


def test_metrics(address: str) -> None:
    engine = paged_engine(kv_events=address)
    with live_server(engine) as server:
        asyncio.run(engine.generate(Request(list(range(1, 41)), GREEDY)))
        text = httpx.get(f"{server.url}/metrics").text
    for name in ("batches", "blocks", "dropped_blocks", "replays"):
        assert f"radixkv_kv_events_{name}_total " in text
    assert "radixkv_kv_events_waiting_blocks " in text
