"""GhostIndex: what was here and is gone. Hashes only, bounded, oldest forgotten first.

A block is known by the hash of the whole prefix that ends with it, so that the same tokens behind another
prefix are another block. Prefix hashes are chained over segments of `SEGMENT_BLOCKS` blocks:

    C[0] = hash of the namespace;  C[s + 1] = xxh3(tokens of segment s, seed C[s])
    hash of block b in segment s = xxh3(tokens from the segment's start to the block's end, seed C[s])

so a lookup costs one hash per segment, and an eviction needs at most a segment of the path above it: each
node remembers the chain value of the segment that it starts in.

A partial block is remembered under the prefix before it, with its length: a prompt that continues it differs
from it in the same block, and only its first tokens can tell.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Any

import xxhash

from radixkv.cache.keys import TOKEN_BYTES
from radixkv.cache.node import Node, Space
from radixkv.cache.radix_tree import RadixTree

SEGMENT_BLOCKS = 256
_PARTIAL = 0x9E3779B97F4A7C15  # told apart from the hash of a whole block by this seed difference
_MASK = 2**64 - 1

_hash = xxhash.xxh3_64_intdigest


class GhostRecord:
    """When, why and by what a run of blocks was removed; shared by the blocks of one removal.

    Attributes:
        reason: `evicted`, `expired` or `reset`.
        at: clock seconds.
        by: what removed it.
        policy_data: what the policy's `ghost_data` returned.
    """

    __slots__ = ("at", "by", "policy_data", "reason")

    def __init__(self, reason: str, at: float, by: str, policy_data: Any = None) -> None:
        self.reason = reason
        self.at = at
        self.by = by
        self.policy_data = policy_data

    def __repr__(self) -> str:
        return f"GhostRecord({self.reason} by {self.by} at {self.at:g})"


class PrefixHasher:
    """Prefix hashes of the blocks of a tree and of prompts."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._segment = SEGMENT_BLOCKS * tree.block_bytes
        self.has_public = False  # whether a prefix was ever public

    def of_prompt(self, data: bytes | memoryview, seed: int, end: int) -> int:
        """The hash of the prefix data[:end] (bytes). O(end)."""
        segment = self._segment
        start, chain = 0, seed
        while end - start > segment:
            chain = _hash(data[start : start + segment], chain)
            start += segment
        return _hash(data[start:end], chain)

    def partial_key(self, data: bytes | memoryview, seed: int, start: int) -> int:
        """The key of a partial block that begins behind data[:start] (bytes)."""
        return (self.of_prompt(data, seed, start) if start else seed) ^ _PARTIAL

    def mark(self, node: Node) -> int:
        """What is mixed into the hashes of private nodes below public prefixes; else 0. O(depth)."""
        if not self.has_public or node.space.is_public:
            return 0
        root = node
        while root.parent is not None:
            root = root.parent
        return node.space.seed ^ root.space.seed

    def _chain(self, node: Node) -> int:
        """The chain value of the segment that the node starts in, remembered along the path. O(segment)."""
        if node.chain is not None:
            return node.chain
        todo = []
        current: Node | None = node
        while current is not None and current.chain is None and current.parent is not None:
            todo.append(current)
            current = current.parent
        blocks = self._tree.block_size * SEGMENT_BLOCKS
        for below in reversed(todo):
            parent = below.parent
            assert parent is not None
            chain = node_seed(parent) if parent.chain is None else parent.chain
            first = parent.start // blocks
            last = below.start // blocks
            if last > first:
                head = self._tree.prefix_bytes(parent, first * blocks)
                for s in range(last - first):
                    chain = _hash(head[s * self._segment : (s + 1) * self._segment], chain)
            below.chain = chain
        assert node.chain is not None
        return node.chain

    def of_node(self, node: Node, first: int, stop: int | None = None) -> tuple[array[int], int]:
        """The hashes of the node's whole blocks first..stop, and the partial key of its tail (or 0).

        O(blocks + one segment of the path above).
        """
        size = self._tree.block_bytes
        chain = self._chain(node)
        mark = self.mark(node)
        unit = self._tree.block_size * SEGMENT_BLOCKS
        origin = node.start - node.start % unit
        assert node.parent is not None
        head = self._tree.prefix_bytes(node.parent, origin) if node.start > origin else b""
        data = head + bytes(node.key)
        offset = 0
        whole = len(node.key) // size
        hashes = array("Q")
        state: Any = None  # a streaming hash: each further block costs only its own bytes
        for index in range(first, whole if stop is None else min(stop, whole)):
            end = len(head) + (index + 1) * size
            if state is None or end - offset > self._segment:
                while end - offset > self._segment:
                    chain = _hash(data[offset : offset + self._segment], chain)
                    offset += self._segment
                state = xxhash.xxh3_64(data[offset:end], chain)
            else:
                state.update(data[end - size : end])
            hashes.append(state.intdigest() ^ mark)
        partial = 0
        if len(node.key) % size and stop is None:
            end = len(head) + whole * size
            while end - offset > self._segment:
                chain = _hash(data[offset : offset + self._segment], chain)
                offset += self._segment
            partial = (_hash(data[offset:end], chain) if end > offset else chain) ^ _PARTIAL ^ mark
        return hashes, partial

    def of_block(self, node: Node, index: int) -> int:
        """The hash of one block of a node, whole or partial. O(blocks before it + one segment)."""
        end = min((index + 1) * self._tree.block_bytes, len(node.key))
        chain = self._chain(node)
        unit = self._tree.block_size * SEGMENT_BLOCKS
        origin = node.start - node.start % unit
        assert node.parent is not None
        head = self._tree.prefix_bytes(node.parent, origin) if node.start > origin else b""
        return self.of_prompt(head + bytes(node.key[:end]), chain, len(head) + end) ^ self.mark(node)


def node_seed(node: Node) -> int:
    """The seed of the tree that a root begins."""
    return node.space.seed


def space_seed(key: tuple[str, ...]) -> int:
    """A namespace's seed: each part is framed by its length."""
    framed = b"".join(len(part).to_bytes(8, "little") + part.encode("utf-8", "surrogatepass") for part in key)
    return _hash(framed, len(key))


class GhostIndex:
    """Removed blocks by prefix hash, the latest `capacity` of them.

    Args:
        capacity: blocks remembered; 0 turns the index off.
    """

    def __init__(self, tree: RadixTree, capacity: int) -> None:
        self.capacity = capacity
        self.hasher = PrefixHasher(tree)
        self._tree = tree
        self._records: OrderedDict[int, GhostRecord] = OrderedDict()
        self._partials: OrderedDict[int, tuple[int, int, GhostRecord]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records) + len(self._partials)

    def __repr__(self) -> str:
        return f"GhostIndex({len(self)} of {self.capacity} blocks)"

    def remember(self, node: Node, num_blocks: int, record: GhostRecord) -> None:
        """The last `num_blocks` blocks of `node` are about to go. O(num_blocks + one segment of the path)."""
        if not self.capacity:
            return
        first = max(len(node.blocks) - num_blocks, len(node.blocks) - self.capacity)
        hashes, partial = self.hasher.of_node(node, first)
        records = self._records
        for value in hashes:
            records[value] = record
            records.move_to_end(value)
        if partial:
            tail = bytes(node.key[len(node.key) - len(node.key) % self._tree.block_bytes :])
            self._partials[partial] = (len(tail), _hash(tail), record)
            self._partials.move_to_end(partial)
        while len(self._records) + len(self._partials) > self.capacity:
            (self._records or self._partials).popitem(last=False)

    def find(self, data: bytes, seed: int, depth: int, found: int, mark: int = 0) -> GhostRecord | None:
        """What removed the block behind the first `depth` tokens of a prompt; None: not known. O(depth).

        Args:
            depth: tokens found in whole blocks.
            found: tokens found at all; a remembered partial block must reach beyond them.
            mark: see `PrefixHasher.mark`, for the block in question.
        """
        records = self._records
        start = depth * TOKEN_BYTES
        end = start + self._tree.block_bytes
        if end <= len(data) and records:
            record = records.get(self.hasher.of_prompt(data, seed, end) ^ mark)
            if record is not None:
                return record
        if self._partials:
            entry = self._partials.get(self.hasher.partial_key(data, seed, start) ^ mark)
            if entry is not None:
                length, digest, record = entry
                if start + length > found * TOKEN_BYTES and _hash(data[start : start + length]) == digest:
                    return record
        return None

    def find_block(self, node: Node, index: int) -> GhostRecord | None:
        """What removed the whole block at `index` of a node earlier. O(one segment of the path)."""
        if not self._records:
            return None
        hashes, _ = self.hasher.of_node(node, index, index + 1)
        return self._records.get(hashes[0]) if hashes else None

    def clear(self) -> None:
        """Forget all ghosts."""
        self._records.clear()
        self._partials.clear()


def make_space(tree: RadixTree, key: tuple[str, ...], group: Any) -> Space:
    """A namespace with its seed for prefix hashes."""
    return Space(key, group, space_seed(key))
