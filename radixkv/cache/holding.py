"""Holding: leases' references to nodes, and what goes when the last one is dropped or tokens are forgotten.

An unheld partial block is only worth keeping while no sibling begins with all of its tokens: it is *covered*
then, and freed at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.cache.node import Node

if TYPE_CHECKING:
    from radixkv.cache.lease import Lease
    from radixkv.cache.prefix_cache import PrefixCache


def hold(cache: PrefixCache, node: Node) -> None:
    """A lease ends at `node` from now on."""
    node.holders += 1
    cache._tree.protect(node)


def release_hold(cache: PrefixCache, node: Node) -> None:
    """A lease no longer ends at `node`."""
    node.holders -= 1
    unprotect(cache, node)


def unprotect(cache: PrefixCache, node: Node) -> None:
    """Drop a reference to `node`; a partial block that a sibling covers goes with its last one."""
    tree = cache._tree
    tree.unprotect(node)
    if not node.refs and 0 < len(node.key) < tree.block_bytes and tree.siblings(node).is_covered(node):
        forget(cache, node, 1)


def drop_covered(cache: PrefixCache, node: Node) -> None:
    """Free unheld partial blocks whose tokens `node` begins with, now that it holds them, too."""
    unheld = cache._tree.siblings(node).unheld_beginning(node)
    if unheld is not None:
        forget(cache, unheld, 1)


def forget(cache: PrefixCache, leaf: Node, num_blocks: int) -> None:
    """Trim blocks that are not worth a ghost: duplicates, and what was asked to be forgotten."""
    group = leaf.space.group
    cache._capacity.free_tree_blocks(cache._tree.trim(leaf, num_blocks), group)


def discard_from(cache: PrefixCache, node: Node, cut: int) -> None:
    """Forget the tokens from `cut` on along the path that ends at `node`, unless something needs them."""
    size = cache.block_size
    while node.parent is not None and not node.refs and node.is_leaf and node.end > cut:
        parent = node.parent
        keep = max(0, -(-(cut - node.start) // size))
        if keep < len(node.blocks):
            forget(cache, node, len(node.blocks) - keep)
        if keep:
            if node.end > cut and not cache._tree.truncate_tail(node, cut):
                forget(cache, node, 1)
            return
        node = parent


def end(cache: PrefixCache, lease: Lease, keep: int | None) -> None:
    """Release a lease; tokens beyond `keep` that it contributed are forgotten."""
    del cache._leases[lease.id]
    if lease._family is not None:
        lease._family.remove(lease)
    private = lease._private_blocks()
    if private:
        cache._capacity.free_private(private, lease._space.group)
    node = lease._node
    cache._tick = tick = cache._tick + 1
    cache.policy.tick = node.last_access = tick
    node.holders -= 1
    unprotect(cache, node)
    if keep is not None:
        discard_from(cache, node, max(keep, lease._own_from))
