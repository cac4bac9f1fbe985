"""An engine for clients in other processes and on other machines: over TCP, for who has the key.

What goes over the connection is pickled, and nothing is encrypted: the network between the two must be one
that only trusted programs use, as for all that a cluster's processes say to each other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
import threading
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any, cast

from radixkv.cluster.loop_thread import LoopThread
from radixkv.cluster.remote.engine import RemoteEngine
from radixkv.cluster.remote.host import serve_engine
from radixkv.engine.client import EngineClient
from radixkv.errors import EngineStoppedError

# A connection whose other end is silent is asked for a sign of life after so many seconds, and again.
_KEEP_ALIVE_S = 2
_KEEP_ALIVE_PROBES = 3
# An engine says how it is four times a second: one that says nothing for so long hangs, though its machine
# answers, and is as good as gone.
_SILENT_S = 5


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine is served.

    Attributes:
        key: proves to it that a client may use it.
    """

    host: str
    port: int
    key: bytes = field(repr=False)


class SharedEngine:
    """An engine that its clients can't close."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def close(self) -> None:
        """Nothing: who made the engine closes it."""


class EngineListener:
    """Serves an engine to any number of clients, until it is closed; the engine stays open.

    Args:
        host: the address to listen on; the port is any that is free.
    """

    def __init__(self, engine: EngineClient, host: str) -> None:
        self._engine = cast(EngineClient, SharedEngine(engine))
        family = "AF_INET6" if ":" in host else "AF_INET"
        self._listener = Listener((host, 0), family=family, backlog=16)
        self.address = EngineAddress(host, cast(Any, self._listener.address)[1], secrets.token_bytes(32))
        self.num_clients = 0
        self._hosts = LoopThread("radixkv-engine-host")
        self._thread = threading.Thread(target=self._accept, name="radixkv-engine-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more clients, and leave those that are there."""
        with contextlib.suppress(OSError):
            socket.create_connection((self.address.host, self.address.port), timeout=1).close()
            self._listener.close()
        self._hosts.stop()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._let_in, args=(connection,), daemon=True).start()

    def _let_in(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self.address.key)
            answer_challenge(connection, self.address.key)
            _tune(connection)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
            return
        self.num_clients += 1
        self._hosts.start(self._serve(connection))

    async def _serve(self, connection: Connection) -> None:
        try:
            await serve_engine(self._engine, connection)
        finally:
            self.num_clients -= 1
            connection.close()


def connect_to(address: EngineAddress) -> EngineClient:
    """The engine that is served there; blocks until it has said what it is.

    Raises:
        EngineStoppedError: it can't be reached, or does not accept the key.

    One that falls silent counts as lost after seconds: calls that run fail with EngineStoppedError.
    """
    try:
        connection = Client((address.host, address.port), authkey=address.key)
        _tune(connection)
        _expect_words(connection)
    except (AuthenticationError, EOFError, OSError) as error:
        raise EngineStoppedError(
            f"the engine at {address.host}:{address.port} can't be reached: {error}"
        ) from error
    return RemoteEngine(connection, connection.close)


def _expect_words(connection: Connection) -> None:
    """Have reading fail when nothing comes for a while."""
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _SILENT_S, 0))


def _tune(connection: Connection) -> None:
    """Send each message at once, and notice in seconds that the other machine has gone."""
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_ALIVE_PROBES)
            silent_ms = 1000 * (_KEEP_ALIVE_S + _KEEP_ALIVE_PROBES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silent_ms)
