# SPDX-License-Identifier: Apache-2.0
"""CacheFeed: the latest events of the cache, read once from the engine for any number of readers.

Each reader has a cursor in a bounded log and reads on from it at its own pace. One that asks for events from
before the log is told so, and starts over with a snapshot. Cursors are counted per part of the cache, so that
a tenant's say nothing of how much happens elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from dataclasses import dataclass

from radixkv.engine.cache_client import CacheClient
from radixkv.errors import EngineOverloadedError, EngineStoppedError

LOG_EVENTS = 20_000
MAX_NAMESPACES = 10_000
LINGER_S = 30.0  # how long the log goes on without a reader, for one that comes back
_BREATH_BLOCKS = 500  # after so many the event loop does something else


@dataclass(frozen=True, slots=True)
class Change:
    """Addition or removal of a block.

    Attributes:
        cursor: number among the changes of its owner.
        number: number among all.
        owner: tenant and salt; None: public.
    """

    cursor: int
    number: int
    owner: tuple[str, str] | None
    is_stored: bool
    block: int
    num_tokens: int


class CacheFeed:
    """Log of the cache's events, kept while there are readers.

    Args:
        cache: whose events.
        log_events: how many are kept.

    Attributes:
        epoch: names the log; another one after it was restarted.
        error: why there are no more events; None: there are.
    """

    def __init__(self, cache: CacheClient, log_events: int = LOG_EVENTS) -> None:
        self.epoch = ""
        self.error: EngineStoppedError | None = None
        self._cache = cache
        self._most = log_events
        self._readers = 0
        self._task: asyncio.Task[None] | None = None
        self._end: asyncio.TimerHandle | None = None
        self._begin()

    def _begin(self) -> None:
        self.epoch = secrets.token_hex(6)
        self._log: deque[Change] = deque()
        self._number = self._lost = 0
        self._places: dict[tuple[str, str] | None, int] = {}
        self._lost_places: dict[tuple[str, str] | None, int] = {}

    # ------------------------------------------------------------------ readers

    async def join(self) -> None:
        """Add a reader. The log will contain all changes after the beginning of this call."""
        self._readers += 1
        if self._end is not None:
            self._end.cancel()
            self._end = None
        if self._task is None or self._task.done():
            self._begin()
            self.error = None
            self._task = asyncio.ensure_future(self._follow())
            await asyncio.sleep(0)  # by now it has asked for the events

    def unsubscribe(self) -> None:
        """Remove a reader; some time after the last one has gone, the log ends."""
        self._readers -= 1
        if not self._readers and self._end is None:
            self._end = asyncio.get_running_loop().call_later(LINGER_S, self.close)

    def close(self) -> None:
        """Stop following."""
        if self._end is not None:
            self._end.cancel()
            self._end = None
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def cursor(self, owner: tuple[str, str] | None, is_admin: bool) -> int:
        """Return a reader's cursor for the end of the log: of an owner, or, for admins, of all."""
        return self._number if is_admin else self._places.get(owner, 0)

    def since(self, cursor: int, owner: tuple[str, str], is_admin: bool, limit: int) -> list[Change] | None:
        """Return the changes after a cursor, oldest first; None: the log begins later."""
        if cursor < (self._lost if is_admin else self._lost_places.get(owner, 0)):
            return None
        found: list[Change] = []
        if cursor == self.cursor(owner, is_admin):
            return found
        for change in reversed(self._log):
            if is_admin:
                if change.number <= cursor:
                    break
                found.append(change)
            elif change.owner == owner:
                if change.cursor <= cursor:
                    break
                found.append(change)
        found.reverse()
        return found[:limit]

    # ------------------------------------------------------------------ the engine's side

    async def _follow(self) -> None:
        try:
            while True:
                with contextlib.suppress(EngineOverloadedError):
                    await self._read()
                self._begin()  # some were dropped: no reader's cursor means anything any more
        except EngineStoppedError as error:
            self.error = error

    async def _read(self) -> None:
        count = 0
        async with contextlib.aclosing(self._cache.events(replay=False)) as events:
            async for changes in events:
                for gone in changes.removed:
                    for block in gone.block_ids:
                        self._note(gone.namespace, False, block, 0)
                for run in changes.stored:
                    for block in run.block_ids:
                        self._note(run.namespace, True, block, run.block_size)
                count += changes.num_blocks
                if count >= _BREATH_BLOCKS:
                    count = 0
                    await asyncio.sleep(0)

    def _note(self, namespace: tuple[str, ...], is_stored: bool, block: int, num_tokens: int) -> None:
        owner = (namespace[0], namespace[1]) if len(namespace) > 1 else None
        self._number += 1
        cursor = self._places[owner] = self._places.get(owner, 0) + 1
        self._log.append(Change(cursor, self._number, owner, is_stored, block, num_tokens))
        if len(self._log) > self._most:
            lost = self._log.popleft()
            self._lost = lost.number
            self._lost_places[lost.owner] = lost.cursor
        if len(self._places) > MAX_NAMESPACES:
            self._begin()
