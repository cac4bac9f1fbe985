# SPDX-License-Identifier: Apache-2.0
"""Feed: passes requests and answers to the observer, a process of its own, without waiting for it.

Above a bound of memory, records that the observer does not take in time are dropped and counted. If it dies,
the traffic goes on, and another one is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import re
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from radixkv.observe.audit.exchange import Exchange
from radixkv_server.proxy.fleet_state import Choice, UpstreamState
from radixkv_server.proxy.passage import Passage

logger = logging.getLogger(__name__)

_SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)  # of the environment
_LENGTH = struct.Struct("<Q")
_RESTART_S = 1.0  # doubled with each restart that follows soon
_MAX_RESTART_S = 60.0
_SOON_S = 120.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Record of a request for the observer: sent when it begins, and again when its answer has ended.

    Attributes:
        number: number of the request, the same both times.
        has_ended: True once the answer has ended.
        conversation: conversation's name in the headers; empty: none.
        secrets: strings to remove from all texts.
        is_whole: True if the answer was complete.
        choice: choice of an upstream, if there are several.
        num_dropped: records dropped so far.
    """

    number: int
    exchange: Exchange
    has_ended: bool
    upstream: str
    conversation: str
    secrets: tuple[str, ...]
    is_whole: bool
    num_dropped: int
    choice: Choice | None = None


class Feed:
    """Channel to the observer.

    Args:
        settings: an ObserverSettings, for each observer that is started.
        max_bytes: that wait for it.
    """

    def __init__(self, settings: Any, max_bytes: int) -> None:
        self._settings = settings
        self._max_bytes = max_bytes
        self._pipe: asyncio.WriteTransport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._early: list[bytes] = []  # while there is no observer
        self._early_bytes = 0
        self.num_dropped = 0

    async def run(self) -> None:
        """Keep an observer running; when cancelled, let it finish its records."""
        delay = _RESTART_S
        try:
            while True:
                started = time.monotonic()
                await self._start()
                assert self._process is not None
                code = await self._process.wait()
                self._pipe = None
                delay = _RESTART_S if time.monotonic() - started > _SOON_S else min(2 * delay, _MAX_RESTART_S)
                logger.warning(
                    "the observer ended (%s): traffic goes on, another one starts in %.0f s", code, delay
                )
                await asyncio.sleep(delay)
        finally:
            await self._stop()

    def begin(self, passage: Passage) -> None:
        """Report a complete request. Never waits."""
        self._put(passage, has_ended=False)

    def put(self, passage: Passage) -> None:
        """Report a request whose answer has ended. Never waits."""
        self.num_dropped += not self._put(passage, has_ended=True)

    def _put(self, passage: Passage, *, has_ended: bool) -> bool:
        exchange, pipe = passage.exchange(), self._pipe
        waiting = self._early_bytes if pipe is None else pipe.get_write_buffer_size()
        if exchange is None or waiting > self._max_bytes or (pipe is not None and pipe.is_closing()):
            return False
        seen = Seen(
            passage.number,
            exchange,
            has_ended,
            passage.upstream,
            passage.conversation,
            passage.secrets,
            not passage.is_cut_off,
            self.num_dropped,
            passage.choice,
        )
        frame = _frame(seen)
        if pipe is None:
            self._early.append(frame)
            self._early_bytes += len(frame)
        else:
            pipe.write(frame)
        return True

    def put_states(self, states: list[UpstreamState]) -> None:
        """Report the states of upstreams. Never waits."""
        pipe = self._pipe
        if pipe is not None and not pipe.is_closing() and not pipe.get_write_buffer_size():
            pipe.write(_frame(states))

    async def _start(self) -> None:
        command = (sys.executable, "-m", "radixkv_server.proxy.observer")
        environment = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, env=environment
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.transport
        self._pipe.write(_frame(self._settings))
        for frame in self._early:
            self._pipe.write(frame)
        self._early, self._early_bytes = [], 0

    async def _stop(self) -> None:
        process, self._pipe = self._process, None
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 10.0)
        if process.returncode is None:
            process.kill()


def _frame(value: Any) -> bytes:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def read_frames(pipe: IO[bytes]) -> Iterator[Any]:
    """Yield the objects written at the other end, until it is closed."""
    while len(head := pipe.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        data = pipe.read(length)
        if len(data) < length:
            return
        yield pickle.loads(data)
