"""Forgetting: what leaves the tree with its last reference, and what is asked to be forgotten.

An unheld partial block is only worth keeping while no sibling begins with all of its tokens: it is *covered*
then, and freed at once. Nothing here leaves a ghost.
"""

from __future__ import annotations

from radixkv.cache.node import Node
from radixkv.cache.retention.capacity import Capacity


def _forget(capacity: Capacity, leaf: Node, num_blocks: int) -> None:
    group = leaf.space.group
    capacity.free_tree_blocks(capacity.tree.trim(leaf, num_blocks), group)


def unprotect(capacity: Capacity, node: Node) -> None:
    """Drop a reference to `node`; a partial block that a sibling covers goes with its last one."""
    capacity.tree.unprotect(node)
    if not node.refs:
        _forget_if_covered(capacity, node)


def release(capacity: Capacity, node: Node) -> None:
    """A lease no longer ends at `node`."""
    capacity.tree.release(node)
    if not node.refs:
        _forget_if_covered(capacity, node)


def _forget_if_covered(capacity: Capacity, node: Node) -> None:
    tree = capacity.tree
    if 0 < len(node.key) < tree.block_bytes and tree.siblings(node).is_covered(node):
        _forget(capacity, node, 1)


def drop_covered(capacity: Capacity, node: Node) -> None:
    """Free an unheld partial block whose tokens `node` begins with, now that it holds them, too."""
    unheld = capacity.tree.siblings(node).unheld_beginning(node)
    if unheld is not None:
        _forget(capacity, unheld, 1)


def discard_from(capacity: Capacity, node: Node, cut: int) -> None:
    """Forget the tokens from `cut` on along the path that ends at `node`, unless something needs them."""
    tree = capacity.tree
    size = tree.block_size
    while node.parent is not None and not node.refs and node.is_leaf and node.end > cut:
        parent = node.parent
        keep = max(0, -(-(cut - node.start) // size))
        if keep < len(node.blocks):
            _forget(capacity, node, len(node.blocks) - keep)
        if keep:
            if node.end > cut and not tree.truncate_tail(node, cut):
                _forget(capacity, node, 1)
            return
        node = parent
