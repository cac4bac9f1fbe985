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

SEGMENT_BLOCKS = 16
_PARTIAL = 0x9E3779B97F4A7C15  # told apart from the hash of a whole block by this difference

State = tuple[int, bytes]

_hash = xxhash.xxh3_64_intdigest


def space_seed(key: tuple[str, ...]) -> int:
    """A namespace's seed: each part is framed by its length."""
    framed = b"".join(len(part).to_bytes(8, "little") + part.encode("utf-8", "surrogatepass") for part in key)
    return _hash(framed, len(key))


class RunHashes:
    """Hashes of the blocks of one run of tokens, asked for in any order.

    Remembers the chain at the segments' beginnings, as far as it was needed: all questions about a run
    cost O(run), each one O(segment) beyond that. The run may grow; `cut` says that it was shortened.

    Args:
        state: at the run's beginning.
        block_bytes: bytes of a block's token ids.
    """

    __slots__ = ("_chains", "_head", "_segment", "_size")

    def __init__(self, state: State, block_bytes: int) -> None:
        chain, self._head = state
        self._chains = array("Q", [chain])
        self._size = block_bytes
        self._segment = SEGMENT_BLOCKS * block_bytes

    def _chain(self, key: bytes | bytearray, segment: int) -> int:
        """The chain at the beginning of a segment that the run reaches."""
        chains, length = self._chains, self._segment
        while len(chains) <= segment:
            start = (len(chains) - 1) * length
            chains.append(_hash(self._slice(key, start, start + length), chains[-1]))
        return chains[segment]

    def _slice(self, key: bytes | bytearray, start: int, end: int) -> bytes | bytearray:
        """Bytes [start, end) of the segment's head followed by the run."""
        head = self._head
        if start >= len(head):
            return key[start - len(head) : end - len(head)]
        return head[start:end] + key[: max(0, end - len(head))]

    def of_blocks(self, key: bytes | bytearray, first: int, stop: int) -> array[int]:
        """The hashes of the blocks [first, stop) of the run, the last one perhaps partial."""
        size, length, before = self._size, self._segment, len(self._head)
        total = before + len(key)
        segment = (before + first * size) // length
        base = limit = segment * length
        data = self._slice(key, base, before + stop * size)
        offset = chain = 0
        hashes = array("Q")
        for end in range(before + (first + 1) * size, before + stop * size + 1, size):
            end = min(end, total)
            while end > limit:
                chain, offset = self._chain(key, segment), limit - base
                segment, limit = segment + 1, limit + length
            hashes.append(_hash(data[offset : end - base], chain))
        return hashes

    def partial_key(self, key: bytes | bytearray, start: int) -> int:
        """The key of a partial block that begins behind key[:start] (bytes), as in prompts."""
        end = len(self._head) + start
        segment = max(0, end - 1) // self._segment
        chain = self._chain(key, segment)
        return (_hash(self._slice(key, segment * self._segment, end), chain) if end else chain) ^ _PARTIAL

    def cut(self, length: int) -> None:
        """The run has only `length` bytes left: forget what lay behind. O(1)."""
        del self._chains[1 + (len(self._head) + length) // self._segment :]


class PrefixHasher:
    """Prefix hashes of the blocks of a tree and of prompts.

    Args:
        block_bytes: bytes of a block's token ids.
    """

    def __init__(self, block_bytes: int) -> None:
        self._size = block_bytes
        self._segment = SEGMENT_BLOCKS * block_bytes
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

    def run(self, state: State) -> RunHashes:
        """The hashes of a run behind a state."""
        return RunHashes(state, self._size)

    def of_block(self, node: Node, index: int) -> int:
        """The hash of one block of a node, whole or partial. O(blocks before it in the node)."""
        assert node.parent is not None
        chain, data = self._advance(self.state_behind(node.parent), node.key[: (index + 1) * self._size])
        return _hash(data, chain) ^ self.mark(node)
