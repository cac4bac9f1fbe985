# SPDX-License-Identifier: Apache-2.0
"""TreeView: the contents of the tree, for readers that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from radixkv.cache.eviction.policy import overridden
from radixkv.cache.keys import TOKEN_BYTES, NamespaceName, TokenIds, decode_tokens, encode_tokens
from radixkv.cache.lookup import Lookup
from radixkv.cache.namespaces import Namespaces
from radixkv.cache.node import Namespace, Node
from radixkv.cache.radix_tree import RadixTree, Walk

_SHOWN_TOKENS = 4


class TreeView:
    """Reads the tree of one cache: `PrefixCache.tree`. Every method is read-only.

    Attributes:
        index: the tree itself, for who visits its nodes, such as `radixkv.cache.reporting.tree_walk`.
        clock: seconds, as the cache has them.
    """

    def __init__(
        self, index: RadixTree, lookup: Lookup, namespaces: Namespaces, clock: Callable[[], float]
    ) -> None:
        self.index = index
        self.clock = clock
        self._lookup = lookup
        self._namespaces = namespaces

    def show(self, max_lines: int = 50) -> str:
        """The tree as ASCII, a line for each node; at most `max_lines`, and one to say that there is more."""
        lines: list[str] = []
        stack: list[Iterator[Node]] = [iter(self.index.roots.values())]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
            elif len(lines) >= max_lines:
                lines.append("...")
                break
            else:
                lines.append(_line(node, len(stack) - 1))
                stack.append(node.each_child())
        return "\n".join(lines) if lines else "(empty)"

    def known(self, namespace: NamespaceName) -> Namespace | None:
        """The namespace, if something is cached or held in it. O(1)."""
        return self._namespaces.known(namespace)

    def of_owner(self, namespace: NamespaceName) -> list[Namespace]:
        """The namespaces in use of a namespace's owner, under whatever adapter. O(namespaces)."""
        return self._namespaces.of_owner(namespace)

    def path(self, token_ids: TokenIds, namespace: NamespaceName = "") -> list[int]:
        """The nodes that a lookup finds, the last one perhaps in part: their ids in a `walk`, top down."""
        walk = self._lookup.match(encode_tokens(token_ids), self.known(namespace), namespace).walk
        if walk is None:
            return []
        last = walk.node if walk.source is None else walk.source
        return [node.blocks[0] for node in self.index.path(last) if node.blocks]

    def continuation(self, token_ids: TokenIds, namespace: NamespaceName = "", limit: int = 64) -> list[int]:
        """Return the continuation, where a match ends, of the nearest prompt cached by the namespace itself.

        Empty if there is none, or if it is public: text declared by others is not shown. O(tokens + path).
        """
        owner = self.known(namespace)
        walk = self._lookup.match(encode_tokens(token_ids), owner).walk
        if walk is None or owner is None:
            return []
        size = limit * TOKEN_BYTES
        return decode_tokens(continuation(walk, size, owner)[:size])

    def following(self, token_ids: TokenIds, namespace: NamespaceName = "", most: int = 64) -> list[int]:
        """Return the text cached after these tokens in the same namespace: a guess of the next tokens.

        At most `most` tokens; of several continuations the latest used one. Of public text only a prefix that
        was declared is followed. O(tokens + path).
        """
        max_bytes = most * TOKEN_BYTES
        return decode_tokens(
            self._lookup.following(encode_tokens(token_ids), self.known(namespace), max_bytes)
        )

    @property
    def evicts_in_order(self) -> bool:
        """True if eviction takes candidates strictly in the order of their priorities."""
        return overridden(self.index.policy, "victim") is None


def continuation(walk: Walk, max_bytes: int, owner: Namespace | None = None) -> bytes:
    """The tokens of the nearest cached prompt from the end of the match on, four bytes each. O(tokens +
    nodes).

    Where it branches further on, the first of the branches, up to the run with which `max_bytes` are
    reached.
    Empty: there is none, or it has left the tree since, or the match does not end in what `owner` (None: all)
    has.
    """
    found = walk.depth + walk.partial
    node: Node | None = walk.neighbour
    while node is not None and node.start > found:  # it was split
        node = node.parent
    if node is None or node.end <= found or (owner is not None and node.owner is not owner):
        return b""
    parts = [bytes(node.key[(found - node.start) * TOKEN_BYTES :])]
    length = len(parts[0])
    while node.children is not None and length < max_bytes:
        node = next(iter(node.children))
        parts.append(bytes(node.key))
        length += len(node.key)
    return b"".join(parts)


def _line(node: Node, level: int) -> str:
    if node.parent is None:
        return f"{node.owner!r}"
    tokens = decode_tokens(node.key[: _SHOWN_TOKENS * TOKEN_BYTES])
    more = " .." if len(node.key) > _SHOWN_TOKENS * TOKEN_BYTES else ""
    marks = (f", {node.refs} refs" if node.refs else "") + (", pinned" if node.pins else "")
    if node.states is not None:
        marks += ", states at " + " ".join(str(state.end) for state in node.states.values())
    shown = " ".join(map(str, tokens)) + more
    return f"{'  ' * level}{node.start}..{node.end} [{shown}] {len(node.blocks)} blocks{marks}"
