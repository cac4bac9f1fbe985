# SPDX-License-Identifier: Apache-2.0
"""Streams: results of each step, from the engine's thread to the event loops of the callers.

One call per event loop and step, however many requests it served. Which request is meant is decided by the
stream, never by the id alone: an id is free again as soon as its reader has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from radixkv.engine.engine import Engine
from radixkv.engine.output_processor import StepResult
from radixkv.engine.outputs import OutputDelta, RequestOutput
from radixkv.errors import EngineStoppedError

Event = OutputDelta | RequestOutput | BaseException


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
