# SPDX-License-Identifier: Apache-2.0
"""CacheClient: the calls of an engine's prefix cache for callers on event loops, wherever the engine runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping

from radixkv.cache.accounts import Quota, QuotaUsage
from radixkv.cache.keys import NOBODY, Owner, TokenIds
from radixkv.cache.pins import PinInfo
from radixkv.cache.reporting.divergence import BreakPoint
from radixkv.cache.reporting.events import BlockChanges
from radixkv.cache.reporting.explain import MissReport
from radixkv.cache.reporting.tree_walk import TreeSnapshot


class CacheClient(ABC):
    """The prefix cache of an engine, or of several: plain calls with plain results.

    Callers name the owner, and build no namespace. Ids of nodes and blocks are unique among all caches.

    Args:
        model: the fingerprint of the model whose K/V the cache holds.

    Raises (all calls):
        InvalidRequestError: malformed token ids, or a value out of range.
        EngineStoppedError: the engine has been closed or has failed.
    """

    def __init__(self, model: str = "") -> None:
        self._model = model

    def namespace(self, tenant: str = "", salt: str = "", adapter: str = "") -> tuple[str, ...]:
        """Return the namespace in which the requests of a tenant are cached."""
        return Owner(tenant, salt, adapter).namespace(self._model)

    @abstractmethod
    async def match(self, token_ids: TokenIds, owner: Owner = NOBODY) -> int:
        """Count the leading tokens that are cached; changes nothing."""

    @abstractmethod
    async def explain(self, token_ids: TokenIds, owner: Owner = NOBODY, *, admin: bool = False) -> MissReport:
        """Explain why the prompt would miss now; `admin`: look into other tenants' namespaces, too.

        Tiers are asked for the missing tokens; a tier that does not answer soon is not waited for.
        """

    @abstractmethod
    async def pin(
        self, token_ids: TokenIds, owner: Owner = NOBODY, *, ttl: float | None = None
    ) -> PinInfo | None:
        """Keep the cached part of a prefix, for `ttl` seconds after each use.

        Returns:
            The pin; None: nothing of the prefix is cached, or the pins' budget is spent.
        """

    @abstractmethod
    async def unpin(self, token_ids: TokenIds, owner: Owner = NOBODY) -> bool:
        """End a pin; False: there was none."""

    @abstractmethod
    async def unpin_id(self, pin_id: str, owner: Owner = NOBODY) -> bool:
        """End the pin of that id; False: there is none."""

    @abstractmethod
    async def put_first(self, token_ids: TokenIds, owner: Owner = NOBODY) -> int:
        """Have the last cached blocks of a prompt evicted first, as its session is over.

        Returns:
            Its cached tokens; 0: nothing changes, as others need them or nothing is cached.
        """

    @abstractmethod
    async def pins(self, *, tenant: str | None = None, max_tokens: int | None = None) -> list[PinInfo]:
        """List the pins of a tenant (None: of all), each with at most `max_tokens` leading tokens."""

    @abstractmethod
    async def quotas(self) -> list[QuotaUsage]:
        """List the quotas and the blocks used of each."""

    @abstractmethod
    async def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Replace the quotas of all tenants; tenants not named are unbounded. Nothing changes if it raises.

        Raises:
            ConfigError: the floors together exceed the pool, or a tenant that has blocks gets its first one.
        """

    @abstractmethod
    async def publish(self, token_ids: TokenIds, *, adapter: str = "") -> int:
        """Share a prefix among all tenants; returns the number of shared tokens."""

    @abstractmethod
    async def unpublish(self, token_ids: TokenIds, *, adapter: str = "") -> bool:
        """Stop sharing a prefix; return False unless it was shared."""

    @abstractmethod
    async def reset(self) -> None:
        """Forget all cached prefixes; running requests keep their blocks."""

    @abstractmethod
    async def advice(self, limit: int = 10, *, tenant: str | None = None, salt: str = "") -> list[BreakPoint]:
        """List the places where prompts part from cached ones: of a tenant and salt, under
        whatever adapter, or (None) of all."""

    @abstractmethod
    async def continuation(self, token_ids: TokenIds, owner: Owner = NOBODY, *, limit: int = 64) -> list[int]:
        """Return the tokens with which the tenant's nearest cached prompt goes on after this one's match."""

    @abstractmethod
    async def path(self, token_ids: TokenIds, owner: Owner = NOBODY) -> list[int]:
        """List the ids of the nodes that hold the cached part of a prompt, from the top down."""

    @abstractmethod
    async def nodes(
        self,
        *,
        tenant: str | None = None,
        salt: str = "",
        shown_tokens: int = 0,
        max_nodes: int = 20_000,
        max_tokens: int = 1_000_000,
    ) -> TreeSnapshot:
        """List the nodes of the cache as data, upper ones first, read in slices of about a millisecond.

        Args:
            tenant: with `salt`, whose nodes, besides the public ones, under whatever adapter; None:
                everybody's.
            shown_tokens: leading tokens of each node to show; -1: all.
            max_nodes, max_tokens: nodes seen and tokens shown after which the rest is left out.
        """

    @abstractmethod
    async def tree(self, max_lines: int = 50) -> str:
        """Draw the tree as ASCII, in at most `max_lines` lines."""

    @abstractmethod
    def events(self, *, replay: bool = True) -> AsyncGenerator[BlockChanges]:
        """Yield the whole blocks stored and removed from now on, in order, first (`replay`) those cached.

        Closing the iterator ends the subscription.

        Raises:
            EngineOverloadedError: the reader was so slow that events were dropped; subscribe again.
        """
