# SPDX-License-Identifier: Apache-2.0
"""Messages between an engine and a client elsewhere, and the Messenger that carries them.

A client asks for calls by name, and gets one answer for a call, items and an end for a stream:

    client to host: Ask, Took, Cancel, AskStatus; before an Ask, its images (`sent_images`)
    host to client: Status first, then Reply, Item, End, Failed, Status
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.channel import Channel, ChannelEnded
from radixkv.cluster.remote import wire
from radixkv.engine.adapters import AdapterCard
from radixkv.engine.counts import EngineStats
from radixkv.errors import InvalidRequestError

#: Items of a stream that may be on their way.
WINDOW = 64


@dataclass(frozen=True, slots=True)
class Ask:
    """Make a call: of the engine, or of its `cache.` or `adapters.`. `id` is the client's, and new."""

    id: int
    name: str
    args: tuple[Any, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a call without readers."""

    id: int


@dataclass(frozen=True, slots=True)
class Took:
    """Acknowledge `count` read items of a stream; the host is never more than `WINDOW` ahead."""

    id: int
    count: int


@dataclass(frozen=True, slots=True)
class AskStatus:
    """Send a `Status`."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a call."""

    id: int
    value: Any


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a stream."""

    id: int
    value: Any


@dataclass(frozen=True, slots=True)
class End:
    """A stream has come to its end."""

    id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The exception of a call."""

    id: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Status:
    """State of an engine that is known without asking it."""

    is_healthy: bool
    is_full: bool
    stats: EngineStats
    adapters: tuple[AdapterCard, ...] | None = None  # None: it takes none


class Messenger:
    """Reads and writes a channel on threads of its own, so that sending holds up no event loop.

    Both ends of a channel have one bound on the length of messages.

    Args:
        on_message: called for each message on the reading thread.
        on_end: called there when the other end has gone, or this one was closed.
    """

    def __init__(
        self, channel: Channel, on_message: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        self._channel = channel
        self._on_message = on_message
        self._on_end = on_end
        self._to_send: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"radixkv-messenger-{work.__name__.strip('_')}", daemon=True)
            for work in (self._read, self._write)
        ]

    def receive(self) -> Any:
        """Return the next message, waited for; before `start`.

        Raises:
            ChannelEnded: the other end has gone, or has sent something that is no message.
        """
        return wire.loads(self._channel.receive())

    def start(self) -> None:
        """Begin to read and to write."""
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        """Send a message after the earlier ones; do nothing if the other end has gone.

        Raises:
            InvalidRequestError: something in it can't be sent to another process, or it is longer than the
                other end takes.
        """
        data, most = wire.dumps(message), self._channel.max_bytes
        if most is not None and len(data) > most:
            raise InvalidRequestError(
                f"this request has {len(data):,} bytes on the way to its engine, and the limit is {most:,}: "
                "send less text, or smaller images"
            )
        self._to_send.put(data)

    def close(self) -> None:
        """Send what waits, then end; does not wait for that."""
        self._to_send.put(None)

    def join(self) -> None:
        """Wait until both threads have ended."""
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        try:
            with contextlib.suppress(ChannelEnded):
                while True:
                    self._on_message(self.receive())
        finally:
            self._on_end()
            self._to_send.put(None)

    def _write(self) -> None:
        with contextlib.suppress(ChannelEnded):  # the reading thread says so
            while (data := self._to_send.get()) is not None:
                self._channel.send(data)
        self._channel.shut_down()
