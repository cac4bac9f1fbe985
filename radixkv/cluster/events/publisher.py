# SPDX-License-Identifier: Apache-2.0
"""EventPublisher: tells followers over ZeroMQ which whole blocks a cache holds, from a thread of its own.

    the engine's thread     receive: one append, and one byte into a pipe where the publisher's thread sleeps
    the publisher's thread  takes all that waits, names and encodes it, sends it, answers requests for replays

Slow or absent readers cost the engine nothing: ZeroMQ drops messages that a reader does not take, and the
sequence numbers show the gap. The reader then asks for a replay: of the missed batches, or, if they have been
dropped, of a batch that begins with AllBlocksCleared and goes on with all cached blocks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.reporting.events import BlockChanges
from radixkv.cluster.events.block_keys import BlockKeys
from radixkv.cluster.events.published_blocks import PublishedBlocks
from radixkv.cluster.events.replay_log import ReplayLog
from radixkv.cluster.events.spec import EventsSpec
from radixkv.cluster.events.wire import END, AllBlocksCleared, Event, encode_batch, topic_of
from radixkv.engine.counts import EngineStats, EventCounts
from radixkv.engine.hooks import StepHook
from radixkv.errors import ConfigError

logger = logging.getLogger("radixkv")

#: Blocks that may wait to be published; beyond that all are dropped, and published again when there is room.
MAX_WAITING_BLOCKS = 1 << 18
#: Seconds after which an empty batch is sent where nothing happened.
HEARTBEAT_S = 1.0
# Blocks of one batch, about; and replays that one request may have waiting for its reader.
_BATCH_BLOCKS = 4096
_HIGH_WATER = 2 * 10_000 + 2
_LINGER_MS = 200
_FORGET = BlockChanges(0, cleared=True)


class EventPublisher(StepHook):
    """A replica's stream. Its sockets are open when it is made; `attach` gives it the cache.

    Args:

    Attributes:
        incarnation: tells this stream from every other one.
        endpoint: of the stream, with the port that it has.
        replay_endpoint: of the replays.

    Raises:
        ConfigError: an address is in use or not this machine's, or a certificate can't be read.
    """

    def __init__(
        self,
        spec: EventsSpec,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        max_waiting_blocks: int = MAX_WAITING_BLOCKS,
        log: ReplayLog | None = None,
    ) -> None:
        self.incarnation = secrets.token_hex(8)
        self._topic = topic_of(spec.topic, self.incarnation)
        self._keys = BlockKeys(spec.secret or secrets.token_bytes(32))
        self._tokens = spec.tokens
        self._heartbeat_s = heartbeat_s
        self._max_waiting = max_waiting_blocks
        self._waiting: deque[BlockChanges] = deque()
        self._num_received = self._num_taken = 0  # blocks; each is counted by one thread
        self._num_dropped = self._num_published = self._num_replays = 0
        self._is_behind = self._is_woken = self._is_closing = False
        self._log = log or ReplayLog()
        self._blocks: PublishedBlocks | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        try:
            if spec.curve is not None:
                self._authenticator = _authenticate(self._context, spec)
            self._stream = self._context.socket(zmq.PUB)
            self._replays = self._context.socket(zmq.ROUTER)
            self.endpoint = _bind(self._stream, spec.endpoint, spec)
            self.replay_endpoint = _bind(self._replays, spec.replay, spec)
        except BaseException:
            self._close_sockets()
            raise

    # ------------------------------------------------------------------ on the engine's thread

    def attach(self, cache: PrefixCache) -> None:
        """Publish all blocks of this cache, and from then on its changes. O(blocks)."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        if self._blocks is None:
            self._blocks = PublishedBlocks(cache.block_size, self._keys, self._tokens)
        self._is_behind = False
        self._waiting.append(_FORGET)
        self._unsubscribe = cache.subscribe(self._receive)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="radixkv-events", daemon=True)
            self._thread.start()

    def after_step(self, cache: PrefixCache) -> None:
        """Publish everything again if changes were dropped and there is room, between steps. O(1) if not."""
        if self._is_behind and not self._waiting:
            self.attach(cache)

    def _receive(self, changes: BlockChanges) -> None:
        num_blocks = changes.num_blocks
        waiting = self._num_received - self._num_taken
        # The changes of one call are always taken while none are queued, whatever their size.
        if self._is_behind or (waiting and waiting + num_blocks > self._max_waiting):
            self._is_behind = True
            self._num_dropped += num_blocks
            return
        self._num_received += num_blocks
        self._waiting.append(changes)
        self._wake()

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"\0")

    @property
    def counts(self) -> EventCounts:
        """Counts of published events; any thread."""
        return EventCounts(
            self._log.next_sequence,
            self._num_published,
            self._num_dropped,
            max(0, self._num_received - self._num_taken),
            self._num_replays,
        )

    def add_counts(self, stats: EngineStats) -> None:
        stats.events = self.counts

    def close(self, *, save: bool = True) -> None:
        """Publish what waits and that nothing is left, then end. May be called again."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        self._is_closing = True
        if self._thread is not None:
            self._is_woken = False
            self._wake()
            self._thread.join()
            self._thread = None
        self._close_sockets()

    def _close_sockets(self) -> None:
        if self._context.closed:
            return
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=_LINGER_MS)
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ------------------------------------------------------------------ on the publisher's thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        poller.register(self._replays, zmq.POLLIN)
        next_beat = time.monotonic() + self._heartbeat_s
        while True:
            is_closing = self._is_closing
            try:
                poller.poll(0 if is_closing else max(0, int(1000 * (next_beat - time.monotonic())) + 1))
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 64)
                self._is_woken = False  # before the changes are taken: what comes after wakes again
                has_sent = self._publish_waiting()
                self._answer_replays()
                if is_closing:
                    self._send([AllBlocksCleared()])
                    return
                if has_sent or time.monotonic() >= next_beat:
                    if not has_sent:
                        self._send([])
                    next_beat = time.monotonic() + self._heartbeat_s
            except Exception:
                logger.exception("block events could not be published; all will be told anew")
                self._is_behind = True
                if is_closing:
                    return

    def _publish_waiting(self) -> bool:
        assert self._blocks is not None
        has_sent = False
        while self._waiting:
            events: list[Event] = []
            num_blocks = 0
            while self._waiting and num_blocks < _BATCH_BLOCKS:
                changes = self._waiting.popleft()
                num_blocks += changes.num_blocks
                events += self._blocks.events(changes)
            self._num_taken += num_blocks
            self._num_published += num_blocks
            if events:
                self._send(events)
                has_sent = True
        if self._is_behind and self._blocks:  # of what was dropped, some may have been removals
            self._blocks.clear()
            self._send([AllBlocksCleared()])
        return has_sent

    def _send(self, events: list[Event]) -> None:
        payload = encode_batch(time.time(), events)
        sequence = self._log.append(payload)
        self._stream.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))

    def _answer_replays(self) -> None:
        while self._replays.poll(0):
            frames = self._replays.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                logger.debug("a request for a replay that is none: %d frames", len(frames))
                continue
            self._num_replays += 1
            peer = frames[0]
            for sequence, payload in self._replay(int.from_bytes(frames[2], "big")):
                self._replays.send_multipart((peer, b"", self._topic, sequence.to_bytes(8, "big"), payload))
            self._replays.send_multipart((peer, b"", b"", END, b""))

    def _replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Batches from `start` on; where they are not there, or are in the future, one with all there is."""
        assert self._blocks is not None
        last = self._log.next_sequence - 1
        if self._log.first_sequence <= start <= last + 1:
            yield from self._log.since(start)
        elif last >= 0:
            yield last, encode_batch(time.time(), self._blocks.snapshot())


def _bind(socket: zmq.Socket[Any], endpoint: str, spec: EventsSpec) -> str:
    """Returns the endpoint with its port."""
    socket.set_hwm(_HIGH_WATER)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    if spec.curve is not None:
        socket.curve_publickey, socket.curve_secretkey = _certificate(spec)
        socket.curve_server = True
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"can't be listened on: {error}"
        raise ConfigError(
            f"--kv-events: {endpoint} {why}; each replica needs two ports of its own, for the stream and for "
            "its replay (the next one, unless replay= says another)"
        ) from None
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.decode().rstrip("\0")


def _certificate(spec: EventsSpec) -> tuple[bytes, bytes]:
    assert spec.curve is not None
    try:
        public, secret = zmq.auth.load_certificate(spec.curve)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--kv-events: curve={spec.curve} is no certificate: {error}") from None
    if secret is None:
        raise ConfigError(f"--kv-events: curve={spec.curve} holds no secret key; give the .key_secret file")
    return public, secret


def _authenticate(context: zmq.Context[Any], spec: EventsSpec) -> ThreadAuthenticator:
    """Only readers whose public keys are in the folder get in."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    assert spec.clients is not None
    authenticator.configure_curve(domain="*", location=str(spec.clients))
    return authenticator
