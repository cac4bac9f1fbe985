# SPDX-License-Identifier: Apache-2.0
"""ReplicatedCache: the prefix caches of several engines, asked and told as if they were one.

Lookups are answered by the cache that holds most of the prompt; changes apply to all of them. Quotas
and public prefixes are remembered for engines that come later. Ids of blocks and nodes are each engine's own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from radixkv.cache.accounts import Quota
from radixkv.cache.keys import NOBODY, EncodedTokens, NamespaceKey, Owner, TokenIds
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.reporting.divergence import BreakPoint
from radixkv.cache.reporting.events import BlockChanges, RemovedBlocks
from radixkv.cluster.replicas.member import AGAIN_S, Member
from radixkv.cluster.replicas.members import Members
from radixkv.engine.cache_client import CacheClient, summed_advice
from radixkv.engine.calls import Call, answer_of_most
from radixkv.errors import ConfigError, EngineStoppedError

T = TypeVar("T")

#: Seconds between two looks for engines that have come or gone, while events are read.
LOOK_S = 0.25


class ReplicatedCache(CacheClient):
    """See the module's text, and `CacheClient`.

    Args:
        members: the engines.
        model: the fingerprint that they share.
    """

    def __init__(self, members: Members, model: str) -> None:
        super().__init__(model)
        self._members = members
        self._quotas: dict[str, Quota] = {}
        self._public: dict[tuple[EncodedTokens, str], None] = {}

    async def _ask(self, call: Callable[[CacheClient], Awaitable[T]]) -> list[T]:
        """Collect the answers of all caches; see `Members.ask`."""
        return await self._members.ask(lambda engine: call(engine.cache))

    async def _with_most(self, token_ids: TokenIds, owner: Owner) -> CacheClient:
        """Return the cache that has most of a prompt."""

        async def look(cache: CacheClient) -> tuple[int, CacheClient]:
            return await cache.match(token_ids, owner), cache

        _, cache = max(await self._ask(look), key=lambda found: found[0])
        return cache

    async def prepare(self, cache: CacheClient) -> None:
        """Repeat all earlier changes in the cache of a new engine."""
        if self._quotas:
            await cache.set_quotas(self._quotas)
        for tokens, adapter in list(self._public):
            await cache.publish(tokens, adapter=adapter)

    def perform(self, call: Call, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Ask all caches and merge their answers by the call's rule, or ask the one with most of a prompt."""
        if call.merge is answer_of_most:
            return self._ask_most(call, call.signature.bind(*args, **options).arguments)
        return self._members.perform(call, args, options, lambda engine: engine.cache)

    async def _ask_most(self, call: Call, given: Mapping[str, Any]) -> Any:
        cache = await self._with_most(given["token_ids"], given.get("owner", NOBODY))
        return await getattr(cache, call.name)(**given)

    # ------------------------------------------------------------------ calls without a rule

    async def advice(self, limit: int = 10, *, tenant: str | None = None, salt: str = "") -> list[BreakPoint]:
        answers = await self._ask(lambda cache: cache.advice(limit, tenant=tenant, salt=salt))
        return summed_advice(answers)[:limit]

    async def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        try:
            await self._ask(lambda cache: cache.set_quotas(quotas))
        except ConfigError:  # of some; then of none
            with contextlib.suppress(ConfigError, EngineStoppedError):
                await self._ask(lambda cache: cache.set_quotas(self._quotas))
            raise
        self._quotas = dict(quotas)

    async def publish(self, token_ids: TokenIds, *, adapter: str = "") -> int:
        shared = min(await self._ask(lambda cache: cache.publish(token_ids, adapter=adapter)))
        self._public[PrefixCache.encode(token_ids), adapter] = None
        return shared

    async def unpublish(self, token_ids: TokenIds, *, adapter: str = "") -> bool:
        self._public.pop((PrefixCache.encode(token_ids), adapter), None)
        return any(await self._ask(lambda cache: cache.unpublish(token_ids, adapter=adapter)))

    async def events(self, *, replay: bool = True) -> AsyncGenerator[BlockChanges]:
        """Of all caches. Blocks of an engine that goes are removed; of one that comes, all are stored."""
        merged = _MergedEvents()
        try:
            while True:
                merged.keep_up(self._members.present(), replay=replay)
                replay = True  # who comes later had nothing that anybody knows
                try:
                    changes = await asyncio.wait_for(merged.waiting.get(), LOOK_S)
                except TimeoutError:
                    continue
                if isinstance(changes, BaseException):
                    raise changes
                yield changes
        finally:
            await merged.close()


def _note(changes: BlockChanges, known: dict[int, tuple[bytes, NamespaceKey]]) -> None:
    """Keep `known`, block -> its identity and owner, as the changes say."""
    for gone in changes.removed:
        for block in gone.block_ids:
            known.pop(block, None)
    for run in changes.stored:
        for block, name in zip(run.block_ids, run.block_hashes, strict=True):
            known[block] = (name, run.namespace)


def _gone(known: dict[int, tuple[bytes, NamespaceKey]]) -> BlockChanges:
    """All of these are removed, the last one first."""
    blocks = [
        RemovedBlocks((name,), (block,), namespace) for block, (name, namespace) in reversed(known.items())
    ]
    known.clear()
    return BlockChanges(0, removed=tuple(blocks))


class _MergedEvents:
    """The events of all engines in one queue, with numbers of its own."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[BlockChanges | BaseException] = asyncio.Queue()
        self._readers: dict[Member, asyncio.Task[None]] = {}
        self._sequence = 0

    def keep_up(self, members: Iterable[Member], *, replay: bool) -> None:
        """Follow the engines that have joined, and stop following the departed ones."""
        now = set(members)
        for member in now - self._readers.keys():
            self._readers[member] = asyncio.ensure_future(self._read(member, replay=replay))
        for gone in self._readers.keys() - now:
            self._readers.pop(gone).cancel()

    async def _read(self, member: Member, *, replay: bool) -> None:
        known: dict[int, tuple[bytes, NamespaceKey]] = {}
        while True:
            try:
                async with aclosing(member.engine.cache.events(replay=replay)) as events:
                    async for changes in events:
                        _note(changes, known)
                        # Others are not cleared, and may keep a state that one has dropped.
                        await self._put(replace(changes, cleared=False, resume_points=()))
            except EngineStoppedError:
                await self._put(_gone(known))
            except asyncio.CancelledError:  # the engine has left
                if known:
                    self.waiting.put_nowait(replace(_gone(known), sequence=self._next()))
                raise
            except Exception as error:  # it was too slow: who reads this begins again
                await self.waiting.put(error)
                return
            replay = True
            await asyncio.sleep(AGAIN_S)

    async def _put(self, changes: BlockChanges) -> None:
        if changes.num_blocks:
            await self.waiting.put(replace(changes, sequence=self._next()))

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    async def close(self) -> None:
        for reader in self._readers.values():
            reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._readers.values(), return_exceptions=True)
