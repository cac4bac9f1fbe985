# SPDX-License-Identifier: Apache-2.0
"""An engine for clients in other processes and on other machines: over TCP, for holders of the key.

Messages are plain data, so that reading them runs no code. They are not encrypted: the network must be one
that only trusted programs use, as for all messages between a cluster's processes.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import sys
import threading
import time
from dataclasses import dataclass, field

from radixkv.channel import Channel, ChannelEnded, WrongKey
from radixkv.cluster.loop_thread import LoopThread
from radixkv.cluster.remote.engine import RemoteEngine
from radixkv.cluster.remote.host import serve_engine
from radixkv.engine.client import EngineClient, EngineFacts
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
_SILENT_MS = 1000 * (_KEEP_ALIVE_S + _KEEP_ALIVE_PROBES)
#: Each message is sent at once, and it is noticed in seconds that the other machine has gone.
_OPTIONS = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
]
if sys.platform == "linux":
    _OPTIONS += [
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_ALIVE_PROBES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS),
    ]
#: Of one message: a prompt of ten million tokens takes a fifth of it.
MAX_MESSAGE_BYTES = 2**28
_LOOK_S = 1.0  # between two looks at whether a listener is closed, where shutting down does not wake it


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Address of a served engine, to be handed to its clients over a way that both trust.

    Attributes:
        key: proves to it that a client may use it.
        facts: of the engine.
    """

    host: str
    port: int
    key: bytes = field(repr=False)
    facts: EngineFacts = field(repr=False)


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
        port: int = self._listening.getsockname()[1]
        self.address = EngineAddress(host, port, secrets.token_bytes(32), engine.facts)
        self.num_clients = 0
        self._strangers: dict[Channel, None] = {}  # the oldest first
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
            for channel in self._strangers:
                channel.shut_down()
        self._hosts.stop()

    def _accept(self) -> None:
        is_short = False
        while not self._closed.is_set():
            try:
                channel = Channel.over(self._listening.accept()[0], max_bytes=MAX_MESSAGE_BYTES)
                with self._lock:
                    if len(self._strangers) == _MAX_STRANGERS:
                        oldest = next(iter(self._strangers))
                        oldest.shut_down()
                        del self._strangers[oldest]
                    self._strangers[channel] = None
                self._start(channel)
                is_short = False
            except TimeoutError:
                pass
            except (OSError, RuntimeError) as error:  # nothing is left to serve it with
                if not self._closed.is_set() and not is_short:
                    logger.warning("an engine's listener on port %d: %s", self.address.port, error)
                is_short = True
                self._closed.wait(_AGAIN_S)

    def _start(self, channel: Channel) -> None:
        try:
            name = "radixkv-engine-handshake"
            threading.Thread(target=self._let_in, args=(channel,), name=name, daemon=True).start()
        except RuntimeError:
            self._forget(channel)
            channel.close()
            raise

    def _let_in(self, channel: Channel) -> None:
        try:
            channel.check_key(self.address.key, asks_first=True, within_s=_HANDSHAKE_S)
            channel.set_options(*_OPTIONS)
        except (ChannelEnded, OSError):
            self._forget(channel)
            channel.close()
            return
        self._forget(channel)
        self.num_clients += 1
        self._hosts.start(self._serve(channel))

    def _forget(self, channel: Channel) -> None:
        with self._lock:
            self._strangers.pop(channel, None)

    async def _serve(self, channel: Channel) -> None:
        try:
            await serve_engine(self._engine, channel, may_close=False)
        finally:
            self.num_clients -= 1
            channel.close()


def connect_to(address: EngineAddress) -> EngineClient:
    """Connect to the engine served there; block until it has introduced itself.

    One that falls silent counts as lost after seconds: calls that run fail with EngineStoppedError.

    Raises:
        EngineStoppedError: it can't be reached, stays silent, or does not accept the key.
    """
    where = f"the engine at {address.host}:{address.port}"
    for tries_left in reversed(range(_TRIES)):
        try:
            channel = _join(address)
        except (ChannelEnded, OSError) as error:
            if isinstance(error, WrongKey) or not tries_left:
                reason = str(error) or "it does not answer"
                raise EngineStoppedError(f"{where} can't be reached: {reason}") from error
            time.sleep(_AGAIN_S)
        else:
            return RemoteEngine(channel, address.facts, on_close=channel.close)
    raise AssertionError("the last try returns or raises")


def _join(address: EngineAddress) -> Channel:
    """Return a channel that has shown the key, and ends when nothing comes for a while."""
    sock = socket.create_connection((address.host, address.port), _HANDSHAKE_S)
    channel = Channel.over(sock, max_bytes=MAX_MESSAGE_BYTES)
    try:
        channel.check_key(address.key, asks_first=False, within_s=_HANDSHAKE_S)
        channel.set_options(*_OPTIONS)
        channel.expect_within(_SILENT_S)
    except BaseException:
        channel.close()
        raise
    return channel
