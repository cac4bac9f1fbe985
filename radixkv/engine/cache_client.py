# SPDX-License-Identifier: Apache-2.0
"""CacheClient: the table of an engine's calls on its prefix cache, for callers on event loops.

Each method without a body is a row: its name, arguments and result, and how the answers of several caches
become one (`merge`). The clients follow from the table:

    AsyncCache        the cache of an engine in this process; overrides each row with what it does
    RemoteCache       sends name and arguments to another process; overrides nothing
    ReplicatedCache   asks all caches and merges; overrides the rows without a rule
"""
# mypy: disable-error-code="empty-body"
# The bodies of declared calls are `perform`.

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

from radixkv.cache.accounts import Quota, QuotaUsage
from radixkv.cache.keys import NOBODY, NamespaceKey, Owner, TokenIds
from radixkv.cache.pins import PinInfo
from radixkv.cache.reporting.divergence import BreakPoint
from radixkv.cache.reporting.events import BlockChanges
from radixkv.cache.reporting.explain import MissReport
from radixkv.cache.reporting.tree_walk import TreeSnapshot
from radixkv.engine.calls import Call, answer_of_most, call, no_answer


def best_explanation(reports: list[MissReport]) -> MissReport:
    """Return the report of the cache with most of the prompt.

    Among equals, the cache with an explanation of the rest says more.
    """
    return max(
        reports,
        key=lambda report: (report.num_hit_tokens, report.num_tier_tokens, report.reason != "first_seen"),
    )


def longest_pin(pins: list[PinInfo | None]) -> PinInfo | None:
    """Return the pin of most tokens; None: no cache made one."""
    return max((pin for pin in pins if pin is not None), key=lambda pin: pin.num_tokens, default=None)


def longest_pins(answers: list[list[PinInfo]]) -> list[PinInfo]:
    """Return each pin once, as the cache has it that keeps most of its tokens."""
    longest: dict[tuple[NamespaceKey, str], PinInfo] = {}
    for pin in (pin for pins in answers for pin in pins):
        known = longest.get((pin.namespace, pin.id))
        if known is None or pin.num_tokens > known.num_tokens:
            longest[pin.namespace, pin.id] = pin
    return list(longest.values())


def summed_quotas(answers: list[list[QuotaUsage]]) -> list[QuotaUsage]:
    """Sum the quotas of each tenant: each engine grants the whole quota."""
    summed: dict[NamespaceKey, QuotaUsage] = {}
    for quota in (quota for quotas in answers for quota in quotas):
        known = summed.get(quota.namespace)
        if known is not None:
            ceilings = (known.ceiling, quota.ceiling)
            quota = replace(
                known,
                floor=known.floor + quota.floor,
                ceiling=None if None in ceilings else sum(ceiling or 0 for ceiling in ceilings),
                used_blocks=known.used_blocks + quota.used_blocks,
                protected_blocks=known.protected_blocks + quota.protected_blocks,
            )
        summed[quota.namespace] = quota
    return list(summed.values())


def summed_advice(answers: list[list[BreakPoint]]) -> list[BreakPoint]:
    """Count each place once, with its cost in all caches, the costliest first."""
    places: dict[object, BreakPoint] = {}
    for place in (place for places_of_one in answers for place in places_of_one):
        key = (place.namespace, place.group_tokens, place.position)
        known = places.get(key)
        if known is not None:
            place = replace(
                known,
                count=known.count + place.count,
                recoverable_tokens=known.recoverable_tokens + place.recoverable_tokens,
                group_count=known.group_count + place.group_count,
            )
        places[key] = place
    return sorted(places.values(), key=lambda place: -place.recoverable_tokens)


def joined_snapshots(answers: list[TreeSnapshot]) -> TreeSnapshot:
    """Return the nodes of all caches, one cache after another."""
    return TreeSnapshot(
        [node for snapshot in answers for node in snapshot.nodes],
        all(snapshot.is_complete for snapshot in answers),
        all(snapshot.ranks_are_exact for snapshot in answers),
    )


class CacheClient:
    """The prefix cache of an engine, or of several: plain calls with plain results.

    Callers name the owner, and build no namespace. Ids of nodes and blocks are unique among all caches.

    Args:
        model: the fingerprint of the model whose K/V the cache holds; those that it gets later are known
            by this one, too (`PrefixCache.rebuilt`).

    Raises (all calls):
        InvalidRequestError: malformed token ids, or a value out of range.
        EngineStoppedError: the engine has been closed or has failed.
    """

    def __init__(self, model: str = "") -> None:
        self._model = model

    def namespace(self, tenant: str = "", salt: str = "", adapter: str = "") -> tuple[str, ...]:
        """Return the namespace in which the requests of a tenant are cached."""
        return Owner(tenant, salt, adapter).namespace(self._model)

    def perform(self, call: Call, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Make a call that this client does not override: return its awaitable, or its items."""
        raise NotImplementedError(f"{type(self).__name__} has no {call.name}")

    @call(merge=max)
    async def match(self, token_ids: TokenIds, owner: Owner = NOBODY) -> int:
        """Count the leading tokens that are cached; changes nothing."""

    @call(merge=best_explanation)
    async def explain(self, token_ids: TokenIds, owner: Owner = NOBODY, *, admin: bool = False) -> MissReport:
        """Explain why the prompt would miss now; `admin`: look into other tenants' namespaces, too.

        Tiers are asked for the missing tokens; a tier that does not answer soon is not waited for.
        """

    @call(merge=longest_pin)
    async def pin(
        self, token_ids: TokenIds, owner: Owner = NOBODY, *, ttl: float | None = None
    ) -> PinInfo | None:
        """Keep the cached part of a prefix, for `ttl` seconds after each use.

        Returns:
            The pin; None: nothing of the prefix is cached, or the pins' budget is spent.
        """

    @call(merge=any)
    async def unpin(self, token_ids: TokenIds, owner: Owner = NOBODY) -> bool:
        """End a pin; False: there was none."""

    @call(merge=any)
    async def unpin_id(self, pin_id: str, owner: Owner = NOBODY) -> bool:
        """End the pin of that id; False: there is none."""

    @call(merge=max)
    async def put_first(self, token_ids: TokenIds, owner: Owner = NOBODY) -> int:
        """Have the last cached blocks of a prompt evicted first, as its session is over.

        Returns:
            Its cached tokens; 0: nothing changes, as others need them or nothing is cached.
        """

    @call(merge=longest_pins)
    async def pins(self, *, tenant: str | None = None, max_tokens: int | None = None) -> list[PinInfo]:
        """List the pins of a tenant (None: of all), each with at most `max_tokens` leading tokens."""

    @call(merge=summed_quotas)
    async def quotas(self) -> list[QuotaUsage]:
        """List the quotas and the blocks used of each."""

    @call()
    async def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Replace the quotas of all tenants; tenants not named are unbounded. Nothing changes if it raises.

        Raises:
            ConfigError: the floors together exceed the pool, or a tenant that has blocks gets its first one.
        """

    @call()
    async def publish(self, token_ids: TokenIds, *, adapter: str = "") -> int:
        """Share a prefix among all tenants; returns the number of shared tokens."""

    @call()
    async def unpublish(self, token_ids: TokenIds, *, adapter: str = "") -> bool:
        """Stop sharing a prefix; return False unless it was shared."""

    @call(merge=no_answer)
    async def reset(self) -> None:
        """Forget all cached prefixes; running requests keep their blocks."""

    @call()
    async def advice(self, limit: int = 10, *, tenant: str | None = None, salt: str = "") -> list[BreakPoint]:
        """List the places where prompts part from cached ones: of a tenant and salt, under
        whatever adapter, or (None) of all."""

    @call(merge=answer_of_most)
    async def continuation(self, token_ids: TokenIds, owner: Owner = NOBODY, *, limit: int = 64) -> list[int]:
        """Return the tokens with which the tenant's nearest cached prompt goes on after this one's match."""

    @call(merge=answer_of_most)
    async def path(self, token_ids: TokenIds, owner: Owner = NOBODY) -> list[int]:
        """List the ids of the nodes that hold the cached part of a prompt, from the top down."""

    @call(merge=joined_snapshots, divided=("max_nodes", "max_tokens"))
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

    @call(merge="\n\n".join, divided=("max_lines",))
    async def tree(self, max_lines: int = 50) -> str:
        """Draw the tree as ASCII, in at most `max_lines` lines."""

    @call()
    def events(self, *, replay: bool = True) -> AsyncGenerator[BlockChanges]:
        """Yield the whole blocks stored and removed from now on, in order, first (`replay`) those cached.

        Closing the iterator ends the subscription.

        Raises:
            EngineOverloadedError: the reader was so slow that events were dropped; subscribe again.
        """
