# SPDX-License-Identifier: Apache-2.0
"""TreeWalk: the tree as plain data, read in slices, so that no step waits for a large one.

A walk visits nodes level by level. It is begun, and each slice is read, between two calls of the cache.
Between two slices the tree may change: what leaves it is not seen any more, what joins it may or may not be,
a reset ends the walk. Each slice by itself is exact.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from radixkv.cache.keys import TOKEN_BYTES, NamespaceKey, NamespaceName, decode_tokens
from radixkv.cache.node import Node
from radixkv.cache.reporting.ages import time_of
from radixkv.cache.reporting.tree_view import TreeView

SLICE_NODES = 500  # about a millisecond, two on a busy machine
SLICE_BYTES = 256 * 1024


class CachedNode(NamedTuple):
    """A run of cached blocks without a branch inside, as seen by the walk.

    Attributes:
        num_tokens, num_blocks: its own.
    """

    id: int  # unlike those of all other nodes at this time; stays while the node's first block is cached
    parent: int | None  # the node above; None: prompts begin with this one
    namespace: NamespaceKey  # whose it is, framed; () where it is public
    level: int  # nodes above it
    start: int  # tokens before it
    num_tokens: int
    num_blocks: int
    num_hits: int  # requests that found it; a little fewer where the tree was not seen whole
    num_leases: int  # running requests that hold it as the last of theirs
    is_held: bool  # requests or pins protect it, or something below it
    is_pinned: bool  # a pin protects it
    idle_s: float  # seconds since its last use, about; complete only for leaves
    eviction_rank: int | None  # 1: it is the next to be evicted among these nodes; None: it is no candidate
    key: bytes  # its leading tokens, as many as were asked for: four bytes each, little-endian
    # Of a model with states: (tokens before it, requests that resumed there, superseded) of each checkpoint.
    checkpoints: tuple[tuple[int, int, bool], ...] = ()

    @property
    def tenant(self) -> str | None:
        """The first part of its namespace; None: it is public."""
        return self.namespace[0] if self.namespace else None

    @property
    def salt(self) -> str | None:
        """The second part of its namespace, empty where that has one part; None: it is public."""
        return None if not self.namespace else self.namespace[1] if len(self.namespace) > 1 else ""

    @property
    def adapter(self) -> str:
        """The identity of the adapter that computed it; empty: none did, or it is public."""
        return self.namespace[2] if len(self.namespace) > 2 else ""

    @property
    def token_ids(self) -> list[int]:
        """Its leading tokens. O(their number)."""
        return decode_tokens(self.key)


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """Nodes of the cache, read between the engine's steps."""

    nodes: list[CachedNode]  # a node's parent before it
    is_complete: bool  # nothing was left out for its size, and nothing was reset meanwhile
    ranks_are_exact: bool  # the eviction policy takes the candidates strictly by their ranks


class TreeWalk:
    """A walk through the nodes of one owner and the public ones, or of all.

    Args:
        view: the tree of a cache, `PrefixCache.tree`.
        owner: (tenant, salt) whose nodes, under whatever adapter, besides the public ones; None: everybody's.
        shown_tokens: leading tokens of each node to read; -1: all.
        max_nodes, max_bytes: after which the walk ends.
    """

    def __init__(
        self,
        view: TreeView,
        owner: NamespaceName | None = None,
        *,
        shown_tokens: int = 0,
        max_nodes: int = 50_000,
        max_bytes: int = 8 * 1024 * 1024,
    ) -> None:
        tree = view.index
        own = None if owner is None else view.of_owner(owner)
        # As CachedNode, but with their own hits, the cache's use counter at their latest use, and what sorts
        # the candidates of eviction: what that means is found out later, where it holds up no step.
        self._seen: list[tuple[Any, ...]] = []
        self._now = view.clock()
        self._readings = tree.use_times.readings()
        self.is_complete = False  # the walk has come to its end, and not by a limit or a reset
        self._tree = tree
        self._roots = tree.roots
        self._own = None if own is None else frozenset(own)
        self._shown_bytes = shown_tokens * TOKEN_BYTES if shown_tokens >= 0 else sys.maxsize
        self._max_nodes = max_nodes
        self._bytes_left = max_bytes
        self._ids: set[int] = set()
        self._todo: deque[tuple[Node, int]] = deque()
        for whose in tree.roots if own is None else {each: None for one in own for each in (one.public, one)}:
            root = tree.roots.get(whose)
            if root is not None:
                self._expand(root, 0)

    @property
    def num_seen(self) -> int:
        """Nodes so far."""
        return len(self._seen)

    def _expand(self, node: Node, level: int) -> None:
        """Schedule the children of the walk's nodes."""
        children, private = node.children, node.namespace_children
        if children is not None:
            self._todo.extend([(child, level) for child in children])
        if private is not None:
            for owner, own in private.items():
                if self._own is None or owner in self._own:
                    self._todo.extend([(child, level) for child in own])

    def advance(self, num_nodes: int = SLICE_NODES, num_bytes: int = SLICE_BYTES) -> bool:
        """Visit up to `num_nodes` more nodes; False: there is nothing more to do. O(nodes + bytes)."""
        if self._tree.roots is not self._roots:  # all was forgotten
            self._todo.clear()
            return False
        stop = min(len(self._seen) + num_nodes, self._max_nodes)
        limit = self._bytes_left - num_bytes
        todo, seen = self._todo, self._seen
        while todo and len(seen) < stop and self._bytes_left > max(0, limit):
            node, level = todo.popleft()
            if node.parent is not None:  # else it has left the tree
                self._visit(node, level)
                if node.children is not None or node.namespace_children is not None:
                    self._expand(node, level + 1)
        if not todo:
            self.is_complete = True
            return False
        return len(seen) < self._max_nodes and self._bytes_left > 0

    def _visit(self, node: Node, level: int) -> None:
        parent, above = node.parent, None
        blocks, key, entry, states = node.blocks, node.key, node.entry, node.states
        assert parent is not None
        if parent.blocks:
            above = parent.blocks[0]
            if above not in self._ids:  # it was split off since its own parent was visited
                self._visit(parent, level - 1)
        first = blocks[0]
        self._ids.add(first)
        size = len(key)
        shown = b""
        if self._shown_bytes:
            shown = bytes(key[: self._shown_bytes])
            self._bytes_left -= len(shown)
        order = None if entry is None else entry[:2]
        self._seen.append(
            (
                first,
                above,
                node.owner.key,
                level,
                node.start,
                size // TOKEN_BYTES,
                len(blocks),
                node.hits,
                node.holders,
                node.refs > 0,
                node.pins > 0,
                node.last_access,
                order,
                shown,
                tuple([(one.end, one.num_hits, one.is_superseded) for one in states.values()])
                if states
                else (),
            )
        )

    def nodes(self, first_id: int = 0) -> list[CachedNode]:
        """Return the nodes seen so far, parents first; any thread, after the walk. O(nodes log nodes).

        `first_id` is added to the ids, which are their first blocks' otherwise.
        """
        seen = list(map(CachedNode._make, self._seen))
        candidates = sorted((node.eviction_rank, node.id) for node in seen if node.eviction_rank is not None)
        ranks = {node_id: rank for rank, (_, node_id) in enumerate(candidates, 1)}
        hits = {node.id: node.num_hits for node in seen}
        if not self._tree.policy.tracks_path:  # they are counted where they end
            for node in reversed(seen):  # children first
                if node.parent is not None:
                    hits[node.parent] += hits[node.id]
        return [
            node._replace(
                id=first_id + node.id,
                parent=None if node.parent is None else first_id + node.parent,
                num_hits=hits[node.id],
                idle_s=max(0.0, self._now - time_of(int(node.idle_s), self._readings)),
                eviction_rank=ranks.get(node.id),
            )
            for node in seen
        ]
