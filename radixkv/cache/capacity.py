"""Capacity: who may have how many blocks, and making room for them by eviction.

Quotas act here: a group's own blocks go first when it reaches its ceiling, and another group's blocks only
down to that group's floor.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.eviction import hook
from radixkv.cache.node import Node
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.retention import QuotaGroup

OnEvict = Callable[[Node, int, str], None]


class Capacity:
    """The pool's blocks divided among groups.

    Args:
        on_evict: called as (node, number of its last blocks, what for) before they go.
    """

    def __init__(self, pool: BlockPool, tree: RadixTree, groups: list[QuotaGroup], on_evict: OnEvict) -> None:
        self.pool = pool
        self.tree = tree
        self.groups = groups
        self.evicted_blocks = 0
        self._on_evict = on_evict
        self._victim = hook(tree.policy, "victim")
        self._trim_limit = hook(tree.policy, "trim_limit")

    def evictable(self) -> int:
        """Blocks in the tree that nothing protects. O(groups)."""
        return sum(group.blocks - group.protected for group in self.groups)

    def available(self, group: QuotaGroup, locked: int = 0) -> int:
        """Blocks that `group` could get now, if `locked` of its evictable ones were protected. O(groups)."""
        if len(self.groups) == 1:
            return self.pool.num_free + group.blocks - group.protected - locked
        own = group.blocks - group.protected - locked
        total = self.pool.num_free + own + sum(g.yields() for g in self.groups if g is not group)
        if group.ceiling is not None:
            total = min(total, group.ceiling - group.used + own)
        return max(0, total)

    def allocate(self, count: int, group: QuotaGroup) -> array[int]:
        """`count` free blocks, evicting as needed.

        The caller has made sure that so many are available.
        """
        if count > self.pool.num_free or group.ceiling is not None:
            self._make_room(count, group)
        group.used += count
        return self.pool.allocate(count)

    def free_private(self, blocks: array[int], group: QuotaGroup) -> None:
        """Drop one holder of each private block; those without another are free."""
        group.used -= self.pool.drop_private(blocks)

    def free_tree_blocks(self, blocks: array[int], group: QuotaGroup) -> None:
        """Blocks that have left the tree are free."""
        group.used -= self.pool.free(blocks)

    def _make_room(self, count: int, group: QuotaGroup) -> None:
        if group.ceiling is not None:
            over = group.used + count - group.ceiling
            while over > 0:
                over -= self._evict_from(group, over, "quota")
        while self.pool.num_free < count:
            victim_group = self._next_group(group)
            limit = count - self.pool.num_free
            if victim_group is not group:
                limit = min(limit, max(1, victim_group.yields()))
            self._evict_from(victim_group, limit, "capacity")

    def _next_group(self, group: QuotaGroup) -> QuotaGroup:
        if len(self.groups) == 1:
            return group
        candidates = [g for g in self.groups if len(g.index) and (g is group or g.yields())]
        if not candidates:
            # What is left of the evictable blocks is public, with protected floors hanging below it.
            candidates = [g for g in self.groups if len(g.index)]
        return min(candidates, key=lambda g: g.index.first_priority())

    def _evict_from(self, group: QuotaGroup, limit: int, by: str) -> int:
        """Trim the policy's choice by at most `limit` blocks; returns how many."""
        index = group.index
        leaf = index.first() if self._victim is None else self._victim(index)
        assert not leaf.refs, f"{leaf!r} is held and must not be evicted"
        count = min(limit, len(leaf.blocks))
        if self._trim_limit is not None:
            count = max(1, min(count, self._trim_limit(leaf)))
        self._on_evict(leaf, count, by)
        group.used -= self.pool.free(self.tree.trim(leaf, count))
        self.evicted_blocks += count
        return count

    def evict(self, count: int, by: str) -> int:
        """Evict exactly min(count, evictable) blocks, floors notwithstanding; returns how many."""
        freed = 0
        only = self.groups[0] if len(self.groups) == 1 else None
        while freed < count:
            if only is not None:
                if not only.index:
                    break
                freed += self._evict_from(only, count - freed, by)
                continue
            groups = [group for group in self.groups if len(group.index)]
            if not groups:
                break
            group = min(groups, key=lambda g: g.index.first_priority())
            freed += self._evict_from(group, count - freed, by)
        return freed
