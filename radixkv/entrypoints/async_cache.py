# SPDX-License-Identifier: Apache-2.0
"""AsyncCache: the prefix cache of an engine in this process; each call runs between two steps.

It is given a way to run a function where the cache may be touched: on the engine's thread, or, in tests
without an engine, on the spot.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

from radixkv.cache.accounts import Quota, QuotaUsage
from radixkv.cache.keys import NOBODY, TOKEN_BYTES, EncodedTokens, NamespaceName, Owner, TokenIds
from radixkv.cache.pins import PinInfo
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.reporting.divergence import BreakPoint
from radixkv.cache.reporting.events import BlockChanges
from radixkv.cache.reporting.explain import MissReport
from radixkv.cache.reporting.tree_walk import TreeSnapshot, TreeWalk
from radixkv.engine.cache_client import CacheClient
from radixkv.errors import EngineOverloadedError, EngineStoppedError
from radixkv.scheduling.length_classes import ONE_CLASS, LengthClasses

T = TypeVar("T")

# Blocks of changes that may wait for a reader. A slower one would do better to read the cache
# again.
MAX_BLOCKS = 100_000

# Nodes that are made plain on the spot; more of them in a thread.
_INLINE_NODES = 500


class RunOnCache(Protocol):
    """Runs a function where the cache may be touched, and returns or raises its result."""

    def __call__(self, function: Callable[[PrefixCache], T], /) -> Awaitable[T]: ...


class ExplainByTiers(Protocol):
    """Adds the tiers' part of the missing tokens to a report."""

    def __call__(
        self, report: MissReport, token_ids: TokenIds, namespace: NamespaceName, /
    ) -> Awaitable[MissReport]: ...


class AsyncCache(CacheClient):
    """The `CacheClient` of an engine in this process.

    Args:
        run: runs a function on the cache.
        model: the fingerprint of the model whose K/V the cache holds.
        explain_by_tiers: asked for each report; None: there are no tiers.
        lengths: classes of lengths with rotary frequencies of their own; None: there is one.
    """

    def __init__(
        self,
        run: RunOnCache,
        model: str = "",
        explain_by_tiers: ExplainByTiers | None = None,
        lengths: LengthClasses | None = None,
    ) -> None:
        super().__init__(model)
        self._lengths = lengths or ONE_CLASS
        self._run = run
        self._explain_by_tiers = explain_by_tiers
        self._followers: set[_Follower] = set()
        self._first_id = secrets.randbits(31) << 32  # a block's number is below 2**31

    def _keyed(self, token_ids: TokenIds, owner: Owner) -> tuple[EncodedTokens, NamespaceName]:
        """The tokens, encoded, and the namespace in which a prompt of them is cached."""
        key = PrefixCache.encode(token_ids)
        return key, self._lengths.namespace(self.namespace(*owner), len(key))

    async def match(self, token_ids: TokenIds, owner: Owner = NOBODY) -> int:
        key, namespace = self._keyed(token_ids, owner)
        return await self._run(lambda cache: cache.match(key, namespace).num_tokens)

    async def explain(self, token_ids: TokenIds, owner: Owner = NOBODY, *, admin: bool = False) -> MissReport:
        key, namespace = self._keyed(token_ids, owner)
        lengths = self._lengths

        def explain(cache: PrefixCache) -> MissReport:
            report = cache.explain(key, namespace, admin=admin)
            return lengths.explained(report, cache, key, namespace) if lengths.ends else report

        report = await self._run(explain)
        if self._explain_by_tiers is None:
            return report
        return await self._explain_by_tiers(report, key, namespace)

    async def pin(
        self, token_ids: TokenIds, owner: Owner = NOBODY, *, ttl: float | None = None
    ) -> PinInfo | None:
        key, namespace = self._keyed(token_ids, owner)
        found = await self._run(lambda cache: cache.pin(key, namespace, ttl))
        return None if found is None else self._known(found)

    async def unpin(self, token_ids: TokenIds, owner: Owner = NOBODY) -> bool:
        key, namespace = self._keyed(token_ids, owner)
        return await self._run(lambda cache: cache.unpin(key, namespace))

    async def unpin_id(self, pin_id: str, owner: Owner = NOBODY) -> bool:
        namespaces = self._lengths.namespaces(self.namespace(*owner))
        return await self._run(lambda cache: any(cache.unpin_id(pin_id, each) for each in namespaces))

    async def put_first(self, token_ids: TokenIds, owner: Owner = NOBODY) -> int:
        key, namespace = self._keyed(token_ids, owner)
        return await self._run(lambda cache: cache.put_first(key, namespace))

    async def pins(self, *, tenant: str | None = None, max_tokens: int | None = None) -> list[PinInfo]:
        found = await self._run(lambda cache: cache.pins(max_tokens))
        return [self._known(pin) for pin in found if tenant in (None, pin.tenant)]

    def _known(self, pin: PinInfo) -> PinInfo:
        return replace(pin, node=self._first_id + pin.node)

    async def quotas(self) -> list[QuotaUsage]:
        return await self._run(lambda cache: cache.quota_usage())

    async def publish(self, token_ids: TokenIds, *, adapter: str = "") -> int:
        namespaces = self._lengths.namespaces(self.namespace(adapter=adapter))
        return await self._run(lambda cache: max([cache.publish(token_ids, each) for each in namespaces]))

    async def unpublish(self, token_ids: TokenIds, *, adapter: str = "") -> bool:
        namespaces = self._lengths.namespaces(self.namespace(adapter=adapter))
        return await self._run(lambda cache: max([cache.unpublish(token_ids, each) for each in namespaces]))

    async def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        await self._run(lambda cache: cache.set_quotas({(tenant,): quotas[tenant] for tenant in quotas}))

    async def reset(self) -> None:
        await self._run(lambda cache: cache.reset())

    async def advice(self, limit: int = 10, *, tenant: str | None = None, salt: str = "") -> list[BreakPoint]:
        owner = None if tenant is None else (tenant, salt)

        def read(cache: PrefixCache) -> list[BreakPoint]:
            if cache.observer is None:
                return []
            return cache.observer.advice(limit, owner)

        return await self._run(read)

    async def continuation(self, token_ids: TokenIds, owner: Owner = NOBODY, *, limit: int = 64) -> list[int]:
        key, namespace = self._keyed(token_ids, owner)
        return await self._run(lambda cache: cache.tree.continuation(key, namespace, limit))

    async def path(self, token_ids: TokenIds, owner: Owner = NOBODY) -> list[int]:
        key, namespace = self._keyed(token_ids, owner)
        path = await self._run(lambda cache: cache.tree.path(key, namespace))
        return [self._first_id + node for node in path]

    async def nodes(
        self,
        *,
        tenant: str | None = None,
        salt: str = "",
        shown_tokens: int = 0,
        max_nodes: int = 20_000,
        max_tokens: int = 1_000_000,
    ) -> TreeSnapshot:
        owner = None if tenant is None else (tenant, salt)

        def begin(cache: PrefixCache) -> tuple[TreeWalk, bool]:
            walk = TreeWalk(
                cache.tree,
                owner,
                shown_tokens=shown_tokens,
                max_nodes=max_nodes,
                max_bytes=max_tokens * TOKEN_BYTES,
            )
            return walk, cache.tree.evicts_in_order

        walk, is_exact = await self._run(begin)
        while await self._run(lambda cache: walk.advance()):
            pass
        is_small = walk.num_seen <= _INLINE_NODES
        nodes = (
            walk.nodes(self._first_id) if is_small else await asyncio.to_thread(walk.nodes, self._first_id)
        )
        return TreeSnapshot(nodes, walk.is_complete, is_exact)

    async def tree(self, max_lines: int = 50) -> str:
        return await self._run(lambda cache: cache.tree.show(max_lines))

    async def events(self, *, replay: bool = True) -> AsyncGenerator[BlockChanges]:
        follower = _Follower(asyncio.get_running_loop())
        self._followers.add(follower)  # from before it is subscribed on: the engine may end at any moment
        try:
            await self._run(lambda cache: follower.subscribe(cache, replay))
            while True:
                for changes in await follower.take():
                    yield _renumbered(changes, self._first_id)
        finally:
            self._followers.discard(follower)
            with contextlib.suppress(EngineStoppedError):
                await self._run(lambda cache: follower.unsubscribe())

    def fail_all(self, error: EngineStoppedError) -> None:
        """The engine has ended: followers of events get this error; on the engine's thread."""
        for follower in list(self._followers):
            follower.fail(error)


def _renumbered(changes: BlockChanges, first_id: int) -> BlockChanges:
    """With block ids that are unique among all caches."""

    def ids(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([first_id + number for number in numbers])

    return replace(
        changes,
        stored=tuple([replace(run, block_ids=ids(run.block_ids)) for run in changes.stored]),
        removed=tuple([replace(run, block_ids=ids(run.block_ids)) for run in changes.removed]),
    )


class _Follower:
    """Carries events from the engine's thread to one event loop, with one wake-up for many.

    Attributes:
        error: why no more events come; None: they do.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.error: EngineStoppedError | None = None
        self._loop = loop
        self._waiting: deque[BlockChanges] = deque()
        self._num_received = self._num_taken = 0  # blocks; each is counted by one thread
        self._missed = 0
        self._is_woken = False
        self._wake = asyncio.Event()
        self._unsubscribe: Callable[[], None] | None = None

    def subscribe(self, cache: PrefixCache, replay: bool) -> None:
        """On the engine's thread."""
        self._unsubscribe = cache.subscribe(self.receive, replay=replay)

    def unsubscribe(self) -> None:
        """On the engine's thread, also where its reader left before it heard that it was subscribed."""
        if self._unsubscribe is not None:
            self._unsubscribe()

    def receive(self, changes: BlockChanges) -> None:
        """On the engine's thread. Raises RuntimeError once the loop is closed; the cache then drops it."""
        if self._num_received - self._num_taken >= MAX_BLOCKS:
            self._missed += changes.num_blocks
        else:
            self._num_received += changes.num_blocks
            self._waiting.append(changes)
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._wake.set)

    def fail(self, error: EngineStoppedError) -> None:
        """On the engine's thread: no more events will come."""
        self.error = error
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    async def take(self) -> list[BlockChanges]:
        """The changes that wait, at least one.

        Raises:
            EngineOverloadedError: some were dropped.
            EngineStoppedError: the engine has ended.
        """
        while not self._waiting:
            if self._missed:
                raise EngineOverloadedError(
                    f"events of {self._missed} blocks were dropped because more than {MAX_BLOCKS} waited to "
                    "be read; subscribe again, with replay"
                )
            if self.error is not None:
                raise self.error
            await self._wake.wait()
            self._wake.clear()
            self._is_woken = False  # before reading: what comes after this wakes again
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._num_taken += sum(changes.num_blocks for changes in taken)
        return taken
