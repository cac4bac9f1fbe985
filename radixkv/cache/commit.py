"""Committing: bringing the tree up to what leases have committed.

One block at a time, a lease's next tokens either join the tree (`_insert`), or are there already in whole
blocks (`_dedupe`: the lease takes those and frees its own).

    root ── [b0 b1]                    lease: b0 b1 | p2 p3      p2 p3 private
    root ── [b0 b1 p2 p3]              nothing hung below: the node was extended
    root ── [b0 b1] ─┬─ [p2 p3]        something did: a new child
                     └─ [c2 c3']
    root ── [b0 b1] ── [c2] ─┬─ [p3]   c2 holds the tokens of p2: p2 is freed, the block table says c2
                             └─ [c3']

A partial block is its lease's own while it grows: it joins the tree beside others that hold the same tokens,
and is deduped when it is full. What a lease has committed waits outside the tree only while blocks of it are
shared with a fork that can't follow; the lease's next call tries again.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from radixkv.cache.holding import drop_covered, hold, release_hold
from radixkv.cache.keys import TOKEN_BYTES, shared_bytes
from radixkv.cache.node import Children, Node, Space

if TYPE_CHECKING:
    from radixkv.cache.lease import Lease


def sync(lease: Lease) -> int:
    """Bring the tree from `_tree_tokens` up to `num_committed`; returns where shared tokens end.

    O(tokens between).
    """
    cache = lease._cache
    shared_until = 0
    if not cache.enabled or lease._is_unshareable:
        return 0
    tree = cache._tree
    size = tree.block_size
    while lease._tree_tokens < lease.num_committed:
        pos = lease._tree_tokens
        start = pos - pos % size
        limit, space = lease.num_committed, lease._space
        if pos < lease._public_tokens:
            limit, space = min(limit, lease._public_tokens), cache._public.space
        node = lease._node
        end = start + size
        if pos == start or len(node.blocks) == 1:  # the next block is, or is to be, a child's first one
            above = node if pos == start else node.parent
            assert above is not None
            siblings = above.children if above.space is space else tree.children_of(above, space)
            if siblings is not None and end <= limit:
                child = siblings.find(bytes(lease._tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]))
                if child is not None:
                    shared_until = _dedupe(lease, child, start, limit)
                    continue
        if pos != start:
            _grow_tail(lease, pos, min(limit, end))
        elif not _insert(lease, pos, limit, space, siblings):
            break
    return shared_until


def _grow_tail(lease: Lease, pos: int, end: int) -> None:
    """Grow the tree's partial block [.., pos) to `end`, for the lease and the forks that share it."""
    cache = lease._cache
    node = lease._node
    cache._tree.extend_tail(node, lease._tokens[pos * TOKEN_BYTES : end * TOKEN_BYTES])
    for sibling in lease._family or ():
        if sibling._node is node and sibling._tree_tokens == pos:
            sibling._tree_tokens = end
    lease._tree_tokens = end
    drop_covered(cache, node)


def _dedupe(lease: Lease, child: Node, start: int, limit: int) -> int:
    """Take over a child whose first block holds the lease's tokens from `start` on; returns where it ends.

    Every block taken over replaces one of the lease: private ones are freed, a partial one in the tree is
    covered now and goes with its last holder. O(tokens shared).
    """
    cache = lease._cache
    tree = cache._tree
    size = cache.block_size
    limit = min(limit, start + len(child.blocks) * size)
    same = shared_bytes(child.key, bytes(lease._tokens[start * TOKEN_BYTES : limit * TOKEN_BYTES]))
    count = same // tree.block_bytes
    target = tree.split(child, count) if count < len(child.blocks) else child
    first = start // size
    own = lease._table[-(-lease._tree_tokens // size) : first + count]
    hold(cache, target)
    release_hold(cache, lease._node)
    lease._node = target
    cache._capacity.free_private(own, lease._space.group)
    lease._table[first : first + count] = target.blocks
    lease._tree_tokens = lease._own_from = start + count * size
    return lease._tree_tokens


def _insert(lease: Lease, pos: int, end: int, space: Space, siblings: Children | None) -> bool:
    """Put the tokens [pos, end) and their private blocks into the tree, as part of `space`.

    False: the first of the blocks is also private to a lease that can't follow.
    """
    cache = lease._cache
    tree = cache._tree
    size = tree.block_size
    first = pos // size
    blocks = lease._table[first : -(-end // size)]
    followers: list[tuple[Lease, int]] = []
    if cache._pool.extra_holders:
        count = _sharable_blocks(lease, blocks, first, followers)
        if not count:
            return False
        if count < len(blocks):
            blocks = blocks[:count]
            end = min(end, pos + count * size)
    num_blocks = len(blocks)
    key = bytearray(lease._tokens[pos * TOKEN_BYTES : end * TOKEN_BYTES])
    node = lease._node
    if (
        siblings is None
        and node.holders == 1
        and node.is_leaf
        and not node.pins_here
        and node.parent is not None
        and node.space is space
        # Blocks with hits of their own are kept apart from new ones, for policies that count hits.
        and (node.start >= lease._own_from or not tree.policy.tracks_path)
    ):
        tree.extend(node, key, blocks)
    else:
        child = tree.add_child(node, space, key, blocks)
        child.refs = child.holders = 1  # the lease's hold moves down: `node` keeps its count of references
        node.holders -= 1
        space.group.protected += num_blocks
        lease._node = child
        if siblings is not None:
            drop_covered(cache, child)
    if space.group is not lease._space.group:
        space.group.used += num_blocks
        lease._space.group.used -= num_blocks
    lease._tree_tokens = end
    for follower, count in followers:
        _follow(follower, lease, count)
    for follower, _ in followers:
        sync(follower)
    return True


def _sharable_blocks(lease: Lease, blocks: array[int], first: int, followers: list[tuple[Lease, int]]) -> int:
    """How many leading blocks may enter the tree: those that nobody but forks shares.

    Forks that share a block have the same tokens up to its end, so they can follow this lease into the
    tree. Fills `followers` with them and the number of leading blocks that each must take over.
    """
    extra = lease._cache._pool.extra_holders
    sharers: list[tuple[Lease, list[int]]] = []
    for other in lease._family or ():
        if other is not lease and not other._is_unshareable:
            theirs = other._table[first : min(other._num_blocks, first + len(blocks))]
            equal = [i for i, block in enumerate(theirs) if block == blocks[i]]
            if equal:
                sharers.append((other, equal))
    holders = [0] * len(blocks)
    for _, equal in sharers:
        for i in equal:
            holders[i] += 1
    count = len(blocks)
    for i, block in enumerate(blocks):
        if extra.get(block, 0) != holders[i]:
            count = i
            break
    for i, block in enumerate(blocks[:count]):
        if holders[i]:
            del extra[block]
    for other, equal in sharers:
        shared = [i for i in equal if i < count]
        if shared:
            followers.append((other, first + shared[-1] + 1))
    return count


def _follow(lease: Lease, leader: Lease, num_blocks: int) -> None:
    """A fork has put blocks into the tree that this lease shares: hold its path's first `num_blocks`."""
    cache = lease._cache
    size = cache.block_size
    start = -(-lease._tree_tokens // size)
    pairs = zip(lease._table[start:num_blocks], leader._table[start:num_blocks], strict=True)
    duplicates = array("i", [own for own, theirs in pairs if own != theirs])
    place = leader._node
    while place.start >= num_blocks * size:
        assert place.parent is not None
        place = place.parent
    keep = num_blocks - place.start // size
    if keep < len(place.blocks):
        place = cache._tree.split(place, keep)
    old = lease._node
    hold(cache, place)
    lease._node = place
    lease._tree_tokens = place.end
    lease._table[:num_blocks] = leader._table[:num_blocks]
    release_hold(cache, old)
    cache._capacity.free_private(duplicates, lease._space.group)
