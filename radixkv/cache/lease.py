# SPDX-License-Identifier: Apache-2.0
"""Lease: one request's hold on blocks, from `acquire` to `release`.

    0 ..... num_cached_tokens ..... num_committed ..... num_tokens
    |  found by acquire       |  computed, or       |  known, not
    |                         |  in this step       |  computed

The blocks of these tokens are in the tree, or private:

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

import functools
import sys
from array import array
from collections.abc import Callable, Container
from copy import copy
from typing import TYPE_CHECKING, Any

from radixkv.cache.block_identity import IDENTITY_BYTES
from radixkv.cache.capacity import Capacity
from radixkv.cache.invalidation import invalidate_subtree
from radixkv.cache.keys import (
    TOKEN_BYTES,
    NamespaceName,
    TokenIds,
    decode_tokens,
    encode_tokens,
    shared_bytes,
)
from radixkv.cache.node import Children, Namespace, Node
from radixkv.cache.pending_copies import Copy, Moved, PendingCopies
from radixkv.cache.reporting.explain import DueReport, MissReport, report_of
from radixkv.cache.reporting.reasons import Reason
from radixkv.cache.states.lease_states import LeaseStates
from radixkv.cache.states.lease_windows import LeaseWindows
from radixkv.errors import LeaseError

if TYPE_CHECKING:  # numpy is not needed: without it, block tables are memoryviews
    import numpy as np
    import numpy.typing as npt

_SPARE_ENTRIES = array("i", [0] * 4)  # room in a new block table, so that the first appends need not move it


@functools.cache
def _make_view() -> Callable[[array[int]], Any]:
    """Return the function that makes an int32 view of an array, without a copy."""
    try:
        import numpy as np  # heavy
    except ImportError:
        return memoryview
    return functools.partial(np.frombuffer, dtype=np.int32)


class Lease:
    """A request's block table and the locks that keep its blocks; made by `PrefixCache.acquire` and `fork`.

    Calls that change something raise LeaseError once it has been released.

    Attributes:
        id: a number that error messages name.
        namespace: as given to `acquire`.
        num_tokens: tokens that have slots.
        num_cached_tokens: leading tokens whose K/V were found by `acquire`; at most the prompt's length - 1.
        resume_at: leading tokens that need not be computed; those from there to `num_cached_tokens` are
            replayed: computed again, and not written.
        num_committed: leading tokens whose K/V exist or are computed in this step.
        num_blocks: entries of its block table.
        tokens: the token ids, four bytes each; bytes until tokens are appended.
        states: the states that it holds; None: the model has none.
        most_shared: leading tokens that may be matched; those after stay private.
        node: where the tree's part of its path ends; the lease is one of its holders. This and what follows
            is for the cache itself.
        tree_tokens: tokens up to there.
        own_from: tokens from there on in the tree were put there by this lease.
        used_at: the cache's use counter when it was acquired: later uses by others have a higher one.
        public_tokens: leading ones that belong to a public prefix.
        pending: copies into its blocks that have not run; None: there are none.
        shares: whether what it commits may be matched.
        forks: the leases that are forks of one another, itself included; None: there are no others.
        due: data of the report, composed when it is read; None: reports are off.
    """

    def __init__(
        self,
        capacity: Capacity,
        namespace: NamespaceName,
        owner: Namespace,
        tokens: bytes | bytearray,
        node: Node,
        tree_tokens: int,
        num_cached_tokens: int,
        public_tokens: int,
        shares: bool,
    ) -> None:
        self.capacity = capacity
        self.tree = capacity.tree
        self.namespace = namespace
        self.owner = owner
        self.tokens = tokens
        self.num_tokens = len(tokens) // TOKEN_BYTES
        self.num_cached_tokens = self.num_committed = self.resume_at = num_cached_tokens
        self.node = node
        self.tree_tokens = self.own_from = tree_tokens
        self.public_tokens = public_tokens
        self.shares, self.most_shared = shares, sys.maxsize
        self.used_at = 0
        self.pending: PendingCopies | None = None
        self.forks: list[Lease] | None = None
        self.states: LeaseStates | LeaseWindows | None = None
        self.due: DueReport | None = None
        self._report: MissReport | None = None
        self._is_released = False
        self.num_blocks = 0  # entries of `_table` in use; spare ones follow
        self._table: array[int]  # set by `fill`
        self._view: npt.NDArray[np.int32] | None  # the same, as it is read; None: to be made
        self.id = capacity.add_lease(self)

    def __repr__(self) -> str:
        state = ", released" if self._is_released else ""
        return (
            f"Lease({self.id}: {self.num_tokens} tokens, {self.num_cached_tokens} cached, "
            f"{self.num_committed} committed, {self.num_blocks} blocks{state})"
        )

    # ------------------------------------------------------------------ reading

    @property
    def report(self) -> MissReport:
        """Report on the tokens beyond `num_cached_tokens`, which the lease did not find when acquired."""
        if self._report is None:
            if self.due is None:
                self._report = MissReport(Reason.SKIPPED, self.num_tokens, 0, skipped="reports are off")
            else:
                states_at = None if self.states is None else self.resume_at
                self._report = report_of(self.due, self.tokens, self.num_cached_tokens, states_at=states_at)
                self.due = None
        return self._report

    @property
    def shares_tail(self) -> bool:
        """True if others hold the partial last block, too: the next `append` replaces it by a copy. O(1)."""
        return bool(self.num_tokens % self.tree.block_size) and self._must_copy_tail()

    @property
    def cached_identity(self) -> tuple[bytes, int]:
        """The identity of its whole blocks in the tree (of none, the seed), and their tokens. O(1)."""
        node = self.node if self.node.ids else self.node.parent
        assert node is not None
        return bytes(node.ids[-IDENTITY_BYTES:]), self.tree_tokens - self.tree_tokens % self.tree.block_size

    def token_ids(self) -> list[int]:
        """Return all tokens of the lease. O(n)."""
        return decode_tokens(self.tokens)

    # ------------------------------------------------------------------ the block table

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """Block ids, int32: of all tokens, and reserved ones. A view, to be fetched after each call. O(1).

        A memoryview where numpy is not installed.
        """
        view = self._view
        if view is None:
            view = self._view = _make_view()(self._table)
        return view[: self.num_blocks]

    def blocks(self, start: int, stop: int) -> array[int]:
        """Return a copy of the entries [start, stop), as far as they are in use. O(stop - start)."""
        return self._table[start : min(stop, self.num_blocks)]

    def fill(self, blocks: array[int]) -> None:
        """Begin the table with `blocks`, which it keeps and appends to. O(1)."""
        self.num_blocks = len(blocks)
        blocks += _SPARE_ENTRIES
        self._table = blocks
        self._view = None

    def add_blocks(self, blocks: array[int]) -> None:
        """Append blocks to the table. Amortised O(new ones)."""
        old = self.num_blocks
        new = old + len(blocks)
        if new > len(self._table):  # a view of it may be in use: it can't be resized
            self._table = self._table + array("i", bytes(4 * max(new - old, old)))
            self._view = None
        self._table[old:new] = blocks
        self.num_blocks = new

    def keep_blocks(self, count: int) -> None:
        """Keep the first entries only. O(1)."""
        self.num_blocks = count

    def replace_blocks(self, first: int, blocks: array[int]) -> None:
        """Put other blocks in the place of the entries from `first` on. O(their number)."""
        self._table[first : first + len(blocks)] = blocks

    def private_blocks(self) -> array[int]:
        """Return the part of the block table that is not in the tree."""
        return self.blocks(-(-self.tree_tokens // self.tree.block_size), self.num_blocks)

    def move(self, node: Node) -> None:
        """Hold another node instead of the present one."""
        self.tree.hold(node)
        old, self.node, self.tree_tokens = self.node, node, node.end
        self.capacity.release(old)

    def invalidate_below(self, below: Container[Node], moved: Moved) -> bool:
        """Make its blocks private that are in nodes about to leave the tree; False: there are none."""
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
            moved.setdefault(block, []).append(self.owner.account)
        self.node, self.tree_tokens = node, start
        self.own_from = min(self.own_from, start)
        return True

    # ------------------------------------------------------------------ copies

    @property
    def copies(self) -> list[Copy]:
        """Copies to make before computing, in order: (source block, target block, slots)."""
        return [] if self.pending is None else self.pending.copies

    @property
    def has_pending_copies(self) -> bool:
        """True if copies have been listed that have not run yet."""
        return self.pending is not None and self.pending.hold_something

    def take_copies(self, *, until_done: bool = False) -> list[Copy]:
        """Take the pending copies off the list, and return them; their sources stay held.

        Args:
            until_done: until `copies_done`, for who commits now and copies later; else until the next commit.
        """
        return [] if self.pending is None else self.pending.take(until_done)

    def copies_done(self) -> None:
        """Release the source blocks of copies that have run.

        Implied by the next `commit`, unless they were taken `until_done`. Committed tokens of the target
        blocks can be matched from now on.
        """
        self._end_copies()
        if self.tree_tokens < self.num_committed and not self._is_released:
            self.sync()
            self.tree.end_changes()

    def new_copy(self, source: int, target: int, slots: int, node: Node | None) -> None:
        """List a copy; `node`: has the source, is protected already. For the cache itself."""
        if self.pending is None:
            self.pending = PendingCopies(self.capacity, self.owner.account)
        self.pending.add(source, target, slots, node)

    def _end_copies(self) -> None:
        """Release the sources of the pending copies, which have run or never will. O(copies)."""
        pending = self.pending
        if pending is not None:
            pending.done()
            if not pending.copies:
                self.pending = None

    # ------------------------------------------------------------------ sharing

    def fork(self) -> Lease:
        """Return another lease on the same blocks, the partial last one included. O(blocks).

        Whoever first writes into the shared last block (by `append`) gets a copy of it. Copies that have not
        been taken yet are the child's as well: whichever of the two runs first makes them.
        """
        if self._is_released:
            raise self._error("fork")
        child = copy(self)
        child.id = self.capacity.add_lease(child)
        child.tokens = bytearray(self.tokens)
        child.fill(self.blocks(0, self.num_blocks))
        self.tree.hold(self.node)
        self.capacity.pool.share(self.private_blocks())
        if self.pending is not None:
            child.pending = self.pending.for_fork()
        if self.states is not None:
            child.states = self.states.fork()
            child.resume_at = child.states.base.position
        if self.forks is None:
            self.forks = [self]
        self.forks.append(child)
        child.forks = self.forks
        return child

    # ------------------------------------------------------------------ growing and shrinking

    def append(self, token_ids: TokenIds) -> None:
        """Add tokens at the end, with a slot each. O(new tokens), amortised O(1) for one.

        A partial last block that another lease holds too is replaced by a copy of its own: see `copies`.

        Raises:
            OutOfBlocks: nothing was changed.
            InvalidRequestError: a token id is malformed.
        """
        if self._is_released:
            raise self._error("append to")
        data = encode_tokens(token_ids)
        old = self.num_tokens
        new = old + len(data) // TOKEN_BYTES
        size = self.tree.block_size
        is_own = self.tree_tokens == old and self.node.holders == 1  # the usual case, without a call
        copies = bool(not is_own and old % size and data) and self._must_copy_tail()
        missing = max(0, -(-new // size) - self.num_blocks)
        if missing or copies:
            blocks = self._grow(missing + copies)
            if copies:
                self._replace_tail(blocks.pop(0))
            if missing:
                self.add_blocks(blocks)
        tokens = self.tokens
        if type(tokens) is bytes:
            tokens = bytearray(tokens)
        tokens += data
        self.tokens = tokens
        self.num_tokens = new

    def _must_copy_tail(self) -> bool:
        """True if others share the partial last block, so that it can't be written."""
        size = self.tree.block_size
        if self.tree_tokens > self.num_tokens - self.num_tokens % size:
            return self.node.holders > 1 or self.tree_tokens > self.num_tokens
        extra = self.capacity.pool.extra_holders
        last = self.num_tokens // size
        return bool(extra) and self.blocks(last, last + 1)[0] in extra

    def _replace_tail(self, target: int) -> None:
        """Replace the shared partial last block by `target`; whoever shares it keeps the old one.

        The computed part of it is listed to be copied.
        """
        start = self.num_tokens - self.num_tokens % self.tree.block_size
        last = self.num_tokens // self.tree.block_size
        source = self.blocks(last, last + 1)[0]
        slots = min(self.num_committed, self.num_tokens) - start
        if self.tree_tokens > start:
            tail, tree = self.node, self.tree
            upper = tree.split(tail, len(tail.blocks) - 1) if len(tail.blocks) > 1 else tail.parent
            assert upper is not None
            tree.hold(upper)
            tree.drop_holder(tail)
            self.node, self.tree_tokens = upper, start
            if slots > 0:
                self.new_copy(source, target, slots, tail)
            else:
                self.capacity.unprotect(tail)
        elif slots > 0:
            self.new_copy(source, target, slots, None)
        else:
            self.capacity.pool.drop_holder(source)
        self.replace_blocks(last, array("i", [target]))

    def reserve(self, num_tokens: int) -> None:
        """Reserve blocks for `num_tokens` tokens in all, slots of tokens to come. O(new blocks).

        Raises:
            OutOfBlocks: nothing was changed.
        """
        if self._is_released:
            raise self._error("reserve blocks for")
        missing = -(-num_tokens // self.tree.block_size) - self.num_blocks
        if missing > 0:
            self.add_blocks(self._grow(missing))

    def truncate(self, num_tokens: int) -> None:
        """Drop the tokens from `num_tokens` on, which must not be committed, and their whole blocks.

        For drafts: tokens are appended, checked, and given back as far as they were wrong. O(blocks freed).

        Raises:
            LeaseError: there are fewer tokens, or some of these are committed.
        """
        if self._is_released:
            raise self._error("truncate")
        if not self.num_committed <= num_tokens <= self.num_tokens:
            raise LeaseError(
                f"{self!r}: truncate({num_tokens}) is not between its {self.num_committed} committed tokens "
                f"and its {self.num_tokens} tokens"
            )
        assert self.report is not None  # it may need the tokens that go
        size = self.tree.block_size
        keep = -(-num_tokens // size)
        private = max(keep, -(-self.tree_tokens // size))
        self.capacity.free_private(self.blocks(private, self.num_blocks), self.owner.account)
        if self.tree_tokens > keep * size:  # others committed it: it is theirs as well
            self.move(self.tree.split_after(self.node, keep * size))
        self.keep_blocks(keep)
        self.tokens = self.tokens[: num_tokens * TOKEN_BYTES]
        self.num_tokens = num_tokens
        self.own_from = min(self.own_from, self.tree_tokens)

    def _grow(self, count: int) -> array[int]:
        """Return `count` more blocks; OutOfBlocks: nothing was changed."""
        capacity, account = self.capacity, self.owner.account
        if count > capacity.pool.num_free or account.ceiling is not None:
            total = self.num_blocks + count
            capacity.require(count, self.owner, total, self.node, self.tree_tokens, lease=self)
        return capacity.allocate(count, account)

    # ------------------------------------------------------------------ committing

    def commit(self, num_tokens: int) -> int:
        """Make the first `num_tokens` tokens shareable: their K/V is there, or is computed in this step.

        Where the same tokens are cached in whole blocks already, the lease's own blocks are freed and its
        block table is changed to the cached ones.

        Returns:
            How many tokens, counted from the position committed before, have their K/V in blocks that were
            committed by others: they must not be written again. If there are any, all tokens before them are
            in such blocks, too.

        O(new tokens); amortised O(1) for one.

        Raises:
            LeaseError: more tokens than the lease has.
        """
        if self._is_released:
            raise self._error("commit on")
        if num_tokens > self.num_tokens:
            raise LeaseError(f"{self!r}: commit({num_tokens}) is beyond its {self.num_tokens} tokens")
        if self.pending is not None and not self.pending.outlasts_commit:
            self._end_copies()
        before = self.num_committed
        if num_tokens <= before:
            return 0
        self.num_committed = num_tokens
        tree_tokens, tree = self.tree_tokens, self.tree
        if tree_tokens == before:  # the usual case in decoding: the block grows in place
            node, used = self.node, before % tree.block_size
            fits = used and num_tokens - before <= tree.block_size - used
            if fits and node.holders == 1 and len(node.blocks) > 1 and num_tokens <= self.most_shared:
                tree.grow_run(node, self.tokens[before * TOKEN_BYTES : num_tokens * TOKEN_BYTES])
                self.tree_tokens = num_tokens
                tree.end_changes()
                return 0
        shared_until = self.sync()
        if shared_until < tree_tokens:
            shared_until = tree_tokens
        tree.end_changes()
        return min(num_tokens, shared_until) - before if shared_until > before else 0

    def rollback(self, num_tokens: int) -> None:
        """Take tokens from `num_tokens` on out of the tree, as far as this lease put them there.

        A step that failed is taken back so. Other leases that hold such tokens keep their blocks, but share
        nothing further. The committed length goes back to at most `num_tokens`. O(leases + blocks below).
        """
        if self._is_released:
            raise self._error("roll back")
        self.num_committed = min(self.num_committed, max(0, num_tokens))
        self._end_copies()
        cut = max(num_tokens, self.own_from)
        if cut < self.tree_tokens:
            top = self.tree.split_before(self.node, cut)
            invalidate_subtree(self.capacity, top, self)
            self.sync()
            self.tree.end_changes()

    # ------------------------------------------------------------------ committed blocks join the tree

    def sync(self) -> int:
        """Put the tokens from `tree_tokens` to `num_committed` into the tree; return where shared tokens end.

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
        self.capacity.free_private(own, self.owner.account)
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
        followers: list[tuple[Lease, int]] = []
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
        if owner.account is not self.owner.account:
            self.capacity.transfer(len(blocks), self.owner.account, owner.account)
        self.tree_tokens = end
        for follower, count in followers:
            follower._follow(self, count)
        for follower, _ in followers:
            follower.sync()
        return True

    def _sharable_blocks(self, blocks: array[int], first: int, followers: list[tuple[Lease, int]]) -> int:
        """Count the leading blocks that may enter the tree: unshared ones, or shared with forks only.

        Forks that share a block have the same tokens up to its end, so they can follow this lease into the
        tree. Fills `followers` with them and the number of leading blocks that each must take over.
        """
        pool = self.capacity.pool
        sharers: list[tuple[Lease, list[int]]] = []
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

    def _follow(self, leader: Lease, num_blocks: int) -> None:
        """Hold the first `num_blocks` of a fork's path; the fork has put shared blocks into the tree."""
        size = self.tree.block_size
        start = -(-self.tree_tokens // size)
        pairs = zip(self.blocks(start, num_blocks), leader.blocks(start, num_blocks), strict=True)
        duplicates = array("i", [own for own, theirs in pairs if own != theirs])
        node = self.tree.split_after(leader.node, num_blocks * size)
        self.replace_blocks(0, leader.blocks(0, num_blocks))
        if self.pending is not None:
            self.pending.forget_into(duplicates)
        self.move(node)
        self.capacity.free_private(duplicates, self.owner.account)

    # ------------------------------------------------------------------ the end

    def release(
        self, discard: bool = False, keep: int | None = None, *, used: bool = True, done: bool = False
    ) -> None:
        """End the lease: committed tokens stay cached and may be evicted, all else is freed. O(blocks freed).

        Args:
            discard: forget the tokens that this lease contributed, unless others hold or pinned them.
            keep: forget the tokens beyond the first `keep`, unless others have used them meanwhile.
            used: True for a use, which moves its blocks back in the order of eviction; not where it forgets.
            done: the conversation is over: its last blocks are evicted first, as far as no other lease, pin
                or longer prefix needs them.
        """
        if self._is_released:
            raise self._error("release")
        if discard:
            keep = 0
        if keep is not None:
            used, self.num_committed = False, min(self.num_committed, keep)
        if self.pending is not None and self.pending.hold_something:
            self._end_copies()  # what the copies would have made is not there
        elif self.tree_tokens < self.num_committed:
            self.sync()
        if self.states is not None:  # what is forgotten below takes its checkpoints along
            self.states.close(None if discard else self)
        self._is_released = True
        del self.capacity.leases[self.id]
        if self.forks is not None:
            self.forks.remove(self)
            if keep is not None:  # what is to be forgotten goes with the last of them
                for fork in self.forks:
                    fork.own_from = min(fork.own_from, self.own_from)
        tree, capacity, node = self.tree, self.capacity, self.node
        if self.num_blocks > -(-self.tree_tokens // tree.block_size):
            capacity.free_private(self.private_blocks(), self.owner.account)
        if used:
            tree.use(node)
        capacity.release(node)
        if keep is not None:
            capacity.discard_from(node, max(keep, self.own_from), None if discard else self.used_at)
        if done and node.entry is not None and node.owner is self.owner:  # not what is public
            node.owner.account.index.put_first(node)
        tree.end_changes()

    def _error(self, action: str) -> LeaseError:
        return LeaseError(f"can't {action} {self!r}")
