# SPDX-License-Identifier: Apache-2.0
"""Member: one engine among several, its blocks, and its state."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from radixkv.cache.reporting.events import BlockChanges
from radixkv.cluster.events.block_keys import BlockKeys, state_name
from radixkv.cluster.events.published_blocks import PublishedBlocks
from radixkv.cluster.events.wire import STATE_MEDIUM, AllBlocksCleared, BlockRemoved
from radixkv.cluster.routing.replica import Replica
from radixkv.engine.client import EngineClient
from radixkv.engine.counts import ReplicaCounts
from radixkv.errors import EngineOverloadedError, EngineStoppedError

#: Seconds after which the events of an engine that has none now are asked for again.
AGAIN_S = 0.25


class Member:
    """See the module's text. `follow` keeps `replica` exact from the engine's own events.

    Attributes:
        replica: the router's view of it; opened by the code that prepares the engine.
        is_draining: it gets no more requests, and leaves when its present ones are done.
        num_requests: sent there so far; `num_retries` of them went on elsewhere.
    """

    def __init__(self, name: str, engine: EngineClient, keys: BlockKeys) -> None:
        self.name = name
        self.engine = engine
        self.replica = Replica(name, block_size=engine.limits.block_size)
        self.is_draining = False
        self.num_requests = self.num_retries = 0
        self._keys = keys

    def counts(self, now: float) -> ReplicaCounts:
        """Its present state."""
        replica = self.replica
        return ReplicaCounts(
            self.name,
            replica.is_open,
            replica.num_blocks,
            replica.queue_s(now),
            replica.num_running,
            replica.prefill_rate,
            self.num_requests,
            self.num_retries,
        )

    async def follow(self) -> None:
        """Keep the router's picture of its blocks until cancelled; a departed engine holds nothing."""
        while True:
            blocks = PublishedBlocks(self.replica.block_size, self._keys, "none")
            self.replica.cleared()
            try:
                async with aclosing(self.engine.cache.events()) as events:
                    async for changes in events:
                        self._apply(blocks, changes)
            except EngineOverloadedError:  # some were dropped: read all anew
                continue
            except EngineStoppedError:
                self.replica.cleared()
            await asyncio.sleep(AGAIN_S)

    def _apply(self, blocks: PublishedBlocks, changes: BlockChanges) -> None:
        for event in blocks.events(changes):
            if isinstance(event, AllBlocksCleared):
                self.replica.cleared()
                continue
            keys = [key for key in event.block_hashes if isinstance(key, int)]
            is_removal = isinstance(event, BlockRemoved)
            if event.medium == STATE_MEDIUM:
                for name in keys:
                    change = self.replica.dropped if is_removal else self.replica.kept
                    change(state_name(name))
            elif is_removal:
                self.replica.removed(keys)
            else:
                self.replica.stored(keys)
