# SPDX-License-Identifier: Apache-2.0
"""Events: which whole blocks come into the tree and leave it, for followers.

Each call of the cache that changes something (a commit, an eviction, a reset) tells its listeners one
`BlockChanges`. A follower that applies them in the order of their sequence numbers knows exactly which whole
blocks can be matched: routers use that to send a request where its prefix is. Such a follower, and the
specification of how to read the stream, is `radixkv.observe.residency`. Of models with states, the changes
also say after which blocks a state is kept, so that requests can go on there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from radixkv.cache.block_identity import IDENTITY_BYTES, each_identity
from radixkv.cache.keys import TOKEN_BYTES, NamespaceKey, decode_tokens
from radixkv.cache.node import Node

logger = logging.getLogger(__name__)

MAX_FAILURES = 8  # in a row, after which a listener is dropped


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Whole blocks that follow one another and can be matched from now on."""

    block_hashes: tuple[bytes, ...]  # their identities, see `radixkv.cache.block_identity`
    parent_hash: bytes | None  # that of the block before the first one; None: it begins a prompt
    block_ids: tuple[int, ...]  # the physical blocks
    key: bytes  # their tokens, four bytes each
    namespace: NamespaceKey  # the framed namespace; () if they are public

    @property
    def block_size(self) -> int:
        """Tokens of each."""
        return len(self.key) // TOKEN_BYTES // len(self.block_ids)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of all of them. O(tokens)."""
        return decode_tokens(self.key)


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """Whole blocks that can't be matched any more, the last one first."""

    block_hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    namespace: NamespaceKey


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The end of a block at which a model with states, or with freed windows, can go on, or no longer can."""

    block_hash: bytes  # the block's identity
    is_kept: bool


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """Changes of one call. Removals happened before anything was stored."""

    sequence: int  # consecutive number, from 1; a replay repeats the latest one
    stored: tuple[StoredBlocks, ...] = ()  # parents before what follows them
    # Evicted, discarded, rolled back or reset; what follows others before them.
    removed: tuple[RemovedBlocks, ...] = ()
    cleared: bool = False  # nothing was left (`reset`); `removed` says what that was
    # In their order, after the blocks; of a block that is not there any more they say nothing.
    resume_points: tuple[ResumePoint, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Blocks stored and removed."""
        return sum(len(run.block_ids) for run in self.stored) + sum(
            len(run.block_ids) for run in self.removed
        )


Listener = Callable[[BlockChanges], None]


class ChangeLog:
    """Collects the changes of a call, and sends them to the listeners when the call ends.

    The cache is in the middle of a change then: a listener's error is logged and goes no
    further, and a listener that keeps failing is dropped.
    """

    def __init__(self, block_bytes: int) -> None:
        self._size = block_bytes  # bytes of a block's token ids
        self._sequence = 0  # of the latest changes
        self._stored: list[StoredBlocks] = []
        self._removed: list[RemovedBlocks] = []
        self._resume_points: list[ResumePoint] = []
        self._listeners: dict[object, Listener] = {}  # by what names the subscription
        self._failures: Counter[object] = Counter()  # in a row

    def __len__(self) -> int:
        return len(self._listeners)

    def add(self, listener: Listener) -> Callable[[], None]:
        """Subscribe a listener; returns a function that unsubscribes, and may be called again. O(1)."""
        name = object()
        self._listeners[name] = listener
        return lambda: self._remove(name)

    def _remove(self, name: object) -> None:
        self._listeners.pop(name, None)

    def stored(self, node: Node, first: int) -> None:
        """Note that the blocks of `node` from index `first` on are in the tree now. O(their tokens)."""
        self._stored += _stored(node, first, self._size)

    def removed(self, node: Node, first: int) -> None:
        """Note that the blocks of `node` from index `first` on are about to leave. O(those)."""
        hashes = _hashes(node, first)
        if not hashes:
            return
        if self._stored:
            self.flush()
        blocks = tuple(node.blocks[first : first + len(hashes)])
        self._removed.append(RemovedBlocks(hashes[::-1], blocks[::-1], node.owner.key))

    def resume_point(self, block_hash: bytes, *, is_kept: bool) -> None:
        """The state after a block of the tree is kept now, or is not any more. O(1)."""
        if self._listeners:
            self._resume_points.append(ResumePoint(block_hash, is_kept))

    def flush(self, cleared: bool = False) -> bool:
        """End a call: send its changes, if any; False: there is no listener any more. O(listeners)."""
        if self._stored or self._removed or self._resume_points or cleared:
            stored, removed, points = tuple(self._stored), tuple(self._removed), tuple(self._resume_points)
            self._stored.clear()
            self._removed.clear()
            self._resume_points.clear()
            if self._listeners:
                self._tell(BlockChanges(self._sequence + 1, stored, removed, cleared, points))
        return bool(self._listeners)

    def _tell(self, changes: BlockChanges) -> None:
        self._sequence = changes.sequence
        for name, listener in list(self._listeners.items()):
            try:
                listener(changes)
            except KeyboardInterrupt:  # not the listener's
                raise
            except BaseException:
                self._failures[name] += 1
                is_last = self._failures[name] >= MAX_FAILURES
                logger.exception(
                    "a listener of cache events failed (%d in a row)%s: %r",
                    self._failures[name],
                    ", it receives nothing more" if is_last else "",
                    listener,
                )
                if is_last:
                    self._remove(name)
            else:
                self._failures.pop(name, None)

    def replay(self, nodes: Iterable[Node], listener: Listener) -> None:
        """Send a new listener the present blocks, under the current sequence number. O(blocks).

        Its errors go to the caller.
        """
        runs: list[StoredBlocks] = []
        points: list[ResumePoint] = []
        for node in nodes:
            runs += _stored(node, 0, self._size)
            points += [ResumePoint(one.identity, True) for one in (node.states or {}).values()]
        if runs:
            listener(BlockChanges(self._sequence, tuple(runs), resume_points=tuple(points)))


def _hashes(node: Node, first: int) -> tuple[bytes, ...]:
    """Return the identities of a node's whole blocks from index `first` on."""
    return each_identity(node.ids[first * IDENTITY_BYTES :])


def _stored(node: Node, first: int, size: int) -> list[StoredBlocks]:
    """Return the whole blocks of `node` from index `first` on, as one run; empty: there are none."""
    hashes = _hashes(node, first)
    if not hashes:
        return []
    parent, before = node.parent, None
    assert parent is not None
    if first:
        before = node.identity(first)
    elif parent.blocks:
        before = parent.identity(len(parent.blocks))
    stop = first + len(hashes)
    key = bytes(node.key[first * size : stop * size])
    return [StoredBlocks(hashes, before, tuple(node.blocks[first:stop]), key, node.owner.key)]
