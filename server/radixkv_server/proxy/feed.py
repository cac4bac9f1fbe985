# SPDX-License-Identifier: Apache-2.0
"""Feed: passes requests and answers to the observer, a process of its own, without waiting for it.

Above a bound of memory, records that the observer does not take in time are dropped and counted. If it dies,
the traffic goes on, and another one is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import re
import struct
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import IO, Any

from radixkv.helper_process import MODULE, helper_environment
from radixkv.observe.audit.exchange import Exchange
from radixkv_server.proxy.fleet_state import Choice, UpstreamState
from radixkv_server.proxy.passage import Passage

logger = logging.getLogger(__name__)

_SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)  # of the environment
_LENGTHS = struct.Struct("<QQQ")
_PIECE_BYTES = 64 * 1024  # written at once
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

    Bodies are not copied here: a frame holds them as they were read, and goes into the pipe piece by piece
    while the traffic goes on.

    Args:
        settings: an ObserverSettings, for each observer that is started.
        max_bytes: limit of the bytes that wait for the observer.
    """

    def __init__(self, settings: Any, max_bytes: int) -> None:
        self._settings = settings
        self._max_bytes = max_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._sending: asyncio.Task[None] | None = None
        self._frames: deque[_Frame] = deque()  # the first one may be under way
        self._num_waiting = 0  # bytes of these
        self._has_more = asyncio.Event()
        self._is_closing = False
        self.num_dropped = 0

    async def run(self) -> None:
        """Keep an observer running; when cancelled, let it finish its records."""
        delay = _RESTART_S
        try:
            while True:
                started = time.monotonic()
                try:
                    what = f"the observer ended ({await self._run_one()})"
                except OSError as error:  # no process, descriptor or memory is left for one
                    what = f"the observer can't be started ({error})"
                delay = _RESTART_S if time.monotonic() - started > _SOON_S else min(2 * delay, _MAX_RESTART_S)
                logger.warning("%s: traffic goes on, another one starts in %.0f s", what, delay)
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
        if self._num_waiting > self._max_bytes or passage.request is None:
            return False
        seen = Seen(
            passage.number,
            passage.exchange_without_bodies(),
            has_ended,
            passage.upstream,
            passage.conversation,
            passage.secrets,
            not passage.is_cut_off,
            self.num_dropped,
            passage.choice,
        )
        answer = passage.answer if has_ended else None  # before, more may come
        self._enqueue(_Frame.of(seen, passage.request, answer or b""))
        return True

    def put_states(self, states: list[UpstreamState]) -> None:
        """Report the states of upstreams. Never waits."""
        if self._sending is not None and not self._frames:
            self._enqueue(_Frame.of(states))

    def _enqueue(self, frame: _Frame) -> None:
        self._frames.append(frame)
        self._num_waiting += frame.num_bytes
        self._has_more.set()

    async def _run_one(self) -> int:
        """Run an observer to its end and return its exit code.

        Raises:
            OSError: it can't be started.
        """
        self._process = process = await self._start()
        assert process.stdin is not None
        self._sending = asyncio.create_task(self._send(process.stdin))
        code = await process.wait()
        await self._end_sending()
        return code

    async def _start(self) -> asyncio.subprocess.Process:
        command = (*MODULE, "radixkv_server.proxy.observer")
        environment = {
            name: value for name, value in helper_environment().items() if not _SECRET.search(name)
        }
        return await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, env=environment)

    async def _send(self, pipe: asyncio.StreamWriter) -> None:
        """Send frames to one observer until it or this one ends."""
        with contextlib.suppress(OSError):
            await _Frame.of(self._settings).send(pipe)
            while True:
                while self._frames:
                    try:
                        await self._frames[0].send(pipe)
                    finally:  # one that an observer ends at is not for the next one
                        self._num_waiting -= self._frames.popleft().num_bytes
                if self._is_closing:
                    return pipe.close()
                self._has_more.clear()
                await self._has_more.wait()

    async def _end_sending(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _stop(self) -> None:
        self._is_closing = True
        self._has_more.set()
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 10.0)
            if process.returncode is None:
                process.kill()
        await self._end_sending()


@dataclass(frozen=True, slots=True)
class _Frame:
    """A value with the bodies that belong to it, which are sent as they are.

    lengths of the value and of both bodies | the value | request | answer
    """

    parts: tuple[bytes | bytearray, ...]

    @classmethod
    def of(cls, value: Any, request: bytes | bytearray = b"", answer: bytes | bytearray = b"") -> _Frame:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        head = _LENGTHS.pack(len(data), len(request), len(answer)) + data
        if len(request) + len(answer) <= _PIECE_BYTES:
            return cls((b"".join((head, request, answer)),))
        return cls((head, request, answer))

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.parts))

    async def send(self, pipe: asyncio.StreamWriter) -> None:
        """Send it piece by piece.

        Raises:
            OSError: the observer has ended.
        """
        for part in self.parts:
            for start in range(0, len(part), _PIECE_BYTES):
                pipe.write(memoryview(part)[start : start + _PIECE_BYTES])
                await pipe.drain()


def read_frames(pipe: IO[bytes]) -> Iterator[Any]:
    """Yield the objects written at the other end, until it is closed."""
    while len(head := pipe.read(_LENGTHS.size)) == _LENGTHS.size:
        parts = [(length, pipe.read(length)) for length in _LENGTHS.unpack(head)]
        if any(len(data) < length for length, data in parts):
            return
        value, request, response = pickle.loads(parts[0][1]), parts[1][1], parts[2][1]
        if isinstance(value, Seen):
            value = replace(value, exchange=replace(value.exchange, request=request, response=response))
        yield value
