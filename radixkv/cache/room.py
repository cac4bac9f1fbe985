"""Room: whether the blocks for a request can be had, and what gives way to it.

Decide, then act: nothing has changed when `OutOfBlocks` is raised.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from radixkv.cache.holding import Holding
from radixkv.cache.leases import Leases
from radixkv.cache.node import Namespace, Node
from radixkv.cache.retention.capacity import Capacity
from radixkv.cache.retention.pins import PinBoard
from radixkv.cache.retention.quota import QuotaGroup
from radixkv.cache.tree_nodes import Walk
from radixkv.errors import OutOfBlocks


class Room:
    """Answers for one cache.

    Args:
    Attributes:
        refused: how often there were too few blocks.
    """

    __slots__ = ("_capacity", "_leases", "_pins", "refused")

    def __init__(self, capacity: Capacity, pins: PinBoard, leases: Leases) -> None:
        self._capacity = capacity
        self._pins = pins
        self._leases = leases
        self.refused = 0

    def grow(self, lease: Holding, count: int) -> array[int]:
        """`count` more blocks for a lease.

        Raises:
            OutOfBlocks: nothing was changed.
        """
        capacity, group = self._capacity, lease.space.group
        if count > capacity.pool.num_free or group.ceiling is not None:
            total = lease.num_blocks + count
            path = (lease.node, lease.tree_tokens)
            self.check(count, lease.space, total, path, lambda: capacity.room(group), lease)
        return capacity.allocate(count, group)

    def beside(self, group: QuotaGroup, walk: Walk, source: Node | None) -> tuple[int, int]:
        """Blocks that could be had while a match is held, and all of `source` if given. O(path).

        What the pool could give, and what the group's ceiling leaves it, as `Capacity.room` says.
        """
        locked = shared = 0  # evictable blocks that holding would protect: the group's own, and public ones
        node = walk.node
        if source is not None and not source.refs:
            if source.space.group is group:
                locked = len(source.blocks)
            else:
                shared = len(source.blocks)
        current: Node | None = node if node is not source else node.parent
        while current is not None and not current.refs:
            count = len(current.blocks)
            if current is node:
                count = (walk.depth - node.start) // self._capacity.tree.block_size
            if current.space.group is group:
                locked += count
            else:
                shared += count
            current = current.parent
        end, depth = (node, walk.depth) if source is None else (source, source.end)
        return self._capacity.room(group, locked, shared, end, depth)

    def check(
        self,
        needed: int,
        space: Namespace,
        total: int,
        path: tuple[Node, int],
        room: Callable[[], tuple[int, int]],
        lease: Holding | None = None,
    ) -> None:
        """Make sure that `needed` blocks can be had; pins give way to what could never fit.

        Args:
            total: blocks of the whole request.
            path: those of them that are in the tree: the node where they end, and at which token.
            room: how many can be had, from the pool and below the ceiling.
            lease: the lease that grows; None: a new one.

        Raises:
            OutOfBlocks: they can't; nothing was changed.
        """
        if needed <= min(room()) or self._pins_give_way(needed, space.group, total, path, room, lease):
            return
        available = min(room())
        self.refused += 1
        tree = self._capacity.tree
        tree.drop_empty_root(space)
        tree.drop_empty_root(space.public)
        quota = "" if space.group.ceiling is None else f" within the quota of {space.group.ceiling}"
        raise OutOfBlocks(
            f"{needed} blocks are needed, {available} of {self._capacity.pool.num_blocks} are free or "
            f"evictable{quota}",
            needed=needed,
            available=available,
        )

    def _pins_give_way(
        self,
        needed: int,
        group: QuotaGroup,
        total: int,
        path: tuple[Node, int],
        room: Callable[[], tuple[int, int]],
        lease: Holding | None,
    ) -> bool:
        """End pins if nothing else can ever make room for the request; False: nothing was changed.

        Nothing else can below the group's ceiling where no other lease of the group is left, and in the pool
        where no other lease at all is.
        """
        pins = self._pins
        if not len(pins) or (lease is not None and lease.has_pending_copies):
            return False
        if group.ceiling is not None and total - self._public_blocks(group, *path) > group.ceiling:
            return False

        def is_enough() -> bool:
            return needed <= min(room())

        if group.ceiling is not None and needed > room()[1]:
            others = any(other is not lease and other.space.group is group for other in self._leases)
            if not others and pins.give_way(is_enough, group):
                return True
        return self._pins_must_yield(group, total, lease) and pins.give_way(is_enough)

    def _public_blocks(self, group: QuotaGroup, end: Node, depth: int) -> int:
        """The blocks of a path up to token `depth` that count for another group: public ones. O(path)."""
        node: Node | None = end
        while node is not None and node.space.group is group:
            node = node.parent
        return 0 if node is None else min(node.end, depth) // self._capacity.tree.block_size

    def _pins_must_yield(self, group: QuotaGroup, total: int, lease: Holding | None) -> bool:
        """Whether waiting can't help a request of `total` blocks: it is alone, and fits but for the pins."""
        if len(self._leases) > (lease is not None):
            return False
        return total <= self._capacity.pool.num_blocks - self._capacity.kept_by_floors(group)
