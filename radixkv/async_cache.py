"""The prefix cache of a running engine for callers on event loops: each call runs between two steps.

`AsyncCache` says what is done with the cache, and is given a way to run that where the cache may be touched:
on the engine's thread, or, in tests without an engine, on the spot.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol, TypeVar

from radixkv.cache.insight.advisor import BreakPoint
from radixkv.cache.insight.ages import time_of
from radixkv.cache.insight.events import BlockChanges
from radixkv.cache.insight.explain import MissReport
from radixkv.cache.insight.tree_walk import NodeSeen, TreeWalk
from radixkv.cache.keys import TOKEN_BYTES, TokenIds
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.retention.quota import Quota
from radixkv.cache_key import CacheKey
from radixkv.client import CachedNode, PinnedPrefix, TenantQuota, TreeSnapshot
from radixkv.errors import EngineOverloadedError, EngineStoppedError

T = TypeVar("T")

# Blocks of changes that may wait for a reader. One that is further behind would do better to read the cache
# anew.
MAX_BLOCKS = 100_000


# Nodes that are made plain on the spot; more of them in a thread.
_INLINE_NODES = 500


class RunOnCache(Protocol):
    """Runs a function where the cache may be touched, and gives what it returns or raises."""

    def __call__(self, function: Callable[[PrefixCache], T], /) -> Awaitable[T]: ...


class AsyncCache:
    """The `CacheClient` of a cache that `run` can reach.

    Args:
        run: runs a function on the cache.
        model: the fingerprint of the model whose K/V the cache holds.
    """

    def __init__(self, run: RunOnCache, model: str = "") -> None:
        self._run = run
        self._model = model
        self._followers: set[_Follower] = set()

    def namespace(self, tenant: str = "", salt: str = "") -> tuple[str, ...]:
        """Where the requests of a tenant are cached."""
        return CacheKey(tenant, salt, model=self._model).namespace

    async def match(self, token_ids: TokenIds, *, tenant: str = "", salt: str = "") -> int:
        namespace = self.namespace(tenant, salt)
        key = PrefixCache.encode(token_ids)
        return await self._run(lambda cache: cache.match(key, namespace).num_tokens)

    async def explain(
        self, token_ids: TokenIds, *, tenant: str = "", salt: str = "", admin: bool = False
    ) -> MissReport:
        namespace = self.namespace(tenant, salt)
        key = PrefixCache.encode(token_ids)
        return await self._run(lambda cache: cache.explain(key, namespace, admin=admin))

    async def pin(
        self,
        token_ids: TokenIds,
        *,
        tenant: str = "",
        salt: str = "",
        ttl: float | None = None,
        at_least: bool = False,
    ) -> int:
        namespace = self.namespace(tenant, salt)
        return await self._run(lambda cache: cache.pin(token_ids, namespace, ttl, at_least=at_least))

    async def unpin(self, token_ids: TokenIds, *, tenant: str = "", salt: str = "") -> bool:
        namespace = self.namespace(tenant, salt)
        return await self._run(lambda cache: cache.unpin(token_ids, namespace))

    async def unpin_id(self, pin_id: str, *, tenant: str = "", salt: str = "") -> bool:
        namespace = self.namespace(tenant, salt)
        return await self._run(lambda cache: cache.unpin_id(pin_id, namespace))

    async def pins(self, *, tenant: str | None = None, most_tokens: int | None = None) -> list[PinnedPrefix]:
        found = []
        for pin in await self._run(lambda cache: cache.pins(most_tokens)):
            key = CacheKey(*pin.namespace)
            if tenant is None or key.tenant == tenant:
                found.append(
                    PinnedPrefix(
                        key.tenant,
                        key.salt,
                        pin.token_ids,
                        pin.num_tokens,
                        pin.expires_in_s,
                        pin.id,
                        pin.node,
                    )
                )
        return found

    async def quotas(self) -> list[TenantQuota]:
        usages = await self._run(lambda cache: cache.quota_usage())
        return [
            TenantQuota(
                usage.namespace, usage.floor, usage.ceiling, usage.used_blocks, usage.protected_blocks
            )
            for usage in usages
        ]

    async def publish(self, token_ids: TokenIds) -> int:
        return await self._run(lambda cache: cache.publish(token_ids, self.namespace()))

    async def unpublish(self, token_ids: TokenIds) -> bool:
        return await self._run(lambda cache: cache.unpublish(token_ids, self.namespace()))

    async def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        await self._run(lambda cache: cache.set_quotas({(tenant,): quotas[tenant] for tenant in quotas}))

    async def reset(self) -> None:
        await self._run(lambda cache: cache.reset())

    async def advice(self, limit: int = 10, *, tenant: str | None = None, salt: str = "") -> list[BreakPoint]:
        namespace = None if tenant is None else self.namespace(tenant, salt)
        return await self._run(lambda cache: cache.advice(limit, namespace))

    async def continuation(
        self, token_ids: TokenIds, *, tenant: str = "", salt: str = "", limit: int = 64
    ) -> list[int]:
        namespace = self.namespace(tenant, salt)
        key = PrefixCache.encode(token_ids)
        return await self._run(lambda cache: cache.tree.continuation(key, namespace, limit))

    async def path(self, token_ids: TokenIds, *, tenant: str = "", salt: str = "") -> list[int]:
        namespace = self.namespace(tenant, salt)
        key = PrefixCache.encode(token_ids)
        return await self._run(lambda cache: cache.tree.path(key, namespace))

    async def nodes(
        self,
        *,
        tenant: str | None = None,
        salt: str = "",
        shown_tokens: int = 0,
        most_nodes: int = 20_000,
        most_tokens: int = 1_000_000,
    ) -> TreeSnapshot:
        namespace = None if tenant is None else self.namespace(tenant, salt)

        def begin(cache: PrefixCache) -> tuple[TreeWalk | None, _Facts]:
            walk = cache.tree.walk(
                namespace,
                shown_tokens=shown_tokens,
                most_nodes=most_nodes,
                most_bytes=most_tokens * TOKEN_BYTES,
            )
            now, readings = cache.tree.use_times()
            return walk, _Facts(now, readings, cache.tree.hits_are_of_paths, cache.tree.evicts_in_order)

        walk, facts = await self._run(begin)
        if walk is None:
            return TreeSnapshot([], True, facts.evicts_in_order)
        while await self._run(lambda cache: walk.advance()):
            pass
        seen, is_complete = walk.seen, walk.is_complete
        if len(seen) <= _INLINE_NODES:
            nodes = facts.nodes(seen)
        else:
            nodes = await asyncio.to_thread(facts.nodes, seen)
        return TreeSnapshot(nodes, is_complete, facts.evicts_in_order)

    async def tree(self, max_lines: int = 50) -> str:
        return await self._run(lambda cache: cache.tree.show(max_lines))

    async def events(self, *, replay: bool = True) -> AsyncGenerator[BlockChanges]:
        follower = _Follower(asyncio.get_running_loop())
        self._followers.add(follower)  # from before it is subscribed on: the engine may end at any moment
        try:
            await self._run(lambda cache: follower.subscribe(cache, replay))
            while True:
                for changes in await follower.take():
                    yield changes
        finally:
            self._followers.discard(follower)
            with contextlib.suppress(EngineStoppedError):
                await self._run(lambda cache: follower.unsubscribe())

    def fail_all(self, error: EngineStoppedError) -> None:
        """The engine has ended: followers of events get this error; on the engine's thread."""
        for follower in list(self._followers):
            follower.fail(error)


class _Facts(NamedTuple):
    """What of a cache turns nodes that a walk saw into those that callers see.

    Attributes:
        now: clock seconds.
        readings: see `UseTimes`.
        hits_are_of_paths: whether nodes count all hits that go through them, or those that end there.
        evicts_in_order: whether the policy keeps to the order of its index.
    """

    now: float
    readings: list[tuple[int, float]]
    hits_are_of_paths: bool
    evicts_in_order: bool

    def nodes(self, seen: list[NodeSeen]) -> list[CachedNode]:
        """O(nodes log nodes)."""
        candidates = sorted((node.order, node.id) for node in seen if node.order is not None)
        ranks = {node_id: rank for rank, (_, node_id) in enumerate(candidates, 1)}
        owners = {key: CacheKey(*key) for key in {node.namespace for node in seen} if key}
        hits = self._hits(seen)
        return [self._node(node, ranks, owners.get(node.namespace), hits[node.id]) for node in seen]

    def _hits(self, seen: list[NodeSeen]) -> dict[int, int]:
        """Requests that found each node."""
        hits = {node.id: node.hits for node in seen}
        if not self.hits_are_of_paths:
            for node in reversed(seen):  # children first
                if node.parent is not None:
                    hits[node.parent] += hits[node.id]
        return hits

    def _node(
        self, node: NodeSeen, ranks: dict[int, int], owner: CacheKey | None, num_hits: int
    ) -> CachedNode:
        used_at = time_of(node.last_use, self.readings)
        return CachedNode(
            node.id,
            node.parent,
            None if owner is None else owner.tenant,
            None if owner is None else owner.salt,
            node.level,
            node.start,
            node.num_tokens,
            node.num_blocks,
            num_hits,
            node.num_leases,
            node.is_held,
            node.is_pinned,
            None if used_at is None else max(0.0, self.now - used_at),
            ranks.get(node.id),
            node.key,
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
        self._told = self._taken = 0  # blocks; each is counted by one thread
        self._missed = 0
        self._is_woken = False
        self._wake = asyncio.Event()
        self._unsubscribe: Callable[[], None] | None = None

    def subscribe(self, cache: PrefixCache, replay: bool) -> None:
        """On the engine's thread."""
        self._unsubscribe = cache.subscribe(self.tell, replay=replay)

    def unsubscribe(self) -> None:
        """On the engine's thread, also where its reader left before it heard that it was subscribed."""
        if self._unsubscribe is not None:
            self._unsubscribe()

    def tell(self, changes: BlockChanges) -> None:
        """On the engine's thread. Raises RuntimeError once the loop is closed; the cache then drops it."""
        if self._told - self._taken >= MAX_BLOCKS:
            self._missed += changes.num_blocks
        else:
            self._told += changes.num_blocks
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
        self._taken += sum(changes.num_blocks for changes in taken)
        return taken
