"""Assembly: makes the parts of a cache and joins them."""

from __future__ import annotations

from collections.abc import Mapping

from radixkv.cache.block_identity import BlockIdentities
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.eviction.policy import EvictionPolicy
from radixkv.cache.insight.advisor import Advisor
from radixkv.cache.insight.explain import Explainer
from radixkv.cache.insight.ghost import GhostIndex
from radixkv.cache.insight.removals import Removals
from radixkv.cache.insight.use_times import UseTimes
from radixkv.cache.keys import TOKEN_BYTES, NamespaceKey
from radixkv.cache.leases import Leases
from radixkv.cache.lookup import Lookup
from radixkv.cache.namespaces import Namespaces
from radixkv.cache.options import CacheOptions
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.retention.capacity import Capacity
from radixkv.cache.retention.pins import PinBoard
from radixkv.cache.retention.quota import Quota, QuotaGroups
from radixkv.cache.room import Room
from radixkv.cache.state import CacheState


def assemble(
    options: CacheOptions, policy: EvictionPolicy, quotas: Mapping[NamespaceKey, Quota]
) -> CacheState:
    """The parts of a new, empty cache.

    Raises:
        ConfigError: the quotas' floors exceed the pool.
    """
    num_blocks, clock = options.num_blocks, options.clock
    groups = QuotaGroups(num_blocks, policy)
    identities = BlockIdentities(options.block_size * TOKEN_BYTES, options.hash_function)
    tree = RadixTree(options.block_size, identities, policy, UseTimes(clock))
    namespaces = Namespaces(groups, identities, tree.block_bytes, options.model)
    groups.set({namespaces.quota_key(key): quota for key, quota in quotas.items()})
    ghost_blocks = 4 * num_blocks if options.ghost_blocks is None else options.ghost_blocks
    ghosts = GhostIndex(ghost_blocks)
    policy.attach(num_blocks, options.block_size, ghosts)
    removals = Removals(tree, ghosts, clock)
    capacity = Capacity(BlockPool(num_blocks), tree, groups, namespaces.publics, removals.evicted)
    pins = PinBoard(tree, int(num_blocks * options.pin_budget), clock)
    leases = Leases()
    return CacheState(
        tree=tree,
        namespaces=namespaces,
        lookup=Lookup(tree, namespaces, options.enabled),
        capacity=capacity,
        pins=pins,
        leases=leases,
        room=Room(capacity, pins, leases),
        ghosts=ghosts,
        removals=removals,
        advisor=Advisor(options.block_size),
        explainer=Explainer(
            tree, ghosts, clock, enabled=options.enabled, partial_reuse=options.partial_reuse
        ),
        clock=clock,
        enabled=options.enabled,
        partial_reuse=options.partial_reuse,
        explains=options.explain,
    )
