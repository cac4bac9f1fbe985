# SPDX-License-Identifier: Apache-2.0
"""Quotas: a floor and a ceiling for the blocks of a namespace.

A quota has a floor (blocks that other namespaces can't push it under) and a ceiling (blocks it may occupy,
cached and held together). Namespaces with a quota are counted and indexed apart; all others form one group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sortedcontainers import SortedList

from radixkv.cache.accounts import BlockAccount, BlockAccounts, Quota, QuotaUsage
from radixkv.cache.eviction.policy import EvictionPolicy
from radixkv.cache.keys import NamespaceKey, NamespaceName, frame_namespace
from radixkv.errors import ConfigError


class BoundedAccount(BlockAccount):
    """An account beside others: it notes in `changed` that its figures have changed."""

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__(policy)
        # (entry, evictable, reclaimable) as `QuotaGroups` last knew it.
        self.indexed_as: tuple[Entry | None, int, int] = (None, 0, 0)
        self._changed: dict[BoundedAccount, None] | None = None
        self._number = 0

    def bound(self, quota: Quota) -> None:
        """Set its floor and its ceiling. O(1)."""
        self.floor, self.ceiling = quota.floor, quota.ceiling
        self.most = None if quota.ceiling is None else max(quota.ceiling, self.used)
        self._note()

    def watch(self, changed: dict[BoundedAccount, None], number: int) -> None:
        """Note changes in `changed` from now on: it is one of several accounts. O(1)."""
        self._changed, self._number = changed, number
        self.index.on_change = self._note
        self._note()

    def _note(self) -> None:
        if self._changed is not None:
            self._changed[self] = None

    def entry(self) -> Entry | None:
        """Return its place among the accounts by the candidate that would go first; None: it has none."""
        return (self.index.first_priority(), self._number, self) if len(self.index) else None

    def count_tree(self, blocks: int, protected: int) -> None:
        self.blocks += blocks
        self.protected += protected
        if self._changed is not None:
            self._changed[self] = None

    def count_used(self, blocks: int) -> None:
        self.used += blocks
        if self._changed is not None:
            self._changed[self] = None

    def forget(self) -> int:
        forgotten = super().forget()
        self._note()
        return forgotten


Entry = tuple[Any, int, BoundedAccount]  # lowest priority, the account's number, the account


class QuotaGroups(BlockAccounts):
    """The group of every namespace: of all without a quota, and one for each name that has ever had one.

    What several groups could give together, and which one gives first, is brought up to date when it is asked
    for: O(log groups) for each group that changed since. While there is only the common one, nothing is kept.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        self.common: BoundedAccount = BoundedAccount(policy)
        self.are_several = False
        self._num_blocks = num_blocks
        self._policy = policy
        self._by_key: dict[NamespaceKey, BoundedAccount] = {}
        self._changed: dict[BoundedAccount, None] = {}
        self._with_candidates: Any = SortedList()  # entries
        self._reclaimable_groups: Any = SortedList()  # those of groups that others may take blocks from
        self._evictable = self._reclaimable = 0
        self._kept_back: set[BlockAccount] = set()

    def __iter__(self) -> Iterator[BoundedAccount]:
        return iter((self.common, *self._by_key.values()))

    def of(self, key: NamespaceKey) -> BoundedAccount:
        """The group that a namespace counts in: its own, else its first part's (the tenant's). O(1)."""
        return self._by_key.get(key) or self._by_key.get(key[:1], self.common)

    @property
    def quotas(self) -> dict[NamespaceKey, Quota]:
        """All quotas, also those without bounds by now."""
        return {key: Quota(group.floor, group.ceiling) for key, group in self._by_key.items()}

    def usage(self) -> list[QuotaUsage]:
        """The quotas and their use. O(groups)."""
        return [
            QuotaUsage(key, group.floor, group.ceiling, group.used, group.protected)
            for key, group in self._by_key.items()
        ]

    def replace(self, quotas: Mapping[NamespaceKey, Quota]) -> None:
        """Replace all quotas; one not named bounds nothing any more. O(groups).

        ConfigError, and nothing changed: the floors together exceed the pool.
        """
        check_floors(quotas.values(), self._num_blocks)
        if quotas and not self.are_several:
            self.are_several = True
            self.common.watch(self._changed, 0)
        for key in quotas:
            if key not in self._by_key:
                group = self._by_key[key] = BoundedAccount(self._policy)
                group.watch(self._changed, len(self._by_key))
        for key, group in self._by_key.items():
            group.bound(quotas.get(key, Quota()))

    # ------------------------------------------------------------------ of several

    def _update(self) -> None:
        while self._changed:
            group, _ = self._changed.popitem()
            entry, evictable, reclaimable = group.indexed_as
            if entry is not None:
                self._with_candidates.remove(entry)
                if reclaimable:
                    self._reclaimable_groups.remove(entry)
            self._evictable -= evictable
            self._reclaimable -= reclaimable
            entry, evictable, reclaimable = group.entry(), group.evictable, group.reclaimable
            group.indexed_as = entry, evictable, reclaimable
            if entry is not None:
                self._with_candidates.add(entry)
                if reclaimable:
                    self._reclaimable_groups.add(entry)
            self._evictable += evictable
            self._reclaimable += reclaimable
            if reclaimable < evictable:
                self._kept_back.add(group)
            else:
                self._kept_back.discard(group)

    def evictable(self) -> int:
        if not self.are_several:
            return self.common.evictable
        self._update()
        return self._evictable

    def reclaimable_beside(self, group: BlockAccount) -> int:
        self._update()
        return self._reclaimable - group.reclaimable

    def kept_back(self) -> set[BlockAccount]:
        self._update()
        return self._kept_back

    def first(self) -> BlockAccount | None:
        if not self.are_several:
            return self.common if len(self.common.index) else None
        self._update()
        return self._with_candidates[0][2] if self._with_candidates else None

    def first_for(self, group: BlockAccount) -> BlockAccount:
        if not self.are_several:
            return group
        self._update()
        assert isinstance(group, BoundedAccount)
        own, others = group.indexed_as[0], self._reclaimable_groups
        if own is None or (others and others[0][:2] < own[:2]):
            found: BlockAccount = others[0][2]
            return found
        return group


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
    """Quotas by framed names; ConfigError: one is malformed."""
    return {
        frame_namespace(namespace): quota if isinstance(quota, Quota) else Quota(*quota)
        for namespace, quota in (quotas or {}).items()
    }
