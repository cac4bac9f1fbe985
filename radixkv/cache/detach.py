"""Detaching subtrees: for reset, and for steps that failed.

The blocks that leases hold leave the tree without being freed: they become private to their holders, who
keep them valid to the end but share nothing from there on. All other blocks below are free.

    root ── [b0 b1] ── [b2 b3] ── [b4]          lease 1 holds b0..b3, lease 2 b0..b4
    root ── [b0 b1]     b2 b3      b4           detached at b2: b2 and b3 are private with two holders

A reset detaches what is held, and retires the rest as it is: see `radixkv.cache.retired`.
"""

from __future__ import annotations

from array import array
from collections.abc import Container
from typing import TYPE_CHECKING

from radixkv.cache.holding import hold
from radixkv.cache.node import Node
from radixkv.cache.retention.quota import QuotaGroup
from radixkv.cache.retired import RetiredTree

if TYPE_CHECKING:
    from radixkv.cache.lease import Lease
    from radixkv.cache.prefix_cache import PrefixCache


def _detach(cache: PrefixCache, top: Node, owner: Lease) -> None:
    """Take the subtree that begins at `top` out of the tree. O(leases * depth + blocks below).

    Args:
        owner: the lease that may share again from there; all others that hold something below lose the right.
    """
    below = _subtree(top)
    _drop_pins(cache, below)
    counts: dict[int, int] = {}
    owners: dict[int, QuotaGroup] = {}
    for lease in cache._leases.values():
        _release_sources(cache, lease, below, counts, owners)
        if lease._node in below:
            _make_private(cache, lease, below, counts, owners)
            if lease is not owner:
                lease._is_unshareable = True
    for node in reversed(list(below)):
        group = node.space.group
        blocks = cache._tree.trim(node, len(node.blocks))
        unheld = array("i", [block for block in blocks if block not in counts])
        cache._capacity.free_tree_blocks(unheld, group)
        for block in blocks:
            if block in counts:  # counted from now on where its first holder is
                group.used -= 1
                owners[block].used += 1
    for block, holders in counts.items():
        if holders > 1:
            cache._pool.extra_holders[block] = holders - 1


class _Everything:
    """All nodes but the roots."""

    def __contains__(self, node: Node) -> bool:
        return node.parent is not None


def retire(cache: PrefixCache) -> RetiredTree:
    """Take all nodes out of the tree at once. O(leases * depth + pins * depth + namespaces)."""
    cache._pins.drop_all()
    tree = cache._tree
    everything = _Everything()
    counts: dict[int, int] = {}
    owners: dict[int, QuotaGroup] = {}
    for lease in cache._leases.values():
        _release_sources(cache, lease, everything, counts, owners)
        if lease._node in everything:
            _make_private(cache, lease, everything, counts, owners)
        lease._is_unshareable = True
    if tree.listener is not None:
        for node in reversed(list(tree.nodes())):
            if len(node.key) >= tree.block_bytes or tree.siblings(node).find(bytes(node.key)) is node:
                tree.listener.removed(node, 0)
    old = tree.retire()
    num_blocks = sum(group.forget() for group in cache._groups) - len(counts)
    for block, holders in counts.items():
        owners[block].used += 1
        if holders > 1:
            cache._pool.extra_holders[block] = holders - 1
    for lease in cache._leases.values():
        lease._node = root = tree.root(lease._node.space)
        hold(cache, root)
    retired = RetiredTree(old, set(counts), num_blocks)
    cache._pool.free_later(retired)
    return retired


def detach_from(cache: PrefixCache, lease: Lease, cut: int) -> None:
    """Take what a lease holds from token `cut` on, and what hangs below it, out of the tree."""
    cut -= cut % cache.block_size
    node = lease._node
    while node.start > cut:
        assert node.parent is not None
        node = node.parent
    if node.start < cut:
        cache._tree.split(node, (cut - node.start) // cache.block_size)
    _detach(cache, node, lease)


def _subtree(top: Node) -> dict[Node, None]:
    """All nodes of the subtree, parents before children."""
    below: dict[Node, None] = {}
    stack = [top]
    while stack:
        node = stack.pop()
        below[node] = None
        stack.extend(node.each_child())
    return below


def _drop_pins(cache: PrefixCache, below: dict[Node, None]) -> None:
    cache._pins.drop_within(below)


def _release_sources(
    cache: PrefixCache,
    lease: Lease,
    below: Container[Node],
    counts: dict[int, int],
    owners: dict[int, QuotaGroup],
) -> None:
    """A pending copy reads one block at its source node, or above where that was split: hold only that."""
    tree = cache._tree
    for node, block in list(lease._sources):
        if node not in below:
            continue
        home: Node = node
        while block not in home.blocks:
            assert home.parent is not None
            home = home.parent
        lease._sources.remove((node, block))
        if home in below:
            lease._source_blocks.append(block)
            counts[block] = counts.get(block, 0) + 1
            owners.setdefault(block, lease._space.group)
        else:
            tree.protect(home)
            lease._sources.append((home, block))
        tree.unprotect(node)


def _make_private(
    cache: PrefixCache,
    lease: Lease,
    below: Container[Node],
    counts: dict[int, int],
    owners: dict[int, QuotaGroup],
) -> None:
    """Move the lease's hold up to the first node that stays; its blocks below become private."""
    node: Node = lease._node
    while node in below:
        assert node.parent is not None
        start = node.start
        node = node.parent
    hold(cache, node)
    lease._node.holders -= 1
    cache._tree.unprotect(lease._node)
    size = cache.block_size
    for block in lease._table[start // size : -(-lease._tree_tokens // size)]:
        counts[block] = counts.get(block, 0) + 1
        owners.setdefault(block, lease._space.group)
    lease._node = node
    lease._tree_tokens = start
    lease._own_from = min(lease._own_from, start)
