"""TreeWalk: the tree as plain data, read in slices, so that nobody's step waits for a large one.

A walk visits nodes level by level. Between two slices the tree may change: what leaves it is not seen any
more, what joins it may or may not be, a reset ends the walk. Each slice by itself is exact.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

from radixkv.cache.keys import TOKEN_BYTES, NamespaceKey
from radixkv.cache.node import Namespace, Node
from radixkv.cache.tree_nodes import TreeNodes

SLICE_NODES = 500  # about a millisecond, two on a busy machine
SLICE_BYTES = 256 * 1024


class NodeSeen(NamedTuple):
    """One node, as it was when the walk came by.

    Attributes:
        id: its first block: no other node has it now, and it stays while that block does.
        parent: the node above; None: it begins a prompt.
        namespace: the framed namespace; () where the node is public.
        level: nodes above it.
        start: tokens before it.
        num_tokens, num_blocks: its own.
        hits: requests that found it, or where `hits_are_of_paths` is false, that found nothing below it.
        last_use: the cache's use counter at its latest use; complete only for leaves.
        num_leases: leases that end here.
        is_held: leases, pins, or what hangs below them protect it.
        is_pinned: pins protect it.
        order: sorts the candidates of eviction, first to go first; None: it is none.
        key: its leading tokens, four bytes each, as many as the walk was asked for.
    """

    id: int
    parent: int | None
    namespace: NamespaceKey
    level: int
    start: int
    num_tokens: int
    num_blocks: int
    hits: int
    last_use: int
    num_leases: int
    is_held: bool
    is_pinned: bool
    order: tuple[Any, int] | None
    key: bytes


_new_seen = cast(Callable[[tuple[Any, ...]], NodeSeen], partial(tuple.__new__, NodeSeen))


class TreeWalk:
    """A walk through the nodes of one namespace and the public ones, or of all.

    Args:
        space: whose nodes, besides the public ones; None: everybody's.
        shown_tokens: leading tokens of each node to read; -1: all.
        most_nodes, most_bytes: after which the walk ends.

    Attributes:
        seen: the nodes so far, a node's parent before it.
        is_complete: the walk has come to its end, and not by a limit or a reset.
    """

    def __init__(
        self,
        tree: TreeNodes,
        space: Namespace | None,
        *,
        shown_tokens: int = 0,
        most_nodes: int = 50_000,
        most_bytes: int = 8 * 1024 * 1024,
    ) -> None:
        self.seen: list[NodeSeen] = []
        self.is_complete = False
        self._tree = tree
        self._roots = tree.roots
        self._space = space
        self._shown_bytes = shown_tokens * TOKEN_BYTES if shown_tokens >= 0 else sys.maxsize
        self._most_nodes = most_nodes
        self._bytes_left = most_bytes
        self._ids: set[int] = set()
        roots = tree.roots if space is None else (space.public, space)
        self._todo: deque[tuple[Node, int]] = deque()
        for owner in roots:
            root = tree.roots.get(owner)
            if root is not None:
                self._expand(root, 0)

    def _expand(self, node: Node, level: int) -> None:
        """What of the walk's nodes hangs below is to be visited."""
        children, private = node.children, node.namespace_children
        if children is not None:
            self._todo.extend([(child, level) for child in children])
        if private is not None:
            for space, own in private.items():
                if self._space is None or space is self._space:
                    self._todo.extend([(child, level) for child in own])

    def advance(self, num_nodes: int = SLICE_NODES, num_bytes: int = SLICE_BYTES) -> bool:
        """Visit up to so many nodes more; False: there is nothing more to do. O(nodes + bytes)."""
        if self._tree.roots is not self._roots:  # all was forgotten
            self._todo.clear()
            return False
        stop = min(len(self.seen) + num_nodes, self._most_nodes)
        limit = self._bytes_left - num_bytes
        todo, seen = self._todo, self.seen
        while todo and len(seen) < stop and self._bytes_left > max(0, limit):
            node, level = todo.popleft()
            if node.parent is not None:  # else it has left the tree
                self._visit(node, level)
                if node.children is not None or node.namespace_children is not None:
                    self._expand(node, level + 1)
        if not todo:
            self.is_complete = True
            return False
        return len(seen) < self._most_nodes and self._bytes_left > 0

    def _visit(self, node: Node, level: int) -> None:
        parent, above = node.parent, None
        blocks, key, entry = node.blocks, node.key, node.entry
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
        self.seen.append(
            _new_seen(
                (
                    first,
                    above,
                    node.space.key,
                    level,
                    node.start,
                    size // TOKEN_BYTES,
                    len(blocks),
                    node.hits,
                    node.last_access,
                    node.holders,
                    node.refs > 0,
                    node.pins > 0,
                    order,
                    shown,
                )
            )
        )
