"""PrefixHasher: a block is known by the hash of the whole prefix that ends with it.

So the same tokens behind another prefix are another block. Hashes are chained over segments of
`SEGMENT_BLOCKS` blocks:

    C[0] = hash of the namespace;  C[s + 1] = xxh3(tokens of segment s, seed C[s])
    hash of block b in segment s = xxh3(tokens from the segment's start to the block's end, seed C[s])

A *state* is what the hash of a longer prefix needs to know of a shorter one: (C of the segment that the
shorter one ends in, that segment's tokens so far). Nodes with children keep the state at their end, so that
the blocks below need no walk. A partial block is remembered under the prefix before it.
"""

from __future__ import annotations

from array import array

import xxhash

from radixkv.cache.node import Node
from radixkv.cache.radix_tree import RadixTree

SEGMENT_BLOCKS = 16
_PARTIAL = 0x9E3779B97F4A7C15  # told apart from the hash of a whole block by this difference

State = tuple[int, bytes]

_hash = xxhash.xxh3_64_intdigest


def space_seed(key: tuple[str, ...]) -> int:
    """A namespace's seed: each part is framed by its length."""
    framed = b"".join(len(part).to_bytes(8, "little") + part.encode("utf-8", "surrogatepass") for part in key)
    return _hash(framed, len(key))


class PrefixHasher:
    """Prefix hashes of the blocks of a tree and of prompts."""

    def __init__(self, tree: RadixTree) -> None:
        self._size = tree.block_bytes
        self._segment = SEGMENT_BLOCKS * tree.block_bytes
        self.has_public = False  # whether a prefix was ever public

    def of_prompt(self, data: bytes | bytearray, seed: int, end: int) -> int:
        """The hash of the prefix data[:end] (bytes). O(end)."""
        segment = self._segment
        start, chain = 0, seed
        while end - start > segment:
            chain = _hash(data[start : start + segment], chain)
            start += segment
        return _hash(data[start:end], chain)

    def partial_key(self, data: bytes | bytearray, seed: int, start: int) -> int:
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

    def state_behind(self, node: Node) -> State:
        """The state at the end of a node's whole blocks.

        Remembered along the path by nodes with children. O(tokens whose state is not yet known).
        """
        todo = []
        current = node
        while current.parent is not None and current.prefix_state is None:
            todo.append(current)
            current = current.parent
        state = current.prefix_state
        if state is None:  # a root
            state = current.space.seed, b""
        for below in reversed(todo):
            state = self._advance(state, below.key)
            if not below.is_leaf:
                below.prefix_state = state
        return state

    def _advance(self, state: State, key: bytes | bytearray) -> State:
        chain, head = state
        data = head + key
        segment = self._segment
        start, end = 0, len(data)
        while end - start > segment:
            chain = _hash(data[start : start + segment], chain)
            start += segment
        return chain, bytes(data[start:])

    def of_run(self, state: State, key: bytes | bytearray, first: int, end: int) -> tuple[array[int], int]:
        """The hashes of the whole blocks of key[:end] (bytes) from index `first` on, behind a state.

        And the key of a partial block at its end, or 0. O(end).
        """
        size, segment = self._size, self._segment
        chain, head = state
        data = head + bytes(key[:end])
        offset = 0
        place = len(head) + first * size
        whole = len(data) - end % size
        hashes = array("Q")
        while place < whole:
            place += size
            while place - offset > segment:
                chain = _hash(data[offset : offset + segment], chain)
                offset += segment
            hashes.append(_hash(data[offset:place], chain))
        if whole == len(data):
            return hashes, 0
        while whole - offset > segment:
            chain = _hash(data[offset : offset + segment], chain)
            offset += segment
        return hashes, (_hash(data[offset:whole], chain) if whole else chain) ^ _PARTIAL

    def of_block(self, node: Node, index: int) -> int:
        """The hash of one block of a node, whole or partial. O(blocks before it in the node)."""
        assert node.parent is not None
        chain, data = self._advance(self.state_behind(node.parent), node.key[: (index + 1) * self._size])
        return _hash(data, chain) ^ self.mark(node)
