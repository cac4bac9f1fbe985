"""CacheParts: the parts of one cache, made and joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from radixkv.cache.block_identity import BlockIdentities, HashFunction
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.eviction.policy import EvictionPolicy
from radixkv.cache.insight.advisor import Advisor
from radixkv.cache.insight.ages import UseTimes
from radixkv.cache.insight.events import ChangeLog, Listener, Listeners
from radixkv.cache.insight.explain import Explainer
from radixkv.cache.insight.ghost import GhostIndex
from radixkv.cache.keys import TOKEN_BYTES, NamespaceKey, NamespaceName
from radixkv.cache.leasing import Leasing
from radixkv.cache.lookup import Lookup
from radixkv.cache.namespaces import Namespaces
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.retention.capacity import Capacity
from radixkv.cache.retention.pins import PinBoard
from radixkv.cache.retention.quota import Quota, QuotaGroups, framed_quotas
from radixkv.errors import ConfigError


class CacheOptions(NamedTuple):
    """Arguments of `PrefixCache` that stay as they are: all but the policy, an object, and the quotas."""

    num_blocks: int
    block_size: int
    enabled: bool
    clock: Callable[[], float]
    ghost_blocks: int | None
    hash_function: HashFunction | None
    model: str
    pin_budget: float
    partial_reuse: bool
    explain: bool

    def check(self) -> None:
        """Raise ConfigError for an option that is out of range."""
        for name, value in (("num_blocks", self.num_blocks), ("block_size", self.block_size)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, not {value!r}")
        if self.num_blocks >= 2**31:
            raise ConfigError(f"num_blocks must be below 2**31, not {self.num_blocks}")
        ghosts = self.ghost_blocks
        if ghosts is not None and (type(ghosts) is not int or ghosts < 0):
            raise ConfigError(f"ghost_blocks must be an integer of at least 0, not {ghosts!r}")
        if not 0.0 <= self.pin_budget <= 1.0:
            raise ConfigError(f"pin_budget must be a share of the pool in [0, 1], not {self.pin_budget!r}")


class Declared(NamedTuple):
    """What users declared to a cache, which outlives what is cached.

    Attributes:
        quotas: by framed namespace.
        public_prefixes: what computes them, and their encoded tokens.
    """

    quotas: dict[NamespaceKey, Quota]
    public_prefixes: tuple[tuple[NamespaceKey, bytes], ...]


class CacheParts:
    """The parts of a new, empty cache. Each owns its state; here is only what concerns several of them.

    Raises:
        ConfigError: an option is out of range, or the quotas' floors exceed the pool.
    """

    def __init__(
        self,
        options: CacheOptions,
        policy: EvictionPolicy,
        quotas: Mapping[NamespaceName, Quota | tuple[int, int | None]] | None,
    ) -> None:
        options.check()
        num_blocks, self.clock = options.num_blocks, options.clock
        self.groups = QuotaGroups(num_blocks, policy)
        identities = BlockIdentities(options.block_size * TOKEN_BYTES, options.hash_function)
        self.tree = tree = RadixTree(options.block_size, identities, policy, UseTimes(self.clock))
        self.namespaces = Namespaces(self.groups, identities, tree.block_bytes, options.model)
        self.groups.set(self._framed(quotas))
        num_ghosts = 4 * num_blocks if options.ghost_blocks is None else options.ghost_blocks
        self.ghosts = GhostIndex(num_ghosts, self.clock)
        policy.attach(num_blocks, options.block_size, self.ghosts)
        self.capacity = Capacity(
            BlockPool(num_blocks), tree, self.groups, self.namespaces.publics, self.ghosts
        )
        self.num_resets = 0
        self.pins = PinBoard(tree, int(num_blocks * options.pin_budget), self.clock)
        self.lookup = Lookup(tree, self.namespaces, options.enabled)
        self.advisor = Advisor(options.block_size)
        self.explainer = Explainer(
            tree,
            self.ghosts,
            self.clock,
            enabled=options.enabled,
            partial_reuse=options.partial_reuse,
        )
        self.leasing = Leasing(
            self.capacity,
            self.pins,
            self.ghosts,
            self.explainer if options.explain else None,
            self.advisor,
            enabled=options.enabled,
            partial_reuse=options.partial_reuse,
        )
        self.follow(Listeners())

    def _framed(
        self, quotas: Mapping[NamespaceName, Quota | tuple[int, int | None]] | None
    ) -> dict[NamespaceKey, Quota]:
        return {self.namespaces.quota_key(name): quota for name, quota in framed_quotas(quotas).items()}

    # ------------------------------------------------------------------ what users declare

    def set_quotas(self, quotas: Mapping[NamespaceName, Quota | tuple[int, int | None]]) -> None:
        """As `PrefixCache.set_quotas`."""
        framed = self._framed(quotas)
        used = {space.key for space in self.tree.roots}
        used |= {lease.space.key for lease in self.leasing.leases.values()}
        for key in framed:
            if not self.groups.is_known(key) and any(key in (name, name[:1]) for name in used):
                raise ConfigError(
                    f"{key[0]!r} has blocks in the cache already, which count for those without a quota: "
                    "give its quota before its first request, or reset the cache"
                )
        self.groups.set(framed)
        self.namespaces.regroup()
        self.capacity.keep_ceilings()

    @property
    def declared(self) -> Declared:
        """What is declared now. O(quotas and prefixes)."""
        return Declared(self.groups.quotas, self.namespaces.declared())

    def declare(self, declared: Declared) -> None:
        """As `PrefixCache.declare`."""
        self.groups.set(declared.quotas)
        for computes, prefix in declared.public_prefixes:
            self.namespaces.declare(computes, prefix)

    # ------------------------------------------------------------------ who follows the tree

    def subscribe(self, listener: Listener, replay: bool) -> Callable[[], None]:
        """As `PrefixCache.subscribe`."""
        if replay:
            self._log.replay(list(self.tree.nodes()), listener)
        return self._log.listeners.add(listener)

    def follow(self, listeners: Listeners) -> None:
        """Tell these of what changes from now on, and nobody else; while there are none it costs nothing."""
        self._log = ChangeLog(self.tree.block_bytes, listeners)
        listeners.on_change = self._join
        self._join(len(listeners) > 0)

    def hand_over(self) -> Listeners:
        """Those who follow: nobody does any more. O(1)."""
        listeners = self._log.listeners
        self.follow(Listeners())
        return listeners

    def _join(self, any_listen: bool) -> None:
        self.tree.changes = self._log if any_listen else None
