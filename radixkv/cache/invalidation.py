# SPDX-License-Identifier: Apache-2.0
"""Invalidation: nodes leave the tree whose blocks leases still hold, at a reset and when a step failed.

The blocks that leases hold leave the tree without being freed: they become private to their holders, who
keep them valid to the end but share nothing from there on. All other blocks below are free.

    root ── [b0 b1] ── [b2 b3] ── [b4]          lease 1 holds b0..b3, lease 2 b0..b4
    root ── [b0 b1]     b2 b3      b4           invalidated at b2: b2 and b3 are private with two holders

After a reset the rest stays as it is, see `radixkv.cache.invalidated_tree`.
"""

from __future__ import annotations

from array import array

from radixkv.cache.capacity import Capacity
from radixkv.cache.invalidated_tree import InvalidatedTree
from radixkv.cache.node import Node
from radixkv.cache.pending_copies import Moved


def invalidate_subtree(capacity: Capacity, top: Node, owner: object) -> None:
    """Take the subtree that begins at `top` out of the tree. O(leases * depth + pins + blocks below).

    Args:
        owner: the lease that may share again from there; all others that hold something below lose the right.
    """
    below: dict[Node, None] = {}  # parents before children
    stack = [top]
    while stack:
        node = stack.pop()
        below[node] = None
        stack.extend(node.each_child())
    capacity.pins.drop_in(below)
    moved: Moved = {}
    for lease in capacity.leases.values():
        if lease.invalidate_below(below, moved) and lease is not owner:
            lease.shares = False
    for node in reversed(list(below)):
        account = node.owner.account
        blocks = capacity.tree.trim(node, len(node.blocks))
        capacity.free_tree_blocks(array("i", [block for block in blocks if block not in moved]), account)
        for block in blocks:
            if block in moved:  # counted from now on where its first holder is
                capacity.transfer(1, account, moved[block][0])
    capacity.pool.set_holders({block: len(accounts) for block, accounts in moved.items()})


def invalidate_all(capacity: Capacity) -> InvalidatedTree:
    """Take all nodes out of the tree at once. O(leases * depth + pins * depth + namespaces)."""
    capacity.pins.drop_in(_Everything())
    tree, leases = capacity.tree, capacity.leases.values()
    moved: Moved = {}
    for lease in leases:
        lease.invalidate_below(_Everything(), moved)
        lease.shares = False
    roots = tree.invalidate_all()
    num_free = capacity.forget_tree(accounts[0] for accounts in moved.values())
    capacity.pool.set_holders({block: len(accounts) for block, accounts in moved.items()})
    for lease in leases:
        lease.node = tree.root(lease.node.owner)
        tree.hold(lease.node)
    invalidated = InvalidatedTree(tree, roots, set(moved), num_free)
    capacity.pool.free_later(invalidated)
    return invalidated


class _Everything:
    """All nodes but the roots."""

    def __contains__(self, node: object) -> bool:
        return isinstance(node, Node) and node.parent is not None
