# SPDX-License-Identifier: Apache-2.0
"""PublishedBlocks: changes of a cache as events for the wire, and the state that followers should have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from radixkv.cache.block_identity import each_identity
from radixkv.cache.keys import NamespaceKey, decode_tokens
from radixkv.cache.reporting.events import BlockChanges, RemovedBlocks, ResumePoint, StoredBlocks
from radixkv.cluster.events.block_keys import (
    NO_CHAIN,
    PUBLIC,
    BlockKeys,
    block_key,
    chains,
    is_open,
    state_name,
)
from radixkv.cluster.events.wire import (
    MEDIUM,
    STATE_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
)


class _Owner(NamedTuple):
    """Owner of blocks, in the wire's terms."""

    key: bytes
    label: str | None
    adapter: str | None
    shows_tokens: bool


class _NamedBlock(NamedTuple):
    key: int
    parent: int | None  # its key
    chain: bytes
    tokens: bytes  # encoded; empty: they are not told
    owner: _Owner


class PublishedBlocks:
    """Published state of one cache's blocks. Not thread-safe.

    Args:
        tokens: whose token ids are told: `open`, `all` or `none`, see `EventsSpec`.
    """

    def __init__(self, block_size: int, keys: BlockKeys, tokens: str) -> None:
        self._block_size = block_size
        self._keys = keys
        self._tokens = tokens
        self._blocks: dict[bytes, _NamedBlock] = {}  # by identity; parents before what follows them
        # Of the keys that several blocks have: each is told once, when the first comes and the last goes.
        self._shared: Counter[int] = Counter()
        self._present: set[int] = set()
        self._resume_points: dict[bytes, _NamedBlock] = {}  # by their block's identity
        self._kept: Counter[int] = Counter()  # how many of these have a key

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Nothing has been told."""
        self._blocks.clear()
        self._shared.clear()
        self._present.clear()
        self._resume_points.clear()
        self._kept.clear()

    def events(self, changes: BlockChanges) -> list[Event]:
        """Take in these changes and return the events for followers. O(their tokens)."""
        if changes.cleared:
            self.clear()
            cleared: list[Event] = [AllBlocksCleared()]
            return cleared + [event for run in changes.stored for event in self._stored(run)]
        removed = [event for gone in changes.removed for event in self._removed(gone)]
        stored = [event for run in changes.stored for event in self._stored(run)]
        return removed + stored + [event for one in changes.resume_points for event in self._resume(one)]

    def snapshot(self) -> list[Event]:
        """Events that bring whoever knows anything else to the same state. O(tokens)."""
        published: set[int] = set()
        fresh = []
        for block in self._blocks.values():
            if block.key not in published:
                published.add(block.key)
                fresh.append(block)
        points = {block.key: block for block in self._resume_points.values()}
        return [AllBlocksCleared(), *self._runs(fresh), *map(self._state, points.values())]

    def _stored(self, run: StoredBlocks) -> list[Event]:
        owner = self._owner(run.namespace)
        chain, parent = NO_CHAIN, None
        if run.parent_hash is not None:
            before = self._blocks.get(run.parent_hash)
            if before is None:  # nobody could make use of them
                return []
            chain, parent = before.chain, before.key
        size = len(run.key) // len(run.block_ids)
        published: list[_NamedBlock] = []
        for i, (identity, link) in enumerate(
            zip(run.block_hashes, each_identity(chains(self._block_size).chain(chain, run.key)), strict=True)
        ):
            known = self._blocks.get(identity)
            if known is None:
                tokens = run.key[i * size : (i + 1) * size] if owner.shows_tokens else b""
                known = self._blocks[identity] = _NamedBlock(
                    block_key(owner.key, link), parent, link, tokens, owner
                )
                if known.key in self._present:
                    self._shared[known.key] += 1
                else:
                    self._present.add(known.key)
                    published.append(known)
            parent = known.key
        return self._runs(published)

    def _removed(self, gone: RemovedBlocks) -> list[Event]:
        published: list[int | bytes] = []
        for identity in gone.block_hashes:
            block = self._blocks.pop(identity, None)
            if block is None:
                continue
            if self._shared[block.key]:
                self._shared[block.key] -= 1
            else:
                self._present.discard(block.key)
                published.append(block.key)
        return [BlockRemoved(block_hashes=published, medium=MEDIUM)] if published else []

    def _resume(self, point: ResumePoint) -> list[Event]:
        if not point.is_kept:
            gone = self._resume_points.pop(point.block_hash, None)
            if gone is None:
                return []
            self._kept[gone.key] -= 1
            name = state_name(gone.key)
            return [] if self._kept[gone.key] else [BlockRemoved(block_hashes=[name], medium=STATE_MEDIUM)]
        block = self._blocks.get(point.block_hash)
        if block is None or point.block_hash in self._resume_points:
            return []
        self._resume_points[point.block_hash] = block
        self._kept[block.key] += 1
        return [self._state(block)] if self._kept[block.key] == 1 else []

    def _state(self, block: _NamedBlock) -> BlockStored:
        return BlockStored(
            block_hashes=[state_name(block.key)],
            parent_block_hash=block.key,
            token_ids=[],
            block_size=self._block_size,
            lora_id=None,
            medium=STATE_MEDIUM,
            lora_name=block.owner.adapter,
            cache_salt=block.owner.label,
        )

    def _owner(self, namespace: NamespaceKey) -> _Owner:
        shows = self._tokens == "all" or (
            self._tokens == "open" and (namespace == PUBLIC or is_open(namespace))
        )
        adapter = namespace[2] if len(namespace) > 2 else ""
        return _Owner(self._keys.owner(namespace), self._keys.label(namespace), adapter or None, shows)

    def _runs(self, blocks: Iterable[_NamedBlock]) -> list[Event]:
        """Blocks as events: consecutive blocks of one owner as one event."""
        events: list[Event] = []
        run: list[_NamedBlock] = []
        for block in blocks:
            if run and (block.parent != run[-1].key or block.owner != run[-1].owner):
                events.append(self._event(run))
                run = []
            run.append(block)
        if run:
            events.append(self._event(run))
        return events

    def _event(self, run: list[_NamedBlock]) -> BlockStored:
        owner = run[0].owner
        return BlockStored(
            block_hashes=[block.key for block in run],
            parent_block_hash=run[0].parent,
            token_ids=decode_tokens(b"".join([block.tokens for block in run])),
            block_size=self._block_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=owner.adapter,
            cache_salt=owner.label,
        )
