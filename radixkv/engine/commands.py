"""What event loops ask of the engine's thread: to start a request, to end one, to call a function."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from radixkv.engine.engine import Engine
from radixkv.engine.engine_thread import Command
from radixkv.engine.streams import Stream, Streams
from radixkv.errors import EngineStoppedError

if TYPE_CHECKING:
    from radixkv.engine.prompt_limits import EncodedPrompt

T = TypeVar("T")


class Add(Command):
    """Start a request; its stream gets what the engine refuses it for."""

    def __init__(self, streams: Streams, stream: Stream, prompt: EncodedPrompt, /, **options: Any) -> None:
        self._streams = streams
        self._stream = stream
        self._prompt = prompt
        self._options = options

    def run(self, engine: Engine) -> None:
        stream = self._stream
        try:
            engine.add_request(self._prompt, request_id=stream.request_id, **self._options)
        except BaseException as error:
            stream.put(error)
        else:
            self._streams.open(stream)

    def cancel(self, error: EngineStoppedError) -> None:
        self._stream.put(error)


class Abort(Command):
    """End the request of a stream whose reader has left."""

    def __init__(self, streams: Streams, stream: Stream) -> None:
        self._streams = streams
        self._stream = stream

    def run(self, engine: Engine) -> None:
        self._streams.close(engine, self._stream)


class AbortById(Command):
    """End a request; its reader gets the output so far."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def run(self, engine: Engine) -> None:
        engine.abort(self._request_id)


class Call(Command):
    """Run a function, and hand what it returns or raises to a future of an event loop."""

    def __init__(
        self, function: Callable[[Engine], T], future: asyncio.Future[T], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._function = function
        self._future = future
        self._loop = loop

    def run(self, engine: Engine) -> None:
        try:
            result = self._function(engine)
        except BaseException as error:
            self._complete(self._future.set_exception, error)
        else:
            self._complete(self._future.set_result, result)

    def cancel(self, error: EngineStoppedError) -> None:
        self._complete(self._future.set_exception, error)

    def _complete(self, complete: Callable[[Any], None], value: object) -> None:
        def unless_done() -> None:
            if not self._future.done():
                complete(value)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(unless_done)
