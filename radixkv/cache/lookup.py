# SPDX-License-Identifier: Apache-2.0
"""Lookup: the longest cached prefix of a prompt, and whether an earlier answer still holds. Read-only."""

from __future__ import annotations

from itertools import islice

from radixkv.cache.keys import TOKEN_BYTES, NamespaceName
from radixkv.cache.namespaces import Namespaces
from radixkv.cache.node import Namespace
from radixkv.cache.public_prefixes import PublicPrefixes
from radixkv.cache.radix_tree import RadixTree, Walk
from radixkv.cache.states.checkpoints import Checkpoints

MAX_NAMESPACES = 256  # others that an administrator's question looks into


class Match:
    """The longest cached prefix of some tokens, at the time of the lookup."""

    # Set by Lookup.match: an __init__ would double what making one costs.
    __slots__ = (
        "_resume",
        "_versions",
        "data",
        "namespace",
        "num_tokens",
        "owner",
        "states",
        "version",
        "walk",
    )

    num_tokens: int  # its length, token-granular; may be the whole prompt
    data: bytes  # the tokens, encoded
    namespace: NamespaceName  # as given
    owner: Namespace | None  # the same as it was known; None: it was not
    walk: Walk | None  # where the lookup ended; None: nothing at all was cached in the namespace
    version: int  # of the lookup when it was made
    states: Checkpoints | None  # of the tree; None: the model has no states
    _resume: tuple[int, int]  # `resume`, and the version of the checkpoints at which it was found
    _versions: tuple[int, int]  # of the node where it ends, and of the one that holds its last tokens

    def __repr__(self) -> str:
        return f"Match({self.num_tokens} of {len(self.data) // TOKEN_BYTES} tokens)"

    @property
    def resume(self) -> int:
        """Its tokens that need not be computed again: up to the deepest state. O(path) after changes."""
        states, walk = self.states, self.walk
        if states is None or walk is None:
            return self.num_tokens
        found, version = self._resume
        if version != states.version:
            most = min(walk.depth, len(self.data) // TOKEN_BYTES - 1)
            checkpoint = states.deepest(walk.node, most) if walk.node.version >= 0 else None
            found = 0 if checkpoint is None else checkpoint.end
            self._resume = found, states.version
        return found

    def end_at(self, walk: Walk | None) -> None:
        """Take the result of a lookup made just now."""
        self.walk = walk
        if walk is None:
            self.num_tokens = 0
            return
        node, depth, partial, source, _, _ = walk
        self.num_tokens = depth + partial
        self._versions = node.version, 0 if source is None else source.version

    def is_untouched(self) -> bool:
        """True if the nodes where it ends are there and unchanged; False: nothing was found."""
        walk = self.walk
        if walk is None or walk[0].version != self._versions[0]:
            return False
        source = walk[3]
        return source is None or source.version == self._versions[1]


class Lookup:
    """Lookups of prompts in a tree, with the public part of a prompt in the shared one."""

    def __init__(self, tree: RadixTree, namespaces: Namespaces, enabled: bool) -> None:
        self._tree = tree
        self._namespaces = namespaces
        self._enabled = enabled  # False: nothing is ever found
        self.version = 0  # changes when earlier answers don't hold any more wherever they end

    def match(self, data: bytes, owner: Namespace | None, namespace: NamespaceName = "") -> Match:
        """Return the longest cached prefix. O(tokens + path).

        Where there is no owner so far, the name says what public text it shares.
        """
        match = Match()
        match.data = data
        match.namespace = namespace
        match.owner = owner
        match.version = self.version
        match.states = self._tree.states
        match._resume = 0, -1
        root = self._tree.roots.get(owner) if owner is not None else None
        if not self._enabled:
            walk = None
        elif self._namespaces.any_declared and (length := self._public(owner, namespace).length_in(data)):
            walk = self._walk_public(data, owner, namespace, length)
        elif root is None or owner is None:
            walk = None
        else:
            walk = self._tree.walk(root, owner, data, 0, len(data))
        match.end_at(walk)
        return match

    def nothing_found(self, data: bytes, owner: Namespace) -> Walk:
        """Return the start of a lookup of these tokens, as an empty result. O(log public prefixes)."""
        root = self._tree.root(owner.public if owner.declared.length_in(data) else owner)
        return Walk(root, 0, 0, None, None, b"")

    def following(self, data: bytes, owner: Namespace | None, most: int) -> bytes:
        """Return the cached continuation of these tokens, at most `most` bytes. O(tokens + path)."""
        if owner is None or not self._enabled:
            return b""
        whole = len(data) - len(data) % self._tree.block_bytes
        walk = self.match(data[:whole], owner).walk
        if walk is None or walk.depth * TOKEN_BYTES != whole:
            return b""
        return self._tree.following(walk, owner, data[whole:], most)

    def still_holds(self, match: Match, data: bytes, namespace: NamespaceName) -> bool:
        """Return True if an earlier match found something and a lookup of these tokens would. O(tokens)."""
        walk = match.walk
        if walk is None or match.version != self.version or match.namespace != namespace:
            return False
        return match.owner is not None and match.data == data and match.is_untouched()

    def found_elsewhere(self, data: bytes, owner: Namespace) -> int:
        """Return the longest match in the `MAX_NAMESPACES` latest other namespaces. O(tokens) for each."""
        others = (other for other in reversed(self._tree.roots) if other is not owner)
        return max(
            (self.match(data, other).num_tokens for other in islice(others, MAX_NAMESPACES)), default=0
        )

    def _public(self, owner: Namespace | None, namespace: NamespaceName) -> PublicPrefixes:
        return self._namespaces.public_of(namespace).declared if owner is None else owner.declared

    def _walk_public(
        self, data: bytes, owner: Namespace | None, namespace: NamespaceName, public: int
    ) -> Walk | None:
        """Follow the public part of a prompt in the shared tree, the rest in the namespace's own."""
        tree = self._tree
        shared = self._namespaces.public_of(namespace) if owner is None else owner.public
        root = tree.roots.get(shared)
        if root is None:
            return None
        walk = tree.walk(root, shared, data, 0, public)
        node = walk.node
        if walk.depth * TOKEN_BYTES < public or node.end > walk.depth or owner is None:
            return walk
        return tree.walk(node, owner, data, public, len(data)) if public < len(data) else walk

    def is_current(self, match: Match, owner: Namespace | None) -> bool:
        """Return True if a new lookup in `owner` would give the same length."""
        if not self._enabled:
            return True
        any_declared = self._namespaces.any_declared
        if match.version == self.version:
            if match.is_untouched():
                return True
            if match.walk is not None and not any_declared:
                return self._renew(match, match.walk)
            if not any_declared and owner is not None and owner not in self._tree.roots:
                return True
        new = self.match(match.data, owner, match.namespace)
        if new.num_tokens != match.num_tokens:
            return False
        match.version, match.owner = new.version, owner
        match.end_at(new.walk)
        return True

    def _renew(self, match: Match, walk: Walk) -> bool:
        """Look again from where the match ended; True (and the match refreshed) if its length is the same."""
        node = walk.node
        if node.version < 0:
            return False
        while node.parent is not None and node.end > walk.depth:  # it was split, or the match ends inside
            node = node.parent
        assert match.owner is not None
        new = self._tree.walk(node, match.owner, match.data, node.end * TOKEN_BYTES, len(match.data))
        if new.depth + new.partial != match.num_tokens:
            return False
        match.end_at(new)
        return True
