"""Events: what is stored in the tree and what leaves it, block by block, for followers.

A follower that applies every event in order of its sequence number knows exactly which blocks can be matched:
routers use that to send a request where its prefix is. `Residency` is such a follower, and the specification
of how to read the stream. A partial block that grows is removed under its old hash and stored under the new.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from radixkv.cache.insight.prefix_hash import SEGMENT_BLOCKS, PrefixHasher, RunHashes
from radixkv.cache.keys import NamespaceKey, decode_tokens
from radixkv.cache.node import Node

logger = logging.getLogger(__name__)

MOST_FAILURES = 8  # in a row, after which a listener is dropped


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


class _Subscription:
    __slots__ = ("failures", "listener")

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.failures = 0  # in a row


class Listeners:
    """Who is told of events. They outlive the cache that they were given to, when that is rebuilt.

    The cache is in the middle of a change when it tells them: what a listener raises is logged and goes no
    further, and a listener that keeps failing is dropped.

    Attributes:
        sequence: number of the latest event.
        on_change: called with whether there are any when the first one comes and when the last one goes.
    """

    def __init__(self) -> None:
        self.sequence = 0
        self.on_change: Callable[[bool], None] | None = None
        self._subscriptions: list[_Subscription] = []

    def __len__(self) -> int:
        return len(self._subscriptions)

    def add(self, listener: Listener) -> Callable[[], None]:
        """Tell a listener of what comes; returns a function that ends that, and may be called again. O(1)."""
        subscription = _Subscription(listener)
        self._subscriptions.append(subscription)
        self._changed()
        return lambda: self._remove(subscription)

    def _remove(self, subscription: _Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._changed()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change(bool(self._subscriptions))

    def tell(self, event: CacheEvent) -> None:
        """Call every listener. O(listeners)."""
        self.sequence = event.sequence
        for subscription in list(self._subscriptions):
            try:
                subscription.listener(event)
            except KeyboardInterrupt:  # not the listener's
                raise
            except BaseException:
                self._failed(subscription)
            else:
                subscription.failures = 0

    def _failed(self, subscription: _Subscription) -> None:
        subscription.failures += 1
        is_last = subscription.failures >= MOST_FAILURES
        logger.exception(
            "a listener of cache events failed (%d in a row)%s: %r",
            subscription.failures,
            ", it is told of nothing more" if is_last else "",
            subscription.listener,
        )
        if is_last:
            self._remove(subscription)


class EventStream:
    """Turns changes of the tree into events; costs nothing while nobody listens.

    Args:
        block_bytes: bytes of a block's token ids.
        listeners: who is told.
    """

    def __init__(self, hasher: PrefixHasher, block_bytes: int, listeners: Listeners) -> None:
        self.listeners = listeners
        self._hasher = hasher
        self._size = block_bytes
        self._long_runs: dict[Node, tuple[int, RunHashes]] = {}  # with `start`, which a split changes

    def forget(self) -> None:
        """Nobody listens any more: what is remembered of nodes would not be kept true."""
        self._long_runs.clear()

    def _run(self, node: Node) -> RunHashes:
        """The node's hashes; remembered for runs that are longer than what one hash is made of."""
        known = self._long_runs.get(node)
        if known is not None and known[0] == node.start:
            return known[1]
        assert node.parent is not None
        run = self._hasher.run(self._hasher.state_behind(node.parent))
        if len(node.blocks) > SEGMENT_BLOCKS:
            self._long_runs[node] = node.start, run
        return run

    def _hashes(self, node: Node, first: int) -> array[int]:
        hashes = self._run(node).of_blocks(node.key, first, len(node.blocks))
        mark = self._hasher.mark(node)
        return array("Q", [value ^ mark for value in hashes]) if mark else hashes

    def _hash_before(self, node: Node, first: int) -> int | None:
        """The hash of the block before the one at index `first`; None: that begins a sequence."""
        if first:
            return self._run(node).of_blocks(node.key, first - 1, first)[0] ^ self._hasher.mark(node)
        parent = node.parent
        assert parent is not None
        if not len(parent.blocks):
            return None
        last = len(parent.blocks)
        return self._run(parent).of_blocks(parent.key, last - 1, last)[0] ^ self._hasher.mark(parent)

    def _stored(self, node: Node, first: int, tell: Listener, step: int) -> None:
        size, sequence = self._size, self.listeners.sequence
        before = self._hash_before(node, first)
        for index, block_hash in enumerate(self._hashes(node, first), first):
            sequence += step
            tokens = tuple(decode_tokens(node.key[index * size : (index + 1) * size]))
            tell(BlockStored(sequence, block_hash, before, node.blocks[index], tokens, node.space.key))
            before = block_hash

    def stored(self, node: Node, first: int) -> None:
        """The blocks of `node` from index `first` on are in the tree now. O(their tokens)."""
        self._stored(node, first, self.listeners.tell, 1)

    def removed(self, node: Node, first: int) -> None:
        """The blocks of `node` from index `first` on are about to leave, last one first. O(their tokens)."""
        sequence = self.listeners.sequence
        hashes = self._hashes(node, first)
        if first:
            known = self._long_runs.get(node)
            if known is not None:
                known[1].cut(first * self._size)
        else:
            self._long_runs.pop(node, None)
        for index in range(len(node.blocks) - 1, first - 1, -1):
            sequence += 1
            block_hash = hashes[index - first]
            self.listeners.tell(BlockRemoved(sequence, block_hash, node.blocks[index], node.space.key))

    def replay(self, nodes: list[Node], listener: Listener) -> None:
        """Tell a new listener what is there already, parents first, under the current sequence number.

        What it raises goes to the caller.
        """
        for node in nodes:
            self._stored(node, 0, listener, 0)


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
