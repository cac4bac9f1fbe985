# SPDX-License-Identifier: Apache-2.0
"""BlockLeases: leases on whole blocks whose contents are copied in or out, as tiers do.

To copy a block is not to use it: nothing is counted as a lookup or a hit, and no order of eviction changes.
"""

from __future__ import annotations

from operator import attrgetter

from radixkv.cache.block_identity import IDENTITY_BYTES, each_identity, what_computes
from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import (
    TOKEN_BYTES,
    EncodedTokens,
    NamespaceKey,
    NamespaceName,
    TokenIds,
    encode_tokens,
)
from radixkv.cache.lease import Lease
from radixkv.cache.leasing import Leasing
from radixkv.cache.lookup import Lookup, Match
from radixkv.cache.namespaces import Namespaces
from radixkv.cache.node import Namespace
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.states.checkpoint import Checkpoint


class BlockLeases:
    """Leases on the whole blocks of one cache: `PrefixCache.block_leases`."""

    def __init__(self, tree: RadixTree, lookup: Lookup, namespaces: Namespaces, leasing: Leasing) -> None:
        self._tree = tree
        self._lookup = lookup
        self._namespaces = namespaces
        self._leasing = leasing

    def missing(self, match: Match) -> BlockRun:
        """Return the whole blocks of a prompt after its match, which must be current, in one namespace.

        They are public blocks if the match ends before the end of public text, else the namespace's own.
        O(tokens after the match).
        """
        tree, data, walk = self._tree, match.data, match.walk
        owner = self._namespaces.obtain(match.namespace)
        public = owner.declared.length_in(data)
        start = 0 if walk is None else walk.depth * TOKEN_BYTES
        part = owner.public if start < public else owner
        before = part.seed if walk is None else tree.identity_of_match(walk, part)
        end = public if start < public else len(data) - len(data) % tree.block_bytes
        ids = tree.identities.chain(before, data[start:end])
        return _run(part, owner, data[:end], start // TOKEN_BYTES, ids)

    def reserve(self, run: BlockRun, match: Match) -> Lease:
        """Lease all blocks up to the end of a run that is missing after a match, with new blocks for the run.

        Committed tokens can be matched. O(tokens + path). OutOfBlocks: nothing was changed.
        """
        owner = self._namespaces.obtain(match.namespace)
        walk = match.walk or self._lookup.nothing_found(match.data, owner)
        return self._leasing.hold_blocks(match.data, run.end, match.namespace, owner, walk)

    def hold(self, run: BlockRun, token_ids: TokenIds, namespace: NamespaceName) -> Lease | None:
        """Lease all blocks of a text up to the last one of a run that is still cached; None: none is.

        O(tokens + path).
        """
        data = encode_tokens(token_ids)
        owner = self._namespaces.obtain(namespace)
        walk = self._lookup.match(data, owner).walk
        end = 0 if walk is None else min(run.end, walk.depth - walk.depth % run.block_size)
        if walk is None or end <= run.start:
            return None
        node = self._tree.split_after(walk.node, end)
        walk = walk._replace(node=node, depth=end)
        return self._leasing.hold_blocks(data, end, namespace, owner, walk)

    def cached_texts(self, limit: int) -> list[tuple[EncodedTokens, NamespaceKey]]:
        """Return at most `limit` cached texts and their namespaces, the most recently used first.

        Public text is included as the beginning of other texts. O(nodes + tokens of the texts).
        """
        leaves = [node for node in self._tree.nodes() if node.is_leaf and not node.owner.is_public]
        leaves.sort(key=attrgetter("last_access"), reverse=True)
        return [
            (EncodedTokens(b"".join(part.key for part in self._tree.path(node))), node.owner.key)
            for node in leaves[:limit]
        ]

    def checkpoints(self, token_ids: TokenIds, namespace: NamespaceName) -> dict[int, Checkpoint]:
        """Return the checkpoints of a text that are in the tree, by their ends. O(tokens + path)."""
        owner = self._namespaces.obtain(namespace)
        walk = self._lookup.match(encode_tokens(token_ids), owner).walk
        if walk is None:
            return {}
        found = (state for node in self._tree.path(walk.node) for state in (node.states or {}).values())
        return {state.end: state for state in found if state.end <= walk.depth}

    def cached_runs(self, token_ids: TokenIds, namespace: NamespaceName) -> list[BlockRun]:
        """Return the cached whole blocks of a text: a run for each owner. O(tokens + path)."""
        data = encode_tokens(token_ids)
        owner = self._namespaces.obtain(namespace)
        walk = self._lookup.match(data, owner).walk
        if walk is None:
            return []
        ids: dict[Namespace, bytearray] = {}
        for node in self._tree.path(walk.node):
            count = min(node.end, walk.depth) - node.start
            ids.setdefault(node.owner, bytearray()).extend(
                node.ids[: count // self._tree.block_size * IDENTITY_BYTES]
            )
        runs, start = [], 0
        for part, own in ids.items():
            end = start + len(own) // IDENTITY_BYTES * self._tree.block_size
            runs.append(_run(part, owner, data[: end * TOKEN_BYTES], start, own))
            start = end
        return runs


def _run(part: Namespace, owner: Namespace, data: bytes, start: int, ids: bytearray) -> BlockRun:
    """Return a run of `owner`'s blocks, or of the public text that it shares."""
    key = what_computes(owner.key) if part.is_public else owner.key
    return BlockRun(key, part.is_public, data, start, each_identity(ids))
