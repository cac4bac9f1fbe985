# SPDX-License-Identifier: Apache-2.0
"""TreeNodes: the nodes of a radix tree, and all that only reads them: lookups, paths, tokens.

`RadixTree` is one that can be changed; a reset leaves one that can't, see
`radixkv.cache.invalidated_tree`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

from radixkv.cache.block_identity import IDENTITY_BYTES, BlockIdentities
from radixkv.cache.keys import CONTEXT_TOKENS, TOKEN_BYTES, shared_bytes
from radixkv.cache.node import Children, Namespace, Node


class Walk(NamedTuple):
    """End of a lookup."""

    node: Node  # the deepest node of which at least one whole block matched, or the root
    depth: int  # tokens matched in whole blocks; node.start < depth <= node.end, or the root's 0
    partial: int  # further tokens that match inside one more block
    source: Node | None  # the node holding that block; None when partial is 0
    neighbour: Node | None  # the cached continuation nearest to the tokens that did not match
    onward: bytes | bytearray  # a few tokens at least with which that goes on where the match ended


_CONTEXT = CONTEXT_TOKENS * TOKEN_BYTES
_new_walk = cast(Callable[[tuple[Any, ...]], Walk], partial(tuple.__new__, Walk))  # quicker than Walk(...)


class TreeNodes:
    """The roots, by namespace, and the `num_nodes` nodes that hang below them."""

    def __init__(
        self, block_size: int, identities: BlockIdentities, roots: dict[Namespace, Node], num_nodes: int
    ) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.identities = identities
        self.roots = roots
        self.num_nodes = num_nodes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_nodes} nodes, {len(self.roots)} namespaces)"

    def children_of(self, node: Node, owner: Namespace) -> Children | None:
        """The children of `node` that belong to `owner`. O(1)."""
        if node.owner is owner:
            return node.children
        return node.namespace_children.get(owner) if node.namespace_children is not None else None

    def identity_after(self, node: Node, owner: Namespace) -> bytes:
        """Identity that a block of `owner` after all of `node` would follow. O(1)."""
        before = bytes(node.ids[-IDENTITY_BYTES:])
        return before if node.owner is owner else self.identities.beyond_public(before, owner.seed)

    def identity_before(self, node: Node, num_blocks: int) -> bytes:
        """Identity that a node's block follows, with `num_blocks` of its blocks in front. O(1)."""
        if num_blocks:
            return node.identity(num_blocks)
        assert node.parent is not None
        return self.identity_after(node.parent, node.owner)

    def identity_of_match(self, walk: Walk, owner: Namespace) -> bytes:
        """Identity that the next block of `owner` would follow where a lookup ended. O(1)."""
        node = walk[0]
        end = (walk[1] - node.start) // self.block_size * IDENTITY_BYTES or IDENTITY_BYTES
        before = bytes(node.ids[end - IDENTITY_BYTES : end])
        return before if node.owner is owner else self.identities.beyond_public(before, owner.seed)

    def walk(self, node: Node, owner: Namespace, data: bytes, pos: int, stop: int) -> Walk:
        """Follow data[pos:stop] (bytes) down from the end of `node`, edge by edge. O(tokens + path)."""
        size = self.block_bytes
        while True:
            children = node.children if node.owner is owner else self.children_of(node, owner)
            if children is None or pos >= stop:
                return _new_walk((node, pos // TOKEN_BYTES, 0, None, None, b""))
            limit = pos + size
            block = data[pos : limit if limit < stop else stop]
            child: Any = children.whole.get(block) if limit <= stop else None
            if child is not None:
                key = child.key
                if data.startswith(key, pos, stop):
                    pos += len(key)
                    tail = len(key) % size
                    if not tail:
                        node = child
                        continue
                    above = child if len(key) > tail else node
                    return _new_walk(
                        (above, (pos - tail) // TOKEN_BYTES, tail // TOKEN_BYTES, child, child, b"")
                    )
                same = shared_bytes(key, data[pos : min(pos + len(key), stop)])
                if same >= size:
                    tail = same % size
                    depth = (pos + same - tail) // TOKEN_BYTES
                    source = child if tail >= TOKEN_BYTES else None
                    same -= same % TOKEN_BYTES
                    onward = key[same : same + _CONTEXT]
                    return _new_walk((child, depth, tail // TOKEN_BYTES, source, child, onward))
            neighbour, same, onward = children.nearest(block)
            if same or size < _CONTEXT:
                onward = neighbour.key[same : same + _CONTEXT]
            source = neighbour if same else None
            return _new_walk((node, pos // TOKEN_BYTES, same // TOKEN_BYTES, source, neighbour, onward))

    def following(self, walk: Walk, owner: Namespace, tail: bytes, most: int) -> bytes:
        """Return at most `most` bytes after `tail` in a namespace, where a walk over whole blocks ended.

        Of several continuations the latest used. O(log siblings) for each node passed.
        """
        node = walk.node
        inside = walk.depth * TOKEN_BYTES - node.start * TOKEN_BYTES
        if node.parent is not None and inside < len(node.key):
            found = bytes(node.key[inside : inside + len(tail) + most])
            if not found.startswith(tail):
                return b""
        else:
            found = b""
        while len(found) < len(tail) + most:
            children = self.children_of(node, owner)
            child = None if children is None else children.latest_beginning_with(tail[len(found) :])
            if child is None:
                break
            node = child
            found += child.key
        return found[len(tail) : len(tail) + most]

    def path(self, node: Node) -> list[Node]:
        """The nodes from below the root down to `node`. O(depth)."""
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.each_child())

    def path_blocks(self, node: Node) -> array[int]:
        """The blocks from the root down to the end of `node`, a new array. O(path + blocks)."""
        if not node.start:
            return node.blocks[:]
        parts = []
        current: Node | None = node
        while current is not None:
            parts.append(current.blocks)
            current = current.parent
        parts.reverse()
        return array("i", b"".join(parts))

    def siblings(self, node: Node) -> Children:
        """The children among which a node is, itself included. O(1)."""
        assert node.parent is not None
        siblings = self.children_of(node.parent, node.owner)
        assert siblings is not None
        return siblings
