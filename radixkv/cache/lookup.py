"""Lookup: the longest cached prefix of a prompt, and whether an earlier answer still holds. Read-only."""

from __future__ import annotations

from itertools import islice

from radixkv.cache.keys import TOKEN_BYTES, NamespaceName
from radixkv.cache.namespaces import Namespaces
from radixkv.cache.node import Namespace, Node
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.retention.public_prefixes import PublicPrefixes
from radixkv.cache.tree_nodes import Walk

MAX_NAMESPACES = 256  # others that an administrator's question looks into


class Match:
    """The longest cached prefix of some tokens, at the time of the lookup.

    Attributes:
        num_tokens: its length, token-granular; may be the whole prompt.
        data: the tokens, encoded.
        namespace: as given.
        space: the same as it was known; None: it was not.
        walk: where the lookup ended; None: nothing at all was cached in the namespace.
    """

    __slots__ = (
        "_source_version",
        "_version",
        "_version_of_all",
        "data",
        "namespace",
        "num_tokens",
        "space",
        "walk",
    )
    # Set by Lookup.match: an __init__ would double what making one costs.
    num_tokens: int
    data: bytes
    namespace: NamespaceName
    space: Namespace | None
    walk: Walk | None
    _version_of_all: int  # the lookup's version
    _version: int
    _source_version: int

    def _ends_at(self, walk: Walk | None) -> None:
        self.walk = walk
        if walk is None:
            self.num_tokens = self._version = self._source_version = 0
            return
        node, depth, partial, source, _, _ = walk
        self.num_tokens = depth + partial
        self._version = node.version
        self._source_version = 0 if source is None else source.version

    def _was_made_at(self, version: int) -> bool:
        return self._version_of_all == version

    def _is_untouched(self) -> bool:
        """Whether the node the match ends at, and the one to copy its last tokens from, are unchanged."""
        walk = self.walk
        if walk is None or walk[0].version != self._version:
            return False
        source = walk[3]
        return source is None or source.version == self._source_version

    def __repr__(self) -> str:
        return f"Match({self.num_tokens} of {len(self.data) // TOKEN_BYTES} tokens)"


class Lookup:
    """Looks prompts up in a tree, the public part of a prompt in the shared one.

    Args:
        enabled: False: nothing is ever found.

    Attributes:
        version: changes when earlier answers don't hold any more wherever they end.
    """

    __slots__ = ("_enabled", "_namespaces", "_tree", "version")

    def __init__(self, tree: RadixTree, namespaces: Namespaces, enabled: bool) -> None:
        self._tree = tree
        self._namespaces = namespaces
        self._enabled = enabled
        self.version = 0

    def outdate(self) -> None:
        """Public prefixes were declared or taken back, or all was forgotten. O(1)."""
        self.version += 1

    def match(self, data: bytes, space: Namespace | None, namespace: NamespaceName = "") -> Match:
        """The longest cached prefix. O(tokens + path).

        Args:
            namespace: of that name; it says what public text is shared where there is no space so far.
        """
        match = Match()
        match.data = data
        match.namespace = namespace
        match.space = space
        match._version_of_all = self.version
        root = self._tree.roots.get(space) if space is not None else None
        if not self._enabled:
            match._ends_at(None)
        elif self._namespaces.any_declared and (length := self._public(space, namespace).length_in(data)):
            match._ends_at(self._walk_public(data, space, namespace, length))
        elif root is None:
            match._ends_at(None)
        else:
            assert space is not None
            match.walk = walk = self._tree.walk(root, space, data, 0, len(data))
            node, depth, partial, source, _, _ = walk
            match.num_tokens = depth + partial
            match._version = node.version
            match._source_version = 0 if source is None else source.version
        return match

    def nothing_found(self, data: bytes, space: Namespace) -> Walk:
        """Where a lookup of these tokens begins, as one that found nothing. O(log public prefixes)."""
        root = self._tree.root(space.public if space.declared.length_in(data) else space)
        return Walk(root, 0, 0, None, None, b"")

    def identity(self, match: Match) -> tuple[bytes, int]:
        """As `PrefixCache.identity`."""
        walk = match.walk
        return (b"", 0) if walk is None else (self._tree.identity_of_match(walk, walk.node.space), walk.depth)

    def following(self, data: bytes, space: Namespace | None, most: int) -> bytes:
        """What is cached after these tokens in the namespace, at most `most` bytes. O(tokens + path)."""
        if space is None or not self._enabled:
            return b""
        whole = len(data) - len(data) % self._tree.block_bytes
        walk = self.match(data[:whole], space).walk
        if walk is None or walk.depth * TOKEN_BYTES != whole:
            return b""
        return self._tree.following(walk, space, data[whole:], most)

    def still_holds(self, match: Match, data: bytes, space: Namespace) -> bool:
        """Whether an earlier match is what a lookup of these tokens would find. O(tokens)."""
        walk = match.walk
        if match.space is not space or match.data != data or match._version_of_all != self.version:
            return False
        if walk is None or walk[0].version != match._version:
            return False
        source = walk[3]
        return source is None or source.version == match._source_version

    def space_of(self, match: Match, namespace: NamespaceName) -> Namespace | None:
        """The namespace of that name, if it is the match's and there are nodes in it. O(1)."""
        space = match.space
        return space if match.namespace == namespace and space in self._tree.roots else None

    def found_elsewhere(self, data: bytes, space: Namespace) -> int:
        """The longest match of another namespace, of the `MAX_NAMESPACES` latest. O(tokens) each."""
        others = (other for other in reversed(self._tree.roots) if other is not space)
        return max(
            (self.match(data, other).num_tokens for other in islice(others, MAX_NAMESPACES)), default=0
        )

    def _public(self, space: Namespace | None, namespace: NamespaceName) -> PublicPrefixes:
        return self._namespaces.public_of(namespace).declared if space is None else space.declared

    def _walk_public(
        self, data: bytes, space: Namespace | None, namespace: NamespaceName, public: int
    ) -> Walk | None:
        """Follow the public part of a prompt in the shared tree, the rest in the namespace's own."""
        tree = self._tree
        shared = self._namespaces.public_of(namespace) if space is None else space.public
        root = tree.roots.get(shared)
        if root is None:
            return None
        walk = tree.walk(root, shared, data, 0, public)
        node = walk.node
        if walk.depth * TOKEN_BYTES < public or node.end > walk.depth or space is None:
            return walk
        return tree.walk(node, space, data, public, len(data)) if public < len(data) else walk

    def is_current(self, match: Match, space: Namespace | None) -> bool:
        """Whether a new lookup would give the same length. O(1); O(log siblings) after a change there.

        Args:
            space: the match's namespace as it is known now.
        """
        if not self._enabled:
            return True
        if match._was_made_at(self.version):
            if match.walk is None:
                if not self._namespaces.any_declared and space is not None and space not in self._tree.roots:
                    return True
            elif match._is_untouched():
                return True
            elif not self._namespaces.any_declared:
                return self._renew(match, match.walk)
        new = self.match(match.data, space, match.namespace)
        if new.num_tokens != match.num_tokens:
            return False
        match._version_of_all = new._version_of_all
        match.space = space
        match._ends_at(new.walk)
        return True

    def _renew(self, match: Match, walk: Walk) -> bool:
        """Look again from where the match ended; True (and the match refreshed) if its length is the same."""
        if walk.node.version < 0:
            return False
        data = match.data
        node: Node | None = walk.node
        depth = walk.depth
        while node is not None and node.start >= depth and node.parent is not None:
            node = node.parent
        if node is None or node.end < depth:
            return False
        if node.end > depth:  # the match ends inside the run: start again from the node above
            parent = node.parent
            assert parent is not None
            pos = node.start
            node = parent
        else:
            pos = depth
        assert match.space is not None
        new = self._tree.walk(node, match.space, data, pos * TOKEN_BYTES, len(data))
        if new.depth + new.partial != match.num_tokens:
            return False
        match._ends_at(new)
        return True
