# SPDX-License-Identifier: Apache-2.0
"""Node and Children: the parts that the radix tree is built of.

A node holds a *run* of blocks: the edge from its parent, without a branch inside. Only the last block of a
leaf may be partial (hold fewer tokens than a block has slots); such a leaf's block is its *tail*.

    root ── [b7 b2 b9] ─┬─ [b4 b1 b0·]      · a partial block: a leaf's tail
                        └─ [b5] ─┬─ [b3]
                                 └─ [b6·]
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

from sortedcontainers import SortedList

from radixkv.cache.accounts import BlockAccount
from radixkv.cache.block_identity import IDENTITY_BYTES
from radixkv.cache.keys import TOKEN_BYTES, NamespaceKey, shared_bytes
from radixkv.cache.public_prefixes import PublicPrefixes
from radixkv.cache.states.checkpoint import Checkpoint

_MAX_LOOKED_AT = 16
_PLAIN_LIST = 512  # above this many children a sorted list in pieces is quicker than one list


class Namespace:
    """A namespace, or the public text of all namespaces with the same model."""

    __slots__ = (
        "__weakref__",
        "account",  # the account it counts in
        "declared",  # the public prefixes that it shares
        "is_public",
        "key",  # framed; () if it is public
        "public",  # the public text that it shares: itself if it is public
        "seed",  # what the identity of its first block follows
    )

    def __init__(
        self,
        key: NamespaceKey,
        account: BlockAccount,
        seed: bytes,
        declared: PublicPrefixes,
        public: Namespace | None,
    ) -> None:
        self.key = key
        self.account = account
        self.seed = seed
        self.declared = declared
        self.is_public = public is None
        self.public = self if public is None else public

    def __repr__(self) -> str:
        return "Namespace(public)" if self.is_public else f"Namespace({self.key!r})"


class Node:
    """A run of cached blocks and what hangs below it.

    Owned by the tree it is in: only `RadixTree` writes its fields, but for the notes that others keep on it,
    which the tree clears or hands on as it changes.
    """

    __slots__ = (
        "blocks",  # physical block ids (int32), one per block of the run
        "children",  # nodes below, or None for a leaf
        "data",  # the eviction policy's own
        "entry",  # in the eviction index, which writes it; None when it is not a candidate
        # Number of leases that acquired a prefix through this node, if the policy asks for that; else of
        # prefixes that end here, or in departed descendants: with all below, they add up to the same.
        "hits",
        "holders",  # how many of the refs are leases
        "ids",  # identities of the run's whole blocks, see `block_identity`; of a root its namespace's seed
        "key",  # the run's token ids, four bytes each
        "lapsed",  # a pin on it has run out; the pins' own
        # The cache's counter at the latest use; complete only for leaves: a node inherits it when they go.
        "last_access",
        "namespace_children",  # only below public nodes: namespace -> its private children there
        "owner",  # the namespace that the node's tokens belong to
        "parent",  # the node above; None for a root and for a node that has left the tree
        "pins",  # pins that end here plus the children that are themselves pinned
        "pins_here",  # pins that end here
        # Leases, pins and pending copies that end here, plus the children that are themselves protected. A
        # node without may be evicted once it is a leaf.
        "refs",
        "renewed_at",  # clock seconds of the latest hit while pins end here; unset where none ever did
        "start",  # number of tokens before the run, a multiple of the block size
        "states",  # by number of the run's blocks before each: `states.checkpoint.Checkpoint`; None: none
        "version",  # changes whenever a match that ends here could have changed; -1: no longer in the tree
    )

    renewed_at: float

    def __init__(
        self,
        parent: Node | None,
        owner: Namespace,
        start: int,
        key: bytearray,
        blocks: array[int],
        ids: bytearray,
    ) -> None:  # the node keeps `key`, `blocks` and `ids`: they must not be used elsewhere
        self.parent = parent
        self.owner = owner
        self.start = start
        self.key = key
        self.blocks = blocks
        self.ids = ids
        self.children: Children | None = None
        self.namespace_children: dict[Namespace, Children] | None = None
        self.refs = self.holders = self.pins = self.pins_here = 0
        self.version = self.last_access = self.hits = 0
        self.lapsed = False
        self.states: dict[int, Checkpoint] | None = None
        self.entry: Any = None
        self.data: Any = None

    def __repr__(self) -> str:
        return f"Node(tokens {self.start}..{self.end}, {len(self.blocks)} blocks, {self.refs} refs)"

    @property
    def end(self) -> int:
        """Number of tokens up to and including the run."""
        return self.start + len(self.key) // TOKEN_BYTES

    def identity(self, num_blocks: int) -> bytes:
        """Return the identity of the prefix up to the end of the run's first `num_blocks` whole blocks. O(1).

        At least one block; of a root, which has none, its seed.
        """
        end = max(1, num_blocks) * IDENTITY_BYTES
        return bytes(self.ids[end - IDENTITY_BYTES : end])

    @property
    def is_leaf(self) -> bool:
        """True for a node without children."""
        return self.children is None and self.namespace_children is None

    def unlink(self) -> None:
        """Drop the links to other nodes: this one is in no tree any more. O(1)."""
        self.parent = self.children = self.namespace_children = self.entry = None

    def each_child(self) -> Iterator[Node]:
        """Yield all nodes directly below, of every namespace."""
        if self.children is not None:
            yield from self.children
        if self.namespace_children is not None:
            for children in self.namespace_children.values():
                yield from children


class Children:
    """The children of one node (in one namespace): by their first block's tokens, and in token order.

    The order finds the one that shares the longest part of a block, which is always a direct neighbour of the
    sought block's place, in O(log n); so are all others, if they don't say otherwise.
    """

    __slots__ = (
        "_order",  # the children's first blocks, sorted, equal ones once
        "_size",
        # Tokens -> the children whose only block is partial and holds just these, the oldest first (requests
        # that computed them at the same time); None: there are none.
        "partial",
        "whole",  # first block -> the child, for those whose first block is whole
    )

    def __init__(self, block_bytes: int) -> None:
        self._size = block_bytes
        self.whole: dict[bytes, Node] = {}
        self.partial: dict[bytes, list[Node]] | None = None
        self._order: Any = []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Node]:
        yield from self.whole.values()
        if self.partial:
            for same in self.partial.values():
                yield from same

    def find(self, block: bytes) -> Node | None:
        """Return the child whose first block is exactly these tokens (whole or partial), the oldest. O(1)."""
        if len(block) < self._size:
            same = self.partial.get(block) if self.partial else None
            return same[0] if same else None
        return self.whole.get(block)

    def _place(self, block: bytes) -> int:
        """Return the place of `block` in the order, existing or not."""
        order = self._order
        return bisect_left(order, block) if type(order) is list else order.bisect_left(block)

    def _member(self, i: int) -> Node:
        """Return the child at one place of the order, of equal ones the oldest."""
        child = self.find(self._order[i])
        assert child is not None
        return child

    def nearest(self, block: bytes) -> tuple[Node, int, bytes]:
        """Return the child that shares most leading tokens with `block`, their bytes, and its first block."""
        order, i = self._order, self._place(block)
        token = block[:TOKEN_BYTES]
        most, best = 0, i
        if i == len(order):
            best = i - 1
        elif order[i].startswith(token):
            most = shared_bytes(order[i], block)
        if i and order[i - 1].startswith(token):
            shared = shared_bytes(order[i - 1], block)
            if shared > most:
                most, best = shared, i - 1
        return self._member(best), most - most % TOKEN_BYTES, order[best]

    def begins_with(self, block: bytes) -> bool:
        """Return True if a child's first block begins with all of `block`."""
        i = self._place(block)
        return i < len(self._order) and self._order[i].startswith(block)

    def latest_beginning_with(self, block: bytes) -> Node | None:
        """Return the last used of the first few children that begin with all of `block` and go on."""
        i, best = self._place(block), None
        for place in range(i, min(i + _MAX_LOOKED_AT, len(self._order))):
            first = self._order[place]
            if not first.startswith(block):
                break
            child = self._member(place)
            if len(child.key) > len(block) and (best is None or child.last_access > best.last_access):
                best = child
        return best

    def is_covered(self, node: Node) -> bool:
        """Return True if another child begins with all the tokens of `node`, a partial child."""
        assert self.partial is not None
        block, order = bytes(node.key), self._order
        after = self._place(block) + 1
        return len(self.partial[block]) > 1 or (after < len(order) and order[after].startswith(block))

    def unheld_beginning(self, node: Node) -> Node | None:
        """Return an unheld partial child that `node` begins with, or None."""
        if not self.partial:
            return None
        block = bytes(node.key[: self._size])
        order = self._order
        i = self._place(block)
        same = self.partial.get(block) or []
        if len(same) > 1 and not same[0].refs and same[0] is not node:
            return same[0]  # the others joined beside it: only the oldest can be unheld
        if i and len(order[i - 1]) < self._size and block.startswith(order[i - 1]):
            before = self.partial[order[i - 1]]
            if len(before) == 1 and not before[0].refs:
                return before[0]
        return None

    def add(self, node: Node) -> None:
        """Add a child; if its first block is whole, it differs from the others'."""
        first = bytes(node.key[: self._size])
        if len(first) < self._size:
            if self.partial is None:
                self.partial = {}
            same = self.partial.setdefault(first, [])
            same.append(node)
            if len(same) > 1:
                return
        else:
            self.whole[first] = node
        order = self._order
        if type(order) is not list:
            order.add(first)
            return
        insort(order, first)
        if len(order) > _PLAIN_LIST:
            self._order = SortedList(order)

    def remove(self, node: Node) -> None:
        """Remove a child."""
        first = bytes(node.key[: self._size])
        if len(first) < self._size:
            assert self.partial is not None
            same = self.partial[first]
            same.remove(node)
            if same:
                return
            del self.partial[first]
        else:
            del self.whole[first]
        order = self._order
        if type(order) is list:
            del order[bisect_left(order, first)]
        else:
            order.remove(first)

    def replace(self, new: Node) -> None:
        """Put `new` in the place of the child that begins with the same whole block."""
        self.whole[bytes(new.key[: self._size])] = new

    def first_blocks(self) -> list[bytes]:
        """The sorted first blocks, equal ones once, for `check`."""
        return list(self._order)
