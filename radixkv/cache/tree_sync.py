"""Bringing the tree up to what a lease has committed.

One block at a time, the next tokens either join the tree (`_insert`), or are there already in whole blocks
(`_dedupe`: those are taken over and the lease's own freed).

    root ── [b0 b1]                    lease: b0 b1 | p2 p3      p2 p3 private
    root ── [b0 b1 p2 p3]              nothing hung below: the node was extended
    root ── [b0 b1] ─┬─ [p2 p3]        something did: a new child
                     └─ [c2 c3']
    root ── [b0 b1] ── [c2] ─┬─ [p3]   c2 holds the tokens of p2: p2 is freed, the block table says c2
                             └─ [c3']

A partial block is its lease's own while it grows: it joins the tree beside others that hold the same tokens,
and is deduped when it is full.

Usually tree_tokens == num_committed. It lags while copies have not run, and while a block is shared with
a fork that can't follow; the lease's next call tries again. It is ahead when the tokens of a fully cached
prompt, or of a fork's sibling, were in the tree before this lease committed them.
"""

from __future__ import annotations

from array import array

from radixkv.cache.keys import TOKEN_BYTES, shared_bytes
from radixkv.cache.lease import Lease
from radixkv.cache.node import Children, Namespace, Node


def sync(lease: Lease) -> int:
    """Bring the tree from `tree_tokens` up to `num_committed`; returns where shared tokens end.

    O(tokens between).
    """
    shared_until = 0
    if not lease.shares:
        return 0
    tree = lease.tree
    size = tree.block_size
    while lease.tree_tokens < lease.num_committed:
        pos = lease.tree_tokens
        start = pos - pos % size
        end = start + size
        limit, space = lease.num_committed, lease.space
        if pos < lease.public_tokens:
            limit, space = min(limit, lease.public_tokens), lease.space.public
        node = lease.node
        if pos == start or len(node.blocks) == 1:  # the next block is, or is to be, a child's first one
            above = node if pos == start else node.parent
            assert above is not None
            siblings = above.children if above.space is space else tree.children_of(above, space)
            if siblings is not None and end <= limit:
                child = siblings.find(bytes(lease.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]))
                if child is not None:
                    shared_until = _dedupe(lease, child, start, limit)
                    continue
        if pos != start:
            _grow_tail(lease, pos, min(limit, end))
        elif not _insert(lease, pos, limit, space, siblings):
            break
    return shared_until


def would_dedupe(lease: Lease, num_tokens: int) -> bool:
    """See `Lease.would_dedupe`."""
    tree, pos = lease.tree, lease.tree_tokens
    size = tree.block_size
    start = pos - pos % size
    end = start + size
    is_public = pos < lease.public_tokens
    if pos > lease.num_committed:
        return True
    if not lease.shares or end > (min(num_tokens, lease.public_tokens) if is_public else num_tokens):
        return False
    if pos != start and len(lease.node.blocks) > 1:
        return False
    above = lease.node if pos == start else lease.node.parent
    assert above is not None
    siblings = tree.children_of(above, lease.space.public if is_public else lease.space)
    block = bytes(lease.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])
    return siblings is not None and siblings.find(block) is not None


def _grow_tail(lease: Lease, pos: int, end: int) -> None:
    """Grow the tree's partial block [.., pos) to `end`, for the lease and the forks that share it."""
    node = lease.node
    lease.tree.extend_tail(node, lease.tokens[pos * TOKEN_BYTES : end * TOKEN_BYTES])
    for sibling in lease.forks or ():
        if sibling.node is node and sibling.tree_tokens == pos:
            sibling.tree_tokens = end
    lease.tree_tokens = end
    lease.capacity.drop_covered(node)


def _dedupe(lease: Lease, child: Node, start: int, limit: int) -> int:
    """Take over a child whose first block holds the lease's tokens from `start` on; returns its end.

    Every block taken over replaces one of the lease: private ones are freed, a partial one in the tree is
    covered now and goes with its last holder. O(tokens shared).
    """
    tree = lease.tree
    size = tree.block_size
    limit = min(limit, start + len(child.blocks) * size)
    same = shared_bytes(child.key, bytes(lease.tokens[start * TOKEN_BYTES : limit * TOKEN_BYTES]))
    count = same // tree.block_bytes
    target = tree.split(child, count) if count < len(child.blocks) else child
    first = start // size
    own = lease.blocks(-(-lease.tree_tokens // size), first + count)
    lease.replace_blocks(first, target.blocks)
    lease.move(target)
    lease.capacity.free_private(own, lease.space.group)
    lease.own_from = lease.tree_tokens
    return lease.tree_tokens


def _insert(lease: Lease, pos: int, end: int, space: Namespace, siblings: Children | None) -> bool:
    """Put the tokens [pos, end) and their private blocks into the tree, as part of `space`.

    False: the first of the blocks is also private to a lease that can't follow.
    """
    tree = lease.tree
    size = tree.block_size
    first = pos // size
    blocks = lease.blocks(first, -(-end // size))
    followers: list[tuple[Lease, int]] = []
    if lease.capacity.pool.extra_holders:
        count = _sharable_blocks(lease, blocks, first, followers)
        if not count:
            return False
        if count < len(blocks):
            blocks = blocks[:count]
            end = min(end, pos + count * size)
    key = bytearray(lease.tokens[pos * TOKEN_BYTES : end * TOKEN_BYTES])
    node = lease.node
    if (
        siblings is None
        and node.holders == 1
        and node.is_leaf
        and not node.pins_here
        and node.parent is not None
        and node.space is space
        # Blocks with hits of their own are kept apart from new ones, for policies that count hits.
        and (node.start >= lease.own_from or not tree.policy.tracks_path)
    ):
        tree.extend(node, key, blocks)
    else:
        lease.node = tree.add_held_child(node, space, key, blocks)
        if siblings is not None and siblings.partial:
            lease.capacity.drop_covered(lease.node)
    if space.group is not lease.space.group:
        lease.capacity.transfer(len(blocks), lease.space.group, space.group)
    lease.tree_tokens = end
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
    pool = lease.capacity.pool
    sharers: list[tuple[Lease, list[int]]] = []
    holders = [0] * len(blocks)
    for other in lease.forks or ():
        if other is not lease and other.shares:
            theirs = other.blocks(first, first + len(blocks))
            equal = [i for i, block in enumerate(theirs) if block == blocks[i]]
            if equal:
                sharers.append((other, equal))
            for i in equal:
                holders[i] += 1
    count = 0
    while count < len(blocks) and pool.extra_holders.get(blocks[count], 0) == holders[count]:
        count += 1
    pool.forget_sharing(blocks[:count])
    for other, equal in sharers:
        shared = [i for i in equal if i < count]
        if shared:
            followers.append((other, first + shared[-1] + 1))
    return count


def _follow(lease: Lease, leader: Lease, num_blocks: int) -> None:
    """A fork has put blocks into the tree that this lease shares: hold its path's first `num_blocks`."""
    size = lease.tree.block_size
    start = -(-lease.tree_tokens // size)
    pairs = zip(lease.blocks(start, num_blocks), leader.blocks(start, num_blocks), strict=True)
    duplicates = array("i", [own for own, theirs in pairs if own != theirs])
    node = lease.tree.split_after(leader.node, num_blocks * size)
    lease.replace_blocks(0, leader.blocks(0, num_blocks))
    if lease.pending is not None:
        lease.pending.forget_into(duplicates)
    lease.move(node)
    lease.capacity.free_private(duplicates, lease.space.group)
