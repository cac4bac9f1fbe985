"""Leasing: makes leases, finds the blocks for them, and knows those that live.

Decide, then act: nothing changes before it is certain that the blocks can be had, so nothing has changed when
`OutOfBlocks` is raised.

                    found
    |-- whole blocks --|- partial -|
    [b0] [b1] ... [bn-1] [bn . . . ]        bn: copied from, or taken over if nobody holds it
    |------ held ------|---- new blocks ... |
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from radixkv.cache import tree_sync
from radixkv.cache.eviction.policy import overridden
from radixkv.cache.insight.advisor import Advisor
from radixkv.cache.insight.explain import DueReport, Explainer, new_due
from radixkv.cache.insight.ghost import GhostIndex
from radixkv.cache.invalidation import invalidate_subtree
from radixkv.cache.keys import TOKEN_BYTES, NamespaceName
from radixkv.cache.lease import Lease
from radixkv.cache.node import Namespace, Node
from radixkv.cache.retention.capacity import Capacity
from radixkv.cache.retention.pins import PinBoard
from radixkv.cache.retention.quota import QuotaGroup
from radixkv.cache.tree_nodes import Walk
from radixkv.errors import OutOfBlocks


class Leasing:
    """The leases of one cache.

    Args:
        explainer, advisor: told of every lookup; None: leases carry no reports.
        enabled: False: what leases commit is not kept.
        partial_reuse: whether parts of blocks are shared.

    Attributes:
        leases: those that live, by number.
        made: leases so far.
        queried_tokens: tokens of their prompts.
        hit_tokens: those of them found cached.
        refused: how often there were too few blocks.
    """

    __slots__ = (
        "_advisor",
        "_enabled",
        "_explainer",
        "_ghosts",
        "_last_id",
        "_on_acquire",
        "_partial_reuse",
        "_pins",
        "capacity",
        "hit_tokens",
        "leases",
        "made",
        "queried_tokens",
        "refused",
    )

    def __init__(
        self,
        capacity: Capacity,
        pins: PinBoard,
        ghosts: GhostIndex,
        explainer: Explainer | None,
        advisor: Advisor,
        *,
        enabled: bool,
        partial_reuse: bool,
    ) -> None:
        self.capacity = capacity
        self.leases: dict[int, Lease] = {}
        self._last_id = 0
        self._pins = pins
        self._ghosts = ghosts
        self._explainer = explainer
        self._advisor = advisor
        self._enabled = enabled
        self._partial_reuse = partial_reuse
        self._on_acquire = overridden(capacity.tree.policy, "on_acquire")
        self.made = self.queried_tokens = self.hit_tokens = self.refused = 0

    # ------------------------------------------------------------------ making a lease

    def make(
        self, data: bytes, namespace: NamespaceName, space: Namespace, walk: Walk, skip: str | None
    ) -> Lease:
        """Plan what to hold, copy and allocate; make sure that there is room; only then change anything.

        Args:
            walk: what a lookup of the prompt found.
            skip: why there was none.

        Raises:
            OutOfBlocks: nothing was changed.
        """
        capacity = self.capacity
        tree = capacity.tree
        size = tree.block_size
        node, depth, partial, source, _, _ = walk
        num_tokens = len(data) // TOKEN_BYTES
        found = depth + partial
        cached = found if found < num_tokens else num_tokens - 1
        takes_over = False  # the partial block itself is extended: nobody else holds it
        slots = 0  # tokens of the partial block to copy
        if source is not None:
            if not self._partial_reuse:
                source, cached = None, min(depth, num_tokens - 1)
            elif not source.holders and source.end == found:
                takes_over = True
            else:
                slots = cached - depth
                if slots <= 0:
                    source = None
        total = -(-num_tokens // size)
        held_tokens = found if takes_over else depth
        needed = total - -(-held_tokens // size)
        group = space.group
        if needed > capacity.pool.num_free or group.ceiling is not None:
            if slots and needed > min(self._room_beside(group, walk, source)):
                source, slots, cached = None, 0, depth
            whole = source  # held to its end, because it is copied from or taken over
            self._check(needed, space, total, (node, depth), lambda: self._room_beside(group, walk, whole))
        due: DueReport | None = None
        if self._explainer is not None:  # before anything is evicted or split
            if skip is None and self._ghosts.count:
                due = self._explainer.due(data, space, walk)
            else:
                due = new_due((walk, num_tokens, None, 0.0, skip))
            if found and skip is None and found < num_tokens - 1 and walk.onward:
                self._advisor.observe(data, walk, space)
        if takes_over:
            assert source is not None
            node = source
        elif depth != node.start + len(node.blocks) * size:  # no node ends where the whole blocks do
            node = tree.split(node, (depth - node.start) // size)
        public = space.declared.length_in(data) // TOKEN_BYTES if space.declared.prefixes else 0
        lease = Lease(self, namespace, space, data, node, held_tokens, cached, public, self._enabled)
        lease.due = due
        self._grant(lease, needed, source if slots else None, slots)
        if self._ghosts.leaving:
            self._ghosts.free_some()
        return lease

    def _grant(self, lease: Lease, needed: int, source: Node | None, slots: int) -> None:
        """Protect the prefix and the source of a copy, give the lease its blocks, and count it."""
        tree, node = self.capacity.tree, lease.node
        tree.hold(node)
        if source is not None:
            tree.protect(source)
        tree.use(node)
        if tree.policy.tracks_path:
            tree.hit_path(node)
        else:
            node.hits += 1
        if self._pins.by_key or self._pins.any_lapsed:
            self._pins.refresh(node)
        table = tree.path_blocks(node)
        if needed:
            table += self.capacity.allocate(needed, lease.space.group)
        lease.fill(table)
        if source is not None:  # the prefix was cut just before the block
            lease.new_copy(source.blocks[0], table[lease.num_blocks - needed], slots, source)
        self.made += 1
        self.queried_tokens += lease.num_tokens
        self.hit_tokens += lease.num_cached_tokens
        if self._on_acquire is not None:
            self._on_acquire(lease.num_tokens, lease.num_cached_tokens)

    def hold_blocks(
        self, data: bytes, num_tokens: int, namespace: NamespaceName, space: Namespace, walk: Walk
    ) -> Lease:
        """A lease on the whole blocks of a text up to `num_tokens`, to move them; those after `walk` are new.

        Nothing is counted or reported: this is no use of the cache.

        Raises:
            OutOfBlocks: nothing was changed.
        """
        capacity, group = self.capacity, space.group
        tree = capacity.tree
        node, depth, *_ = walk = walk._replace(partial=0, source=None)
        total = num_tokens // tree.block_size
        needed = total - depth // tree.block_size
        if needed > capacity.pool.num_free or group.ceiling is not None:
            self._check(needed, space, total, (node, depth), lambda: self._room_beside(group, walk, None))
        if depth != node.start + len(node.blocks) * tree.block_size:
            node = tree.split(node, (depth - node.start) // tree.block_size)
        public = min(space.declared.length_in(data) // TOKEN_BYTES, num_tokens)
        data = data[: num_tokens * TOKEN_BYTES]
        lease = Lease(self, namespace, space, data, node, depth, depth, public, self._enabled)
        tree.hold(node)
        table = tree.path_blocks(node)
        if needed:
            table += capacity.allocate(needed, group)
        lease.fill(table)
        if self._ghosts.leaving:
            self._ghosts.free_some()
        return lease

    # ------------------------------------------------------------------ what leases ask for, see `Lessor`

    def add(self, lease: Lease) -> int:
        """A new lease; returns its number. O(1)."""
        self._last_id = number = self._last_id + 1
        self.leases[number] = lease
        return number

    def remove(self, lease: Lease) -> None:
        """A lease has ended. O(1)."""
        del self.leases[lease.id]

    def grow(self, lease: Lease, count: int) -> array[int]:
        """`count` more blocks for a lease.

        Raises:
            OutOfBlocks: nothing was changed.
        """
        capacity, group = self.capacity, lease.space.group
        if count > capacity.pool.num_free or group.ceiling is not None:
            total = lease.num_blocks + count
            path = (lease.node, lease.tree_tokens)
            self._check(count, lease.space, total, path, lambda: capacity.room(group), lease)
        return capacity.allocate(count, group)

    sync = staticmethod(tree_sync.sync)
    would_dedupe = staticmethod(tree_sync.would_dedupe)

    def invalidate(self, top: Node, owner: Lease) -> None:
        """What hangs below `top` leaves the tree; all but `owner` lose the right to share what they hold."""
        invalidate_subtree(self.capacity, self._pins, self.leases.values(), top, owner)

    # ------------------------------------------------------------------ whether there is room

    def _room_beside(self, group: QuotaGroup, walk: Walk, source: Node | None) -> tuple[int, int]:
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
                count = (walk.depth - node.start) // self.capacity.tree.block_size
            if current.space.group is group:
                locked += count
            else:
                shared += count
            current = current.parent
        end, depth = (node, walk.depth) if source is None else (source, source.end)
        return self.capacity.room(group, locked, shared, end, depth)

    def _check(
        self,
        needed: int,
        space: Namespace,
        total: int,
        path: tuple[Node, int],
        room: Callable[[], tuple[int, int]],
        lease: Lease | None = None,
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
        tree = self.capacity.tree
        tree.drop_empty_root(space)
        tree.drop_empty_root(space.public)
        quota = "" if space.group.ceiling is None else f" within the quota of {space.group.ceiling}"
        raise OutOfBlocks(
            f"{needed} blocks are needed, {available} of {self.capacity.pool.num_blocks} are free or "
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
        lease: Lease | None,
    ) -> bool:
        """End pins if nothing else can ever make room for the request; False: nothing was changed.

        Nothing else can below the group's ceiling where no other lease of the group is left, and in the pool
        where no other lease at all is.
        """
        pins, capacity, leases = self._pins, self.capacity, self.leases
        if not len(pins) or (lease is not None and lease.has_pending_copies):
            return False
        if group.ceiling is not None and total - self._public_blocks(group, *path) > group.ceiling:
            return False

        def is_enough() -> bool:
            return needed <= min(room())

        if group.ceiling is not None and needed > room()[1]:
            others = any(other is not lease and other.space.group is group for other in leases.values())
            if not others and pins.give_way(is_enough, group):
                return True
        if len(leases) > (lease is not None):  # it is not alone: waiting may help
            return False
        fits_without_pins = total <= capacity.pool.num_blocks - capacity.kept_by_floors(group)
        return fits_without_pins and pins.give_way(is_enough)

    def _public_blocks(self, group: QuotaGroup, end: Node, depth: int) -> int:
        """The blocks of a path up to token `depth` that count for another group: public ones. O(path)."""
        node: Node | None = end
        while node is not None and node.space.group is group:
            node = node.parent
        return 0 if node is None else min(node.end, depth) // self.capacity.tree.block_size
