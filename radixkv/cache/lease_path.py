# SPDX-License-Identifier: Apache-2.0
"""LeasePath: places of a lease's blocks, in the tree or private, and how committed ones join the tree.

    0 ........... tree_tokens ........... num_tokens
    |  in the tree:            |  private blocks: not
    |  its node protects them  |  matchable by others

One block at a time, the next tokens either join the tree (`_insert`), or are there already in whole blocks
(`_dedupe`: those are taken over and the lease's own freed).

    root ── [b0 b1]                    lease: b0 b1 | p2 p3      p2 p3 private
    root ── [b0 b1 p2 p3]              the node had no children: it was extended
    root ── [b0 b1] ─┬─ [p2 p3]        it had some: a new child
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
from collections.abc import Container

from radixkv.cache.block_table import BlockTable
from radixkv.cache.capacity import Capacity
from radixkv.cache.keys import TOKEN_BYTES, shared_bytes
from radixkv.cache.node import Children, Namespace, Node
from radixkv.cache.pending_copies import Moved, PendingCopies
from radixkv.cache.radix_tree import RadixTree


class LeasePath(BlockTable):
    """A block table that begins with the blocks of a path in the tree; `Lease` sets its fields."""

    capacity: Capacity
    tree: RadixTree
    owner: Namespace
    tokens: bytes | bytearray  # the token ids, four bytes each; bytes until tokens are appended
    num_tokens: int  # that have slots
    num_committed: int  # leading tokens whose K/V exist or are computed in this step
    node: Node  # where the tree's part of its path ends; the lease is one of its holders
    tree_tokens: int  # up to there
    own_from: int  # tokens from there on in the tree were put there by this lease
    # The cache's use counter when it was acquired: later uses by others have a higher one.
    used_at: int
    public_tokens: int  # leading ones that belong to a public prefix
    pending: PendingCopies | None  # copies into its blocks that have not run
    shares: bool  # whether what it commits may be matched
    most_shared: int  # leading tokens that may; those after stay private
    # The leases that are forks of one another, itself included; None: there are no others.
    forks: list[LeasePath] | None

    def private_blocks(self) -> array[int]:
        """The part of the block table that is not in the tree."""
        return self.blocks(-(-self.tree_tokens // self.tree.block_size), self.num_blocks)

    def move(self, node: Node) -> None:
        """Hold another node instead of the present one."""
        self.tree.hold(node)
        old, self.node, self.tree_tokens = self.node, node, node.end
        self.capacity.release(old)

    def invalidate_below(self, below: Container[Node], moved: Moved) -> bool:
        """Make its blocks in nodes that are about to leave the tree private; False: there are none."""
        if self.pending is not None:
            self.pending.invalidate_below(below, moved)
        if self.node not in below:
            return False
        node, start, tree = self.node, self.node.start, self.tree
        while node in below:
            assert node.parent is not None
            start, node = node.start, node.parent
        tree.hold(node)
        tree.release(self.node)
        size = tree.block_size
        for block in self.blocks(start // size, -(-self.tree_tokens // size)):
            moved.setdefault(block, []).append(self.owner.group)
        self.node, self.tree_tokens = node, start
        self.own_from = min(self.own_from, start)
        return True

    # ------------------------------------------------------------------ committed blocks join the tree

    def sync(self) -> int:
        """Bring the tree from `tree_tokens` up to `num_committed`; returns where shared tokens end.

        O(tokens between).
        """
        shared_until = 0
        if not self.shares:
            return 0
        tree = self.tree
        size = tree.block_size
        most = min(self.num_committed, self.most_shared)
        while self.tree_tokens < most:
            pos = self.tree_tokens
            start = pos - pos % size
            end = start + size
            limit, owner = most, self.owner
            if pos < self.public_tokens:
                limit, owner = min(limit, self.public_tokens), self.owner.public
            node = self.node
            if pos == start or len(node.blocks) == 1:  # the next block is, or is to be, a child's first one
                above = node if pos == start else node.parent
                assert above is not None
                siblings = above.children if above.owner is owner else tree.children_of(above, owner)
                if siblings is not None and end <= limit:
                    child = siblings.whole.get(bytes(self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]))
                    if child is not None:
                        shared_until = self._dedupe(child, start, limit)
                        continue
            if pos != start:
                self._grow_tail(pos, min(limit, end))
            elif not self._insert(pos, limit, owner, siblings):
                break
        return shared_until

    def would_dedupe(self, num_tokens: int) -> bool:
        """Return True if committing that many tokens would take over blocks committed by others. O(block).

        Changes nothing. Only the next block can be one: what hangs below one's own new blocks is one's own.
        """
        tree, pos = self.tree, self.tree_tokens
        size = tree.block_size
        start = pos - pos % size
        end = start + size
        num_tokens = min(num_tokens, self.most_shared)
        is_public = pos < self.public_tokens
        if pos > self.num_committed:
            return True
        if not self.shares or end > (min(num_tokens, self.public_tokens) if is_public else num_tokens):
            return False
        if pos != start and len(self.node.blocks) > 1:
            return False
        above = self.node if pos == start else self.node.parent
        assert above is not None
        siblings = tree.children_of(above, self.owner.public if is_public else self.owner)
        block = bytes(self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])
        return siblings is not None and block in siblings.whole

    def _grow_tail(self, pos: int, end: int) -> None:
        """Grow the tree's partial block [.., pos) to `end`, for the lease and the forks that share it."""
        node = self.node
        self.tree.extend_tail(node, self.tokens[pos * TOKEN_BYTES : end * TOKEN_BYTES])
        for sibling in self.forks or ():
            if sibling.node is node and sibling.tree_tokens == pos:
                sibling.tree_tokens = end
        self.tree_tokens = end
        self.capacity.drop_covered(node)

    def _dedupe(self, child: Node, start: int, limit: int) -> int:
        """Take over a child whose first block holds the lease's tokens from `start` on; returns its end.

        Every block taken over replaces one of the lease: private ones are freed, a partial one in the tree is
        covered now and goes with its last holder. O(tokens shared).
        """
        tree = self.tree
        size = tree.block_size
        limit = min(limit, start + len(child.blocks) * size)
        same = shared_bytes(child.key, bytes(self.tokens[start * TOKEN_BYTES : limit * TOKEN_BYTES]))
        count = same // tree.block_bytes
        target = tree.split(child, count) if count < len(child.blocks) else child
        first = start // size
        own = self.blocks(-(-self.tree_tokens // size), first + count)
        self.replace_blocks(first, target.blocks)
        self.move(target)
        self.capacity.free_private(own, self.owner.group)
        self.own_from = self.tree_tokens
        return self.tree_tokens

    def _insert(self, pos: int, end: int, owner: Namespace, siblings: Children | None) -> bool:
        """Put the tokens [pos, end) and their private blocks into the tree, as part of `owner`.

        False: the first of the blocks is also private to a lease that can't follow.
        """
        tree = self.tree
        size = tree.block_size
        first = pos // size
        blocks = self.blocks(first, -(-end // size))
        followers: list[tuple[LeasePath, int]] = []
        if self.capacity.pool.extra_holders:
            count = self._sharable_blocks(blocks, first, followers)
            if not count:
                return False
            if count < len(blocks):
                blocks = blocks[:count]
                end = min(end, pos + count * size)
        key = bytearray(self.tokens[pos * TOKEN_BYTES : end * TOKEN_BYTES])
        node = self.node
        if (
            siblings is None
            and node.holders == 1
            and node.is_leaf
            and not node.pins_here
            and node.parent is not None
            and node.owner is owner
            # Blocks with hits of their own are kept apart from new ones, for policies that count hits.
            and (node.start >= self.own_from or not tree.policy.tracks_path)
        ):
            tree.extend(node, key, blocks)
        else:
            self.node = tree.add_held_child(node, owner, siblings, key, blocks)
            if siblings is not None and siblings.partial:
                self.capacity.drop_covered(self.node)
        if owner.group is not self.owner.group:
            self.capacity.transfer(len(blocks), self.owner.group, owner.group)
        self.tree_tokens = end
        for follower, count in followers:
            follower._follow(self, count)
        for follower, _ in followers:
            follower.sync()
        return True

    def _sharable_blocks(self, blocks: array[int], first: int, followers: list[tuple[LeasePath, int]]) -> int:
        """Count the leading blocks that may enter the tree: unshared ones, or shared with forks only.

        Forks that share a block have the same tokens up to its end, so they can follow this lease into the
        tree. Fills `followers` with them and the number of leading blocks that each must take over.
        """
        pool = self.capacity.pool
        sharers: list[tuple[LeasePath, list[int]]] = []
        holders = [0] * len(blocks)
        for other in self.forks or ():
            if other is not self and other.shares:
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

    def _follow(self, leader: LeasePath, num_blocks: int) -> None:
        """A fork has put blocks into the tree that this lease shares: hold its path's first `num_blocks`."""
        size = self.tree.block_size
        start = -(-self.tree_tokens // size)
        pairs = zip(self.blocks(start, num_blocks), leader.blocks(start, num_blocks), strict=True)
        duplicates = array("i", [own for own, theirs in pairs if own != theirs])
        node = self.tree.split_after(leader.node, num_blocks * size)
        self.replace_blocks(0, leader.blocks(0, num_blocks))
        if self.pending is not None:
            self.pending.forget_into(duplicates)
        self.move(node)
        self.capacity.free_private(duplicates, self.owner.group)
