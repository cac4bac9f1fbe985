# SPDX-License-Identifier: Apache-2.0
"""Lease: one request's hold on blocks, from `acquire` to `release`.

    0 ..... num_cached_tokens ..... num_committed ..... num_tokens
    |  found by acquire       |  computed, or       |  known, not
    |                         |  in this step       |  computed

`radixkv.cache.lease_path` says who owns the blocks of these tokens.
"""

from __future__ import annotations

import sys
from array import array
from copy import copy
from typing import TYPE_CHECKING

from radixkv.cache.block_identity import IDENTITY_BYTES
from radixkv.cache.capacity import Capacity
from radixkv.cache.invalidation import invalidate_subtree
from radixkv.cache.keys import TOKEN_BYTES, NamespaceName, TokenIds, decode_tokens, encode_tokens
from radixkv.cache.lease_path import LeasePath
from radixkv.cache.node import Namespace, Node
from radixkv.cache.pending_copies import Copy, PendingCopies
from radixkv.cache.reporting.explain import DueReport, MissReport, report_of
from radixkv.cache.reporting.reasons import Reason
from radixkv.errors import LeaseError

if TYPE_CHECKING:
    from radixkv.cache.states.lease_states import LeaseStates
    from radixkv.cache.states.lease_windows import LeaseWindows


class Lease(LeasePath):
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
        states: the states that it holds; None: the model has none.
        due: data of the report, composed when it is read; None: reports are off. For the cache itself.
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
        self.pending = self.forks = None
        self.states: LeaseStates | LeaseWindows | None = None
        self.due: DueReport | None = None
        self._report: MissReport | None = None
        self._is_released = False
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
        """Why the tokens beyond `num_cached_tokens` were not found when the lease was acquired."""
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
        """Identity of its whole blocks in the tree (of none, the seed), and their tokens. O(1)."""
        node = self.node if self.node.ids else self.node.parent
        assert node is not None
        return bytes(node.ids[-IDENTITY_BYTES:]), self.tree_tokens - self.tree_tokens % self.tree.block_size

    def token_ids(self) -> list[int]:
        """All tokens of the lease. O(n)."""
        return decode_tokens(self.tokens)

    # ------------------------------------------------------------------ copies

    @property
    def copies(self) -> list[Copy]:
        """(source block, target block, slots) to copy, in order, before computing."""
        return [] if self.pending is None else self.pending.copies

    @property
    def has_pending_copies(self) -> bool:
        """True if copies have been listed that have not run yet."""
        return self.pending is not None and self.pending.hold_something

    def take_copies(self, *, until_done: bool = False) -> list[Copy]:
        """The pending copies; the list is empty afterwards, and their sources stay held.

        Args:
            until_done: until `copies_done`, for who commits now and copies later; else until the next commit.
        """
        return [] if self.pending is None else self.pending.take(until_done)

    def copies_done(self) -> None:
        """The copies have run: their source blocks need no longer be held.

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
            self.pending = PendingCopies(self.capacity, self.owner.group)
        self.pending.add(source, target, slots, node)

    def _end_copies(self) -> None:
        """The pending copies have run, or never will. O(copies)."""
        pending = self.pending
        if pending is not None:
            pending.done()
            if not pending.copies:
                self.pending = None

    # ------------------------------------------------------------------ sharing

    def fork(self) -> Lease:
        """Another lease on the same blocks, the partial last one included; O(blocks).

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
        """Have blocks for `num_tokens` tokens in all: the next tokens find their slots there. O(new blocks).

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
        self.capacity.free_private(self.blocks(private, self.num_blocks), self.owner.group)
        if self.tree_tokens > keep * size:  # others committed it: it is theirs as well
            self.move(self.tree.split_after(self.node, keep * size))
        self.keep_blocks(keep)
        self.tokens = self.tokens[: num_tokens * TOKEN_BYTES]
        self.num_tokens = num_tokens
        self.own_from = min(self.own_from, self.tree_tokens)

    def _grow(self, count: int) -> array[int]:
        """`count` more blocks; OutOfBlocks: nothing was changed."""
        capacity, group = self.capacity, self.owner.group
        if count > capacity.pool.num_free or group.ceiling is not None:
            total = self.num_blocks + count
            capacity.require(count, self.owner, total, self.node, self.tree_tokens, lease=self)
        return capacity.allocate(count, group)

    # ------------------------------------------------------------------ committing

    def commit(self, num_tokens: int) -> int:
        """The first `num_tokens` tokens have their K/V, or get it in this step: shareable from now on.

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
        """A step failed: tokens from `num_tokens` on, as far as this lease committed them, can't be matched.

        Other leases that hold them keep their blocks, but contribute nothing further. The committed length
        goes back to at most `num_tokens`. O(leases + blocks below).
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
            capacity.free_private(self.private_blocks(), self.owner.group)
        if used:
            tree.use(node)
        capacity.release(node)
        if keep is not None:
            capacity.discard_from(node, max(keep, self.own_from), None if discard else self.used_at)
        if done and node.entry is not None and node.owner is self.owner:  # not what is public
            node.owner.group.index.put_first(node)
        tree.end_changes()

    def _error(self, action: str) -> LeaseError:
        return LeaseError(f"can't {action} {self!r}")
