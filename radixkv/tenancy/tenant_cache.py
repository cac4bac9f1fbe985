# SPDX-License-Identifier: Apache-2.0
"""TenantCache: the prefix cache with quotas, public prefixes and pins, exported as `radixkv.PrefixCache`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple

from radixkv.cache.accounts import Quota, QuotaUsage
from radixkv.cache.block_identity import what_computes
from radixkv.cache.eviction.policy import EvictionPolicy
from radixkv.cache.keys import TOKEN_BYTES, NamespaceKey, NamespaceName, TokenIds, encode_tokens
from radixkv.cache.pins import PinInfo
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.radix_tree import RadixTree
from radixkv.errors import ConfigError, InvalidRequestError
from radixkv.tenancy.pins import Pin, PinBoard
from radixkv.tenancy.quota import QuotaGroups, framed_quotas
from radixkv.tenancy.shared_capacity import SharedCapacity
from radixkv.tenancy.shared_namespaces import SharedNamespaces


class Declared(NamedTuple):
    """Declarations of users to a cache, which outlive its contents."""

    quotas: dict[NamespaceKey, Quota]
    public_prefixes: tuple[tuple[NamespaceKey, bytes], ...]  # what computes them, and their encoded tokens


class TenantCache(PrefixCache):
    """A `PrefixCache` shared by tenants.

    Args:
        pin_budget: share of the pool that pins may protect.
        quotas: namespace -> Quota, or (floor, ceiling) in blocks. A quota of a plain name also counts the
            namespaces that begin with it and have none of their own: a tenant's salts share one quota.
        options: see `PrefixCache`.

    Raises:
        ConfigError: an option is out of range.
    """

    _accounts = QuotaGroups
    _namespaces_in = SharedNamespaces
    _capacity_of = SharedCapacity
    _groups: QuotaGroups
    _namespaces: SharedNamespaces
    _capacity: SharedCapacity
    _pins: PinBoard

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        policy: str | EvictionPolicy = "lru",
        *,
        pin_budget: float = 0.5,
        quotas: Mapping[NamespaceName, Quota | tuple[int, int | None]] | None = None,
        **options: Any,
    ) -> None:
        if not 0.0 <= pin_budget <= 1.0:
            raise ConfigError(f"pin_budget must be a share of the pool in [0, 1], not {pin_budget!r}")
        self._pin_budget = pin_budget
        super().__init__(num_blocks, block_size, policy, **options)
        self._options["pin_budget"] = pin_budget
        self._groups.replace(self._framed(quotas or {}))

    def _pin_board(self, tree: RadixTree, clock: Callable[[], float]) -> PinBoard:
        return PinBoard(tree, int(self.num_blocks * self._pin_budget), clock)

    # ------------------------------------------------------------------ public prefixes

    def publish(self, token_ids: TokenIds, namespace: NamespaceName = "") -> int:
        """Declare a prefix public: from now on its whole blocks are shared.

        By all namespaces whose K/V is computed as that of `namespace` is: whose keys agree in all parts from
        the third on, after tenant and salt. What namespaces cached of it before stays theirs. O(tokens).

        Returns:
            Tokens of the prefix that are shared: its whole blocks.
        """
        length = self._namespaces.declare(self._computes(namespace), encode_tokens(token_ids))
        self._lookup.version += 1
        return length // TOKEN_BYTES

    def unpublish(self, token_ids: TokenIds, namespace: NamespaceName = "") -> bool:
        """Take a declaration back: the prefix is no longer shared by new requests. False: there was none."""
        self._lookup.version += 1
        return self._namespaces.undeclare(self._computes(namespace), encode_tokens(token_ids))

    def _computes(self, namespace: NamespaceName) -> NamespaceKey:
        return what_computes(self._namespaces.key(namespace))

    # ------------------------------------------------------------------ what outlives it

    @property
    def declared(self) -> Declared:
        """Quotas and public prefixes, which outlive the cache's contents. O(their number)."""
        return Declared(self._groups.quotas, self._namespaces.declared())

    def declare(self, declared: Declared) -> None:
        """Repeat the declarations of another cache, on a new one.

        Raises:
            ConfigError: the quotas' floors exceed the pool.
        """
        self._groups.replace(declared.quotas)
        for computes, prefix in declared.public_prefixes:
            self._namespaces.declare(computes, prefix)

    # ------------------------------------------------------------------ quotas

    def set_quotas(self, quotas: Mapping[NamespaceName, Quota | tuple[int, int | None]]) -> None:
        """Replace all quotas (see the constructor); nothing changes if it raises.

        Above a lowered ceiling, cached blocks go at once; held ones, when their requests want more
        or end. O(groups + namespaces in use), and as `evict`.

        Raises:
            ConfigError: a quota is malformed, the floors together exceed the pool, or a name that has never
                had a quota has blocks already, which count for all others (`reset` frees it of them).
        """
        framed, known = self._framed(quotas), self._groups.quotas
        used = {owner.key for owner in self._tree.roots}
        used |= {lease.owner.key for lease in self._capacity.leases.values()}
        for key in framed:
            if key not in known and any(key in (name, name[:1]) for name in used):
                raise ConfigError(
                    f"{key[0]!r} has blocks in the cache already, which count for those without a quota: "
                    "give its quota before its first request, or reset the cache"
                )
        self._groups.replace(framed)
        self._namespaces.regroup()
        self._capacity.keep_ceilings(self._groups)

    def _framed(
        self, quotas: Mapping[NamespaceName, Quota | tuple[int, int | None]]
    ) -> dict[NamespaceKey, Quota]:
        return {self._namespaces.quota_key(name): quota for name, quota in framed_quotas(quotas).items()}

    def quota_usage(self) -> list[QuotaUsage]:
        """Limits and use of each quota. O(quotas)."""
        return self._groups.usage()

    # ------------------------------------------------------------------ pins

    def pin(
        self,
        token_ids: TokenIds,
        namespace: NamespaceName = "",
        ttl: float | None = None,
        *,
        at_least: bool = False,
    ) -> PinInfo | None:
        """Keep the cached part of a prefix from eviction; each hit renews the time.

        At most the pin budget is protected, leading blocks first. Pinning a prefix again extends and renews.

        Args:
            ttl: seconds; None: until `unpin`.
            at_least: make no pin shorter than it was, and of a prefix that is pinned in part one pin of that
                part: for frequent calls, and for prefixes that others may have pinned, too.

        Returns:
            The pin; None: nothing of the prefix is cached, or the budget is spent.

        Raises:
            InvalidRequestError: ttl is not a number above 0.

        O(tokens + path).
        """
        pins = self._pins
        pins.expire()
        data = encode_tokens(token_ids)
        if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, Real) or not ttl > 0):
            raise InvalidRequestError(
                f"ttl must be a number of seconds above 0, or None, not {ttl!r}", param="ttl"
            )
        owner = self._namespaces.obtain(namespace)  # what is pinned may all be public
        walk = self._lookup.match(data, owner).walk
        pin = None if walk is None else pins.add(data, owner, walk, ttl, at_least)
        return None if pin is None else pins.show(pin)

    def unpin(self, token_ids: TokenIds, namespace: NamespaceName = "") -> bool:
        """End a pin set with these tokens, or that pins just these; False: there is none. O(path)."""
        self._pins.expire()
        data, owner = encode_tokens(token_ids), self._namespaces.known(namespace)
        if owner is None:
            return False
        return self._unpin(self._pins.find(data, owner, self._lookup.match(data, owner).walk))

    def unpin_id(self, pin_id: str, namespace: NamespaceName = "") -> bool:
        """End the pin of that id in a namespace; False: there is none. O(path)."""
        self._pins.expire()
        return self._unpin(self._pins.by_key.get((self._namespaces.key(namespace), pin_id)))

    def _unpin(self, pin: Pin | None) -> bool:
        if pin is not None:
            self._pins.drop(pin)
        return pin is not None

    def pins(self, max_tokens: int | None = None) -> list[PinInfo]:
        """The pins, oldest first; with at most `max_tokens` leading tokens of each. O(pins, tokens)."""
        self._pins.expire()
        return [self._pins.show(pin, max_tokens) for pin in self._pins]
