# SPDX-License-Identifier: Apache-2.0
"""An engine that has failed is made anew, if that was asked for; everybody hears what happened."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator

import pytest
from paged_language_model import PagedHashModel, greedy_reference, make_engine
from waiting import until_async

from radixkv.cache.accounts import Quota
from radixkv.engine.engine import Engine
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.entrypoints.engine_thread import RestartPolicy
from radixkv.errors import EngineStoppedError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPT = [5, 6, 7, 8, 9]
SOON = RestartPolicy(max_restarts=3, pause_s=0.001)

pytestmark = pytest.mark.injects_faults


@pytest.fixture(scope="module", autouse=True)
def only_new_objects_are_collected() -> Iterator[None]:
    """A restart collects garbage: that shall not look at all that other tests have loaded."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)  # a restart does it, for an engine that was frozen
        yield


class Factory:
    """Makes engines; each but the first waits until a test lets it.

    Attributes:
        made: weak references to all engines, in order.
        alive_at_restart: how many of the earlier ones were still in memory when another was asked for.
        fail: raise this instead of making one.
        deadly: when set, the engine's next step ends its thread.
    """

    def __init__(self) -> None:
        self.made: list[weakref.ref[Engine]] = []
        self.alive_at_restart: list[int] = []
        self.fail: BaseException | None = None
        self.deadly = threading.Event()
        self.may_restart = threading.Event()
        self.may_restart.set()

    def __call__(self) -> Engine:
        if self.made:
            assert self.may_restart.wait(60)
            self.alive_at_restart.append(sum(engine() is not None for engine in self.made))
        if self.fail is not None:
            raise self.fail
        engine, _ = make_engine(num_blocks=64, model=PagedHashModel(64, 8, fail_if=self._die))
        self.made.append(weakref.ref(engine))
        return engine

    def _die(self, *_: object) -> bool:
        if self.deadly.is_set():
            self.deadly.clear()
            raise SystemExit("memory is broken")
        return False


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Factory:
    # The helper remembers every engine, to check it at the end; here the first must be free to go.
    monkeypatch.setattr("paged_language_model.MADE", deque(maxlen=0))
    # And so must what pytest keeps of the log: tracebacks hold on to frames.
    monkeypatch.setattr(logging.getLogger("radixkv"), "disabled", True)
    return Factory()


@contextlib.asynccontextmanager
async def serving(factory: Factory, restart: RestartPolicy | None = SOON) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(factory, restart=restart)
    try:
        yield engine
    finally:
        factory.may_restart.set()
        await engine.close()


async def kill(engine: AsyncEngine, factory: Factory) -> None:
    """Make the thread fail with a request in flight; returns when that has heard of it."""
    stream = engine.stream(Request(PROMPT, SamplingParams(max_tokens=300, ignore_eos=True)))
    await anext(stream)
    factory.deadly.set()
    with pytest.raises(EngineStoppedError, match="memory is broken"):
        async for _ in stream:
            pass


async def test_a_failed_engine_is_made_anew_and_the_old_one_is_gone_by_then(factory: Factory) -> None:
    async with serving(factory) as engine:
        factory.may_restart.clear()
        await kill(engine, factory)
        assert not engine.is_healthy
        with pytest.raises(EngineStoppedError, match="being restarted") as caught:
            await engine.generate(Request(PROMPT, GREEDY))
        assert caught.value.retry_after_s is not None
        assert engine.stats().finished_requests == 0, "figures can be read meanwhile"
        del caught
        # The errors held it until now. A collection does nothing while another thread is in one of its own.
        await until_async(lambda: gc.collect() >= 0 and factory.made[0]() is None)
        factory.may_restart.set()
        await until_async(lambda: engine.is_healthy)
        output = await engine.generate(Request(PROMPT, GREEDY))
        assert output.outputs[0].token_ids == greedy_reference(PROMPT, 8)
        assert output.num_cached_tokens == 0
        assert factory.alive_at_restart == [0], "two models may not fit into memory"


async def test_quotas_and_public_prefixes_outlive_a_restart(factory: Factory) -> None:
    async with serving(factory) as engine:
        public = list(range(40, 60))
        assert await engine.cache.publish(public) == 16
        await engine.cache.set_quotas({"ada": Quota(floor=5, ceiling=20)})
        await kill(engine, factory)
        await until_async(lambda: engine.is_healthy)
        assert [(q.namespace, q.floor, q.ceiling) for q in await engine.cache.quotas()] == [(("ada",), 5, 20)]
        await engine.generate(Request([*public, 1], GREEDY, tenant="ada"))
        other = await engine.generate(Request([*public, 2], GREEDY, tenant="ben"))
        assert other.num_cached_tokens == 16


async def test_restarts_are_few(factory: Factory) -> None:
    async with serving(factory) as engine:
        for _ in range(SOON.max_restarts):
            await kill(engine, factory)
            await until_async(lambda: engine.is_healthy)
        await kill(engine, factory)
        with pytest.raises(EngineStoppedError) as caught:
            await engine.generate(Request(PROMPT, GREEDY))
        assert caught.value.retry_after_s is None
        assert len(factory.made) == 1 + SOON.max_restarts


@pytest.mark.parametrize(("healthy_s", "pauses"), [(0.0, [0.001, 0.001]), (1e6, [0.001, 0.002])])
async def test_a_healthy_run_ends_the_row_of_longer_pauses(
    factory: Factory, healthy_s: float, pauses: list[float]
) -> None:
    async with serving(factory, RestartPolicy(pause_s=0.001, healthy_s=healthy_s)) as engine:
        for pause in pauses:
            factory.may_restart.clear()
            await kill(engine, factory)
            with pytest.raises(EngineStoppedError) as caught:
                await engine.generate(Request(PROMPT, GREEDY))
            assert caught.value.retry_after_s == pause
            del caught
            factory.may_restart.set()
            await until_async(lambda: engine.is_healthy)


async def test_an_engine_that_cannot_be_made_again_is_tried_a_few_times(factory: Factory) -> None:
    async with serving(factory) as engine:
        factory.fail = MemoryError("none left")
        await kill(engine, factory)

        async def is_given_up() -> bool:
            try:
                await engine.generate(Request(PROMPT, GREEDY))
            except EngineStoppedError as error:
                return error.retry_after_s is None
            return False

        for _ in range(20_000):
            if await is_given_up():
                break
            await asyncio.sleep(0.001)
        with pytest.raises(EngineStoppedError, match="none left"):
            await engine.generate(Request(PROMPT, GREEDY))
        assert len(factory.alive_at_restart) == SOON.max_restarts


async def test_closing_ends_the_wait_for_a_restart(factory: Factory) -> None:
    async with serving(factory, RestartPolicy(pause_s=10_000.0)) as engine:
        await kill(engine, factory)
        await engine.close()
        with pytest.raises(EngineStoppedError, match="closed"):
            await engine.generate(Request(PROMPT, GREEDY))
    assert len(factory.made) == 1


async def test_without_the_setting_the_end_is_the_end(factory: Factory) -> None:
    async with serving(factory, None) as engine:
        await kill(engine, factory)
        with pytest.raises(EngineStoppedError) as caught:
            await engine.generate(Request(PROMPT, GREEDY))
        assert caught.value.retry_after_s is None
        assert not engine.is_healthy
