# SPDX-License-Identifier: Apache-2.0
"""An engine for clients in other processes and on other machines: over TCP, for holders of the key.

Messages are pickled, and nothing is encrypted: the network between the two must be one
that only trusted programs use, as for all messages between a cluster's processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from radixkv.cluster.loop_thread import LoopThread
from radixkv.cluster.remote.channel import shut_down
from radixkv.cluster.remote.engine import RemoteEngine
from radixkv.cluster.remote.host import serve_engine
from radixkv.engine.client import EngineClient
from radixkv.errors import EngineStoppedError

logger = logging.getLogger(__name__)

# A silent connection is probed after this many seconds, and again.
_KEEP_ALIVE_S = 2
_KEEP_ALIVE_PROBES = 3
# An engine says how it is four times a second: one that says nothing for so long hangs, though its machine
# answers, and is as good as gone.
_SILENT_S = 5
_HANDSHAKE_S = 5.0  # for proving the key to each other
_MAX_STRANGERS = 32  # connections that have not
_TRIES = 3
_AGAIN_S = 0.1
_LOOK_S = 1.0  # between two looks at whether a listener is closed, where shutting down does not wake it


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Address of a served engine.

    Attributes:
        key: proves to it that a client may use it.
    """

    host: str
    port: int
    key: bytes = field(repr=False)


class EngineListener:
    """Serves an engine to any number of clients, none of whom can close it, until the listener is closed.

    Connections that have not proven the key yet have a deadline and a bound in number: of more, the oldest
    is closed. Running out of descriptors delays those to come, and ends nothing.

    Args:
        host: the address to listen on; the port is any that is free.
    """

    def __init__(self, engine: EngineClient, host: str) -> None:
        self._engine = engine
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=128)
        self._listening.settimeout(_LOOK_S)
        self.address = EngineAddress(host, self._listening.getsockname()[1], secrets.token_bytes(32))
        self.num_clients = 0
        self._strangers: dict[Connection, None] = {}  # the oldest first
        self._lock = threading.Lock()  # around these
        self._closed = threading.Event()
        self._hosts = LoopThread("radixkv-engine-host")
        self._thread = threading.Thread(target=self._accept, name="radixkv-engine-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more clients, and keep the present ones."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listening.close()
        with self._lock:
            for connection in self._strangers:
                shut_down(connection)
        self._hosts.stop()

    def _accept(self) -> None:
        is_short = False
        while not self._closed.is_set():
            try:
                connection = _connection_of(self._listening.accept()[0])
                with self._lock:
                    if len(self._strangers) == _MAX_STRANGERS:
                        shut_down(oldest := next(iter(self._strangers)))
                        del self._strangers[oldest]
                    self._strangers[connection] = None
                self._start(connection)
                is_short = False
            except TimeoutError:
                pass
            except (
                OSError,
                RuntimeError,
            ) as error:  # nothing is left to serve it with
                if not self._closed.is_set() and not is_short:
                    logger.warning("an engine's listener on port %d: %s", self.address.port, error)
                is_short = True
                self._closed.wait(_AGAIN_S)

    def _start(self, connection: Connection) -> None:
        try:
            name = "radixkv-engine-handshake"
            threading.Thread(target=self._let_in, args=(connection,), name=name, daemon=True).start()
        except RuntimeError:
            self._forget(connection)
            connection.close()
            raise

    def _let_in(self, connection: Connection) -> None:
        try:
            with _within(_HANDSHAKE_S, connection):
                deliver_challenge(connection, self.address.key)
                answer_challenge(connection, self.address.key)
                _tune(connection)
        except (AuthenticationError, EOFError, OSError):
            self._forget(connection)
            connection.close()
            return
        self._forget(connection)
        self.num_clients += 1
        self._hosts.start(self._serve(connection))

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._strangers.pop(connection, None)

    async def _serve(self, connection: Connection) -> None:
        try:
            await serve_engine(self._engine, connection, may_close=False)
        finally:
            self.num_clients -= 1
            connection.close()


def connect_to(address: EngineAddress) -> EngineClient:
    """Connect to the engine served there; block until it has introduced itself.

    One that falls silent counts as lost after seconds: calls that run fail with EngineStoppedError.

    Raises:
        EngineStoppedError: it can't be reached, stays silent, or does not accept the key.
    """
    where = f"the engine at {address.host}:{address.port}"
    for tries_left in reversed(range(_TRIES)):
        try:
            connection = _join(address)
        except AuthenticationError as error:
            raise EngineStoppedError(f"{where} can't be reached: {error}") from error
        except (EOFError, OSError) as error:
            if not tries_left:
                reason = str(error) or "it does not answer"
                raise EngineStoppedError(f"{where} can't be reached: {reason}") from error
            time.sleep(_AGAIN_S)
        else:
            return RemoteEngine(connection, connection.close)
    raise AssertionError("the last try returns or raises")


def _join(address: EngineAddress) -> Connection:
    """Return a connection that has shown the key, and fails to be read when nothing comes for a while."""
    connection = _connection_of(socket.create_connection((address.host, address.port), _HANDSHAKE_S))
    try:
        with _within(_HANDSHAKE_S, connection):
            answer_challenge(connection, address.key)
            deliver_challenge(connection, address.key)
            _tune(connection)
            _expect_words(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _connection_of(sock: socket.socket) -> Connection:
    sock.setblocking(True)
    return Connection(sock.detach())


@contextlib.contextmanager
def _within(seconds: float, connection: Connection) -> Iterator[None]:
    """End the connection if the block takes longer."""
    timer = threading.Timer(seconds, shut_down, [connection])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


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
