"""What the cache holds after the place where a lookup ended."""

from __future__ import annotations

from radixkv.cache.keys import TOKEN_BYTES
from radixkv.cache.node import Namespace, Node
from radixkv.cache.tree_nodes import Walk


def continuation(walk: Walk, most_bytes: int, owner: Namespace | None = None) -> bytes:
    """The tokens of the nearest cached prompt from the end of the match on, four bytes each.

    Where it branches further on, the first of the branches. O(tokens + nodes).

    Args:
        most_bytes: stop after the run with which so many are reached.
        owner: read only what belongs to this namespace; None: whatever hangs there.

    Returns:
        Empty: there is none, or it has left the tree since the lookup.
    """
    found = walk.depth + walk.partial
    node: Node | None = walk.neighbour
    while node is not None and node.start > found:  # it was split
        node = node.parent
    if node is None or node.end <= found or (owner is not None and node.space is not owner):
        return b""
    parts = [bytes(node.key[(found - node.start) * TOKEN_BYTES :])]
    length = len(parts[0])
    while node.children is not None and length < most_bytes:
        node = next(iter(node.children))
        parts.append(bytes(node.key))
        length += len(node.key)
    return b"".join(parts)
