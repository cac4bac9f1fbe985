"""Quotas: a floor and a ceiling for the blocks of a namespace.

A quota has a floor (blocks that other namespaces can't push it under) and a ceiling (blocks it may occupy,
cached and held together). Namespaces with a quota are counted and indexed apart; all others form one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sortedcontainers import SortedList

from radixkv.cache.eviction.policy import EvictionPolicy
from radixkv.cache.keys import Namespace, NamespaceKey, frame_namespace
from radixkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds on the blocks of one namespace, cached and held together.

    Attributes:
        floor: blocks under which requests of other namespaces can't push it.
        ceiling: blocks it can't exceed; None: the pool.
    """

    floor: int = 0
    ceiling: int | None = None

    def __post_init__(self) -> None:
        if self.floor < 0 or (self.ceiling is not None and self.ceiling < max(1, self.floor)):
            raise ConfigError(
                f"a quota needs 0 <= floor <= ceiling and a ceiling of at least 1, not {self!r}"
            )


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """A quota and what is used of it, in blocks.

    Attributes:
        namespace: whose: those that begin with it count here, too.
        used_blocks: cached and held.
        protected_blocks: of the cached ones, those that leases or pins protect.
    """

    namespace: NamespaceKey
    floor: int
    ceiling: int | None
    used_blocks: int
    protected_blocks: int


class QuotaGroup:
    """The namespaces that share one quota, and the count of their blocks.

    The tree counts its blocks here, `Capacity` those used; both by the methods.

    Attributes:
        used: blocks in the tree and private to leases.
        blocks: blocks in the tree.
        protected: blocks in the tree that leases, pins or pending copies protect.
        index: the leaves that may be evicted.
    """

    __slots__ = ("blocks", "ceiling", "floor", "index", "protected", "used")

    def __init__(self, policy: EvictionPolicy, floor: int = 0, ceiling: int | None = None) -> None:
        self.index = policy.new_index()
        self.floor = floor
        self.ceiling = ceiling
        self.used = self.blocks = self.protected = 0

    @property
    def evictable(self) -> int:
        """Blocks that could be evicted, quotas aside."""
        return self.blocks - self.protected

    def count_tree(self, blocks: int, protected: int) -> None:
        """So many more blocks are in the tree, and protected there; fewer if negative. O(1)."""
        self.blocks += blocks
        self.protected += protected

    def count_used(self, blocks: int) -> None:
        """So many more blocks are in the tree or private to leases; fewer if negative. O(1)."""
        self.used += blocks

    def forget(self) -> int:
        """The tree was reset: none of its blocks is the group's any more; returns how many were. O(1)."""
        forgotten = self.blocks
        self.used -= forgotten
        self.blocks = self.protected = 0
        self.index.clear()
        return forgotten

    def yields(self) -> int:
        """Blocks that other namespaces may take from it."""
        evictable = self.blocks - self.protected
        return min(evictable, max(0, self.used - self.floor)) if self.floor else evictable


Entry = tuple[Any, int, "WatchedGroup"]  # lowest priority, the group's number, the group


class WatchedGroup(QuotaGroup):
    """One of several groups: says when its counts or its candidates change.

    Attributes:
        standing: (entry, evictable, yields) as the `GroupOrder` last knew it.
    """

    __slots__ = ("_changed", "_number", "standing")

    def __init__(
        self,
        changed: dict[WatchedGroup, None],
        policy: EvictionPolicy,
        floor: int = 0,
        ceiling: int | None = None,
    ) -> None:
        self._changed = changed
        self._number = len(changed)
        changed[self] = None
        self.standing: tuple[Entry | None, int, int] = (None, 0, 0)
        super().__init__(policy, floor, ceiling)
        self.index.on_change = self._note

    def _note(self) -> None:
        self._changed[self] = None

    def entry(self) -> Entry | None:
        """Its place among the groups by the candidate that would go first; None: it has none."""
        return (self.index.first_priority(), self._number, self) if len(self.index) else None

    def count_tree(self, blocks: int, protected: int) -> None:
        super().count_tree(blocks, protected)
        self._note()

    def count_used(self, blocks: int) -> None:
        super().count_used(blocks)
        self._note()

    def forget(self) -> int:
        self._note()
        return super().forget()


class GroupOrder:
    """Several groups: what they could give together, and which one gives first.

    Only the groups that changed since the last question are looked at again: O(log groups) each.

    Args:
        changed: where the groups say that they changed.
    """

    def __init__(self, changed: dict[WatchedGroup, None]) -> None:
        self._changed = changed
        self._with_candidates: Any = SortedList()  # entries
        self._yielding: Any = SortedList()  # those of groups that others may take blocks from
        self._evictable = self._yields = 0
        self._kept_back: set[QuotaGroup] = set()

    def _update(self) -> None:
        while self._changed:
            group, _ = self._changed.popitem()
            entry, evictable, yields = group.standing
            if entry is not None:
                self._with_candidates.remove(entry)
                if yields:
                    self._yielding.remove(entry)
            self._evictable -= evictable
            self._yields -= yields
            entry, evictable, yields = group.standing = group.entry(), group.evictable, group.yields()
            if entry is not None:
                self._with_candidates.add(entry)
                if yields:
                    self._yielding.add(entry)
            self._evictable += evictable
            self._yields += yields
            if yields < evictable:
                self._kept_back.add(group)
            else:
                self._kept_back.discard(group)

    def evictable(self) -> int:
        """Blocks that could be evicted, quotas aside."""
        self._update()
        return self._evictable

    def yields_beside(self, group: QuotaGroup) -> int:
        """Blocks that `group` may take from the others."""
        self._update()
        return self._yields - group.yields()

    def kept_back(self) -> set[QuotaGroup]:
        """The groups that could give more if it were not for their floor."""
        self._update()
        return self._kept_back

    def first(self) -> QuotaGroup | None:
        """The group whose candidate goes first, floors notwithstanding; None: there are no candidates."""
        self._update()
        return self._with_candidates[0][2] if self._with_candidates else None

    def first_for(self, group: QuotaGroup) -> QuotaGroup:
        """The group whose candidate goes first to make room for `group`."""
        assert isinstance(group, WatchedGroup)
        self._update()
        own, others = group.standing[0], self._yielding
        if own is None or (others and others[0][:2] < own[:2]):
            found: QuotaGroup = others[0][2]
            return found
        return group


def quota_groups(
    quotas: Mapping[Namespace, Quota | tuple[int, int | None]] | None,
    num_blocks: int,
    policy: EvictionPolicy,
) -> tuple[QuotaGroup, dict[NamespaceKey, QuotaGroup], GroupOrder | None]:
    """The group of all without a quota, one group per namespace with one, and their order if there are any.

    Raises:
        ConfigError: the floors together exceed the pool, or one quota is malformed.
    """
    if not quotas:
        return QuotaGroup(policy), {}, None
    changed: dict[WatchedGroup, None] = {}
    common = WatchedGroup(changed, policy)
    groups: dict[NamespaceKey, QuotaGroup] = {}
    for namespace, quota in quotas.items():
        bounds = quota if isinstance(quota, Quota) else Quota(*quota)
        groups[frame_namespace(namespace)] = WatchedGroup(changed, policy, bounds.floor, bounds.ceiling)
    floors = sum(group.floor for group in groups.values())
    if floors > num_blocks:
        raise ConfigError(f"the quotas' floors sum up to {floors} blocks; the pool has {num_blocks}")
    return common, groups, GroupOrder(changed)
