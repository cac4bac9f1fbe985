# SPDX-License-Identifier: Apache-2.0
"""PendingCopies: the copies into a lease's blocks that have not run yet, and the hold on their sources.

    listed ---- take ----> part of a step ---- done ----> run
    |   their sources are held: they are not allocated      |

Who makes copies later, with others' work between, takes them `until_done`: a block that is still to be read
must not be given to anybody, who could overwrite it first. Other copies are made by the lease's user before
its next commit, and end with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Container

from radixkv.cache.accounts import BlockAccount
from radixkv.cache.capacity import Capacity
from radixkv.cache.node import Node

Copy = tuple[int, int, int]  # source block, target block, slots
Moved = dict[int, list[BlockAccount]]  # blocks that leave the tree -> of each holder, what its own count as


class PendingCopies:
    """The pending copies of one lease."""

    __slots__ = ("_account", "_capacity", "blocks", "copies", "nodes", "outlasts_commit")

    def __init__(self, capacity: Capacity, account: BlockAccount) -> None:
        self._capacity = capacity
        self._account = account  # what the lease's own blocks count as
        self.copies: list[Copy] = []  # those that nobody has taken to make them, in order
        # (node, block) that copies read in the tree, protected until they have run.
        self.nodes: list[tuple[Node, int]] = []
        self.blocks: list[int] = []  # what they read outside the tree, with one holder more until then
        self.outlasts_commit = False  # they have been taken `until_done`

    @property
    def hold_something(self) -> bool:
        """True if some have not run yet."""
        return bool(self.nodes or self.blocks)

    def add(self, source: int, target: int, slots: int, node: Node | None) -> None:
        """List a copy. A reference to `node`, which has the source, or a holder of the source goes along."""
        self.copies.append((source, target, slots))
        if node is not None:
            self.nodes.append((node, source))
        else:
            self.blocks.append(source)

    def take(self, until_done: bool) -> list[Copy]:
        """Take the copies off the list; they hold their sources still, `until_done` even over a commit."""
        copies, self.copies = self.copies, []
        self.outlasts_commit = self.outlasts_commit or until_done
        return copies

    def forget_into(self, blocks: Container[int]) -> None:
        """Drop the copies into blocks that are no longer the lease's. O(copies)."""
        self.copies = [copy for copy in self.copies if copy[1] not in blocks]

    def for_fork(self) -> PendingCopies:
        """Return the same copies for a fork, which waits for them and holds their sources too. O(copies)."""
        fork = PendingCopies(self._capacity, self._account)
        for node, _ in self.nodes:
            self._capacity.tree.protect(node)
        self._capacity.pool.share(array("i", self.blocks))
        fork.copies, fork.nodes, fork.blocks = self.copies[:], self.nodes[:], self.blocks[:]
        fork.outlasts_commit = self.outlasts_commit
        return fork

    def done(self) -> None:
        """Release the sources of copies that have run, or never will. O(copies)."""
        self.outlasts_commit = False
        nodes, self.nodes = self.nodes, []
        for node, _ in nodes:
            self._capacity.unprotect(node)
        blocks, self.blocks = self.blocks, []
        if blocks:
            self._capacity.free_private(array("i", blocks), self._account)

    def invalidate_below(self, below: Container[Node], moved: Moved) -> None:
        """Keep sources in nodes that are about to leave the tree. O(copies * depth).

        A copy reads one block at its source node, or above where that was split: hold that.
        """
        tree = self._capacity.tree
        nodes, self.nodes = self.nodes, []
        for node, block in nodes:
            if node not in below:
                self.nodes.append((node, block))
                continue
            home: Node = node
            while block not in home.blocks:
                assert home.parent is not None
                home = home.parent
            if home in below:
                self.blocks.append(block)
                moved.setdefault(block, []).append(self._account)
            else:
                tree.protect(home)
                self.nodes.append((home, block))
            tree.unprotect(node)
