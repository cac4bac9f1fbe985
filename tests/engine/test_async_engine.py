# SPDX-License-Identifier: Apache-2.0
"""AsyncEngine over the paged model: ids, closing, several event loops, faults that are no Exceptions."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from paged_language_model import LetterTokenizer, PagedHashModel, greedy_reference, make_engine
from tiny_models import byte_level_tokenizer

from radixkv.engine.outputs import CompletionOutput, OutputDelta, RequestOutput
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.errors import (
    EngineOverloadedError,
    EngineStoppedError,
    InvalidRequestError,
    RadixKVError,
    RequestFailedError,
)
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request
from radixkv.text.prompt_texts import HUGE_TEXT, HUGE_TEXTS_AT_ONCE, LONG_TEXT
from radixkv.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


class Panic(BaseException):
    """What a panic of a Rust library looks like from Python."""


class Gate:
    """A place where the engine's thread can be held between two steps."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()

    def __call__(self, *_: object) -> bool:
        self.reached.set()
        assert self.open.wait(60), "nobody opened the gate"
        return False

    def shut(self) -> None:
        self.reached.clear()
        self.open.clear()

    async def wait_until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 60)


def model(gate: Callable[..., bool] | None = None) -> PagedHashModel:
    return PagedHashModel(128, 8, fail_if=gate)


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(make_engine(num_blocks=128, **options)[0])
    try:
        yield engine
    finally:
        await engine.close()


async def assert_idle(engine: AsyncEngine) -> None:
    """Nothing runs and nothing is held."""

    def look(inner: Any) -> tuple[int, int, int]:
        inner.check()
        return len(inner.requests), inner.cache.stats.held_blocks, inner.scheduler.num_waiting

    assert await engine.call(look) == (0, 0, 0)


async def test_answers_are_those_of_the_reference_streamed_or_not():
    async with serving() as engine:
        prompts = [[1 + i, 2, 3, 4] for i in range(6)]

        async def streamed(prompt: list[int]) -> list[int]:
            return [
                token async for delta in engine.stream(Request(prompt, GREEDY)) for token in delta.token_ids
            ]

        whole, pieces = (
            await asyncio.gather(*(engine.generate(Request(prompt, GREEDY)) for prompt in prompts)),
            await asyncio.gather(*map(streamed, prompts)),
        )
        expected = [await reference(prompt) for prompt in prompts]
        assert [output.outputs[0].token_ids for output in whole] == expected
        assert pieces == expected
        await assert_idle(engine)


async def test_nothing_is_made_to_be_thrown_away(monkeypatch):
    """A whole answer has no deltas made of it, a stream no output, and no list of all that came before."""
    made: Counter[str] = Counter()

    def counting(kind: type) -> None:
        plain = kind.__init__

        def init(self: Any, *args: Any, **options: Any) -> None:
            made[kind.__name__] += 1
            plain(self, *args, **options)

        monkeypatch.setattr(kind, "__init__", init)

    for kind in (OutputDelta, CompletionOutput, RequestOutput):
        counting(kind)
    for samples in (1, 3):
        params = SamplingParams(n=samples, seed=1, max_tokens=9, ignore_eos=True)
        async with serving() as engine:
            await engine.generate(Request([1, 2, 3, 4], params))
            assert made == {"RequestOutput": 1, "CompletionOutput": samples}
            made.clear()
            deltas = [delta async for delta in engine.stream(Request([1, 2, 3, 4], params))]
            assert made == {"OutputDelta": len(deltas)}
            assert sum(len(delta.token_ids) for delta in deltas) == 9 * samples, "each token is told once"
            made.clear()
            await assert_idle(engine)


async def reference(prompt: list[int], max_tokens: int = 8) -> list[int]:
    """What greedy decoding past the end token gives, on an engine of its own."""
    engine, _ = make_engine(num_blocks=128)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.add_request(prompt, params)
    finished: list[Any] = []
    while engine.has_work:
        finished += engine.step().finished
    return finished[0].outputs[0].token_ids


@pytest.mark.parametrize("steps", [0, 1, 3])
async def test_an_id_is_free_as_soon_as_its_stream_is_closed(steps):
    old, new = [5, 6, 7], [40, 41]
    expected = await reference(new)
    gate = Gate()
    async with serving(model=model(gate)) as engine:
        for _ in range(5):
            stream = engine.stream(Request(old, LONG, request_id="same"))
            if steps == 0:  # closed while its first step runs
                gate.shut()
                first = asyncio.ensure_future(anext(stream))
                await gate.wait_until_reached()
                first.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await first
                gate.open.set()
            for _ in range(steps):
                await anext(stream)
            await stream.aclose()
            output = await engine.generate(Request(new, GREEDY, request_id="same"))
            assert output.prompt_token_ids == new
            assert output.outputs[0].token_ids == expected
        await assert_idle(engine)


async def test_closing_after_the_last_token_does_not_harm_the_next_request_of_that_id():
    gate = Gate()
    async with serving(model=model(gate)) as engine:
        stream = engine.stream(Request([5, 6], SamplingParams(max_tokens=1), request_id="same"))
        await anext(stream)  # it has ended on the engine's thread, its reader does not know yet
        gate.shut()
        await stream.aclose()
        again = asyncio.ensure_future(engine.generate(Request([9, 9], GREEDY, request_id="same")))
        await gate.wait_until_reached()
        gate.open.set()
        assert (await again).outputs[0].token_ids == await reference([9, 9])


async def test_an_id_in_use_is_refused():
    async with serving() as engine:
        stream = engine.stream(Request([5, 6], LONG, request_id="same"))
        await anext(stream)
        with pytest.raises(InvalidRequestError, match="same"):
            await engine.generate(Request([7], GREEDY, request_id="same"))
        assert (await anext(stream)).token_ids
        await stream.aclose()
        await assert_idle(engine)


async def test_a_full_queue_is_refused_and_takes_again_later():
    gate = Gate()
    async with serving(model=model(gate), max_queue=2, max_num_seqs=1) as engine:
        gate.shut()
        first = asyncio.ensure_future(engine.generate(Request([1, 2], GREEDY)))
        await gate.wait_until_reached()
        rest = [asyncio.ensure_future(engine.generate(Request([3 + i], GREEDY))) for i in range(4)]
        await asyncio.sleep(0)
        gate.open.set()
        results = await asyncio.gather(first, *rest, return_exceptions=True)
        refused = [result for result in results if isinstance(result, EngineOverloadedError)]
        assert len(refused) == 2
        assert "max_queue" in str(refused[0])
        assert (await engine.generate(Request([9], GREEDY))).outputs[0].token_ids
        await assert_idle(engine)


async def test_closing_while_a_long_prompt_is_tokenised_ends_the_wait():
    started, go_on = threading.Event(), threading.Event()

    def hold(text: str) -> None:
        started.set()
        assert go_on.wait(60)

    engine = AsyncEngine(make_engine(num_blocks=1024, tokenizer=LetterTokenizer(on_encode=hold))[0])
    waiting = asyncio.ensure_future(engine.generate(Request("x" * (LONG_TEXT + 1), GREEDY)))
    assert await asyncio.to_thread(started.wait, 60)
    await engine.close()
    go_on.set()
    with pytest.raises(EngineStoppedError, match="closed"):
        await asyncio.wait_for(waiting, 30)
    await engine.close()


async def test_long_conversations_are_rendered_off_the_event_loop():
    threads: list[str] = []
    tokenizer = LetterTokenizer(on_encode=lambda text: threads.append(threading.current_thread().name))
    messages = [{"role": "user", "content": "x"}]
    big = "x" * (LONG_TEXT + 1)
    async with serving(tokenizer=tokenizer) as engine:
        await engine.render_chat(messages)
        await engine.render_chat([{"role": "user", "content": "x", "tool_calls": [{"arguments": big}]}])
        await engine.render_chat(messages, tools=[{"function": {"parameters": {"enum": [big]}}}])
        await engine.render_chat(messages, documents=[big])
    here = threading.current_thread().name
    assert [name == here for name in threads] == [True, False, False, False]


async def test_huge_texts_are_tokenised_two_at_a_time_and_hold_up_no_others():
    lock, go_on, full = threading.Lock(), threading.Event(), threading.Event()
    at_once: list[int] = []
    inside = 0

    def hold(text: str) -> None:
        nonlocal inside
        if len(text) > HUGE_TEXT:
            with lock:
                inside += 1
                at_once.append(inside)
                if inside == HUGE_TEXTS_AT_ONCE:
                    full.set()
            assert go_on.wait(60)
            with lock:
                inside -= 1

    async with serving(tokenizer=LetterTokenizer(on_encode=hold)) as engine:
        size = HUGE_TEXT + 1
        huge = [asyncio.ensure_future(engine.tokenize("x" * size)) for _ in range(8)]
        chat = asyncio.ensure_future(engine.render_chat([{"role": "user", "content": "x" * size}]))
        for shorter in (1, LONG_TEXT + 1, HUGE_TEXT):
            assert await asyncio.wait_for(engine.tokenize("y" * shorter), 60)
        huge[3].cancel()
        assert await asyncio.to_thread(full.wait, 60)
        go_on.set()
        await asyncio.gather(*huge, chat, return_exceptions=True)
    assert max(at_once) == HUGE_TEXTS_AT_ONCE
    assert len(at_once) == 8  # and the cancelled one never began


async def test_closing_fails_what_runs_and_what_waits():
    gate = Gate()
    engine = AsyncEngine(make_engine(num_blocks=128, model=model(gate), max_num_seqs=1)[0])
    gate.shut()
    running = asyncio.ensure_future(engine.generate(Request([1, 2], LONG)))
    await gate.wait_until_reached()
    waiting = [asyncio.ensure_future(engine.generate(Request([3], LONG))) for _ in range(3)]
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0)
    gate.open.set()
    for result in await asyncio.gather(running, *waiting, return_exceptions=True):
        assert isinstance(result, EngineStoppedError)
    await closing
    assert not engine.is_healthy
    with pytest.raises(EngineStoppedError):
        await engine.generate(Request([1], GREEDY))
    with pytest.raises(EngineStoppedError):
        await engine.call(lambda inner: None)


async def test_when_the_thread_dies_everybody_hears_of_it():
    gate = Gate()

    def fatal(*_: object) -> bool:
        gate()
        raise SystemExit("the thread is gone")

    engine = AsyncEngine(make_engine(num_blocks=128, model=PagedHashModel(128, 8, fail_if=fatal))[0])
    gate.shut()
    running = asyncio.ensure_future(engine.generate(Request([1, 2], LONG)))
    await gate.wait_until_reached()
    late = asyncio.ensure_future(engine.generate(Request([3], LONG)))
    asked = asyncio.ensure_future(engine.call(lambda inner: inner.stats()))
    await asyncio.sleep(0)
    gate.open.set()
    results = await asyncio.wait_for(asyncio.gather(running, late, asked, return_exceptions=True), 30)
    assert all(isinstance(result, EngineStoppedError) for result in results), results
    assert "the thread is gone" in str(results[0])
    assert not engine.is_healthy
    assert engine.stats().steps == 0
    with pytest.raises(EngineStoppedError, match="failed"):
        await engine.generate(Request([1], GREEDY))
    await engine.close()


async def test_a_panic_while_decoding_fails_that_request_only():
    target = [5, 6, 7]
    bad = await reference(target, 3)

    class Panicking(LetterTokenizer):
        def stream(self, skip_special_tokens: bool = True, *, kept: object = ()) -> Any:
            decoder = super().stream(skip_special_tokens)
            given: list[int] = []

            def push(token_ids: list[int]) -> str:
                given.extend(token_ids)
                if given == bad:
                    raise Panic("index out of bounds")
                return "."

            decoder.push = push  # type: ignore[method-assign]
            return decoder

    async with serving(tokenizer=Panicking()) as engine:
        good = asyncio.ensure_future(engine.generate(Request([1, 2, 3, 4], GREEDY)))
        with pytest.raises(RequestFailedError, match="index out of bounds"):
            await engine.generate(Request(target, GREEDY))
        assert (await good).outputs[0].text == "." * 8
        assert engine.is_healthy
        await assert_idle(engine)


async def test_a_panic_while_tokenising_is_a_bad_request():
    def panic(text: str) -> None:
        if "!" in text:
            raise Panic("no such byte")

    async with serving(tokenizer=LetterTokenizer(on_encode=panic)) as engine:
        for text in ("!", "!" * (LONG_TEXT + 1)):
            with pytest.raises(InvalidRequestError, match="no such byte"):
                await engine.generate(Request(text, GREEDY))
        assert (await engine.generate(Request("fine", GREEDY))).prompt == "fine"


async def test_a_panic_of_the_model_fails_that_request_only():
    def fail(batch: Any) -> bool:
        if any(entry.request.request_id == "bad" for entry in batch.entries):
            raise Panic("kernel")
        return False

    async with serving(model=PagedHashModel(128, 8, fail_if=fail)) as engine:
        good = asyncio.ensure_future(engine.generate(Request([1, 2, 3, 4], GREEDY)))
        with pytest.raises(RequestFailedError, match="kernel"):
            await engine.generate(Request([5, 6], GREEDY, request_id="bad"))
        assert (await good).outputs[0].token_ids == await reference([1, 2, 3, 4])
        await assert_idle(engine)


async def test_what_a_call_raises_goes_to_its_caller():
    def panic(inner: Any) -> None:
        raise Panic("in the call")

    async with serving() as engine:
        with pytest.raises(Panic):
            await engine.call(panic)
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda inner: 1 // 0)
        assert engine.is_healthy


@pytest.fixture
def other_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_a_request_ends_when_its_event_loop_is_closed(other_loop):
    engine = AsyncEngine(make_engine(num_blocks=128)[0])
    stream = engine.stream(Request([5, 6, 7], SamplingParams(max_tokens=900, ignore_eos=True)))
    other_loop.run_until_complete(anext(stream))
    other_loop.close()

    async def wait_until_idle() -> int:
        while await engine.call(lambda inner: inner.has_work):  # each call waits for a step
            pass
        await assert_idle(engine)
        aborted = engine.stats().aborted_requests
        await engine.close()
        return aborted

    assert asyncio.run(wait_until_idle()) == 1
    with contextlib.suppress(StopIteration):
        stream.aclose().send(None)


def test_several_event_loops_share_an_engine():
    engine = AsyncEngine(make_engine(num_blocks=128)[0])
    results: dict[int, list[list[int]]] = {}

    async def ask(number: int) -> None:
        prompts = [[1 + number, 2 + i] for i in range(8)]
        outputs = await asyncio.gather(*(engine.generate(Request(prompt, GREEDY)) for prompt in prompts))
        results[number] = [output.outputs[0].token_ids for output in outputs]

    threads = [threading.Thread(target=lambda n=n: asyncio.run(ask(n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(4):
        expected = [asyncio.run(reference([1 + number, 2 + i])) for i in range(8)]
        assert results[number] == expected
    asyncio.run(assert_idle(engine))
    asyncio.run(engine.close())


@pytest.mark.parametrize("seed", range(4))
async def test_any_order_of_closing_cancelling_and_reusing_ids_leaves_nothing(seed):
    random = np.random.default_rng(seed)
    answers = {p: await reference([p, 2, 3]) for p in range(1, 6)}
    async with serving(max_num_seqs=4) as engine:

        async def client(number: int) -> None:
            for _ in range(10):
                p = int(random.integers(1, 6))
                options: dict[str, Any] = {"request_id": f"id-{number}"}
                kind = random.integers(4)
                if kind == 0:
                    output = await engine.generate(Request([p, 2, 3], GREEDY, **options))
                    assert output.outputs[0].token_ids == answers[p]
                elif kind == 1:
                    task = asyncio.ensure_future(engine.generate(Request([p, 2, 3], LONG, **options)))
                    for _ in range(int(random.integers(4))):
                        await asyncio.sleep(0)
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
                else:
                    stream = engine.stream(Request([p, 2, 3], LONG, **options))
                    given: list[int] = []
                    for _ in range(int(random.integers(1, 6))):
                        given += (await anext(stream)).token_ids
                    await stream.aclose()
                    assert given[: len(answers[p])] == answers[p][: len(given)]

        await asyncio.gather(*map(client, range(6)))
        await assert_idle(engine)


@pytest.mark.parametrize(
    "kind", [np.array, torch.tensor, tuple, lambda ids: [np.int64(token) for token in ids]]
)
async def test_arrays_of_ids_are_prompts(kind):
    async with serving() as engine:
        output = await engine.generate(Request(kind([5, 6, 7]), GREEDY))
        assert output.prompt_token_ids == [5, 6, 7]
        assert output.outputs[0].token_ids == await reference([5, 6, 7])


@pytest.mark.parametrize("bad", [[[1, 2]], [1.5], [-1], [97], ["a"], [], [None], [2**40], b"ab", 5])
async def test_bad_prompts_are_refused(bad):
    async with serving() as engine:
        with pytest.raises(RadixKVError):
            await engine.generate(Request(bad, GREEDY))
        await assert_idle(engine)


def test_greedy_reference_ends_where_the_engine_does():
    engine, _ = make_engine()
    engine.add_request([3, 1], SamplingParams(temperature=0.0, max_tokens=8))
    finished: list[Any] = []
    while engine.has_work:
        finished += engine.step().finished
    assert finished[0].outputs[0].token_ids == greedy_reference([3, 1], 8)


async def test_a_long_conversation_of_which_little_is_new_waits_for_no_huge_text():
    """Of a known conversation of 200,000 characters, what is new is tokenised beside huge texts."""
    gate = threading.Event()

    class HeldTokenizer(Tokenizer):
        def encode(self, text: str, *arguments: Any, **options: Any) -> list[int]:
            assert gate.wait(60)
            return super().encode(text, *arguments, **options)

    tokenizer = HeldTokenizer(byte_level_tokenizer())
    messages = [{"role": "user", "content": f"{i} " + "word " * 5000} for i in range(8)]
    async with serving(tokenizer=tokenizer) as engine:
        known = np.asarray(await engine.render_chat(messages, add_generation_prompt=False))
        huge = [asyncio.ensure_future(engine.tokenize("x" * (HUGE_TEXT + 1))) for _ in range(4)]
        messages.append({"role": "user", "content": "new"})
        ids = np.asarray(await asyncio.wait_for(engine.render_chat(messages), 60))
        assert not any(text.done() for text in huge)
        gate.set()
        await asyncio.gather(*huge)
    assert ids.dtype == np.int32
    assert ids[: len(known)].tolist() == known.tolist()
    assert ids.tolist() == Tokenizer(byte_level_tokenizer()).apply_chat_template(messages)
