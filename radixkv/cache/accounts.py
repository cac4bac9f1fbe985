# SPDX-License-Identifier: Apache-2.0
"""Accounts: counts of the blocks that namespaces use, with the bounds that quotas set to them.

A quota has a floor (blocks that other namespaces can't push it under) and a ceiling (blocks it may occupy,
cached and held together). Each name that has ever had a quota has an account of its own; all namespaces
without one share the common account. A cache without quotas has only that, without bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sortedcontainers import SortedList

from radixkv.cache.eviction.policy import EvictionPolicy
from radixkv.cache.keys import NamespaceKey, NamespaceName, frame_namespace
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

    The tree counts its blocks here, `Capacity` those used; both by the methods. Where there are several
    accounts, it notes in `changed` that its figures have changed.
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
        # (entry, evictable, reclaimable) as `BlockAccounts` last knew it.
        self.indexed_as: tuple[Entry | None, int, int] = (None, 0, 0)
        self._changed: dict[BlockAccount, None] | None = None  # None: it is the only account
        self._number = 0

    @property
    def evictable(self) -> int:
        """Blocks that could be evicted, quotas aside."""
        return self.blocks - self.protected

    @property
    def reclaimable(self) -> int:
        """Evictable blocks that other namespaces may take from it."""
        evictable = self.blocks - self.protected
        return min(evictable, max(0, self.used - self.floor)) if self.floor else evictable

    def entry(self) -> Entry | None:
        """Return its place among the accounts by the candidate that is evicted first; None: it has none."""
        return (self.index.first_priority(), self._number, self) if len(self.index) else None

    def bound(self, quota: Quota) -> None:
        """Set its floor and its ceiling. O(1)."""
        self.floor, self.ceiling = quota.floor, quota.ceiling
        self.most = None if quota.ceiling is None else max(quota.ceiling, self.used)
        self._note()

    def watch(self, changed: dict[BlockAccount, None], number: int) -> None:
        """Note changes in `changed` from now on: it is one of several accounts. O(1)."""
        self._changed, self._number = changed, number
        self.index.on_change = self._note
        self._note()

    def _note(self) -> None:
        if self._changed is not None:
            self._changed[self] = None

    def count_tree(self, blocks: int, protected: int) -> None:
        """Count more blocks in the tree, and protected there; fewer if negative. O(1)."""
        self.blocks += blocks
        self.protected += protected
        if self._changed is not None:
            self._changed[self] = None

    def count_used(self, blocks: int) -> None:
        """Count more blocks in the tree or private to leases; fewer if negative. O(1)."""
        self.used += blocks
        if self._changed is not None:
            self._changed[self] = None

    def forget(self) -> int:
        """Forget the tree's blocks after a reset; returns their number. O(1)."""
        forgotten = self.blocks
        self.used -= forgotten
        self.blocks = self.protected = 0
        self.index.clear()
        self._note()
        return forgotten


Entry = tuple[Any, int, BlockAccount]  # lowest priority, the account's number, the account


class BlockAccounts:
    """The accounts of one cache: the common one, and one for each name that has ever had a quota.

    How many blocks several accounts could give together, and which one gives first, is brought up to date
    when somebody asks: O(log accounts) for each one that changed since. While there is only the common
    account, nothing is kept.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        self.common = BlockAccount(policy)  # of all namespaces without a quota
        self.are_several = False  # whether there are more than the common one
        self._num_blocks = num_blocks
        self._policy = policy
        self._by_key: dict[NamespaceKey, BlockAccount] = {}
        self._changed: dict[BlockAccount, None] = {}
        self._with_candidates: Any = SortedList()  # entries
        self._reclaimable_accounts: Any = SortedList()  # those of accounts that others may take blocks from
        self._evictable = self._reclaimable = 0
        self._kept_back: set[BlockAccount] = set()

    def __iter__(self) -> Iterator[BlockAccount]:
        """Yield all accounts, the common one first."""
        return iter((self.common, *self._by_key.values()))

    def of(self, key: NamespaceKey) -> BlockAccount:
        """Return the account of a namespace: its own, else its first part's (the tenant's). O(1)."""
        return self._by_key.get(key) or self._by_key.get(key[:1], self.common)

    @property
    def quotas(self) -> dict[NamespaceKey, Quota]:
        """All quotas, those without bounds by now included."""
        return {key: Quota(account.floor, account.ceiling) for key, account in self._by_key.items()}

    def usage(self) -> list[QuotaUsage]:
        """Return the quotas and their use. O(accounts)."""
        return [
            QuotaUsage(key, account.floor, account.ceiling, account.used, account.protected)
            for key, account in self._by_key.items()
        ]

    def replace(self, quotas: Mapping[NamespaceKey, Quota]) -> None:
        """Replace all quotas; a name that is left out has no bounds any more. O(accounts).

        ConfigError, and nothing changed: the floors together exceed the pool.
        """
        check_floors(quotas.values(), self._num_blocks)
        if quotas and not self.are_several:
            self.are_several = True
            self.common.watch(self._changed, 0)
        for key in quotas:
            if key not in self._by_key:
                account = self._by_key[key] = BlockAccount(self._policy)
                account.watch(self._changed, len(self._by_key))
        for key, account in self._by_key.items():
            account.bound(quotas.get(key, Quota()))

    # ------------------------------------------------------------------ order among several

    def _update(self) -> None:
        while self._changed:
            account, _ = self._changed.popitem()
            entry, evictable, reclaimable = account.indexed_as
            if entry is not None:
                self._with_candidates.remove(entry)
                if reclaimable:
                    self._reclaimable_accounts.remove(entry)
            self._evictable -= evictable
            self._reclaimable -= reclaimable
            entry, evictable, reclaimable = account.entry(), account.evictable, account.reclaimable
            account.indexed_as = entry, evictable, reclaimable
            if entry is not None:
                self._with_candidates.add(entry)
                if reclaimable:
                    self._reclaimable_accounts.add(entry)
            self._evictable += evictable
            self._reclaimable += reclaimable
            if reclaimable < evictable:
                self._kept_back.add(account)
            else:
                self._kept_back.discard(account)

    def evictable(self) -> int:
        """Count the blocks that could be evicted, quotas aside."""
        if not self.are_several:
            return self.common.evictable
        self._update()
        return self._evictable

    def reclaimable_beside(self, account: BlockAccount) -> int:
        """Count the blocks that `account` may take from the others."""
        self._update()
        return self._reclaimable - account.reclaimable

    def kept_back(self) -> set[BlockAccount]:
        """Return the accounts that could give more if it were not for their floor."""
        self._update()
        return self._kept_back

    def first(self) -> BlockAccount | None:
        """Return the account whose candidate is evicted first, floors notwithstanding; None: none has any."""
        if not self.are_several:
            return self.common if len(self.common.index) else None
        self._update()
        return self._with_candidates[0][2] if self._with_candidates else None

    def first_for(self, account: BlockAccount) -> BlockAccount:
        """Return the account whose candidate is evicted first to make room for `account`."""
        if not self.are_several:
            return account
        self._update()
        own, others = account.indexed_as[0], self._reclaimable_accounts
        if own is None or (others and others[0][:2] < own[:2]):
            found: BlockAccount = others[0][2]
            return found
        return account


def check_floors(quotas: Iterable[Quota], num_blocks: int) -> None:
    """Raise ConfigError unless a pool can keep all floors at once."""
    floors = sum(quota.floor for quota in quotas)
    if floors > num_blocks:
        raise ConfigError(
            f"the quotas' floors sum up to {floors} blocks; the pool has {num_blocks}: lower the floors "
            "(floor_blocks in a keys file), or give the pool more blocks (--num-blocks, --kv-cache-memory)"
        )


def framed_quotas(
    quotas: Mapping[NamespaceName, Quota | tuple[int, int | None]] | None,
) -> dict[NamespaceKey, Quota]:
    """Return quotas by framed names; ConfigError: one is malformed."""
    return {
        frame_namespace(namespace): quota if isinstance(quota, Quota) else Quota(*quota)
        for namespace, quota in (quotas or {}).items()
    }
