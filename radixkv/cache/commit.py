"""Committing: bringing the tree up to what leases have committed.

One block at a time, a lease's next tokens either join the tree (`_insert`), or are there already in whole
blocks (`_converge`: the lease takes those and frees its own), or must wait (*lagging*) because another cached
block begins with the same partial block, or because forks that can't follow share it.

    root ── [b0 b1]                    lease: b0 b1 | p2 p3      p2 p3 private
    root ── [b0 b1 p2 p3]              nothing hung below: the node was extended
    root ── [b0 b1] ─┬─ [p2 p3]        something did: a new child
                     └─ [c2 c3']
    root ── [b0 b1] ── [c2] ─┬─ [p3]   c2 holds the tokens of p2: p2 is freed, the block table says c2
                             └─ [c3']
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from radixkv.cache.holding import drop_covered, hold, release_hold, unprotect
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
    if cache._lagging:
        cache._lagging.pop(lease, None)
    if not cache.enabled or lease._is_unshareable:
        return 0
    tree = cache._tree
    size, block_bytes = tree.block_size, tree.block_bytes
    while lease._tree_tokens < lease.num_committed:
        pos = lease._tree_tokens
        if pos % size:
            converged = _sync_tail(lease, pos, min(lease.num_committed, pos - pos % size + size))
            if converged is None:
                cache._lagging[lease] = None
                break
            shared_until = max(shared_until, converged)
            continue
        limit, space = lease.num_committed, lease._space
        if pos < lease._public_tokens:
            limit, space = min(limit, lease._public_tokens), cache._public.space
        node = lease._node
        siblings = node.children if node.space is space else tree.children_of(node, space)
        if siblings is not None:
            first = bytes(lease._tokens[pos * TOKEN_BYTES : min(pos + size, limit) * TOKEN_BYTES])
            if len(first) == block_bytes:
                child = siblings.find(first)
                if child is not None:
                    shared_until = _converge(lease, child, pos, limit)
                    continue
            elif siblings.covers(first) is not None:
                cache._lagging[lease] = None
                break
        if not _insert(lease, pos, limit, space, siblings):
            cache._lagging[lease] = None
            break
    return shared_until


def _sync_tail(lease: Lease, pos: int, end: int) -> int | None:
    """Grow the tree's partial block [.., pos) to `end`; None: a sibling covers it already.

    Returns where tokens shared with others end: 0, or the end of the block after converging.
    """
    cache = lease._cache
    tree = cache._tree
    node = lease._node
    start = pos - pos % cache.block_size
    if len(node.blocks) == 1:
        parent = node.parent
        assert parent is not None
        siblings = tree.children_of(parent, node.space)
        assert siblings is not None
        grown = bytes(lease._tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])
        if len(grown) == tree.block_bytes:
            child = siblings.find(grown)
            if child is not None:
                _leave_stub(lease, parent, start)
                return _converge(lease, child, start, end)
        elif siblings.covers(grown) is not None:
            return None
    tree.extend_tail(node, lease._tokens[pos * TOKEN_BYTES : end * TOKEN_BYTES])
    for sibling in lease._family or ():
        if sibling._node is node and sibling._tree_tokens == pos:
            sibling._tree_tokens = end
    lease._tree_tokens = end
    drop_covered(cache, node)
    return 0


def _leave_stub(lease: Lease, parent: Node, start: int) -> None:
    """Go back above a node that consists of this lease's partial block; its block becomes private."""
    cache = lease._cache
    stub = lease._node
    hold(cache, parent)
    lease._node = parent
    stub.holders -= 1
    if stub.holders or stub.refs > 1:
        # Others need the block where it is: this lease keeps no claim on it, since it converges next.
        unprotect(cache, stub)
        lease._table[start // cache.block_size] = -1
    else:
        group = stub.space.group
        cache._tree.trim(stub, 1)
        group.used -= 1
        lease._space.group.used += 1
    lease._tree_tokens = start


def _converge(lease: Lease, child: Node, pos: int, limit: int) -> int:
    """Follow a child whose first block is this lease's next one; returns where it ends. O(tokens shared).

    Every block followed replaces a private one of the lease, which is freed.
    """
    cache = lease._cache
    tree = cache._tree
    size = cache.block_size
    limit = min(limit, pos + len(child.blocks) * size)
    same = shared_bytes(child.key, bytes(lease._tokens[pos * TOKEN_BYTES : limit * TOKEN_BYTES]))
    count = same // tree.block_bytes
    target = tree.split(child, count) if count < len(child.blocks) else child
    first = pos // size
    own = array("i", [block for block in lease._table[first : first + count] if block >= 0])
    hold(cache, target)
    release_hold(cache, lease._node)
    lease._node = target
    cache._capacity.free_private(own, lease._space.group)
    lease._table[first : first + count] = target.blocks
    lease._tree_tokens = lease._own_from = pos + count * size
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
        if siblings is not None and siblings.stubs:
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
    cache._lagging.pop(lease, None)
