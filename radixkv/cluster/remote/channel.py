# SPDX-License-Identifier: Apache-2.0
"""Channel: messages between two processes, pickled, in order; sending holds up no event loop.

A client asks for calls by name, and gets one answer for a call, items and an end for a stream:

    client to host: Ask, Took, Cancel, AskStatus
    host to client: EngineFacts first, then Reply, Item, End, Failed, Status
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from radixkv.engine.adapters import AdapterCard
from radixkv.engine.counts import EngineStats
from radixkv.errors import InvalidRequestError, RadixKVError

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


def as_sent(error: BaseException, stand_in: type[RadixKVError]) -> BaseException:
    """Return the error, or if it can't be pickled and read again, a `stand_in` that describes it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # of whatever object in it
        return stand_in(f"{type(error).__name__}: {error}")
    return error


class Channel:
    """An end of a connection, with a thread that reads it and one that writes it.

    Args:
        on_message: called for each message on the reading thread.
        on_end: called there when the other end has gone, or this one was closed.
    """

    def __init__(
        self, connection: Connection, on_message: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._on_message = on_message
        self._on_end = on_end
        self._to_send: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"radixkv-channel-{work.__name__.strip('_')}", daemon=True)
            for work in (self._read, self._write)
        ]

    def receive(self) -> Any:
        """The next message, waited for; before `start`.

        Raises:
            EOFError: the other end has gone.
        """
        return pickle.loads(self._connection.recv_bytes())

    def start(self) -> None:
        """Begin to read and to write."""
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        """Send a message after the earlier ones; do nothing if the other end has gone.

        Raises:
            InvalidRequestError: something in it can't be sent to another process.
        """
        try:
            data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # of whatever object in it
            raise InvalidRequestError(f"this can't be sent to another process: {error}") from error
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
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._on_message(self.receive())
        finally:  # also where a message can't be read: nobody may wait for an answer for ever
            self._on_end()
            self._to_send.put(None)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the other end has gone: the reading thread says so
            while (data := self._to_send.get()) is not None:
                self._connection.send_bytes(data)
        shut_down(self._connection)


def shut_down(connection: Connection) -> None:
    """End what waits to read from a connection, at either end."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
