"""Lease: one request's hold on blocks, from `acquire` to `release`; the public face of a `Holding`.

0 ..... num_cached_tokens ..... num_committed ..... num_tokens
|  found by acquire       |  computed, or       |  known, not
|                         |  in this step       |  computed
"""

from __future__ import annotations

import numpy as np

from radixkv.cache.holding import Holding
from radixkv.cache.insight.explain import DueReport, Explainer, MissReport
from radixkv.cache.invalidation import invalidate_subtree
from radixkv.cache.keys import TOKEN_BYTES, NamespaceName, TokenIds, encode_tokens
from radixkv.cache.node import Namespace, Node
from radixkv.cache.state import CacheState
from radixkv.errors import LeaseError


class Lease(Holding):
    """A request's block table and the locks that keep its blocks; made by `PrefixCache.acquire` and `fork`.

    Attributes:
        id: a number that error messages name.
        namespace: as given to `acquire`.
        num_tokens: tokens that have slots.
        num_cached_tokens: leading tokens whose K/V were found by `acquire`; at most the prompt's length - 1.
        num_committed: leading tokens whose K/V exist or are computed in this step.
        copies: (source block, target block, slots) to copy, in order, before computing.
        due: what the report is made of when it is read; None: reports are off.
    """

    __slots__ = (
        "__weakref__",
        "_is_released",
        "_report",
        "_state",
        "due",
        "id",
        "namespace",
        "num_cached_tokens",
    )

    def __init__(
        self,
        state: CacheState,
        namespace: NamespaceName,
        space: Namespace,
        tokens: bytes | bytearray,
        node: Node,
        tree_tokens: int,
        num_tokens: int,
        num_cached_tokens: int,
        num_committed: int,
        public_tokens: int,
        shares: bool,
    ) -> None:  # its maker fills the block table, see `begin` and `fork`
        Holding.__init__(  # quicker than super()
            self,
            state.capacity,
            space,
            tokens,
            node,
            tree_tokens,
            num_tokens,
            num_committed,
            public_tokens,
            shares,
        )
        self._state = state
        self.id = state.leases.add(self)
        self.namespace = namespace
        self.num_cached_tokens = num_cached_tokens
        self._is_released = False
        self.due: DueReport | None = None
        self._report: MissReport | None = None

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
                self._report = MissReport("skipped", self.num_tokens, 0, skipped="reports are off")
            else:
                self._report = Explainer.complete(self.due, self.tokens, self.num_cached_tokens)
                self.due = None
        return self._report

    @property
    def shares_tail(self) -> bool:
        """Whether others hold the partial last block, too: the next `append` replaces it by a copy. O(1)."""
        return bool(self.num_tokens % self._tree.block_size) and self._must_copy_tail()

    def token_ids(self) -> list[int]:
        """All tokens of the lease. O(n)."""
        return np.frombuffer(bytes(self.tokens), np.int32).tolist()

    # ------------------------------------------------------------------ growing

    def append(self, token_ids: TokenIds) -> None:
        """Add tokens at the end, with a slot each. O(new tokens), amortised O(1) for one.

        A partial last block that another lease holds too is replaced by a copy of its own: see `copies`.

        Raises:
            OutOfBlocks: nothing was changed.
            InvalidRequestError: a token id is malformed.
            LeaseError: the lease has been released.
        """
        if self._is_released:
            raise self._error("append to")
        data = encode_tokens(token_ids)
        if self._append_in_place(data):
            return
        size = self._tree.block_size
        old = self.num_tokens
        missing = -(-(old + len(data) // TOKEN_BYTES) // size) - self.num_blocks
        copies = bool(old % size) and self._must_copy_tail()
        blocks = self._state.room.grow(self, missing + copies)
        if copies:
            self._replace_tail(blocks.pop(0))
        if missing > 0:
            self._add_blocks(blocks)
        is_in_place = self._append_in_place(data)
        assert is_in_place

    def truncate(self, num_tokens: int) -> None:
        """Drop the tokens from `num_tokens` on, which must not be committed, and their whole blocks.

        For drafts: tokens are appended, checked, and given back as far as they were wrong. O(blocks freed).

        Raises:
            LeaseError: there are fewer tokens, or some of these are committed, or the lease was released.
        """
        if self._is_released:
            raise self._error("truncate")
        if not self.num_committed <= num_tokens <= self.num_tokens:
            raise LeaseError(
                f"{self!r}: truncate({num_tokens}) is not between its {self.num_committed} committed tokens "
                f"and its {self.num_tokens} tokens"
            )
        assert self.report is not None  # it may need the tokens that go
        self._truncate(num_tokens)

    def copies_done(self) -> None:
        """The copies have run: their source blocks need no longer be held.

        Implied by the next `commit`, unless they were taken `until_done`. What was committed of the blocks
        copied to can be matched from now on.
        """
        self._end_copies()
        if self.tree_tokens < self.num_committed and not self._is_released:
            self._sync()
            self._tree.end_changes()

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
            LeaseError: more tokens than the lease has, or the lease has been released.
        """
        if self._is_released:
            raise self._error("commit on")
        if num_tokens > self.num_tokens:
            raise LeaseError(f"{self!r}: commit({num_tokens}) is beyond its {self.num_tokens} tokens")
        return self._commit(num_tokens)

    # ------------------------------------------------------------------ sharing and ending

    def fork(self) -> Lease:
        """Another lease on the same blocks, the partial last one included; O(blocks).

        Whoever first writes into the shared last block (by `append`) gets a copy of it. Copies that have not
        been taken yet are the child's as well: whichever of the two runs first makes them.

        Raises:
            LeaseError: the lease has been released.
        """
        if self._is_released:
            raise self._error("fork")
        state = self._state
        child = Lease(
            state,
            self.namespace,
            self.space,
            bytearray(self.tokens),
            self.node,
            self.tree_tokens,
            self.num_tokens,
            self.num_cached_tokens,
            self.num_committed,
            self._public_tokens,
            self.shares,
        )
        self._share_with(child)
        child.due, child._report = self.due, self._report
        return child

    def rollback(self, num_tokens: int) -> None:
        """A step failed: tokens from `num_tokens` on, as far as this lease committed them, can't be matched.

        Other leases that hold them keep their blocks, but contribute nothing further. The committed length
        goes back to at most `num_tokens`. O(leases + blocks below).

        Raises:
            LeaseError: the lease has been released.
        """
        if self._is_released:
            raise self._error("roll back")
        top = self._rollback(num_tokens)
        if top is not None:
            invalidate_subtree(self._state, top, self)
            self._sync()
            self._tree.end_changes()

    def release(self, discard: bool = False, keep: int | None = None) -> None:
        """End the lease: committed tokens stay cached and may be evicted, all else is freed. O(blocks freed).

        Args:
            discard: forget the tokens that this lease contributed, unless others hold or pinned them.
            keep: forget those beyond the first `keep` tokens.

        Raises:
            LeaseError: the lease has been released before.
        """
        if self._is_released:
            raise self._error("release")
        if self.has_pending_copies:  # what the copies would have made is not there
            self._end_copies()
        elif self.tree_tokens < self.num_committed:
            self._sync()
        self._is_released = True
        self._state.leases.remove(self.id)
        self._end(0 if discard else keep)
        self._tree.end_changes()

    def _error(self, action: str) -> LeaseError:
        return LeaseError(f"can't {action} {self!r}")
