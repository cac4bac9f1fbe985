"""Events: what is stored in the tree and what leaves it, block by block, for followers.

A follower that applies every event in order of its sequence number knows exactly which blocks can be matched:
routers use that to send a request where its prefix is. `Residency` is such a follower, and the specification
of how to read the stream. A partial block that grows is removed under its old hash and stored under the new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixkv.cache.insight.prefix_hash import PrefixHasher
from radixkv.cache.keys import NamespaceKey, decode_tokens
from radixkv.cache.node import Node


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block can be matched from now on.

    Attributes:
        sequence: consecutive number of the event, from 1.
        block_hash: 64-bit hash of namespace and prefix up to the block's end.
        parent_hash: the same for the block before; None for the first block of a sequence.
        block_id: physical block.
        token_ids: the block's tokens; fewer than a block has slots if it is partial.
        namespace: the framed namespace.
    """

    sequence: int
    block_hash: int
    parent_hash: int | None
    block_id: int
    token_ids: tuple[int, ...]
    namespace: NamespaceKey


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block can't be matched any more (evicted, discarded, withdrawn, reset, or about to be replaced)."""

    sequence: int
    block_hash: int
    block_id: int
    namespace: NamespaceKey


CacheEvent = BlockStored | BlockRemoved
Listener = Callable[[CacheEvent], None]


class EventStream:
    """Turns changes of the tree into events for its listeners; costs nothing without any."""

    def __init__(self, hasher: PrefixHasher, block_bytes: int) -> None:
        self.listeners: list[Listener] = []
        self.sequence = 0
        self._hasher = hasher
        self._size = block_bytes

    def _emit(self, event: CacheEvent) -> None:
        for listener in list(self.listeners):
            listener(event)

    def _stored(self, node: Node, index: int, listener: Listener | None = None) -> None:
        size = self._size
        parent = node if index else node.parent
        assert parent is not None
        before = index - 1 if index else len(parent.blocks) - 1
        parent_hash = self._hasher.of_block(parent, before) if before >= 0 else None
        tokens = tuple(decode_tokens(node.key[index * size : (index + 1) * size]))
        block_hash = self._hasher.of_block(node, index)
        event = BlockStored(
            self.sequence, block_hash, parent_hash, node.blocks[index], tokens, node.space.key
        )
        if listener is None:
            self._emit(event)
        else:
            listener(event)

    def stored(self, node: Node, first: int) -> None:
        """The blocks of `node` from index `first` on are in the tree now."""
        for index in range(first, len(node.blocks)):
            self.sequence += 1
            self._stored(node, index)

    def removed(self, node: Node, first: int) -> None:
        """The blocks of `node` from index `first` on are about to leave, the last one first."""
        for index in range(len(node.blocks) - 1, first - 1, -1):
            self.sequence += 1
            block_hash = self._hasher.of_block(node, index)
            self._emit(BlockRemoved(self.sequence, block_hash, node.blocks[index], node.space.key))

    def replay(self, nodes: list[Node], listener: Listener) -> None:
        """Tell a new listener what is there already, parents first, under the current sequence number."""
        for node in nodes:
            for index in range(len(node.blocks)):
                self._stored(node, index, listener)


class Residency:
    """A follower: rebuilds from the stream which prefixes can be matched."""

    def __init__(self) -> None:
        self.blocks: dict[int, BlockStored] = {}
        self.sequence = 0

    def __call__(self, event: CacheEvent) -> None:
        """Apply one event; events must come without a gap (a replayed one repeats the sequence number)."""
        assert event.sequence >= self.sequence, "events must be applied in order"
        self.sequence = event.sequence
        if isinstance(event, BlockStored):
            assert event.parent_hash is None or event.parent_hash in self.blocks, "a block without its parent"
            self.blocks[event.block_hash] = event
        else:
            del self.blocks[event.block_hash]

    def prefixes(self) -> set[tuple[NamespaceKey, tuple[int, ...]]]:
        """Every prefix that ends with a resident block, with its namespace. O(blocks * depth)."""
        out = set()
        for stored in self.blocks.values():
            parts, current = [stored.token_ids], stored
            while current.parent_hash is not None:
                current = self.blocks[current.parent_hash]
                parts.append(current.token_ids)
            out.add((stored.namespace, tuple(token for part in reversed(parts) for token in part)))
        return out
