# SPDX-License-Identifier: Apache-2.0
"""AsyncEngine: an engine with a thread of its own, for asyncio callers such as the server.

The life of a request here:

 1. its prompt is tokenised and checked (a long one off the event loop), and goes to the engine's thread;
 2. the thread adds it, or sends back why not; from then on its stream is known there under its id;
 3. what each step gives goes to the streams, one call per event loop, so that a step costs a loop one
    wake-up, however many requests it served;
 4. it ends with its output, with an error, aborted when its reader leaves, or when its event
    loop is found closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from radixkv.cache.keys import Owner
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.engine.client import EngineClient, EngineFacts
from radixkv.engine.config import EngineConfig
from radixkv.engine.counts import EngineStats
from radixkv.engine.engine import Engine
from radixkv.engine.output_processor import StepResult
from radixkv.engine.outputs import OutputDelta, RequestOutput
from radixkv.engine.weights import NewWeights, PauseMode, Tag, check_level, check_mode, check_tags
from radixkv.entrypoints.async_cache import AsyncCache
from radixkv.entrypoints.engine_thread import EngineThread, RestartPolicy
from radixkv.errors import EngineStoppedError, InvalidRequestError, RequestFailedError, WeightUpdateError
from radixkv.option_names import CALL_NAMES, check_names, fields_of
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import PromptLike, Request, plain_prompt
from radixkv.text.prompt_texts import RendersChats
from radixkv.tiers.tier_use import ASK_AGAIN_S, ASK_TIERS_S

if TYPE_CHECKING:
    from radixkv.cache.keys import NamespaceName, TokenIds
    from radixkv.cache.reporting.explain import MissReport
    from radixkv.engine.adapters import AdapterRegistry
    from radixkv.engine.startup import EngineSummary
    from radixkv.model.loading.loader import LoadedModel
    from radixkv.tiers.tier import Tier


Event = OutputDelta | RequestOutput | BaseException

#: Arguments that calls don't have, with what to write instead.
_NOT_OF_CALLS = {
    **fields_of(SamplingParams, "it goes into SamplingParams({}=...)"),
    **CALL_NAMES,
    **fields_of(Request, "give the call a Request(prompt, params, {}=...)", without=("prompt", "params")),
}


class Stream:
    """Destination of one request's results."""

    __slots__ = ("events", "loop", "request_id")

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.loop = loop
        self.events: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        """Put an event into it, from any thread; nothing happens if the loop is closed."""
        send(self.loop, [(self, event)])


class Streams:
    """The streams of the requests that the engine has; used on the engine's thread only."""

    def __init__(self) -> None:
        self._by_id: dict[str, Stream] = {}

    def open(self, stream: Stream) -> None:
        self._by_id[stream.request_id] = stream

    def close(self, engine: Engine, stream: Stream) -> None:
        """Its reader has left: end its request, if that has not ended yet."""
        if self._by_id.get(stream.request_id) is stream:
            del self._by_id[stream.request_id]
            engine.abort(stream.request_id)
            self.deliver(engine, engine.take_result())

    def deliver(self, engine: Engine, result: StepResult) -> None:
        """Send a step's results; requests whose event loop is closed are ended."""
        while result.deltas or result.finished:
            by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Event]]] = {}
            events: list[OutputDelta | RequestOutput] = [*result.deltas, *result.finished]
            for event in events:
                stream = self._by_id.get(event.request_id)
                if stream is not None:
                    by_loop.setdefault(stream.loop, []).append((stream, event))
            for loop, sent in by_loop.items():
                if not send(loop, sent):
                    self._forget_loop(engine, loop)
            for event in events:  # from here on it is not this thread's to tell of its own end
                if isinstance(event, RequestOutput) or event.is_last:
                    self._by_id.pop(event.request_id, None)
            result = engine.take_result()

    def _forget_loop(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        orphans = [request_id for request_id, stream in self._by_id.items() if stream.loop is loop]
        for request_id in orphans:
            del self._by_id[request_id]
            engine.abort(request_id)

    def fail_all(self, error: EngineStoppedError) -> None:
        """The engine has ended."""
        for stream in self._by_id.values():
            stream.put(error)
        self._by_id.clear()


def send(loop: asyncio.AbstractEventLoop, events: Iterable[tuple[Stream, Event]]) -> bool:
    """Put events into streams of one loop, from any thread; False: the loop is closed."""

    def put() -> None:
        for stream, event in events:
            stream.events.put_nowait(event)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        return False
    return True


T = TypeVar("T")


class AsyncEngine(RendersChats, EngineClient):
    """Serve many requests at once from asyncio: the `EngineClient` of an engine in this process.

    `EngineClient` says what its members do. In place of a `Request`, `generate` and `stream` take a prompt
    (as `LLM.generate` does) and parameters; None: the model's own recommendations.

    Creating one blocks until its engine is ready. Several event loops may use it.

    Args:
        engine: from now on only this object's thread may touch it. Or a function that makes it, which is
            then called on that thread. Prefer the function where the engine computes on a CPU: OpenMP keeps
            a set of worker threads per calling thread, and with two sets on the same cores none of them
            waits actively any more, which made decode steps 1.5 times slower.
        restart: replace a failed engine, with that function; its unfinished requests have failed,
            and its cache is empty.

    Attributes:
        cache: the prefix cache's calls.
    """

    def __init__(
        self, engine: Engine | Callable[[], Engine], *, restart: RestartPolicy | None = None
    ) -> None:
        self._streams = Streams()
        super().__init__()
        self._changing = threading.Lock()
        self._weights_path: str | None = None
        source = engine if isinstance(engine, Engine) else partial(self._build, engine)
        self._thread = EngineThread(source, self._streams.deliver, self._fail_all, restart)
        self.cache: AsyncCache = AsyncCache(
            self._run_on_cache, self.model_fingerprint, self._explain_by_tiers, self.limits.lengths
        )

    def _build(self, source: Callable[[], Engine]) -> Engine:
        """Make an engine, with the weights that the one before it had last."""
        engine = source()
        if self._weights_path is not None:
            engine.use_weights(engine.read_weights(self._weights_path))
        return engine

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, tier: Tier | None = None, loaded: LoadedModel | None = None
    ) -> AsyncEngine:
        """Load the model and start. Blocks until ready.

        Args:
            tier: see `Engine`; a replacing engine goes on with it.
            loaded: the model, if it has been loaded before.

        Raises:
            ConfigError, ModelLoadError: see `radixkv.entrypoints.builder.build_engine`.
        """
        from radixkv.entrypoints.builder import build_engine  # heavy: loaders and models

        restarts = config.tensor_parallel > 1 if config.restart_engine is None else config.restart_engine
        restart = RestartPolicy() if restarts else None
        return cls(lambda: build_engine(config, tier=tier, loaded=loaded), restart=restart)

    # ------------------------------------------------------------------ facts

    @property
    def facts(self) -> EngineFacts:
        return self._thread.info.facts

    @property
    def adapters(self) -> AdapterRegistry:
        return self._thread.info.input_processor.adapters

    @property
    def summary(self) -> EngineSummary:
        """The engine's figures for the start-up banner."""
        summary = self._thread.info.summary
        assert summary is not None, "the engine was not made by build_engine"
        return summary

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_running

    @property
    def is_full(self) -> bool:
        return self._thread.stats.num_waiting >= self.config.max_queue

    def stats(self) -> EngineStats:
        with contextlib.suppress(EngineStoppedError):
            self._thread.submit(lambda engine: None)  # an idle engine takes new figures for the next caller
        return self._thread.stats

    # ------------------------------------------------------------------ requests

    async def check_quota(self, requests: Sequence[Request]) -> None:
        prepared = [await self._prepare(request) for request in requests]

        def check(engine: Engine) -> None:
            for request in prepared:
                engine.input_processor.check_quota(request)

        await self.call(check)

    @check_names(_NOT_OF_CALLS)
    async def stream(
        self, prompt: PromptLike | Request, params: SamplingParams | None = None
    ) -> AsyncGenerator[OutputDelta]:
        request = self._request(prompt, params)
        request.stream = True
        stream = await self._start(request)
        has_ended = False
        try:
            while not has_ended:
                event = await stream.events.get()
                has_ended = not isinstance(event, OutputDelta) or event.is_last
                delta = _checked(event, OutputDelta)
                yield delta
                if has_ended:
                    _raise_failure(delta)
        finally:
            if not has_ended:
                self._abandon(stream)

    @check_names(_NOT_OF_CALLS)
    async def generate(
        self, prompt: PromptLike | Request, params: SamplingParams | None = None
    ) -> RequestOutput:
        stream = await self._start(self._request(prompt, params))
        try:
            event = await stream.events.get()
        except BaseException:
            self._abandon(stream)
            raise
        output = _checked(event, RequestOutput)
        _raise_failure(output)
        return output

    async def abort(self, request_id: str) -> None:
        with contextlib.suppress(EngineStoppedError):
            self._thread.submit(lambda engine: engine.abort(request_id))

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function on the engine's own thread, between two steps, and return its result.

        Raises:
            EngineStoppedError: the engine has been closed or has failed; and whatever the function raises.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def answer(complete: Callable[[Any], None], value: object) -> None:
            def unless_done() -> None:
                if not future.done():
                    complete(value)

            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(unless_done)

        def run(engine: Engine) -> None:
            try:
                result = function(engine)
            except BaseException as error:
                answer(future.set_exception, error)
            else:
                answer(future.set_result, result)

        self._thread.submit(run, lambda error: answer(future.set_exception, error))
        return await future

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._thread.stop()
        await asyncio.to_thread(self._thread.join)

    # ------------------------------------------------------------------ pauses, weights, sleep

    async def pause(self, *, mode: PauseMode = "abort") -> None:
        await self.call(lambda engine: engine.pause(mode))
        while mode == "wait" and await self.call(lambda engine: bool(engine.requests)):
            await asyncio.sleep(ASK_AGAIN_S)

    async def resume(self) -> None:
        await self.call(lambda engine: engine.resume())

    async def is_paused(self) -> bool:
        return await self.call(lambda engine: engine.paused is not None)

    async def update_weights(self, path: str, *, mode: PauseMode = "keep") -> str:
        check_mode(mode)
        with self._alone():
            read = await self.call(lambda engine: engine.read_weights)
            new = await asyncio.to_thread(read, path)
            was_paused = await self.is_paused()
            try:
                if not was_paused:
                    await self.pause(mode=mode)
                await self.call(lambda engine: self._use(engine, new))
            finally:
                if not was_paused:
                    with contextlib.suppress(EngineStoppedError):
                        await asyncio.shield(self.resume())
        return new.fingerprint

    async def sleep(self, level: int = 1, *, mode: PauseMode = "abort") -> None:
        check_level(level)
        with self._alone():
            was_paused = await self.is_paused()
            await self.pause(mode=mode)
            try:
                await self.call(lambda engine: engine.sleep(level))
            except InvalidRequestError:
                if not was_paused:
                    await self.resume()
                raise

    async def wake_up(self, tags: Sequence[Tag] | None = None) -> None:
        waking = check_tags(tags)
        with self._alone():
            read, path, lacks = await self.call(
                lambda engine: (engine.read_weights, engine.weights_path, engine.lacks_weights)
            )
            new = await asyncio.to_thread(read, path) if lacks and "weights" in waking else None
            await self.call(lambda engine: self._wake(engine, waking, new))

    async def is_sleeping(self) -> bool:
        return await self.call(lambda engine: engine.is_sleeping)

    def _use(self, engine: Engine, new: NewWeights) -> None:
        engine.use_weights(new)
        self._weights_path = new.path  # an engine that takes this one's place is given them, too
        self._thread.publish_facts(engine)

    def _wake(self, engine: Engine, tags: frozenset[Tag], new: NewWeights | None) -> None:
        engine.wake_up(tags, new)
        self._thread.publish_facts(engine)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a second change of weights, or sleep, before the first one has ended."""
        if not self._changing.acquire(blocking=False):
            raise WeightUpdateError(
                "the engine's weights are being changed, or it falls asleep or wakes: try again after that"
            )
        try:
            yield
        finally:
            self._changing.release()

    def _run_on_cache(self, function: Callable[[PrefixCache], T]) -> Awaitable[T]:
        return self.call(lambda engine: function(engine.cache))

    async def _explain_by_tiers(
        self, report: MissReport, token_ids: TokenIds, namespace: NamespaceName
    ) -> MissReport:
        """A tier that does not know at once is asked again, for some time."""
        end = time.monotonic() + ASK_TIERS_S
        while time.monotonic() < end:
            explained = await self.call(lambda engine: engine.explain_by_tiers(report, token_ids, namespace))
            if explained is not None:
                return explained
            await asyncio.sleep(ASK_AGAIN_S)
        return report

    def _fail_all(self, error: EngineStoppedError) -> None:
        self._streams.fail_all(error)
        self.cache.fail_all(error)

    # ------------------------------------------------------------------ text

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        return await self._off_loop(
            len(text),
            lambda: self._thread.info.input_processor.tokenize(
                text, add_special_tokens=add_special_tokens, allow_special=allow_special
            ),
        )

    # ------------------------------------------------------------------ one request

    def _request(self, prompt: PromptLike | Request, params: SamplingParams | None) -> Request:
        """Return the request that a call is given, or one of its prompt and parameters."""
        if not isinstance(prompt, Request):
            given = SamplingParams(**self.default_sampling) if params is None else params
            return Request(plain_prompt(prompt), given)
        if params is not None:
            raise InvalidRequestError(
                "params were given beside a Request, which has its own: Request(prompt, params)",
                param="params",
            )
        return prompt

    async def _prepare(self, request: Request) -> Request:
        """Check a request, off the event loop where it is long; see `InputProcessor.prepare`."""
        request.namespace = Owner(request.tenant, request.salt).namespace(self.model_fingerprint)
        if request.lora and not self.adapters.in_memory(request.lora):
            # Held until the request has it: its files are read here, off the event loop.
            request.adapter = await asyncio.to_thread(self.adapters.acquire, request.lora)
        checks, words = self._thread.info.input_processor, request.params.bad_words
        prompt_size = len(request.prompt) if hasattr(request.prompt, "__len__") else 0  # else it is refused
        size = prompt_size + sum(len(word) + 64 for word in words)
        await self._off_loop(size, lambda: checks.prepare(request))
        return request

    async def _start(self, request: Request) -> Stream:
        """Check a request and hand it to the engine's thread, which tells the stream of it from then on."""
        await self._prepare(request)
        if request.params.grammar is not None:
            # Shielded: others may wait for the same grammar.
            checks = self._thread.info.input_processor
            compiling = checks.submit_grammar(request.params.grammar, request.namespace)
            request.grammar = await asyncio.shield(asyncio.wrap_future(compiling))
        # Unique among engines: one client may stand for several.
        request.request_id = request.request_id or f"req-{uuid.uuid4().hex}"
        reader = Stream(request.request_id, asyncio.get_running_loop())

        def add(engine: Engine) -> None:
            try:
                engine.add(request)
            except BaseException as error:
                reader.put(error)
            else:
                self._streams.open(reader)

        self._thread.submit(add, reader.put)
        return reader

    def _abandon(self, stream: Stream) -> None:
        """End the request of a stream without readers."""
        with contextlib.suppress(EngineStoppedError):
            self._thread.submit(lambda engine: self._streams.close(engine, stream))


def _checked(event: Event, kind: type[T]) -> T:
    """Return the event of the engine's thread, if it is no error."""
    if isinstance(event, BaseException):
        raise event
    assert isinstance(event, kind)
    return event


def _raise_failure(ended: OutputDelta | RequestOutput) -> None:
    if ended.error is not None:
        raise RequestFailedError(ended.error, code=ended.error_code)
