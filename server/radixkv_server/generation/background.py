# SPDX-License-Identifier: Apache-2.0
"""Background answers, which go on without their client: a task each, with the events of their streams.

    started --frames--> running --end, error, time--> ended --KEPT_S, or too many bytes--> forgotten
                           `--cancel, shutdown--'

The server finishes the tasks before it exits, like the requests of its connections.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from radixkv_server.errors import ApiError, is_expected, shutting_down, to_api_error
from radixkv_server.generation.progress import Usage

logger = logging.getLogger("radixkv.server")

#: Seconds that an ended answer is kept with its events, most answers of one tenant, and most bytes of them.
KEPT_S = 600.0
MAX_KEPT = 256
MAX_KEPT_BYTES = 16 * 1024 * 1024
#: Ends an event of a stream; no event has it inside.
END_OF_EVENT = b"\n\n"


class BackgroundRenderer(Protocol):
    """Protocol of an API's background answer; every method returns framed events."""

    def begun(self) -> bytes:
        """Report that the answer waits for its turn."""

    async def failed(self, error: ApiError) -> bytes:
        """Make the answer a failed one, and keep it."""

    async def cancelled(self, usage: Usage) -> bytes:
        """Make the answer a cancelled one, and keep it. Does nothing to one that is complete."""


class BackgroundAnswer:
    """Answer in the background.

    Args:
        frames: generates the answer as framed events.
        usage: token counts of the answer, updated while it runs.
        on_end: called once when the answer has ended, with the error that ended it.

    Attributes:
        renderer: the answer itself.
        events: events so far; the index of each is its number.
        num_bytes: size of the events.
        ended_at: `time.monotonic` of its end; None while it runs.
    """

    def __init__(
        self,
        tenant: str,
        answer_id: str,
        renderer: BackgroundRenderer,
        frames: AsyncGenerator[bytes],
        usage: Usage,
        on_end: Callable[[ApiError | None], None],
    ) -> None:
        self.tenant = tenant
        self.id = answer_id
        self.renderer = renderer
        self.events: list[bytes] = []
        self.num_bytes = 0
        self.ended_at: float | None = None
        self._frames = frames
        self._usage = usage
        self._on_end = on_end
        self._news = asyncio.Event()
        self._is_cancelled = False
        self._is_ending = False
        self._task: asyncio.Task[None] | None = None
        self._add(renderer.begun())

    def start(self, timeout_s: float) -> asyncio.Task[None]:
        """Start generating; the task ends with the answer."""
        self._task = asyncio.ensure_future(self._run(timeout_s))
        return self._task

    async def end(self, *, by_client: bool) -> None:
        """End the answer, cancelled by its client or by the server's shutdown; waits until it has ended."""
        assert self._task is not None
        if not self._is_ending and not self._task.cancelling():
            self._is_cancelled = by_client
            self._task.cancel()
        await asyncio.wait([self._task])

    async def stream(self, after: int) -> AsyncGenerator[bytes]:
        """Yield the events after number `after`, to the end of the answer."""
        sent = after + 1
        while True:
            news = self._news
            if sent < len(self.events):
                ready, sent = self.events[sent:], len(self.events)
                yield b"".join(ready)
            elif self.ended_at is not None:
                return
            else:
                await news.wait()

    async def _run(self, timeout_s: float) -> None:
        error: ApiError | None = None
        try:
            async with asyncio.timeout(timeout_s), aclosing(self._frames) as frames:
                async for frame in frames:
                    self._add(frame)
        except asyncio.CancelledError:
            error = None if self._is_cancelled else shutting_down()
        except TimeoutError:
            message = f"The response took longer than {timeout_s:g} s (background_timeout_s)."
            error = ApiError(504, message, code="timeout")
        except Exception as caught:
            if not is_expected(caught):
                logger.error("unexpected error in the background", exc_info=caught)
            error = to_api_error(caught)
        self._is_ending = True
        try:
            if error is not None:
                self._add(await self.renderer.failed(error))
            elif self._is_cancelled:
                self._add(await self.renderer.cancelled(self._usage))
        finally:
            self._on_end(error)
            self.ended_at = time.monotonic()
            self._add(b"")

    def _add(self, frames: bytes) -> None:
        self.num_bytes += len(frames)
        self.events += [event + END_OF_EVENT for event in frames.split(END_OF_EVENT) if event]
        self._news.set()
        self._news = asyncio.Event()


class Background:
    """All background answers, bounded for each tenant.

    Args:
        max_running: most unfinished answers of a tenant.
        timeout_s: longest time of an answer, including its wait in the queue.
        tasks: tasks that the server waits for at its shutdown; the answers' tasks are added.
    """

    def __init__(self, max_running: int, timeout_s: float, tasks: set[asyncio.Task[Any]]) -> None:
        self.timeout_s = timeout_s
        self._max_running = max_running
        self._tasks = tasks
        self._answers: dict[tuple[str, str], BackgroundAnswer] = {}

    def check_room(self, tenant: str) -> None:
        """Check that another answer of the tenant may begin.

        Raises:
            ApiError: 429; too many have not ended.
        """
        answers = self._answers.values()
        running = [one for one in answers if one.tenant == tenant and one.ended_at is None]
        if len(running) >= self._max_running:
            message = (
                f"{len(running)} responses run in the background, as many as one API key may have "
                "(max_background_responses): wait for one, or cancel one."
            )
            raise ApiError(429, message, code="too_many_background_responses", headers={"Retry-After": "1"})

    def start(self, answer: BackgroundAnswer) -> None:
        """Start generating an answer."""
        self._forget()
        self._answers[answer.tenant, answer.id] = answer
        task = answer.start(self.timeout_s)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def get(self, tenant: str, answer_id: str) -> BackgroundAnswer | None:
        """Return the tenant's answer, running or kept, or None."""
        self._forget()
        return self._answers.get((tenant, answer_id))

    async def remove(self, tenant: str, answer_id: str) -> None:
        """End and forget the tenant's answer, if there is one."""
        answer = self._answers.get((tenant, answer_id))
        if answer is not None:
            await answer.end(by_client=True)
            self._answers.pop((tenant, answer_id), None)

    async def close(self) -> None:
        """End all that is left; waits until their ends are stored."""
        running = [answer for answer in self._answers.values() if answer.ended_at is None]
        await asyncio.gather(*(answer.end(by_client=False) for answer in running))

    def _forget(self) -> None:
        """Drop ended answers that are too old, and the oldest of tenants that have too many bytes."""
        now, kept, numbers = time.monotonic(), Counter[str](), Counter[str]()
        for key, answer in reversed(list(self._answers.items())):
            if answer.ended_at is None:
                continue
            kept[answer.tenant] += answer.num_bytes
            numbers[answer.tenant] += 1
            is_old = now - answer.ended_at > KEPT_S
            if is_old or kept[answer.tenant] > MAX_KEPT_BYTES or numbers[answer.tenant] > MAX_KEPT:
                del self._answers[key]
