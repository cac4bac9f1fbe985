# SPDX-License-Identifier: Apache-2.0
"""SharedCapacity: a pool shared under quotas, public prefixes and pins.

Another account's blocks are taken only down to its floor, together with the public blocks above them. Pins
give way to a request that could never run beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixkv.cache.accounts import BlockAccount, Quota
from radixkv.cache.capacity import Capacity
from radixkv.cache.node import Node
from radixkv.tenancy.quota import QuotaGroups


class SharedCapacity(Capacity):
    """The pool's blocks, divided among tenants."""

    def _pins_give_way(
        self,
        needed: int,
        group: BlockAccount,
        total: int,
        node: Node,
        depth: int,
        room: Callable[[], tuple[int, int]],
        lease: Any,
    ) -> bool:
        """End pins if nothing else can ever make room for the request; False: nothing was changed.

        That is so where no other lease of the group that is at its ceiling is left, or no other lease at all.
        """
        if not len(self.pins) or (lease is not None and lease.has_pending_copies):
            return False
        if group.ceiling is not None:
            last: Node | None = node
            while last is not None and last.owner.group is group:
                last = last.parent
            public = 0 if last is None else min(last.end, depth) // self.tree.block_size
            if total - public > group.ceiling:
                return False

        def is_enough() -> bool:
            return needed <= min(room())

        if group.ceiling is not None and needed > room()[1]:
            others = any(other is not lease and other.owner.group is group for other in self.leases.values())
            if not others and self.pins.give_way(is_enough, group):
                return True
        if len(self.leases) > (lease is not None):  # it is not alone: waiting may help
            return False
        fits_without_pins = total <= self.pool.num_blocks - self._kept_by_floors(group)
        return fits_without_pins and self.pins.give_way(is_enough)

    def _below_floors(
        self, kept_back: set[BlockAccount], group: BlockAccount, end: Node | None, depth: int
    ) -> int:
        """Unprotected public blocks that can't go because others' floors keep what hangs below them."""
        if not kept_back:
            return 0
        path = set()
        while end is not None:
            path.add(end)
            end = end.parent
        blocks = 0
        for node in self._public_nodes_above(lambda other: other in kept_back and other is not group):
            if not node.refs:
                beyond = node.end - depth if node in path else node.end - node.start
                blocks += max(0, beyond) // self.tree.block_size
        return blocks

    def _kept_by_floors(self, group: BlockAccount) -> int:
        """Most blocks that `group` could never get: others' floors, and the public blocks above them."""
        others = [g for g in self.groups if g is not group and g.floor]
        public = self._public_nodes_above(lambda other: other is not group and other.floor > 0)
        return sum(len(node.blocks) for node in public) + sum(min(g.floor, g.used) for g in others)

    def _public_nodes_above(self, is_meant: Callable[[BlockAccount], bool]) -> list[Node]:
        """The public nodes with something of certain groups below. O(public nodes * namespaces below)."""
        roots = self.tree.roots
        nodes = [roots[public] for public in self.publics.values() if public in roots]
        for node in nodes:  # parents first
            nodes.extend(node.children or ())
        above: set[Node] = set()
        for node in reversed(nodes):
            if node in above or any(is_meant(owner.group) for owner in node.namespace_children or ()):
                above.add(node)
                if node.parent is not None:
                    above.add(node.parent)
        return [node for node in nodes if node in above]

    def keep_ceilings(self, groups: QuotaGroups) -> None:
        """Evict cached blocks above ceilings that were lowered. O(groups), and as `evict`."""
        for group in groups:
            while group.ceiling is not None and group.used > group.ceiling and len(group.index):
                self._evict_from(group, group.used - group.ceiling, "quota")
            group.bound(Quota(group.floor, group.ceiling))
        self.tree.end_changes()
