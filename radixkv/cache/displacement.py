# SPDX-License-Identifier: Apache-2.0
"""Ages of the prefixes that an allocation would evict, found without evicting them."""

from __future__ import annotations

from typing import Any

from radixkv.cache.accounts import BlockAccount
from radixkv.cache.capacity import Capacity


def displaces_younger(capacity: Capacity, group: BlockAccount, count: int, age_s: float) -> bool:
    """True if `count` blocks for `group` would be taken from leaves used less than `age_s` seconds ago.

    Leaves of sessions that are over go first, whatever their age. With a leaf go the ancestors that it alone
    keeps. Where nothing can be evicted, nothing is displaced. O(leaves that would go and their ancestors).
    """
    left, victims = count - capacity.pool.num_free, group
    over = 0 if group.ceiling is None else group.used + count - group.ceiling
    if over <= 0 < left:
        if capacity.room(group)[0] <= capacity.pool.num_free:  # requests and floors hold the rest
            return False
        victims = capacity.groups.first_for(group)
    left = max(left, over)
    if left <= 0:
        return False
    index, age_of = victims.index, capacity.tree.use_times.age_s
    done = {id(leaf): leaf for leaf in index.all_done()}
    left -= sum(_alone(leaf) for leaf in done.values())
    for leaf in index:
        if left <= 0:
            return False
        if id(leaf) in done:
            continue
        if age_of(leaf.last_access) < age_s:
            return True
        left -= _alone(leaf)
    return False


def _alone(leaf: Any) -> int:
    """Count the blocks of a leaf and of the ancestors that would be leaves without it. O(ancestors)."""
    count, node = len(leaf.blocks), leaf
    while (parent := node.parent) is not None and not parent.refs and _has_one_child(parent):
        count, node = count + len(parent.blocks), parent
    return count


def _has_one_child(node: Any) -> bool:
    return node.namespace_children is None and node.children is not None and len(node.children) == 1
