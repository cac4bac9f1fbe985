"""AsyncEngine: an Engine with a thread of its own, for asyncio callers such as the server.

One thread owns the engine; everything reaches it as a command through one queue. The results of a step go
to each event loop in one call, so that a step costs the loop one wake-up, however many requests it served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from radixkv.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.engine.request_group import EngineStats, StepResult
from radixkv.errors import (
    EngineOverloadedError,
    EngineStoppedError,
    InvalidRequestError,
    RequestFailedError,
)
from radixkv.request import OutputDelta, RequestOutput, SamplingParams
from radixkv.scheduling.request_state import Namespace

if TYPE_CHECKING:
    from radixkv.engine.builder import EngineSummary
    from radixkv.text.tokenizer import Tokenizer

logger = logging.getLogger("radixkv")

# Text longer than this is tokenised in a worker thread, so that the event loop stays free (characters).
LONG_TEXT = 4096

_Event = OutputDelta | RequestOutput | BaseException


class _Stream:
    """Where the results of one request go."""

    __slots__ = ("events", "loop", "request_id")

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.loop = loop
        self.events: asyncio.Queue[_Event] = asyncio.Queue()


class AsyncEngine:
    """Serve many requests at once from asyncio. Creating one blocks until its engine is ready.

    Args:
        engine: from now on only this object's thread may touch it. Or a function that makes it, which is
            then called on that thread. Prefer the function where the engine computes on a CPU: OpenMP keeps
            a set of worker threads per calling thread, and with two sets on the same cores none of them
            waits actively any more, which made decode steps 1.5 times slower.
    """

    def __init__(self, engine: Engine | Callable[[], Engine]) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._next_id = 0
        # The engine's thread needs the interpreter back quickly after each tensor operation; with the
        # default of 5 ms a busy event loop could hold up every layer.
        sys.setswitchinterval(min(sys.getswitchinterval(), 0.0005))
        made: Future[Engine] = Future()
        self._thread = threading.Thread(
            target=self._make_and_run, args=(engine, made), name="radixkv-engine", daemon=True
        )
        self._thread.start()
        self._engine = made.result()

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncEngine:
        """Load the model and start. Blocks until ready.

        Raises:
            ConfigError, ModelLoadError: see `radixkv.engine.builder.build_engine`.
        """
        from radixkv.engine.builder import build_engine

        return cls(lambda: build_engine(config))

    # ------------------------------------------------------------------ what callers see

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None
        return tokenizer

    @property
    def model_name(self) -> str:
        return self._engine.model_name

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def summary(self) -> EngineSummary:
        """What the start-up banner says of the engine."""
        summary = self._engine.summary
        assert summary is not None, "the engine was not made by build_engine"
        return summary

    @property
    def is_healthy(self) -> bool:
        """Whether the engine's thread takes requests."""
        return not self._closed and self._failure is None and self._thread.is_alive()

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        namespace: Namespace = "",
        priority: int = 0,
    ) -> AsyncIterator[OutputDelta]:
        """Yield what each step adds, all samples interleaved. Closing the iterator aborts the request.

        Raises:
            InvalidRequestError, ContextLengthExceededError, EngineOverloadedError: before the first delta.
            RequestFailedError: the request failed; others go on.
            EngineStoppedError: the engine has been closed.
        """
        async with contextlib.aclosing(
            self._events(prompt, params, request_id=request_id, namespace=namespace, priority=priority)
        ) as events:
            async for event in events:
                if isinstance(event, OutputDelta):
                    yield event

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        namespace: Namespace = "",
        priority: int = 0,
    ) -> RequestOutput:
        """Wait for the whole output. Cancelling the task aborts the request. Raises what `stream` raises."""
        async with contextlib.aclosing(
            self._events(prompt, params, request_id=request_id, namespace=namespace, priority=priority)
        ) as events:
            async for event in events:
                if isinstance(event, RequestOutput):
                    return event
        raise EngineStoppedError("the engine stopped before the request was finished")

    async def abort(self, request_id: str) -> None:
        """End a request; within one step its blocks are released. Unknown ids are ignored."""
        self._commands.put(lambda: self._engine.abort(request_id))

    def stats(self) -> EngineStats:
        """The engine's counters as of its last step, or the last thing asked of it while it was idle."""
        if self._thread.is_alive():
            self._commands.put(lambda: None)  # an idle engine takes a new snapshot for the next caller
        return self._stats

    async def call(self, function: Callable[[Engine], object]) -> object:
        """Run a function on the engine's own thread, between two steps, and return its result."""
        self._raise_if_stopped()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()

        def settle(result: object, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def run() -> None:
            result, error = None, None
            try:
                result = function(self._engine)
            except BaseException as caught:
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(settle, result, error)

        self._commands.put(run)
        return await future

    async def close(self) -> None:
        """Stop the thread; unfinished requests get EngineStoppedError."""
        if not self._closed:
            self._closed = True
            self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    # ------------------------------------------------------------------ one request

    async def _events(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None,
        namespace: Namespace,
        priority: int,
    ) -> AsyncGenerator[OutputDelta | RequestOutput]:
        self._raise_if_stopped()
        token_ids = await self._encode(prompt)
        self._engine.check_request(token_ids, params)
        if self._engine.scheduler.num_waiting >= self.config.max_queue:
            raise EngineOverloadedError(
                f"{self._engine.scheduler.num_waiting} requests are waiting, the most allowed (--max-queue); "
                "try again later"
            )
        if request_id is None:
            request_id = f"req-{self._next_id}"
            self._next_id += 1
        if request_id in self._streams:
            raise InvalidRequestError(f"a request with the id {request_id!r} is running already")
        stream = _Stream(request_id, asyncio.get_running_loop())
        self._streams[request_id] = stream
        self._commands.put(lambda: self._add(stream, token_ids, params, namespace, priority))
        finished = False
        try:
            while not finished:
                event = await stream.events.get()
                if isinstance(event, BaseException):
                    finished = True
                    raise event
                if isinstance(event, RequestOutput):
                    finished = True
                    event.prompt = prompt if isinstance(prompt, str) else None
                    if event.error is not None:
                        raise RequestFailedError(event.error, code=event.error_code)
                yield event
        finally:
            self._streams.pop(request_id, None)
            if not finished:
                self._commands.put(lambda: self._engine.abort(request_id))

    async def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if len(prompt) > LONG_TEXT:
            return await asyncio.to_thread(self._engine.intake.tokenize, prompt)
        return self._engine.intake.tokenize(prompt)

    def _raise_if_stopped(self) -> None:
        if self._closed or not self._thread.is_alive():
            raise EngineStoppedError("the engine has been closed")
        if self._failure is not None:
            raise EngineStoppedError(f"the engine has failed: {self._failure}")

    # ------------------------------------------------------------------ the engine's thread

    def _add(
        self,
        stream: _Stream,
        token_ids: list[int],
        params: SamplingParams,
        namespace: Namespace,
        priority: int,
    ) -> None:
        try:
            self._engine.add_request(
                token_ids, params, request_id=stream.request_id, namespace=namespace, priority=priority
            )
        except Exception as error:
            self._send(stream.loop, [(stream, error)])

    def _make_and_run(self, source: Engine | Callable[[], Engine], made: Future[Engine]) -> None:
        try:
            engine = source if isinstance(source, Engine) else source()
            self._stats = engine.stats()
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(engine)
        self._run(engine)

    def _run(self, engine: Engine) -> None:
        try:
            while True:
                if not self._take_commands(wait=not engine.has_work):
                    break
                result = engine.step() if engine.has_work else engine.take_result()
                self._stats = engine.stats()  # before anybody can have seen what the step gave
                self._deliver(result)
        except BaseException as error:
            logger.exception("the engine's thread failed")
            self._failure = error
        finally:
            self._closed = True
            self._fail_all()

    def _take_commands(self, *, wait: bool) -> bool:
        """Run what callers have asked for; False: close."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            self._stats = self._engine.stats()
            wait = False

    def _deliver(self, result: StepResult) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, _Event]]] = {}
        events: list[OutputDelta | RequestOutput] = [*result.deltas, *result.finished]
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append((stream, event))
        for loop, sent in by_loop.items():
            self._send(loop, sent)

    @staticmethod
    def _send(loop: asyncio.AbstractEventLoop, events: Sequence[tuple[_Stream, _Event]]) -> None:
        def put() -> None:
            for stream, event in events:
                stream.events.put_nowait(event)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            loop.call_soon_threadsafe(put)

    def _fail_all(self) -> None:
        reason = f": {self._failure}" if self._failure is not None else ""
        for stream in list(self._streams.values()):
            self._send(stream.loop, [(stream, EngineStoppedError(f"the engine has stopped{reason}"))])
