# SPDX-License-Identifier: Apache-2.0
"""A relay between a publisher of block events and its followers, which loses, delays, reorders and cuts."""

from __future__ import annotations

import random
import threading
from typing import Any

import zmq


class UnreliableRelay:
    """Passes messages on from a thread of its own, badly, until it is told to be good.

    Attributes:
        endpoint: of the stream.
        replay_endpoint: of the replays.
        num_faults: messages lost, late or twice, and cuts.
    """

    def __init__(self, stream: str, replay: str, seed: int) -> None:
        self.num_faults = 0
        self._rng = random.Random(seed)
        self._context: zmq.Context[Any] = zmq.Context()
        self._upstream = (stream, replay)
        self._out = self._context.socket(zmq.PUB)
        self._asked = self._context.socket(zmq.ROUTER)
        for socket in (self._out, self._asked):
            socket.set_hwm(0)
            socket.bind("tcp://127.0.0.1:0")
        self.endpoint = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._asked.getsockopt_string(zmq.LAST_ENDPOINT)
        self._late: list[list[bytes]] = []
        self._reader = b""  # who asked for a replay; one follower uses a relay
        self._is_good = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def be_good(self) -> None:
        self._is_good.set()

    def follow(self, stream: str, replay: str) -> None:
        """The publisher is another one from now on, at another place."""
        self._upstream = (stream, replay)

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _connect(self) -> tuple[tuple[str, str], Any, Any]:
        upstream = self._upstream
        stream, replays = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        for socket, endpoint in ((stream, upstream[0]), (replays, upstream[1])):
            socket.set_hwm(0)
            socket.connect(endpoint)
        stream.subscribe(b"")
        return upstream, stream, replays

    def _pass_on(self, message: list[bytes]) -> None:
        fate = 0.0 if self._is_good.is_set() else self._rng.random()
        self.num_faults += fate >= 0.8
        if fate < 0.85:
            self._out.send_multipart(message)
        if 0.8 <= fate < 0.95:  # twice, or late
            self._late.append(message)
        if self._late and self._rng.random() < 0.3:
            self._out.send_multipart(self._late.pop(self._rng.randrange(len(self._late))))

    def _run(self) -> None:
        upstream, stream, replays = self._connect()
        while not self._is_closing.is_set():
            poller = zmq.Poller()
            for socket in (stream, replays, self._asked):
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(20))
            if stream in ready:
                self._pass_on(stream.recv_multipart())
            if self._asked in ready:
                self._reader, _, start = self._asked.recv_multipart()
                if self._is_good.is_set() or self._rng.random() < 0.95:
                    replays.send_multipart((b"", start))
            if replays in ready:
                answer = replays.recv_multipart()
                if self._is_good.is_set() or self._rng.random() < 0.98:
                    self._asked.send_multipart((self._reader, *answer))
            cuts = not self._is_good.is_set() and self._rng.random() < 0.002
            if cuts or upstream != self._upstream:
                self.num_faults += cuts
                stream.close(linger=0)
                replays.close(linger=0)
                upstream, stream, replays = self._connect()
        stream.close(linger=0)
        replays.close(linger=0)
