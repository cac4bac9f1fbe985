# SPDX-License-Identifier: Apache-2.0
"""InvalidatedTree: the remains of a reset, so that it need not walk a million nodes.

A reset takes the roots away at once; the nodes below stay unchanged. Their block ids are handed to the
pool node by node, as it allocates; the ghost index asks them for the blocks of the reset, as long as it would
remember as many blocks; then they are taken apart in small pieces.

    invalidated ── handing out ids ──> drained ── forgotten by the ghosts ──> taken apart
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice

from radixkv.cache.keys import TOKEN_BYTES
from radixkv.cache.node import Namespace, Node
from radixkv.cache.radix_tree import RadixTree


class InvalidatedTree:
    """The nodes of a tree that was reset; nothing holds or changes them any more.

    Args:
        tree: the tree that they were in.
        roots: its roots until then.
        held: blocks that are private to leases now, and not free.
        num_blocks: number of the other blocks.
    """

    __slots__ = ("_held", "_places", "_roots", "_taken_nodes", "_to_clear", "_tree", "num_blocks")

    def __init__(
        self, tree: RadixTree, roots: dict[Namespace, Node], held: set[int], num_blocks: int
    ) -> None:
        self.num_blocks = num_blocks  # blocks that have not been handed out yet
        self._tree = tree
        self._held = held
        self._roots = roots
        self._places = self._nodes()
        self._taken_nodes = 0
        self._to_clear: list[Node] | None = None

    def _nodes(self) -> Iterator[Node]:
        """Yield all nodes, parents first, in an order that does not change."""
        stack = [iter(self._roots.values())]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
            else:
                yield node
                stack.append(node.each_child())

    def _free(self, node: Node) -> array[int]:
        held = self._held
        return array("i", [block for block in node.blocks if block not in held]) if held else node.blocks

    def take(self) -> array[int]:
        """Return the free blocks of the next node that has any; there must be some left. O(blocks)."""
        for node in self._places:
            self._taken_nodes += 1
            blocks = self._free(node)
            if blocks:
                self.num_blocks -= len(blocks)
                return blocks
        raise AssertionError("no blocks are left")

    def waiting_blocks(self) -> list[int]:
        """Return the ids that have not been handed out, for `check`. O(nodes)."""
        if not self.num_blocks:
            return []
        return [b for node in islice(self._nodes(), self._taken_nodes, None) for b in self._free(node)]

    def had(self, data: bytes, first: Namespace, own: Namespace, depth: int, found: int) -> bool:
        """Return True if the block after the first `depth` tokens of a prompt was here. O(tokens + path).

        The prompt's first block belongs to `first`, that block to `own`; a partial one must reach beyond
        `found` tokens.
        """
        root = self._roots.get(first)
        if root is None:
            return False
        walk = self._tree.walk(root, first, data, 0, len(data))
        if own is not first:  # private tokens after public ones
            if walk.node.end != walk.depth:
                return False
            walk = self._tree.walk(walk.node, own, data, walk.depth * TOKEN_BYTES, len(data))
        end = walk.depth + walk.partial
        if walk.depth > depth:
            return True
        return walk.depth == depth and end > found and walk.source is not None and walk.source.end == end

    def take_apart(self, num_nodes: int) -> bool:
        """Unlink some nodes once all blocks have been handed out; True when all are. O(num_nodes)."""
        if self.num_blocks:
            return False
        if self._to_clear is None:
            self._to_clear = list(self._roots.values())
            self._roots = {}
            self._places = iter(())
        todo = self._to_clear
        while todo and num_nodes:
            node = todo.pop()
            todo.extend(node.each_child())
            node.unlink()
            num_nodes -= 1
        return not todo
