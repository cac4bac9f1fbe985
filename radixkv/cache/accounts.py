# SPDX-License-Identifier: Apache-2.0
"""Accounts: counts of the blocks that namespaces use, with the bounds that quotas may set to them.

By itself there is one account, of all namespaces and without bounds; `radixkv.tenancy.quota` adds others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from radixkv.cache.eviction.policy import EvictionPolicy
from radixkv.cache.keys import NamespaceKey
from radixkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds on the blocks of one namespace, cached and held together."""

    floor: int = 0  # blocks under which requests of other namespaces can't push it
    ceiling: int | None = None  # blocks it can't exceed; None: the pool

    def __post_init__(self) -> None:
        if self.floor < 0 or (self.ceiling is not None and self.ceiling < max(1, self.floor)):
            raise ConfigError(
                f"a quota needs 0 <= floor <= ceiling and a ceiling of at least 1, not {self!r}"
            )


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """A quota and the blocks used of it."""

    namespace: NamespaceKey  # whose: those that begin with it count here, too
    floor: int
    ceiling: int | None
    used_blocks: int  # cached and held
    protected_blocks: int  # of the cached ones, those that leases or pins protect


class BlockAccount:
    """Block counts of the namespaces that share one quota, or have none.

    The tree counts its blocks here, `Capacity` those used; both by the methods.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.index = policy.new_index()  # the leaves that may be evicted
        self.floor = 0
        self.ceiling: int | None = None
        # Blocks that it may hold: its ceiling, or its blocks at the time when that was lowered.
        self.most: int | None = None
        self.used = 0  # blocks in the tree and private to leases
        self.blocks = 0  # blocks in the tree
        self.protected = 0  # of these, what leases, pins or pending copies protect

    @property
    def evictable(self) -> int:
        """Blocks that could be evicted, quotas aside."""
        return self.blocks - self.protected

    @property
    def reclaimable(self) -> int:
        """Evictable blocks that other namespaces may take from it."""
        evictable = self.blocks - self.protected
        return min(evictable, max(0, self.used - self.floor)) if self.floor else evictable

    def count_tree(self, blocks: int, protected: int) -> None:
        """Count more blocks in the tree, and protected there; fewer if negative. O(1)."""
        self.blocks += blocks
        self.protected += protected

    def count_used(self, blocks: int) -> None:
        """Count more blocks in the tree or private to leases; fewer if negative. O(1)."""
        self.used += blocks

    def forget(self) -> int:
        """Forget the tree's blocks after a reset; returns their number. O(1)."""
        forgotten = self.blocks
        self.used -= forgotten
        self.blocks = self.protected = 0
        self.index.clear()
        return forgotten


class BlockAccounts:
    """The accounts of one cache; this base has one for all namespaces."""

    are_several = False  # whether there are more than the common one

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        self.common: BlockAccount = BlockAccount(policy)  # of all namespaces without a quota

    def __iter__(self) -> Iterator[BlockAccount]:
        """All of them, the common one first."""
        return iter((self.common,))

    def of(self, key: NamespaceKey) -> BlockAccount:
        """Return the account that a namespace counts in. O(1)."""
        return self.common

    def evictable(self) -> int:
        """Count the blocks that could be evicted, quotas aside."""
        return self.common.evictable

    def reclaimable_beside(self, group: BlockAccount) -> int:
        """Count the blocks that `group` may take from the others."""
        return 0

    def kept_back(self) -> set[BlockAccount]:
        """Return the accounts that could give more if it were not for their floor."""
        return set()

    def first(self) -> BlockAccount | None:
        """Return the account whose candidate goes first, floors notwithstanding; None: no candidates."""
        return self.common if len(self.common.index) else None

    def first_for(self, group: BlockAccount) -> BlockAccount:
        """Return the account whose candidate goes first to make room for `group`."""
        return group
