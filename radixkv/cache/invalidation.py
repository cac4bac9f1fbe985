"""Detaching: nodes leave the tree whose blocks leases still hold, at a reset and when a step failed.

The blocks that leases hold leave the tree without being freed: they become private to their holders, who
keep them valid to the end but share nothing from there on. All other blocks below are free.

    root ── [b0 b1] ── [b2 b3] ── [b4]          lease 1 holds b0..b3, lease 2 b0..b4
    root ── [b0 b1]     b2 b3      b4           detached at b2: b2 and b3 are private with two holders

A reset detaches what is held, and retires the rest as it is: see `radixkv.cache.invalidated_tree`.
"""

from __future__ import annotations

from array import array

from radixkv.cache.holding import Holding
from radixkv.cache.invalidated_tree import InvalidatedTree
from radixkv.cache.moved_blocks import Moved
from radixkv.cache.node import Node
from radixkv.cache.state import CacheState


def invalidate_subtree(state: CacheState, top: Node, owner: Holding) -> None:
    """Take the subtree that begins at `top` out of the tree. O(leases * depth + blocks below).

    Args:
        owner: the lease that may share again from there; all others that hold something below lose the right.
    """
    below = _subtree(top)
    state.pins.drop_within(below)
    moved = Moved()
    for lease in state.leases:
        if lease.invalidate_below(below, moved) and lease is not owner:
            lease.stop_sharing()
    capacity = state.capacity
    for node in reversed(list(below)):
        group = node.space.group
        blocks = capacity.tree.trim(node, len(node.blocks))
        free = array("i", [block for block in blocks if block not in moved.holders])
        capacity.free_tree_blocks(free, group)
        for block in blocks:
            if block in moved.holders:  # counted from now on where its first holder is
                capacity.transfer(1, group, moved.owners[block])
    capacity.pool.set_holders(moved.holders)


def _subtree(top: Node) -> dict[Node, None]:
    """All nodes of the subtree, parents before children."""
    below: dict[Node, None] = {}
    stack = [top]
    while stack:
        node = stack.pop()
        below[node] = None
        stack.extend(node.each_child())
    return below


class _Everything:
    """All nodes but the roots."""

    def __contains__(self, node: object) -> bool:
        return isinstance(node, Node) and node.parent is not None


def invalidate_all(state: CacheState) -> InvalidatedTree:
    """Take all nodes out of the tree at once. O(leases * depth + pins * depth + namespaces)."""
    state.pins.drop_all()
    capacity = state.capacity
    tree = capacity.tree
    moved = Moved()
    for lease in state.leases:
        lease.invalidate_below(_Everything(), moved)
        lease.stop_sharing()
    old = tree.invalidate_all()
    num_free = capacity.forget_tree(moved.owners.values())
    capacity.pool.set_holders(moved.holders)
    for lease in state.leases:
        lease.enter_new_tree()
    retired = InvalidatedTree(old, set(moved.holders), num_free)
    capacity.pool.free_later(retired)
    return retired
