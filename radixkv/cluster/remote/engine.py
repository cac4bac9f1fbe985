# SPDX-License-Identifier: Apache-2.0
"""RemoteEngine: the `EngineClient` of an engine in another process.

Each call is sent by its name with its arguments and comes back as its result, an error, or item by item.
Nothing is shared: results are copies, and times are durations.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

from radixkv.channel import Channel, ChannelEnded
from radixkv.cluster.remote.messages import (
    WINDOW,
    Ask,
    AskStatus,
    Cancel,
    End,
    Failed,
    Item,
    Messenger,
    Reply,
    Status,
    Took,
)
from radixkv.cluster.remote.sent_images import SentImages
from radixkv.engine.adapters import AdapterCard, Adapters
from radixkv.engine.cache_client import CacheClient
from radixkv.engine.calls import Call
from radixkv.engine.client import EngineClient, EngineFacts
from radixkv.engine.counts import EngineStats
from radixkv.errors import EngineStoppedError, InvalidRequestError

Event = Reply | Item | End | Failed


class _Pending:
    """A call that was not answered yet, and the event loop that waits for it."""

    def __init__(self, call_id: int) -> None:
        self.id = call_id
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, event: Event) -> bool:
        """Call from any thread; False: the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:
            return False
        return True


class Link:
    """Makes calls over a connection, for any number of event loops.

    Args:
        channel: to a process that runs `radixkv.cluster.remote.host.serve_engine`.
        facts: of the engine there; None: its process is on this machine, and sends them first.

    Attributes:
        facts: of the engine there.
        status: the latest that is known of it.
    """

    def __init__(self, channel: Channel, facts: EngineFacts | None = None) -> None:
        self.status: Status
        self._ids = itertools.count()
        self._lock = threading.Lock()  # around the next three: no call may slip in after the last one
        self._pending: dict[int, _Pending] = {}
        self._ended: EngineStoppedError | None = None
        self._images = SentImages()
        self._messenger = Messenger(channel, self._take, self._lose)
        try:
            self.facts = _received_facts(channel) if facts is None else facts
            self._take(self._messenger.receive())
        except ChannelEnded:
            raise EngineStoppedError("the engine's process ended before its engine was ready") from None
        self._messenger.start()

    @property
    def is_open(self) -> bool:
        return self._ended is None

    def ask_status(self) -> None:
        """Have the status renewed, for the next look at it."""
        if self.is_open:
            self._messenger.send(AskStatus())

    def perform(self, call: Call, args: tuple[Any, ...], options: dict[str, Any], part: str = "") -> Any:
        """Make a call of the engine's, or of its `cache.` or `adapters.`, in the call's manner.

        Cancelling one that is awaited cancels it there; closing an iterator closes the remote one.
        """
        if call.manner == "streamed":
            return self._iterate(part + call.name, args, options)
        answer = self._call(part + call.name, args, options)
        return asyncio.run(answer) if call.manner == "blocking" else answer

    async def _call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        with self._asking(name, args, options) as pending:
            event = await pending.events.get()
            if isinstance(event, Failed):
                raise event.error
            assert isinstance(event, Reply)
            return event.value

    async def _iterate(
        self, name: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> AsyncGenerator[Any]:
        with self._asking(name, args, options) as pending:
            num_taken = 0
            while not isinstance(event := await pending.events.get(), End):
                if isinstance(event, Failed):
                    raise event.error
                assert isinstance(event, Item)
                yield event.value
                num_taken += 1
                if num_taken == WINDOW // 2:
                    self._messenger.send(Took(pending.id, num_taken))
                    num_taken = 0

    @contextlib.contextmanager
    def _asking(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[_Pending]:
        pending = _Pending(next(self._ids))
        with self._lock:
            if self._ended is not None:
                raise EngineStoppedError(str(self._ended))
            self._pending[pending.id] = pending  # first: the answer may be here before this thread goes on
            try:
                for message in self._images.shortened(Ask(pending.id, name, args, options)):
                    self._messenger.send(message)
                self._images.sent()
            except InvalidRequestError:
                del self._pending[pending.id]
                raise
        try:
            yield pending
        finally:
            if self._pending.pop(pending.id, None) is not None:  # it goes on there
                self._messenger.send(Cancel(pending.id))

    def _take(self, message: Status | Event) -> None:
        """On the messenger's thread."""
        if isinstance(message, Status):
            self.status = message
        else:
            has_ended = not isinstance(message, Item)
            pending = (self._pending.pop if has_ended else self._pending.get)(message.id, None)
            if pending is not None and not pending.put(message) and not has_ended:
                self._pending.pop(message.id, None)
                self._messenger.send(Cancel(message.id))

    def _lose(self) -> None:
        """End, on the messenger's thread: the other process has gone, or the link was closed."""
        with self._lock:
            self._ended = self._ended or EngineStoppedError("the engine's process has ended")
            left, self._pending = self._pending, {}
        for pending in left.values():
            pending.put(Failed(pending.id, EngineStoppedError(str(self._ended))))

    async def close(self) -> None:
        """Take no more calls, and fail all pending ones."""
        with self._lock:
            self._ended = EngineStoppedError("the engine has been closed")
        self._messenger.close()
        await asyncio.to_thread(self._messenger.join)


def _received_facts(channel: Channel) -> EngineFacts:
    """Return the constants of an engine in a process of this machine, or raise why there is none."""
    facts = channel.receive_object()
    if isinstance(facts, BaseException):
        raise facts
    assert isinstance(facts, EngineFacts)
    return facts


class RemoteCache(CacheClient):
    """The prefix cache of that engine."""

    def __init__(self, link: Link) -> None:
        super().__init__(link.facts.model_fingerprint)
        self._link = link

    def perform(self, call: Call, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return self._link.perform(call, args, options, "cache.")


class RemoteAdapters(Adapters):
    """The adapters of that engine."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.is_enabled = link.status.adapters is not None

    def perform(self, call: Call, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return self._link.perform(call, args, options, "adapters.")

    def cards(self) -> Sequence[AdapterCard]:
        self._link.ask_status()  # for the next caller
        return self._link.status.adapters or ()


class RemoteEngine(EngineClient):
    """The `EngineClient` of the engine at the other end of a connection.

    Args:
        channel, facts: see `Link`. Blocks until the engine there is ready.
        on_close: called in a thread once it is closed.

    Raises:
        EngineStoppedError: nothing serves an engine there; and what making that engine raised.
    """

    def __init__(
        self,
        channel: Channel,
        facts: EngineFacts | None = None,
        *,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._link = Link(channel, facts)
        self._on_close = on_close
        self.cache = RemoteCache(self._link)
        self._adapters = RemoteAdapters(self._link)

    def perform(self, call: Call, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return self._link.perform(call, args, options)

    @property
    def facts(self) -> EngineFacts:
        return self._link.facts

    @property
    def adapters(self) -> Adapters:
        return self._adapters

    @property
    def is_healthy(self) -> bool:
        return self._link.is_open and self._link.status.is_healthy

    @property
    def is_full(self) -> bool:
        return self._link.status.is_full

    def stats(self) -> EngineStats:
        self._link.ask_status()  # for the next caller
        return self._link.status.stats

    async def abort(self, request_id: str) -> None:
        with contextlib.suppress(EngineStoppedError):
            await super().abort(request_id)

    async def close(self) -> None:
        with contextlib.suppress(EngineStoppedError):
            await super().close()
        await self._link.close()
        await asyncio.to_thread(self._on_close)
