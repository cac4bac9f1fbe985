# SPDX-License-Identifier: Apache-2.0
"""Subscriber: follows the streams of any number of replicas from one thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import zmq
import zmq.auth
from zmq.utils.monitor import recv_monitor_message

from radixkv.cluster.events.follower import Follower
from radixkv.cluster.events.spec import EventsSpec
from radixkv.errors import ConfigError

logger = logging.getLogger("radixkv")

#: Seconds without a message after which a stream that has heartbeats is taken for dead.
SILENCE_S = 3.5
#: Seconds that a replay may take to begin, or to go on.
REPLAY_S = 1.0
# Between two looks at the times, and before a replay is asked for again that came with gaps.
_TICK_S = 0.1
_MAX_MESSAGES = 256  # of one stream in a row


class Subscriber:
    """Feeds followers until it is closed. Only its thread changes them; reading is safe on any.

    Args:
        streams: name -> where the stream is, and who follows it.
        silence_s: see `SILENCE_S`.
        replay_s: see `REPLAY_S`.

    Raises:
        ConfigError: a certificate can't be read.
    """

    def __init__(
        self,
        streams: Mapping[str, tuple[EventsSpec, Follower]],
        *,
        silence_s: float = SILENCE_S,
        replay_s: float = REPLAY_S,
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._streams = [
                _Stream(self._context, name, spec, follower, silence_s, replay_s)
                for name, (spec, follower) in streams.items()
            ]
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="radixkv-follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; the followers' knowledge stays. May be called again."""
        self._is_closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for stream in self._streams:
            for socket in stream.sockets:
                poller.register(socket, zmq.POLLIN)
        while not self._is_closing.is_set():
            poller.poll(int(1000 * _TICK_S))
            for stream in self._streams:
                try:
                    stream.step(time.monotonic(), poller)
                except Exception:
                    logger.exception(
                        "the block events of %s can't be followed; what was known is forgotten", stream.name
                    )
                    stream.follower.lost()


class _Stream:
    """The sockets of one replica's stream, and since when something is waited for."""

    def __init__(
        self,
        context: zmq.Context[Any],
        name: str,
        spec: EventsSpec,
        follower: Follower,
        silence_s: float,
        replay_s: float,
    ) -> None:
        self.name = name
        self.follower = follower
        self._context = context
        self._spec = spec
        self._silence_s = silence_s
        self._replay_s = replay_s
        self._heard = time.monotonic()
        self._asked: float | None = None  # since when a replay is waited for
        self._messages = context.socket(zmq.SUB)
        self._messages.setsockopt(zmq.RCVHWM, 100_000)
        self._messages.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor = self._messages.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._messages.subscribe(b"")
        self._connect(self._messages, spec.endpoint)
        self._replays = self._open_replays()

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        return [self._monitor, self._messages, self._replays]

    def step(self, now: float, poller: zmq.Poller) -> None:
        """Take arrived messages, and stop waiting for replies that will not come."""
        follower = self.follower
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            follower.disconnected()
        for _ in range(_MAX_MESSAGES):
            if not self._messages.poll(0):
                break
            self._heard = now
            follower.receive(self._messages.recv_multipart())
        while self._replays.poll(0):
            frames = self._replays.recv_multipart()[1:]  # after an empty one
            self._asked = now
            if follower.replayed(frames):
                self._asked = None
                break
        if follower.has_heartbeat and now - self._heard > self._silence_s:
            self._heard = now
            follower.lost()
        if self._asked is not None and now - self._asked > self._replay_s:
            self._asked = None
            poller.unregister(self._replays)
            self._replays.close(linger=0)  # with answers that come after all
            self._replays = self._open_replays()
            poller.register(self._replays, zmq.POLLIN)
            follower.replay_failed()
        if follower.wanted is not None and self._asked is None:
            self._asked = now
            # A refused reader has no peer to send to: waiting would stop the whole thread.
            with suppress(zmq.Again):
                self._replays.send_multipart((b"", follower.wanted.to_bytes(8, "big")), zmq.NOBLOCK)

    def _open_replays(self) -> zmq.Socket[Any]:
        socket = self._context.socket(zmq.DEALER)
        socket.set_hwm(100_000)
        self._connect(socket, self._spec.replay)
        return socket

    def _connect(self, socket: zmq.Socket[Any], endpoint: str) -> None:
        spec = self._spec
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        if spec.curve is not None and spec.server is not None:
            try:
                socket.curve_serverkey, _ = zmq.auth.load_certificate(spec.server)
                socket.curve_publickey, secret = zmq.auth.load_certificate(spec.curve)
            except (OSError, ValueError) as error:
                raise ConfigError(f"--kv-events: no certificate: {error}") from None
            if secret is None:
                raise ConfigError(
                    f"--kv-events: curve={spec.curve} holds no secret key; give the .key_secret file"
                )
            socket.curve_secretkey = secret
        socket.connect(endpoint)
