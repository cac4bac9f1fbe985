"""Admission: what a new lease holds, copies and allocates; whether there is room; and granting it.

Decide, then act: nothing changes before it is certain that the blocks can be had.

                    found
    |-- whole blocks --|- partial -|
    [b0] [b1] ... [bn-1] [bn . . . ]        bn: copied from, or taken over if nobody holds it
    |------ held ------|---- new blocks ... |
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from radixkv.cache.insight.explain import DueReport
from radixkv.cache.keys import TOKEN_BYTES, Namespace
from radixkv.cache.lease import Lease
from radixkv.cache.node import Node, Space
from radixkv.cache.radix_tree import Walk
from radixkv.errors import OutOfBlocks

if TYPE_CHECKING:
    from radixkv.cache.prefix_cache import PrefixCache
    from radixkv.cache.retention.quota import QuotaGroup

_SPARE_ENTRIES = array("i", [0] * 4)  # room in a new block table, so that the first appends need not move it


def admit(
    cache: PrefixCache, data: bytes, namespace: Namespace, space: Space, walk: Walk, skip: str | None
) -> Lease:
    """Plan what to hold, copy and allocate; make sure that there is room; only then change anything."""
    size = cache.block_size
    node, depth, partial, source, _, _ = walk
    num_tokens = len(data) // TOKEN_BYTES
    found = depth + partial
    cached = found if found < num_tokens else num_tokens - 1
    takes_over = False  # the partial block itself is extended: nobody else holds it
    slots = 0  # tokens of the partial block to copy
    if source is not None:
        if not cache.partial_reuse:
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
    if needed > cache._pool.num_free or space.group.ceiling is not None:
        group = space.group
        if slots and needed > _room_beside(cache, group, walk, source):
            source, slots, cached = None, 0, depth
        whole = source  # held to its end, because it is copied from or taken over
        check_room(cache, needed, space, total, lambda: _room_beside(cache, group, walk, whole))
    if takes_over:
        assert source is not None
        node = source
    elif depth != node.start + len(node.blocks) * size:  # no node ends where the whole blocks do
        node = cache._tree.split(node, (depth - node.start) // size)
    cache._lease_ids += 1
    lease = Lease(cache, cache._lease_ids, namespace, space, data, node, held_tokens, num_tokens, cached)
    if cache._public.prefixes:
        lease._public_tokens = cache._public.length_in(data) // TOKEN_BYTES
    if cache.explains:
        _note_report(cache, lease, data, walk, skip)
    _grant(cache, lease, total, needed, source if slots else None, slots)
    _account(cache, lease, data, walk)
    return lease


def _grant(
    cache: PrefixCache, lease: Lease, total: int, needed: int, source: Node | None, slots: int
) -> None:
    """Protect the prefix and the source of a copy, fill the block table: held blocks, then new ones."""
    node = lease._node
    node.holders += 1
    cache._tree.protect(node)
    if source is not None:
        cache._tree.protect(source)
    cache._tick = tick = cache._tick + 1
    cache.policy.tick = node.last_access = tick
    if cache.policy.tracks_path:
        _hit_path(cache, node)
    if cache._pinned or cache._pins.any_lapsed:
        cache._pins.refresh(node)
    table = node.blocks[:]
    if node.start:
        parts = []
        current: Node | None = node
        while current is not None:
            parts.append(current.blocks)
            current = current.parent
        parts.reverse()
        table = array("i", b"".join(parts))
    if needed:
        table += cache._capacity.allocate(needed, lease._space.group)
    table += _SPARE_ENTRIES
    lease._table = table
    lease._num_blocks = total
    if source is not None:
        block = source.blocks[0]  # the prefix was cut just before it
        lease._sources.append((source, block))
        lease.copies.append((block, table[total - needed], slots))
    cache._leases[lease.id] = lease


def _hit_path(cache: PrefixCache, node: Node) -> None:
    """Count a hit of every node of the path and tell the policy, deepest first."""
    on_hit = cache.policy.on_hit
    while node.parent is not None:
        node.hits += 1
        on_hit(node)
        node = node.parent


def _note_report(cache: PrefixCache, lease: Lease, data: bytes, walk: Walk, skip: str | None) -> None:
    """Note what the lease's report will need, before anything is evicted for it."""
    if skip is not None:
        lease.report_due(DueReport(-1, walk, lease.num_tokens, 0.0, 0, 0, skip))
    else:
        cache._reports.note(lease, lease._space, data, walk, cache._clock())


def _account(cache: PrefixCache, lease: Lease, data: bytes, walk: Walk) -> None:
    """Count a lease just granted, and tell the policy."""
    num_tokens, cached = lease.num_tokens, lease.num_cached_tokens
    cache._acquires += 1
    cache._queried_tokens += num_tokens
    cache._hit_tokens += cached
    if cache._on_acquire is not None:
        cache._on_acquire(num_tokens, cached)
    if cache.policy.uses_ghosts and walk.depth + walk.partial < num_tokens:
        _tell_ghost_hit(cache, data, lease._space, walk)


def _tell_ghost_hit(cache: PrefixCache, data: bytes, space: Space, walk: Walk) -> None:
    """Tell the policy if the first block that was missed had been removed."""
    cache._ghosts.catch_up()
    seed, mark = cache._public.seed_and_mark(data, space, walk.depth)
    found = walk.depth + walk.partial
    record = cache._ghosts.find(data, len(data) // TOKEN_BYTES, seed, walk.depth, found, mark)
    if record is not None:
        cache.policy.on_ghost_hit(walk.depth, record)


# ---------------------------------------------------------------------- room


def _room_beside(cache: PrefixCache, group: QuotaGroup, walk: Walk, source: Node | None) -> int:
    """Blocks that could be had while the match is held, and all of `source` if given."""
    locked = shared = 0  # evictable blocks that holding would protect: the group's own, and public ones
    node = walk.node
    if source is not None and not source.refs:
        if source.space.group is group:
            locked = len(source.blocks)
        else:
            shared = len(source.blocks)
    current: Node | None = node if node is not source else node.parent
    while current is not None and not current.refs:
        count = len(current.blocks) if current is not node else (walk.depth - node.start) // cache.block_size
        if current.space.group is group:
            locked += count
        else:
            shared += count
        current = current.parent
    if source is not None:
        return cache._capacity.available(group, locked, shared, source, source.end)
    return cache._capacity.available(group, locked, shared, node, walk.depth)


def check_room(
    cache: PrefixCache,
    needed: int,
    space: Space,
    total: int,
    room: Callable[[], int],
    lease: Lease | None = None,
) -> None:
    """Raise OutOfBlocks unless `needed` blocks can be had; pins give way to what could never fit.

    Args:
        total: blocks of the whole request.
        room: how many can be had.
        lease: the lease that grows; None: a new one.
    """
    available = room()
    if needed <= available:
        return
    pins_yield = len(cache._pins) > 0 and _pins_must_yield(cache, space, total, lease)
    while pins_yield and len(cache._pins):
        cache._pins.give_way()
        available = room()
        if needed <= available:
            return
    cache._out_of_blocks += 1
    cache._tree.drop_empty_root(space)
    cache._tree.drop_empty_root(cache._public.space)
    quota = "" if space.group.ceiling is None else f" within the quota of {space.group.ceiling}"
    raise OutOfBlocks(
        f"{needed} blocks are needed, {available} of {cache.num_blocks} are free or evictable{quota}",
        needed=needed,
        available=available,
    )


def _pins_must_yield(cache: PrefixCache, space: Space, total: int, lease: Lease | None) -> bool:
    """Whether waiting can't help a request of `total` blocks: it is alone, and fits but for the pins."""
    if len(cache._leases) > (lease is not None):
        return False
    if lease is not None and (lease._sources or lease._source_blocks):
        return False
    group = space.group
    attainable = cache.num_blocks - cache._capacity.kept_by_floors(group)
    return total <= min(attainable, group.ceiling or cache.num_blocks)
