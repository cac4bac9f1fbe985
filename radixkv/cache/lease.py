"""Lease: one request's hold on blocks, from `acquire` to `release`.

Who owns which part of a lease's tokens:

    0 ........... tree_tokens ........... num_tokens
    |  in the tree:            |  private blocks: nobody
    |  its node protects them  |  can match them

    0 ..... num_cached_tokens ..... num_committed ..... num_tokens
    |  found by acquire       |  computed, or       |  known, not
    |                         |  in this step       |  computed

Usually tree_tokens == num_committed. It lags behind (by less than a block) while another cached block begins
with the same tokens as this lease's partial block: nothing new could be found there. It runs ahead when the
tokens of a fully cached prompt, or of a fork's sibling, were in the tree before this lease committed them.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from radixkv.cache.explain import MissReport, PendingReport
from radixkv.cache.keys import TOKEN_BYTES, Namespace, TokenIds, encode_tokens, shared_bytes
from radixkv.cache.node import Children, Node, Space
from radixkv.errors import LeaseError

if TYPE_CHECKING:
    from radixkv.cache.prefix_cache import PrefixCache

Copy = tuple[int, int, int]


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
        tokens: bytearray,
        node: Node,
        table: npt.NDArray[np.int32],
        num_blocks: int,
        tree_tokens: int,
        num_cached_tokens: int,
    ) -> None:
        self._cache = cache
        self.id = lease_id
        self.namespace = namespace
        self._space = space
        self._tokens = tokens
        self._node = node
        self._table = table
        self._num_blocks = num_blocks
        self._tree_tokens = tree_tokens
        self._own_from = tree_tokens
        self._public_tokens = 0  # leading tokens that belong to a public prefix
        self._sources: list[tuple[Node, int]] = []
        self._source_blocks: list[int] = []
        self._family: list[Lease] | None = None
        self._is_released = False
        self._is_unshareable = False
        self._report: MissReport | tuple[Any, ...] | None = None
        self.num_tokens = len(tokens) // TOKEN_BYTES
        self.num_cached_tokens = num_cached_tokens
        self.num_committed = num_cached_tokens
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
        return self._table[: self._num_blocks]

    @property
    def report(self) -> MissReport:
        """Why the tokens beyond `num_cached_tokens` were not found when the lease was acquired."""
        if self._report is None:
            self._report = MissReport("skipped", self.num_tokens, 0, skipped="reports are off")
        if type(self._report) is tuple:  # what acquire noted, at the least cost; see PendingReport
            self._report = self._cache._explainer.complete(PendingReport(*self._report))
        return self._report  # type: ignore[return-value]

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
        size = self._cache.block_size
        old = self.num_tokens
        new = old + len(data) // TOKEN_BYTES
        missing = -(-new // size) - self._num_blocks
        copy = False
        if old % size and data:
            if self._tree_tokens > old - old % size:
                copy = self._node.holders > 1
            else:
                extra = self._cache._pool.extra_holders
                copy = bool(extra) and int(self._table[self._num_blocks - 1]) in extra
        if missing > 0 or copy:
            blocks = self._cache._allocate(missing + copy, self._space.group, self)
            self._reserve(self._num_blocks + missing)
            if copy:
                self._copy_tail(int(blocks[0]), old)
                blocks = blocks[1:]
            self._table[self._num_blocks : self._num_blocks + missing] = blocks
            self._num_blocks += missing
            self._tokens += data
            self.num_tokens = new
            if self._cache._lagging:
                self._cache._resync()
            return
        self._tokens += data
        self.num_tokens = new

    def _reserve(self, num_blocks: int) -> None:
        if num_blocks > len(self._table):
            table = np.empty(max(num_blocks, len(self._table) * 2), np.int32)
            table[: self._num_blocks] = self.block_table
            self._table = table

    def _copy_tail(self, target: int, num_tokens: int) -> None:
        """Replace the shared partial last block by `target`; whoever shares it keeps the old one."""
        cache = self._cache
        start = num_tokens - num_tokens % cache.block_size
        source = int(self._table[self._num_blocks - 1])
        slots = min(self.num_committed, num_tokens) - start
        if self._tree_tokens > start:
            tail = self._node
            tree = cache._tree
            many = len(tail.blocks) > 1
            upper = tree.split(tail, len(tail.blocks) - 1) if many else tail.parent
            assert upper is not None
            cache._hold(upper)
            tail.holders -= 1
            self._node = upper
            self._tree_tokens = start
            if slots > 0:
                self._sources.append((tail, source))  # keeps the reference that the lease had
            else:
                cache._unprotect(tail)
        elif slots > 0:
            self._source_blocks.append(source)  # keeps the holder's count that the lease had
        else:
            cache._pool.drop_holder(source)
        self._table[self._num_blocks - 1] = target
        if slots > 0:
            cache._lagging[self] = None  # its copy may enter the tree when the original goes
            self.copies.append((source, target, slots))

    def copies_done(self) -> None:
        """The copies have run: their source blocks need no longer be held. Implied by the next `commit`."""
        nodes, self._sources = self._sources, []
        for node, _ in nodes:
            self._cache._unprotect(node)
        blocks, self._source_blocks = self._source_blocks, []
        if blocks:
            self._cache._free_private(np.array(blocks, np.int32), self._space.group)
        if (nodes or blocks) and self._cache._lagging:
            self._cache._resync()

    # ------------------------------------------------------------------ committing

    def commit(self, num_tokens: int) -> int:
        """The first `num_tokens` tokens have their K/V, or get it in this step: shareable from now on.

        Where the same tokens are cached in whole blocks already, the lease's own blocks are freed and its
        block table is changed to the cached ones.

        Returns:
            How many tokens, counted from the position committed before, have their K/V in blocks that were
            committed by others: they must not be written again.

        O(new tokens); amortised O(1) for one.

        Raises:
            LeaseError: more tokens than the lease has, or the lease has been released.
        """
        if self._is_released:
            raise self._error("commit on")
        if num_tokens > self.num_tokens:
            raise LeaseError(f"{self!r}: commit({num_tokens}) is beyond its {self.num_tokens} tokens")
        if self._sources or self._source_blocks:
            self.copies_done()
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
        shared_until = max(tree_tokens, self._sync())
        return max(0, min(num_tokens, shared_until) - before)

    def _sync(self) -> int:
        """Bring the tree from `_tree_tokens` up to `num_committed`; returns where shared tokens end."""
        cache = self._cache
        shared_until = 0
        cache._lagging.pop(self, None)
        if not cache.enabled or self._is_unshareable:
            return 0
        tree = cache._tree
        size = cache.block_size
        while self._tree_tokens < self.num_committed:
            pos = self._tree_tokens
            if pos % size:
                converged = self._sync_tail(pos, min(self.num_committed, pos - pos % size + size))
                if converged is None:
                    cache._lagging[self] = None
                    break
                shared_until = max(shared_until, converged)
                continue
            limit, space = self.num_committed, self._space
            if pos < self._public_tokens:
                limit, space = min(limit, self._public_tokens), cache._public
            siblings = tree.children_of(self._node, space)
            if siblings is not None:
                first = bytes(self._tokens[pos * TOKEN_BYTES : min(pos + size, limit) * TOKEN_BYTES])
                child = siblings.find(first) if len(first) == tree.block_bytes else None
                if child is not None:
                    shared_until = self._converge(child, pos, limit)
                    continue
                if len(first) < tree.block_bytes and siblings.covers(first) is not None:
                    cache._lagging[self] = None
                    break
            if not self._insert(pos, limit, space, siblings):
                cache._lagging[self] = None
                break
        return shared_until

    def _sync_tail(self, pos: int, end: int) -> int | None:
        """Grow the tree's partial block [.., pos) to `end`; None: a sibling covers it already.

        Returns where tokens shared with others end: 0, or the end of the block after converging.
        """
        cache = self._cache
        tree = cache._tree
        node = self._node
        size = cache.block_size
        start = pos - pos % size
        if len(node.blocks) == 1:
            parent = node.parent
            assert parent is not None
            siblings = tree.children_of(parent, node.space)
            assert siblings is not None
            grown = bytes(self._tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])
            if len(grown) == tree.block_bytes:
                child = siblings.find(grown)
                if child is not None:
                    self._leave_stub(parent, start)
                    return self._converge(child, start, end)
            elif siblings.covers(grown) is not None:
                return None
        tree.extend_tail(node, self._tokens[pos * TOKEN_BYTES : end * TOKEN_BYTES])
        for sibling in self._family or ():
            if sibling._node is node and sibling._tree_tokens == pos:
                sibling._tree_tokens = end
        self._tree_tokens = end
        cache._drop_covered(node)
        return 0

    def _leave_stub(self, parent: Node, start: int) -> None:
        """Go back above a node that consists of this lease's partial block; its block becomes private."""
        cache = self._cache
        stub = self._node
        if stub.holders > 1 or stub.refs > 1:
            # Others need the block where it is: this lease keeps no claim on it, since it converges next.
            cache._hold(parent)
            self._node = parent
            stub.holders -= 1
            cache._unprotect(stub)
            self._table[start // cache.block_size] = -1
        else:
            cache._hold(parent)
            stub.holders -= 1
            self._node = parent
            group = stub.space.group
            cache._tree.trim(stub, 1)
            group.used -= 1
            self._space.group.used += 1
        self._tree_tokens = start

    def _converge(self, child: Node, pos: int, limit: int) -> int:
        """Follow a child whose first block is this lease's next one; returns where it ends. O(tokens shared).

        Every block followed replaces a private one of the lease, which is freed.
        """
        cache = self._cache
        tree = cache._tree
        size = cache.block_size
        limit = min(limit, pos + len(child.blocks) * size)
        same = shared_bytes(child.key, bytes(self._tokens[pos * TOKEN_BYTES : limit * TOKEN_BYTES]))
        count = same // tree.block_bytes
        target = tree.split(child, count) if count < len(child.blocks) else child
        first = pos // size
        own = self._table[first : first + count].copy()
        cached = np.frombuffer(target.blocks, np.int32)
        cache._hold(target)
        cache._release_hold(self._node)
        self._node = target
        cache._free_private(own[own >= 0], self._space.group)
        self._table[first : first + count] = cached
        self._tree_tokens = self._own_from = pos + count * size
        return self._tree_tokens

    def _insert(self, pos: int, end: int, space: Space, siblings: Children | None) -> bool:
        """Put the tokens [pos, end) and their private blocks into the tree, as part of `space`.

        False: the first of the blocks is also private to a lease that can't follow.
        """
        cache = self._cache
        tree = cache._tree
        size = cache.block_size
        first = pos // size
        table = self._table[first : -(-end // size)]
        followers: list[tuple[Lease, int]] = []
        if cache._pool.extra_holders:
            count = self._sharable_blocks(table, first, followers)
            if not count:
                return False
            if count < len(table):
                table = table[:count]
                end = min(end, pos + count * size)
        key = self._tokens[pos * TOKEN_BYTES : end * TOKEN_BYTES]
        blocks = array("i", table.tobytes())
        node = self._node
        if (
            siblings is None
            and node.is_leaf
            and node.holders == 1
            and not node.pins_here
            and node.parent is not None
            and node.space is space
            # Blocks with hits of their own are kept apart from new ones, for policies that count hits.
            and (node.start >= self._own_from or not tree.policy.tracks_path)
        ):
            tree.extend(node, key, blocks)
        else:
            child = tree.add_child(node, space, key, blocks)
            cache._hold(child)
            cache._release_hold(node)
            self._node = child
            if siblings is not None:
                cache._drop_covered(child)
        if space.group is not self._space.group:
            space.group.used += len(blocks)
            self._space.group.used -= len(blocks)
        self._tree_tokens = end
        for lease, num_blocks in followers:
            lease._follow(self, num_blocks)
        for lease, _ in followers:
            lease._sync()
        return True

    def _sharable_blocks(
        self, table: npt.NDArray[np.int32], first: int, followers: list[tuple[Lease, int]]
    ) -> int:
        """How many leading blocks of `table` may enter the tree: those that nobody but forks shares.

        Forks that share a block have the same tokens up to its end, so they can follow this lease into the
        tree. Fills `followers` with them and the number of leading blocks that each must take over.
        """
        extra = self._cache._pool.extra_holders
        sharers: list[tuple[Lease, list[int]]] = []
        for lease in self._family or ():
            if lease is not self and not lease._is_unshareable:
                theirs = lease._table[first : min(lease._num_blocks, first + len(table))]
                equal = np.flatnonzero(theirs == table[: len(theirs)]).tolist()
                if equal:
                    sharers.append((lease, equal))
        holders = [0] * len(table)
        for _, equal in sharers:
            for i in equal:
                holders[i] += 1
        count = len(table)
        for i, block in enumerate(table.tolist()):
            if extra.get(block, 0) != holders[i]:
                count = i
                break
        for i, block in enumerate(table[:count].tolist()):
            if holders[i]:
                del extra[block]
        for lease, equal in sharers:
            shared = [i for i in equal if i < count]
            if shared:
                followers.append((lease, first + shared[-1] + 1))
        return count

    def _follow(self, leader: Lease, num_blocks: int) -> None:
        """A fork has put blocks into the tree that this lease shares: hold its path's first `num_blocks`."""
        cache = self._cache
        size = cache.block_size
        own = self._table[-(-self._tree_tokens // size) : num_blocks].copy()
        others = own != leader._table[num_blocks - len(own) : num_blocks]
        place = leader._node
        while place.start >= num_blocks * size:
            assert place.parent is not None
            place = place.parent
        keep = num_blocks - place.start // size
        if keep < len(place.blocks):
            place = cache._tree.split(place, keep)
        old = self._node
        cache._hold(place)
        self._node = place
        self._tree_tokens = place.end
        self._table[:num_blocks] = leader._table[:num_blocks]
        cache._release_hold(old)
        cache._free_private(own[others], self._space.group)
        cache._lagging.pop(self, None)

    # ------------------------------------------------------------------ sharing and ending

    def fork(self) -> Lease:
        """Another lease on the same blocks, the partial last one included; O(blocks).

        Whoever first writes into the shared last block (by `append`) gets a copy of it.

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
            self.block_table.copy(),
            self._num_blocks,
            self._tree_tokens,
            self.num_cached_tokens,
        )
        child.num_committed = self.num_committed
        child._own_from = self._own_from
        child._public_tokens = self._public_tokens
        child._is_unshareable = self._is_unshareable
        child._report = self._report
        cache._hold(self._node)
        cache._pool.share(self._private_blocks())
        if self._family is None:
            self._family = [self]
        self._family.append(child)
        child._family = self._family
        cache._leases[child.id] = child
        if self in cache._lagging:
            cache._lagging[child] = None
        return child

    def _private_blocks(self) -> npt.NDArray[np.int32]:
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
        self.copies_done()
        self.num_committed = min(self.num_committed, max(0, num_tokens))
        cut = max(num_tokens, self._own_from)
        if cut < self._tree_tokens:
            self._cache._detach_from(self, cut)
            self._sync()
            if self._cache._lagging:
                self._cache._resync()

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
        # A block whose copy has not run must not enter the tree now that its source goes.
        self._cache._lagging.pop(self, None)
        self._is_released = True
        self.copies_done()
        self._cache._end(self, 0 if discard else keep)

    def _error(self, action: str) -> LeaseError:
        return LeaseError(f"can't {action} {self!r}")
