"""Lease: one request's hold on blocks, from `acquire` to `release`.

Who owns which part of a lease's tokens:

    0 ........... tree_tokens ........... num_tokens
    |  in the tree:            |  private blocks: nobody
    |  its node protects them  |  can match them

    0 ..... num_cached_tokens ..... num_committed ..... num_tokens
    |  found by acquire       |  computed, or       |  known, not
    |                         |  in this step       |  computed

Usually tree_tokens == num_committed. It is behind while copies have not run, and while a block is shared with
a fork that can't follow. It is ahead when the tokens of a fully cached prompt, or of a fork's sibling, were
in the tree before this lease committed them.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixkv.cache.commit import sync
from radixkv.cache.detach import detach_from
from radixkv.cache.holding import end, hold, release_hold, unprotect
from radixkv.cache.insight.explain import DueReport, MissReport
from radixkv.cache.keys import TOKEN_BYTES, Namespace, TokenIds, encode_tokens
from radixkv.cache.node import Node, Space
from radixkv.errors import LeaseError

if TYPE_CHECKING:
    from radixkv.cache.prefix_cache import PrefixCache

Copy = tuple[int, int, int]

_NO_BLOCKS = array("i")


class Lease:
    """A request's block table and the locks that keep its blocks; made by `PrefixCache.acquire` and `fork`.

    Attributes:
        id: a number that error messages name.
        namespace: as given to `acquire`.
        num_tokens: tokens that have slots.
        num_cached_tokens: leading tokens whose K/V were found by `acquire`; at most the prompt's length - 1.
        num_committed: leading tokens whose K/V exist or are computed in this step.
        copies: (source block, target block, slots) to copy, in order, before computing.
    """

    __slots__ = (
        "__weakref__",
        "_cache",
        "_due",
        "_family",
        "_is_released",
        "_is_unshareable",
        "_node",
        "_num_blocks",
        "_own_from",
        "_public_tokens",
        "_report",
        "_source_blocks",
        "_sources",
        "_space",
        "_table",
        "_tokens",
        "_tree_tokens",
        "_view",
        "copies",
        "id",
        "namespace",
        "num_cached_tokens",
        "num_committed",
        "num_tokens",
    )

    def __init__(
        self,
        cache: PrefixCache,
        lease_id: int,
        namespace: Namespace,
        space: Space,
        tokens: bytes | bytearray,
        node: Node,
        tree_tokens: int,
        num_tokens: int,
        num_cached_tokens: int,
    ) -> None:  # its maker sets the block table, and the cache's counts of references
        self._cache = cache
        self.id = lease_id
        self.namespace = namespace
        self._space = space
        self._tokens = tokens  # bytes until tokens are appended
        self._node = node
        self._table = _NO_BLOCKS  # block ids and spare entries
        self._view: npt.NDArray[np.int32] | None = None  # the same as an array
        self._num_blocks = 0
        self._tree_tokens = self._own_from = tree_tokens
        self._public_tokens = 0  # leading tokens that belong to a public prefix
        self._sources: list[tuple[Node, int]] = []
        self._source_blocks: list[int] = []
        self._family: list[Lease] | None = None
        self._is_released = self._is_unshareable = False
        self._due: DueReport | None = None
        self._report: MissReport | None = None
        self.num_tokens = num_tokens
        self.num_cached_tokens = self.num_committed = num_cached_tokens
        self.copies: list[Copy] = []

    def __repr__(self) -> str:
        state = ", released" if self._is_released else ""
        return (
            f"Lease({self.id}: {self.num_tokens} tokens, {self.num_cached_tokens} cached, "
            f"{self.num_committed} committed, {self._num_blocks} blocks{state})"
        )

    # ------------------------------------------------------------------ reading

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """Block ids, int32 [ceil(num_tokens / block_size)]: a view, to be fetched after each call. O(1)."""
        view = self._view
        if view is None:
            view = self._view = np.frombuffer(self._table, np.int32)
        return view[: self._num_blocks]

    @property
    def report(self) -> MissReport:
        """Why the tokens beyond `num_cached_tokens` were not found when the lease was acquired."""
        if self._report is None:
            if self._due is None:
                self._cache._reports.flush()
            due = self._due
            if due is None:
                self._report = MissReport("skipped", self.num_tokens, 0, skipped="reports are off")
            elif due.moment >= 0:
                self._cache._ghosts.catch_up(due.moment)
            if self._report is None:
                self.complete_report()
        assert self._report is not None
        return self._report

    def report_due(self, due: DueReport) -> None:
        """What the report needs is known now."""
        self._due = due

    def complete_report(self) -> None:
        """The ghost index stands where it stood at the acquire: compose the report now."""
        if self._report is None and self._due is not None:
            self._report = self._cache._explainer.complete(self._due, self._tokens, self.num_cached_tokens)
            self._due = None

    @property
    def is_released(self) -> bool:
        """Whether `release` was called."""
        return self._is_released

    def token_ids(self) -> list[int]:
        """All tokens of the lease. O(n)."""
        return np.frombuffer(bytes(self._tokens), np.int32).tolist()

    def take_copies(self) -> list[Copy]:
        """The pending copies; the list is empty afterwards. Their sources stay held, see `copies_done`."""
        copies, self.copies = self.copies, []
        return copies

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
        cache = self._cache
        size = cache.block_size
        old = self.num_tokens
        new = old + len(data) // TOKEN_BYTES
        missing = -(-new // size) - self._num_blocks
        copy = False
        if old % size and data:
            if self._tree_tokens > old - old % size:
                copy = self._node.holders > 1 or self._tree_tokens > old
            else:
                extra = cache._pool.extra_holders
                copy = bool(extra) and self._table[self._num_blocks - 1] in extra
        if missing > 0 or copy:
            self._add_blocks(missing, copy)
        tokens = self._tokens
        if type(tokens) is bytes:
            self._tokens = tokens = bytearray(tokens)
        tokens += data
        self.num_tokens = new

    def _add_blocks(self, missing: int, copy: bool) -> None:
        """Allocate blocks for tokens to append, and one to copy the last block to if asked."""
        blocks = self._cache._allocate(missing + copy, self._space.group, self)
        if copy:
            self._copy_tail(blocks.pop(0), self.num_tokens)
        if missing <= 0:
            return
        old = self._num_blocks
        new = old + missing
        if new > len(self._table):  # a view of it may be in use: it can't be resized
            self._table = self._table + array("i", bytes(4 * max(new - old, old)))
            self._view = None
        self._table[old:new] = blocks
        self._num_blocks = new

    def _copy_tail(self, target: int, num_tokens: int) -> None:
        """Replace the shared partial last block by `target`; whoever shares it keeps the old one."""
        cache = self._cache
        start = num_tokens - num_tokens % cache.block_size
        source = self._table[self._num_blocks - 1]
        slots = min(self.num_committed, num_tokens) - start
        if self._tree_tokens > start:
            tail = self._node
            tree = cache._tree
            many = len(tail.blocks) > 1
            upper = tree.split(tail, len(tail.blocks) - 1) if many else tail.parent
            assert upper is not None
            hold(cache, upper)
            tail.holders -= 1
            self._node = upper
            self._tree_tokens = start
            if slots > 0:
                self._sources.append((tail, source))  # keeps the reference that the lease had
            else:
                unprotect(cache, tail)
        elif slots > 0:
            self._source_blocks.append(source)  # keeps the holder's count that the lease had
        else:
            cache._pool.drop_holder(source)
        self._table[self._num_blocks - 1] = target
        if slots > 0:
            self.copies.append((source, target, slots))

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
        cache, size = self._cache, self._cache.block_size
        keep = -(-num_tokens // size)
        private = max(keep, -(-self._tree_tokens // size))
        cache._capacity.free_private(self._table[private : self._num_blocks], self._space.group)
        if self._tree_tokens > keep * size:  # others committed it: it is theirs as well
            old = node = self._node
            while node.start >= keep * size and node.parent is not None:
                node = node.parent
            if node.end > keep * size:
                node = cache._tree.split(node, keep - node.start // size)
            hold(cache, node)
            self._node, self._tree_tokens = node, keep * size
            release_hold(cache, old)
        self._num_blocks = keep
        self._tokens = self._tokens[: num_tokens * TOKEN_BYTES]
        self.num_tokens = num_tokens
        self._own_from = min(self._own_from, self._tree_tokens)

    def copies_done(self) -> None:
        """The copies have run: their source blocks need no longer be held. Implied by the next `commit`.

        What was committed of the blocks copied to can be matched from now on.
        """
        self._drop_sources()
        if self._tree_tokens < self.num_committed and not self._is_released:
            sync(self)

    def _drop_sources(self) -> None:
        nodes, self._sources = self._sources, []
        for node, _ in nodes:
            unprotect(self._cache, node)
        blocks, self._source_blocks = self._source_blocks, []
        if blocks:
            self._cache._capacity.free_private(array("i", blocks), self._space.group)

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
        if self._sources or self._source_blocks:
            self._drop_sources()
        before = self.num_committed
        if num_tokens <= before:
            return 0
        self.num_committed = num_tokens
        size = self._cache.block_size
        tree_tokens = self._tree_tokens
        if tree_tokens == before:
            used = before % size
            node = self._node
            fits = used and num_tokens - before <= size - used
            if fits and node.holders == 1 and len(node.blocks) > 1 and self._cache._tree.listener is None:
                node.key += self._tokens[before * TOKEN_BYTES : num_tokens * TOKEN_BYTES]
                node.version += 1
                self._tree_tokens = num_tokens
                return 0
        shared_until = max(tree_tokens, sync(self))
        return max(0, min(num_tokens, shared_until) - before)

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
        cache = self._cache
        child = Lease(
            cache,
            cache._next_lease_id(),
            self.namespace,
            self._space,
            bytearray(self._tokens),
            self._node,
            self._tree_tokens,
            self.num_tokens,
            self.num_cached_tokens,
        )
        child._table = self._table[:]
        child._num_blocks = self._num_blocks
        child.num_committed = self.num_committed
        child._own_from = self._own_from
        child._public_tokens = self._public_tokens
        child._is_unshareable = self._is_unshareable
        child._report = self.report if cache.explains else None
        hold(cache, self._node)
        cache._pool.share(self._private_blocks())
        # The copies may not have run yet: the child waits for them too, and keeps what they read.
        child.copies = self.copies[:]
        for node, block in self._sources:
            cache._tree.protect(node)
            child._sources.append((node, block))
        cache._pool.share(array("i", self._source_blocks))
        child._source_blocks = self._source_blocks[:]
        if self._family is None:
            self._family = [self]
        self._family.append(child)
        child._family = self._family
        cache._leases[child.id] = child
        return child

    def _private_blocks(self) -> array[int]:
        """The part of the block table that is not in the tree."""
        return self._table[-(-self._tree_tokens // self._cache.block_size) : self._num_blocks]

    def withdraw(self, num_tokens: int) -> None:
        """A step failed: tokens from `num_tokens` on, as far as this lease committed them, can't be matched.

        Other leases that hold them keep their blocks, but contribute nothing further. The committed length
        goes back to at most `num_tokens`. O(leases + blocks below).

        Raises:
            LeaseError: the lease has been released.
        """
        if self._is_released:
            raise self._error("withdraw from")
        self.num_committed = min(self.num_committed, max(0, num_tokens))
        self._drop_sources()
        cut = max(num_tokens, self._own_from)
        if cut < self._tree_tokens:
            detach_from(self._cache, self, cut)
            sync(self)

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
        if self._sources or self._source_blocks:  # what the copies would have made is not there
            self._drop_sources()
        elif self._tree_tokens < self.num_committed:
            sync(self)
        self._is_released = True
        end(self._cache, self, 0 if discard else keep)

    def _error(self, action: str) -> LeaseError:
        return LeaseError(f"can't {action} {self!r}")
