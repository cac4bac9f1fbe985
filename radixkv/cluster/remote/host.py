# SPDX-License-Identifier: Apache-2.0
"""The engine's end of a connection: it answers a `RemoteEngine` until the connection is closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, NamedTuple

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
from radixkv.cluster.remote.sent_images import ReceivedImages, SentImage
from radixkv.cluster.remote.wire import sendable
from radixkv.engine.adapters import Adapters
from radixkv.engine.cache_client import CacheClient
from radixkv.engine.calls import Call, calls_of
from radixkv.engine.client import EngineClient
from radixkv.errors import ENDS_PROCESS, InvalidRequestError, RadixKVError, RequestFailedError

STATUS_S = 0.25  # how often the client hears of an engine that nobody asks for anything


async def serve_engine(engine: EngineClient, channel: Channel, *, may_close: bool = True) -> None:
    """Serve the other end until it goes; then end the calls it left running. The engine stays open.

    A client on this machine is sent the engine's facts first; one elsewhere has them with the address, as
    tokenizers can't be sent but as pickles.

    Args:
        may_close: the client's `close` closes the engine; False: it only ends the connection, as others use
            the engine, too.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    host = _Host(engine, may_close)
    if channel.is_local:
        with contextlib.suppress(ChannelEnded):  # the messenger says so
            await asyncio.to_thread(channel.send_object, engine.facts)
    messenger = host.messenger = Messenger(
        channel,
        lambda message: _on_loop(loop, lambda: host.take(message)),
        lambda: _on_loop(loop, ended.set),
    )
    host.send_status()
    messenger.start()
    sending = asyncio.ensure_future(host.send_statuses())
    try:
        await ended.wait()
    finally:
        sending.cancel()
        await host.cancel_all()
        messenger.close()
        await asyncio.to_thread(messenger.join)


def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody serves any more
        loop.call_soon_threadsafe(call)


class _RunningCall(NamedTuple):
    """A call that runs, and how many items more it may send."""

    task: asyncio.Task[None]
    window: asyncio.Semaphore


class _Host:
    """The calls of one client that run; used on the event loop."""

    messenger: Messenger

    def __init__(self, engine: EngineClient, may_close: bool) -> None:
        self._engine = engine
        self._may_close = may_close
        #: Calls that a client may make, by the part of an engine that answers them.
        self._tables = {
            "": calls_of(EngineClient),
            "cache": calls_of(CacheClient),
            "adapters": calls_of(Adapters),
        }
        self._calls: dict[int, _RunningCall] = {}
        self._images = ReceivedImages()

    def take(self, message: SentImage | Ask | Took | Cancel | AskStatus) -> None:
        """A message has come."""
        if isinstance(message, AskStatus):
            self.send_status()
        elif isinstance(message, SentImage):
            self._images.take(message)
        elif isinstance(message, Ask):
            try:
                message = self._images.restored(message)
            except RequestFailedError as error:
                self.messenger.send(Failed(message.id, error))
                return
            window = asyncio.Semaphore(WINDOW)
            task = asyncio.ensure_future(self._answer(message, window))
            self._calls[message.id] = _RunningCall(task, window)
            task.add_done_callback(lambda _: self._calls.pop(message.id))
        elif message.id in self._calls:
            call = self._calls[message.id]
            if isinstance(message, Cancel):
                call.task.cancel()
            else:
                for _ in range(message.count):
                    call.window.release()

    async def cancel_all(self) -> None:
        """The client has gone."""
        tasks = [call.task for call in self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def send_status(self) -> None:
        engine = self._engine
        adapters = tuple(engine.adapters.cards()) if engine.adapters.is_enabled else None
        self.messenger.send(Status(engine.is_healthy, engine.is_full, engine.stats(), adapters))

    async def send_statuses(self) -> None:
        """Now and then, for ever."""
        while True:
            await asyncio.sleep(STATUS_S)
            self.send_status()

    def _find(self, name: str) -> tuple[Call, Callable[..., Any]]:
        """Return a call of the tables, and what makes it."""
        part, _, of_part = name.rpartition(".")
        call = self._tables.get(part, {}).get(of_part)
        if call is None:
            raise InvalidRequestError(f"an engine has no call {name!r}")
        if name == "close" and not self._may_close:
            return call, _close_nothing
        return call, getattr(getattr(self._engine, part) if part else self._engine, of_part)

    async def _answer(self, ask: Ask, window: asyncio.Semaphore) -> None:
        """Make a call; its result is followed by the engine's state."""
        last: Reply | End | Failed
        try:
            call, method = self._find(ask.name)
            if call.manner == "streamed":
                async with aclosing(method(*ask.args, **ask.options)) as items:
                    async for item in items:
                        await window.acquire()
                        self.messenger.send(Item(ask.id, item))
                last = End(ask.id)
            elif call.manner == "blocking":
                last = Reply(ask.id, await asyncio.to_thread(method, *ask.args, **ask.options))
            else:
                last = Reply(ask.id, await method(*ask.args, **ask.options))
        except (*ENDS_PROCESS, asyncio.CancelledError):
            raise
        except BaseException as error:
            last = Failed(ask.id, sendable(error, RequestFailedError))
        self.send_status()  # before anybody can have seen what happened
        try:
            self.messenger.send(last)
        except RadixKVError as error:
            self.messenger.send(Failed(ask.id, error))


async def _close_nothing() -> None:
    """Leave the engine to others."""
