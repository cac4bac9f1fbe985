"""Detaching: nodes leave the tree whose blocks leases still hold, at a reset and when a step failed.

The blocks that leases hold leave the tree without being freed: they become private to their holders, who
keep them valid to the end but share nothing from there on. All other blocks below are free.

    root ── [b0 b1] ── [b2 b3] ── [b4]          lease 1 holds b0..b3, lease 2 b0..b4
    root ── [b0 b1]     b2 b3      b4           detached at b2: b2 and b3 are private with two holders

A reset detaches what is held, and retires the rest as it is: see `radixkv.cache.invalidated_tree`.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Container

from radixkv.cache.invalidated_tree import InvalidatedTree
from radixkv.cache.lease import Lease
from radixkv.cache.node import Node
from radixkv.cache.pending_copies import Moved
from radixkv.cache.retention.capacity import Capacity
from radixkv.cache.retention.pins import PinBoard


def invalidate_subtree(
    capacity: Capacity, pins: PinBoard, leases: Collection[Lease], top: Node, owner: Lease
) -> None:
    """Take the subtree that begins at `top` out of the tree. O(leases * depth + pins + blocks below).

    Args:
        owner: the lease that may share again from there; all others that hold something below lose the right.
    """
    below = _subtree(top)
    for pin in [pin for pin in pins if pin.node in below]:
        pins.drop(pin)
    moved: Moved = {}
    for lease in leases:
        if _leave(lease, below, moved) and lease is not owner:
            lease.shares = False
    for node in reversed(list(below)):
        group = node.space.group
        blocks = capacity.tree.trim(node, len(node.blocks))
        capacity.free_tree_blocks(array("i", [block for block in blocks if block not in moved]), group)
        for block in blocks:
            if block in moved:  # counted from now on where its first holder is
                capacity.transfer(1, group, moved[block][0])
    capacity.pool.set_holders({block: len(groups) for block, groups in moved.items()})


def invalidate_all(capacity: Capacity, pins: PinBoard, leases: Collection[Lease]) -> InvalidatedTree:
    """Take all nodes out of the tree at once. O(leases * depth + pins * depth + namespaces)."""
    for pin in list(pins):
        pins.drop(pin)
    tree = capacity.tree
    moved: Moved = {}
    for lease in leases:
        _leave(lease, _Everything(), moved)
        lease.shares = False
    old = tree.invalidate_all()
    num_free = capacity.forget_tree(groups[0] for groups in moved.values())
    capacity.pool.set_holders({block: len(groups) for block, groups in moved.items()})
    for lease in leases:
        lease.node = tree.root(lease.node.space)
        tree.hold(lease.node)
    retired = InvalidatedTree(old, set(moved), num_free)
    capacity.pool.free_later(retired)
    return retired


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


def _leave(lease: Lease, below: Container[Node], moved: Moved) -> bool:
    """Nodes are about to leave the tree: what a lease holds of them becomes private. O(depth + blocks).

    Returns whether anything of the lease's path was among them.
    """
    if lease.pending is not None:
        lease.pending.invalidate_below(below, moved)
    if lease.node not in below:
        return False
    node, start, tree = lease.node, lease.node.start, lease.tree
    while node in below:
        assert node.parent is not None
        start, node = node.start, node.parent
    tree.hold(node)
    tree.release(lease.node)
    size = tree.block_size
    for block in lease.blocks(start // size, -(-lease.tree_tokens // size)):
        moved.setdefault(block, []).append(lease.space.group)
    lease.node, lease.tree_tokens = node, start
    lease.own_from = min(lease.own_from, start)
    return True
