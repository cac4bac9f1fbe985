"""Holding: a lease's tokens, its block table and its place in the tree, and how these stay in step.

Who owns which part of a lease's tokens:

    0 ........... tree_tokens ........... num_tokens
    |  in the tree:            |  private blocks: nobody
    |  its node protects them  |  can match them

Bringing the tree up to what is committed (`_sync`), one block at a time, the next tokens either join the tree
(`_insert`), or are there already in whole blocks (`_dedupe`: those are taken over and the lease's own freed).

    root ── [b0 b1]                    lease: b0 b1 | p2 p3      p2 p3 private
    root ── [b0 b1 p2 p3]              nothing hung below: the node was extended
    root ── [b0 b1] ─┬─ [p2 p3]        something did: a new child
                     └─ [c2 c3']
    root ── [b0 b1] ── [c2] ─┬─ [p3]   c2 holds the tokens of p2: p2 is freed, the block table says c2
                             └─ [c3']

A partial block is its lease's own while it grows: it joins the tree beside others that hold the same tokens,
and is deduped when it is full.

Usually tree_tokens == num_committed. It is behind while copies have not run, and while a block is shared with
a fork that can't follow; the lease's next call tries again. It is ahead when the tokens of a fully cached
prompt, or of a fork's sibling, were in the tree before this lease committed them.
"""

from __future__ import annotations

from array import array
from collections.abc import Container

from radixkv.cache.block_identity import IDENTITY_BYTES
from radixkv.cache.block_table import BlockTable
from radixkv.cache.discard import discard_from, drop_covered, release, unprotect
from radixkv.cache.keys import TOKEN_BYTES, shared_bytes
from radixkv.cache.moved_blocks import Moved
from radixkv.cache.node import Children, Namespace, Node
from radixkv.cache.pending_copies import Copy, PendingCopies
from radixkv.cache.retention.capacity import Capacity


class Holding(BlockTable):
    """What one lease holds. Its fields are written here only; `Lease` is the public face of it.

    Attributes:
        space: the namespace.
        tokens: the token ids as bytes.
        num_tokens: tokens that have slots.
        num_committed: leading tokens whose K/V exist or are computed in this step.
        node: where the tree's part of its path ends; the lease is one of its holders.
        tree_tokens: the tokens up to there.
        pending: copies into its blocks that have not run.
        shares: whether what it commits may be matched.
    """

    __slots__ = (
        "_capacity",
        "_forks",
        "_own_from",
        "_public_tokens",
        "_tree",
        "node",
        "num_committed",
        "num_tokens",
        "pending",
        "shares",
        "space",
        "tokens",
        "tree_tokens",
    )

    def __init__(
        self,
        capacity: Capacity,
        space: Namespace,
        tokens: bytes | bytearray,
        node: Node,
        tree_tokens: int,
        num_tokens: int,
        num_committed: int,
        public_tokens: int,
        shares: bool,
    ) -> None:  # the block table is filled by `begin` or `_share_with`
        self._capacity = capacity
        self._tree = capacity.tree
        self.space = space
        self.tokens = tokens  # bytes until tokens are appended
        self.num_tokens = num_tokens
        self.num_committed = num_committed
        self.node = node
        self.tree_tokens = self._own_from = tree_tokens
        self._public_tokens = public_tokens  # leading tokens that belong to a public prefix
        self.shares = shares
        self.pending: PendingCopies | None = None
        self._forks: list[Holding] | None = None  # the forks of one another, itself included

    def private_blocks(self) -> array[int]:
        """The part of the block table that is not in the tree."""
        return self.blocks(-(-self.tree_tokens // self._tree.block_size), self.num_blocks)

    @property
    def cached_identity(self) -> tuple[bytes, int]:
        """Identity of its whole blocks in the tree (of none, the seed), and their tokens. O(1)."""
        node = self.node if self.node.ids else self.node.parent
        assert node is not None
        return bytes(node.ids[-IDENTITY_BYTES:]), self.tree_tokens - self.tree_tokens % self._tree.block_size

    @property
    def has_pending_copies(self) -> bool:
        """Whether copies have been listed that have not run yet."""
        return self.pending is not None and self.pending.hold_something

    @property
    def copies(self) -> list[Copy]:
        """(source block, target block, slots) to copy, in order, before computing."""
        return [] if self.pending is None else self.pending.copies

    def take_copies(self, *, until_done: bool = False) -> list[Copy]:
        """The pending copies; the list is empty afterwards, and their sources stay held.

        Args:
            until_done: until `copies_done`, for who commits now and copies later; else until the next commit.
        """
        return [] if self.pending is None else self.pending.take(until_done)

    def _new_copy(self, source: int, target: int, slots: int, node: Node | None) -> None:
        if self.pending is None:
            self.pending = PendingCopies(self._capacity, self.space.group)
        self.pending.add(source, target, slots, node)

    # ------------------------------------------------------------------ beginning

    def begin(self, num_new: int, source: Node | None, slots: int) -> None:
        """Fill the block table: the path's blocks, then new ones; list the copy of `slots` slots of `source`.

        For admission: the path and `source` are protected already. O(path + blocks).
        """
        table = self._tree.path_blocks(self.node)
        if num_new:
            table += self._capacity.allocate(num_new, self.space.group)
        self._fill(table)
        if source is not None:
            # The prefix was cut just before the block.
            self._new_copy(source.blocks[0], table[self.num_blocks - num_new], slots, source)

    def _share_with(self, child: Holding) -> None:
        """Make a new holding of the same node a fork of this one. O(blocks)."""
        child._fill(self.blocks(0, self.num_blocks))
        child._own_from = self._own_from
        self._tree.hold(self.node)
        self._capacity.pool.share(self.private_blocks())
        if self.pending is not None:
            child.pending = self.pending.for_fork()
        if self._forks is None:
            self._forks = [self]
        self._forks.append(child)
        child._forks = self._forks

    # ------------------------------------------------------------------ growing and shrinking

    def _must_copy_tail(self) -> bool:
        """Whether others share the partial last block, so that it can't be written."""
        size = self._tree.block_size
        if self.tree_tokens > self.num_tokens - self.num_tokens % size:
            return self.node.holders > 1 or self.tree_tokens > self.num_tokens
        extra = self._capacity.pool.extra_holders
        return bool(extra) and self.blocks(self.num_blocks - 1, self.num_blocks)[0] in extra

    def _append_in_place(self, data: bytes) -> bool:
        """Append tokens if the lease's own blocks have slots for them; False: nothing was done.

        O(new tokens), amortised.
        """
        old = self.num_tokens
        new = old + len(data) // TOKEN_BYTES
        size = self._tree.block_size
        if new > self.num_blocks * size:
            return False
        is_own = self.tree_tokens == old and self.node.holders == 1  # the usual case, without a call
        if not is_own and old % size and data and self._must_copy_tail():
            return False
        tokens = self.tokens
        if type(tokens) is bytes:
            self.tokens = tokens = bytearray(tokens)
        tokens += data
        self.num_tokens = new
        return True

    def _replace_tail(self, target: int) -> None:
        """Replace the shared partial last block by `target`; whoever shares it keeps the old one.

        What is computed of it is listed to be copied.
        """
        start = self.num_tokens - self.num_tokens % self._tree.block_size
        last = self.num_blocks - 1
        source = self.blocks(last, last + 1)[0]
        slots = min(self.num_committed, self.num_tokens) - start
        if self.tree_tokens > start:
            tail, tree = self.node, self._tree
            upper = tree.split(tail, len(tail.blocks) - 1) if len(tail.blocks) > 1 else tail.parent
            assert upper is not None
            tree.hold(upper)
            tree.drop_holder(tail)
            self.node, self.tree_tokens = upper, start
            if slots > 0:
                self._new_copy(source, target, slots, tail)
            else:
                unprotect(self._capacity, tail)
        elif slots > 0:
            self._new_copy(source, target, slots, None)
        else:
            self._capacity.pool.drop_holder(source)
        self._replace_blocks(last, array("i", [target]))

    def _end_copies(self) -> None:
        """The pending copies have run, or never will. O(copies)."""
        pending = self.pending
        if pending is not None:
            pending.done()
            if not pending.copies:
                self.pending = None

    def _truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and the blocks that they need."""
        size = self._tree.block_size
        keep = -(-num_tokens // size)
        private = max(keep, -(-self.tree_tokens // size))
        self._capacity.free_private(self.blocks(private, self.num_blocks), self.space.group)
        if self.tree_tokens > keep * size:  # others committed it: it is theirs as well
            self._move(self._tree.split_after(self.node, keep * size))
        self._keep_blocks(keep)
        self.tokens = self.tokens[: num_tokens * TOKEN_BYTES]
        self.num_tokens = num_tokens
        self._own_from = min(self._own_from, self.tree_tokens)

    def _move(self, node: Node) -> None:
        """Hold another node instead of the present one."""
        self._tree.hold(node)
        old, self.node, self.tree_tokens = self.node, node, node.end
        release(self._capacity, old)

    # ------------------------------------------------------------------ committing

    def _commit(self, num_tokens: int) -> int:
        """Up to `num_tokens` tokens are computed; see `Lease.commit`."""
        if self.pending is not None and not self.pending.outlasts_commit:
            self._end_copies()
        before = self.num_committed
        if num_tokens <= before:
            return 0
        self.num_committed = num_tokens
        tree_tokens = self.tree_tokens
        if tree_tokens == before:
            tree, node = self._tree, self.node
            used = before % tree.block_size
            fits = used and num_tokens - before <= tree.block_size - used
            if fits and node.holders == 1 and len(node.blocks) > 1:
                tree.grow_run(node, self.tokens[before * TOKEN_BYTES : num_tokens * TOKEN_BYTES])
                self.tree_tokens = num_tokens
                tree.end_changes()
                return 0
        shared_until = max(tree_tokens, self._sync())
        self._tree.end_changes()
        return max(0, min(num_tokens, shared_until) - before)

    def _rollback(self, num_tokens: int) -> Node | None:
        """Tokens from `num_tokens` on are not committed; returns the node that this lease put there, if any.

        O(path + blocks of a node).
        """
        self.num_committed = min(self.num_committed, max(0, num_tokens))
        self._end_copies()
        cut = max(num_tokens, self._own_from)
        return self._tree.split_before(self.node, cut) if cut < self.tree_tokens else None

    def _sync(self) -> int:
        """Bring the tree from `tree_tokens` up to `num_committed`; returns where shared tokens end.

        O(tokens between).
        """
        shared_until = 0
        if not self.shares:
            return 0
        tree = self._tree
        size = tree.block_size
        while self.tree_tokens < self.num_committed:
            pos = self.tree_tokens
            start = pos - pos % size
            end = start + size
            limit, space = self.num_committed, self.space
            if pos < self._public_tokens:
                limit, space = min(limit, self._public_tokens), self.space.public
            node = self.node
            if pos == start or len(node.blocks) == 1:  # the next block is, or is to be, a child's first one
                above = node if pos == start else node.parent
                assert above is not None
                siblings = above.children if above.space is space else tree.children_of(above, space)
                if siblings is not None and end <= limit:
                    child = siblings.find(bytes(self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]))
                    if child is not None:
                        shared_until = self._dedupe(child, start, limit)
                        continue
            if pos != start:
                self._grow_tail(pos, min(limit, end))
            elif not self._insert(pos, limit, space, siblings):
                break
        return shared_until

    def would_dedupe(self, num_tokens: int) -> bool:
        """Whether committing that many tokens would take over blocks that others committed. O(block).

        Changes nothing. Only the next block can be one: what hangs below one's own new blocks is one's own.
        """
        tree, pos = self._tree, self.tree_tokens
        size = tree.block_size
        start = pos - pos % size
        end = start + size
        is_public = pos < self._public_tokens
        if pos > self.num_committed:
            return True
        if not self.shares or end > (min(num_tokens, self._public_tokens) if is_public else num_tokens):
            return False
        if pos != start and len(self.node.blocks) > 1:
            return False
        above = self.node if pos == start else self.node.parent
        assert above is not None
        siblings = tree.children_of(above, self.space.public if is_public else self.space)
        block = bytes(self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])
        return siblings is not None and siblings.find(block) is not None

    def _grow_tail(self, pos: int, end: int) -> None:
        """Grow the tree's partial block [.., pos) to `end`, for the lease and the forks that share it."""
        node = self.node
        self._tree.extend_tail(node, self.tokens[pos * TOKEN_BYTES : end * TOKEN_BYTES])
        for sibling in self._forks or ():
            if sibling.node is node and sibling.tree_tokens == pos:
                sibling.tree_tokens = end
        self.tree_tokens = end
        drop_covered(self._capacity, node)

    def _dedupe(self, child: Node, start: int, limit: int) -> int:
        """Take over a child whose first block holds the lease's tokens from `start` on; returns its end.

        Every block taken over replaces one of the lease: private ones are freed, a partial one in the tree is
        covered now and goes with its last holder. O(tokens shared).
        """
        tree = self._tree
        size = tree.block_size
        limit = min(limit, start + len(child.blocks) * size)
        same = shared_bytes(child.key, bytes(self.tokens[start * TOKEN_BYTES : limit * TOKEN_BYTES]))
        count = same // tree.block_bytes
        target = tree.split(child, count) if count < len(child.blocks) else child
        first = start // size
        own = self.blocks(-(-self.tree_tokens // size), first + count)
        self._replace_blocks(first, target.blocks)
        self._move(target)
        self._capacity.free_private(own, self.space.group)
        self._own_from = self.tree_tokens
        return self.tree_tokens

    def _insert(self, pos: int, end: int, space: Namespace, siblings: Children | None) -> bool:
        """Put the tokens [pos, end) and their private blocks into the tree, as part of `space`.

        False: the first of the blocks is also private to a lease that can't follow.
        """
        tree = self._tree
        size = tree.block_size
        first = pos // size
        blocks = self.blocks(first, -(-end // size))
        followers: list[tuple[Holding, int]] = []
        if self._capacity.pool.extra_holders:
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
            and node.space is space
            # Blocks with hits of their own are kept apart from new ones, for policies that count hits.
            and (node.start >= self._own_from or not tree.policy.tracks_path)
        ):
            tree.extend(node, key, blocks)
        else:
            self.node = tree.add_held_child(node, space, key, blocks)
            if siblings is not None and siblings.partial:
                drop_covered(self._capacity, self.node)
        if space.group is not self.space.group:
            self._capacity.transfer(len(blocks), self.space.group, space.group)
        self.tree_tokens = end
        for follower, count in followers:
            follower._follow(self, count)
        for follower, _ in followers:
            follower._sync()
        return True

    def _sharable_blocks(self, blocks: array[int], first: int, followers: list[tuple[Holding, int]]) -> int:
        """How many leading blocks may enter the tree: those that nobody but forks shares.

        Forks that share a block have the same tokens up to its end, so they can follow this lease into the
        tree. Fills `followers` with them and the number of leading blocks that each must take over.
        """
        pool = self._capacity.pool
        sharers: list[tuple[Holding, list[int]]] = []
        holders = [0] * len(blocks)
        for other in self._forks or ():
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

    def _follow(self, leader: Holding, num_blocks: int) -> None:
        """A fork has put blocks into the tree that this lease shares: hold its path's first `num_blocks`."""
        size = self._tree.block_size
        start = -(-self.tree_tokens // size)
        pairs = zip(self.blocks(start, num_blocks), leader.blocks(start, num_blocks), strict=True)
        duplicates = array("i", [own for own, theirs in pairs if own != theirs])
        place = self._tree.split_after(leader.node, num_blocks * size)
        self._replace_blocks(0, leader.blocks(0, num_blocks))
        self._move(place)
        self._capacity.free_private(duplicates, self.space.group)

    # ------------------------------------------------------------------ leaving the tree, and the end

    def invalidate_below(self, below: Container[Node], moved: Moved) -> bool:
        """Nodes are about to leave the tree: what is held of them becomes private. O(depth + blocks).

        Returns whether anything of the lease's path was among them.
        """
        if self.pending is not None:
            self.pending.invalidate_below(below, moved)
        if self.node not in below:
            return False
        node = self.node
        start = node.start
        while node in below:
            assert node.parent is not None
            start = node.start
            node = node.parent
        self._tree.hold(node)
        self._tree.release(self.node)
        size = self._tree.block_size
        for block in self.blocks(start // size, -(-self.tree_tokens // size)):
            moved.add(block, self.space.group)
        self.node, self.tree_tokens = node, start
        self._own_from = min(self._own_from, start)
        return True

    def stop_sharing(self) -> None:
        """What the lease commits from now on can't be matched."""
        self.shares = False

    def enter_new_tree(self) -> None:
        """All nodes and roots are gone, see `leave`: hold the new root. O(1)."""
        self.node = self._tree.root(self.node.space)
        self._tree.hold(self.node)

    def _end(self, keep: int | None) -> None:
        """Give everything back; tokens beyond `keep` that this lease contributed are forgotten."""
        if self._forks is not None:
            self._forks.remove(self)
        if self.num_blocks > -(-self.tree_tokens // self._tree.block_size):
            self._capacity.free_private(self.private_blocks(), self.space.group)
        node = self.node
        self._tree.use(node)
        release(self._capacity, node)
        if keep is not None:
            discard_from(self._capacity, node, max(keep, self._own_from))
