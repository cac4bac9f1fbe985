# SPDX-License-Identifier: Apache-2.0
"""Residency: which whole blocks can be matched, by the events of a cache alone.

The specification of how to read that stream, see `radixkv.cache.reporting.events`.
"""

from __future__ import annotations

from typing import NamedTuple

from radixkv.cache.keys import NamespaceKey
from radixkv.cache.reporting.events import BlockChanges


class ResidentBlock(NamedTuple):
    """A block as a follower knows it."""

    parent_hash: bytes | None
    block_id: int
    token_ids: tuple[int, ...]
    namespace: NamespaceKey


class Residency:
    """A follower: rebuilds from the stream which whole blocks can be matched."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, ResidentBlock] = {}  # by their identity
        self.sequence = 0  # of the latest changes

    def __call__(self, changes: BlockChanges) -> None:
        """Apply changes; they must come without a gap (a replay repeats the sequence number)."""
        assert changes.sequence >= self.sequence, "changes must be applied in order"
        self.sequence = changes.sequence
        for gone in changes.removed:
            for block_hash in gone.block_hashes:
                del self.blocks[block_hash]
        assert not (changes.cleared and self.blocks), "blocks are left after a reset"
        for run in changes.stored:
            before, tokens = run.parent_hash, run.token_ids
            assert before is None or before in self.blocks, "a block without its parent"
            size = run.block_size
            for i, block_hash in enumerate(run.block_hashes):
                part = tuple(tokens[i * size : (i + 1) * size])
                self.blocks[block_hash] = ResidentBlock(before, run.block_ids[i], part, run.namespace)
                before = block_hash

    def prefixes(self) -> set[tuple[NamespaceKey, tuple[int, ...]]]:
        """Every prefix that ends with a resident block, with its namespace. O(blocks * depth)."""
        out = set()
        for block in self.blocks.values():
            parts, current = [block.token_ids], block
            while current.parent_hash is not None:
                current = self.blocks[current.parent_hash]
                parts.append(current.token_ids)
            out.add((block.namespace, tuple(token for part in reversed(parts) for token in part)))
        return out
