# SPDX-License-Identifier: Apache-2.0
"""An engine in another process: what comes across, and what happens when either side goes away."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import pytest
from engine_process import paged_engine, paged_engine_elsewhere, served_in_a_thread
from scripted_engine import Asked, ScriptedEngine

from radixkv.cluster.remote import wire
from radixkv.cluster.remote.messages import Ask, Messenger, Reply
from radixkv.cluster.remote.process import start_engine
from radixkv.engine.client import EngineClient, EngineFacts
from radixkv.engine.counts import EngineStats
from radixkv.errors import (
    ConfigError,
    ContextLengthExceededError,
    EngineOverloadedError,
    EngineStoppedError,
    InvalidRequestError,
    RequestFailedError,
)
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)


@contextlib.asynccontextmanager
async def elsewhere(**options: object) -> AsyncIterator[EngineClient]:
    engine = paged_engine_elsewhere(num_blocks=256, block_size=16, **options)
    try:
        yield engine
    finally:
        await engine.close()


def processes() -> list[multiprocessing.process.BaseProcess]:
    return multiprocessing.active_children()


async def test_answers_are_the_same_as_here():
    here = paged_engine(num_blocks=256, block_size=16)
    async with elsewhere() as there:
        for params in (
            GREEDY,
            SamplingParams(temperature=0.8, seed=3, n=2, best_of=3, max_tokens=12, ignore_eos=True),
            SamplingParams(max_tokens=12, structured={"regex": "[a-d]{4}"}, seed=1),
            SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=1),
        ):
            one, other = [await engine.generate(Request([5, 6, 7], params)) for engine in (here, there)]
            assert one.outputs == other.outputs
            assert one.prompt_logprobs == other.prompt_logprobs
    await here.close()


async def test_a_burst_of_streams_is_not_mixed_up():
    here = paged_engine(num_blocks=256, block_size=16)
    expected = [(await here.generate(Request([1 + i, 2], GREEDY))).outputs[0].token_ids for i in range(30)]
    await here.close()
    async with elsewhere() as engine:

        async def ask(i: int) -> list[int]:
            return [
                token
                async for delta in engine.stream(Request([1 + i, 2], GREEDY))
                for token in delta.token_ids
            ]

        assert await asyncio.gather(*map(ask, range(30))) == expected
        assert engine.stats().finished_requests == 30


async def test_errors_come_with_their_fields():
    async with elsewhere(max_queue=1, max_num_seqs=1) as engine:
        with pytest.raises(InvalidRequestError, match="out of range") as caught:
            await engine.generate(Request([10**6], GREEDY))
        assert caught.value.param == "prompt"
        with pytest.raises(ContextLengthExceededError) as too_long:
            await engine.generate(Request([1] * engine.limits.max_model_len, GREEDY))
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(InvalidRequestError, match="sent to another process"):
            await engine.generate(Request((token for token in [1, 2]), GREEDY))  # type: ignore[arg-type]
        waiting = [asyncio.ensure_future(engine.generate(Request([1 + i], LONG))) for i in range(6)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert isinstance(done.pop().exception(), EngineOverloadedError)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_every_error_survives_the_way():
    for error in (
        EngineStoppedError("gone", retry_after_s=1.5),
        RequestFailedError("failed", code="nan_logits"),
        InvalidRequestError("bad", param="seed", code="x"),
        ContextLengthExceededError("long", param="messages"),
        EngineOverloadedError("full"),
        ConfigError("wrong"),
    ):
        for copy in (pickle.loads(pickle.dumps(error)), wire.loads(wire.dumps(error))):
            assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


async def test_whoever_leaves_ends_the_request_there():
    async with elsewhere() as engine:
        stream = engine.stream(Request([5, 6], LONG))
        await anext(stream)
        await stream.aclose()
        task = asyncio.ensure_future(engine.generate(Request([7, 8], LONG)))
        while not engine.stats().num_running:
            await engine.cache.match([1])
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        while engine.stats().aborted_requests < 2:
            await engine.cache.match([1])  # each call waits for a step
        assert engine.stats().cache.held_blocks == 0


def test_several_event_loops_share_it_and_a_closed_one_ends_its_requests():
    engine = paged_engine_elsewhere(num_blocks=256, block_size=16)
    other = asyncio.new_event_loop()
    stream = engine.stream(Request([5, 6], LONG))
    other.run_until_complete(anext(stream))
    other.close()
    answers: dict[int, list[int]] = {}

    async def ask(number: int) -> None:
        answers[number] = (await engine.generate(Request([9, 9], GREEDY))).outputs[0].token_ids

    threads = [threading.Thread(target=lambda n=n: asyncio.run(ask(n))) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers[0] == answers[1] == answers[2]

    async def wait_and_close() -> None:
        while engine.stats().aborted_requests < 1:
            await engine.cache.match([1])
        await engine.close()

    asyncio.run(wait_and_close())
    with contextlib.suppress(StopIteration, RuntimeError):
        stream.aclose().send(None)


async def test_when_the_process_dies_everybody_hears_of_it():
    before = {process.pid for process in processes()}
    engine = paged_engine_elsewhere(num_blocks=256, block_size=16)
    (process,) = [one for one in processes() if one.pid not in before]
    stream = engine.stream(Request([5, 6], LONG))
    await anext(stream)
    waiting = asyncio.ensure_future(engine.generate(Request([7, 8], LONG)))
    events = asyncio.ensure_future(anext(engine.cache.events(replay=False)))
    await asyncio.sleep(0)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineStoppedError, match="process has ended"):
        async for _ in stream:
            pass
    for task in (waiting, events):
        with pytest.raises(EngineStoppedError, match="process has ended"):
            await task
    assert not engine.is_healthy
    with pytest.raises(EngineStoppedError):
        await engine.generate(Request([1], GREEDY))
    await engine.abort("nobody")
    assert isinstance(engine.stats(), EngineStats)
    await engine.close()
    await engine.close()


async def test_the_process_ends_with_its_engine_and_with_its_client():
    before = {process.pid for process in processes()}
    engine = paged_engine_elsewhere(num_blocks=256, block_size=16)
    await engine.close()
    assert {process.pid for process in processes()} <= before


def no_engine() -> EngineClient:
    raise ConfigError("there is no such model")


def ends_at_once() -> EngineClient:
    os._exit(3)


def test_an_engine_that_can_not_be_made_says_why():
    with pytest.raises(ConfigError, match="no such model"):
        start_engine(no_engine, method="forkserver")
    with pytest.raises(EngineStoppedError, match="before its engine was ready"):
        start_engine(ends_at_once, method="forkserver")


class OddError(Exception):
    """One that can be pickled, but not read again: as those of many libraries are."""

    def __init__(self, what: str, *, status: int) -> None:
        super().__init__(f"{what}: {status}")


def oddly_no_engine() -> EngineClient:
    raise OddError("the hub says no", status=418)


def test_an_engine_that_can_not_be_made_says_why_whatever_its_error_is():
    with pytest.raises(EngineStoppedError, match="OddError: the hub says no: 418"):
        start_engine(oddly_no_engine, method="forkserver")


class OfAnotherVersion:
    """Can be written there, and not be read here."""

    def __reduce__(self) -> tuple[object, ...]:
        return refuse_to_read, ()


def refuse_to_read() -> None:
    raise ValueError("a class of another version")


class NotUnderstood(ScriptedEngine):
    @property
    def facts(self) -> EngineFacts:
        return replace(super().facts, image_processor=OfAnotherVersion())


def test_an_engine_that_is_not_understood_ends_with_the_attempt():
    with pytest.raises(ValueError, match="another version"):
        start_engine(NotUnderstood, method="forkserver")


class Unpicklable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not this one")


@pytest.mark.parametrize("error", [OddError("full", status=7), Unpicklable("full: 7")])
async def test_an_error_that_can_not_be_read_here_fails_its_own_call_alone(error):
    def fail(asked: Asked, so_far: int) -> BaseException | None:
        return error if so_far == 2 else None

    async with served_in_a_thread(ScriptedEngine(max_model_len=1000, fail=fail)) as engine:
        with pytest.raises(RequestFailedError, match=f"{type(error).__name__}: full: 7"):
            await asyncio.wait_for(engine.generate(Request("say:abcdef", SamplingParams())), 20)
        answer = await asyncio.wait_for(engine.generate(Request("say:a", SamplingParams())), 20)
        assert answer.outputs[0].text == "a"


async def test_an_answer_may_be_there_before_the_question_is_sent_on(monkeypatch):
    """However late the thread that asks goes on."""
    answered = threading.Event()
    messages: list[object] = []
    send, receive = Messenger.send, Messenger.receive

    def send_and_wait(messenger: Messenger, message: object) -> None:
        send(messenger, message)
        if isinstance(message, Ask):
            assert answered.wait(20)

    def note(messenger: Messenger) -> object:
        if messages and isinstance(messages[-1], Reply):
            answered.set()  # it was taken
        messages.append(receive(messenger))
        return messages[-1]

    async with elsewhere() as engine:
        monkeypatch.setattr(Messenger, "receive", note)
        await engine.cache.match([1])  # the thread that reads waited in the old one
        answered.clear()
        messages.clear()
        monkeypatch.setattr(Messenger, "send", send_and_wait)
        answer = asyncio.ensure_future(engine.cache.match([1]))
        await asyncio.wait([answer], timeout=20)
        monkeypatch.undo()
        assert answer.done()
        assert answer.result() == 0


async def test_nothing_runs_further_ahead_than_it_is_read():
    """Of an engine that waits for its reader: what nobody reads does not pile up between the processes."""
    given = 0

    def count(asked: object, so_far: int) -> None:
        nonlocal given
        given = so_far

    async with served_in_a_thread(ScriptedEngine(max_model_len=10**6, fail=count)) as engine:
        stream = engine.stream(Request("say:" + "x" * 5000, SamplingParams(max_tokens=5000)))
        for _ in range(10):
            await anext(stream)
        for _ in range(20):
            await engine.cache.match([1])  # the host has had its turns
        assert 10 <= given <= 100
        rest = [delta async for delta in stream]
        assert len(rest) == 4990


@pytest.mark.parametrize("method", ["spawn"])
@pytest.mark.nightly
@pytest.mark.usefixtures("trapped_folder")
def test_a_process_may_be_a_new_one(method):
    engine = start_engine(partial(ScriptedEngine, max_model_len=64), method=method)

    async def ask() -> str:
        text = (await engine.generate(Request("say:hi", SamplingParams()))).outputs[0].text
        await engine.close()
        return text

    assert asyncio.run(ask()) == "hi"
