# SPDX-License-Identifier: Apache-2.0
"""Follower: the blocks of one replica, known from its messages alone, in spite of loss, delay and reordering.

It takes messages and says from which sequence number on it wants a replay; it opens no socket and reads no
clock (`radixkv.cluster.events.subscriber` does). Its knowledge is exact, or it is forgotten:

    the next number            applied, then the held messages that follow it
    a number already seen      ignored
    a later number             held; a replay is wanted from the one that is missing
    AllBlocksCleared first     applied at once, whatever is missing before it
    another incarnation        all is forgotten; messages of earlier ones are ignored from then on
    a replay that begins late  the missing part is lost: all is forgotten, and later messages count
    no replay, or no heartbeat all is forgotten until there is one

Engines that name no incarnation begin at 0 when they restart. So all is forgotten when their connection ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from radixkv.cache.block_identity import each_identity
from radixkv.cache.keys import NamespaceKey, encode_tokens
from radixkv.cluster.events.block_keys import NO_CHAIN, PUBLIC, PUBLIC_LABEL, BlockKeys, block_key, chains
from radixkv.cluster.events.wire import (
    END,
    MEDIUM,
    STATE_MEDIUM,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    WireError,
    decode_batch,
    incarnation_of,
)
from radixkv.errors import InvalidRequestError

MAX_HELD = 1024  # messages that came early
_MAX_RETIRED = 64  # incarnations whose late messages are known as such


class Watcher(Protocol):
    """A listener to the blocks that a replica holds, by their keys (`radixkv.cluster.events.block_keys`)."""

    def stored(self, keys: Sequence[int]) -> None: ...

    def removed(self, keys: Sequence[int]) -> None: ...

    def kept(self, key: int) -> None:
        """The state after a block is kept: requests of a model with states can go on there."""

    def dropped(self, key: int) -> None:
        """It is not kept any more."""

    def cleared(self) -> None: ...


class _HeldBlock(NamedTuple):
    key: int | None  # None: nobody can ask for it
    chain: bytes | None  # None: not known, so neither are those of what follows


class Follower:
    """Follows one replica.

    Args:
        keys: with the secret that the replica's stream has, all of its blocks can be asked for; with another
            one, those whose token ids it tells.
        watcher: is told of every change.

    Attributes:
        incarnation: of the stream; empty: its messages name none.
        wanted: the sequence number from which a replay is needed; None: nothing is missing.
        num_forgotten: how often all was forgotten because something was lost.
        block_size: of the blocks that were stored last, in tokens; 0: none were.
    """

    def __init__(self, keys: BlockKeys, watcher: Watcher | None = None) -> None:
        self.incarnation: str | None = None
        self.wanted: int | None = 0  # what was before is missing
        self.num_forgotten = 0
        self.block_size = 0
        self._keys = keys
        self._watcher = watcher
        self._next = 0
        self._blocks: dict[BlockHash, _HeldBlock] = {}
        self._counts: Counter[int] = Counter()  # of keys that several blocks have, how many more
        self._known: set[int] = set()
        self._states: dict[BlockHash, int] = {}  # the keys of the blocks before them
        self._num_states: Counter[int] = Counter()  # by such a key
        self._held: dict[int, list[Event]] = {}
        self._retired: deque[str] = deque(maxlen=_MAX_RETIRED)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def hashes(self) -> set[BlockHash]:
        """The replica's own names of the blocks it holds. O(blocks)."""
        return set(self._blocks)

    @property
    def is_exact(self) -> bool:
        """True if no message is missing before the last one seen."""
        return self.incarnation is not None and self.wanted is None

    @property
    def has_heartbeat(self) -> bool:
        """True if its stream never falls silent."""
        return bool(self.incarnation)

    # ------------------------------------------------------------------ messages

    def receive(self, frames: Sequence[bytes]) -> None:
        """Take a message of the stream: topic, sequence number, batch. A malformed message counts as lost."""
        self._take(frames, is_replay=False)

    def replayed(self, frames: Sequence[bytes]) -> bool:
        """A message of a replay, with or without its topic; True: it was the last one."""
        if len(frames) >= 2 and frames[-2] == END:
            self._close_replay()
            return True
        self._take((b"", *frames) if len(frames) == 2 else frames, is_replay=True)
        return False

    def replay_failed(self) -> None:
        """No replay came in time. Who names incarnations will answer again, others may have none to give."""
        if self.incarnation:
            self.lost()
        else:
            self._close_replay()

    def lost(self) -> None:
        """After a silence that was too long: forget all, and begin again with a full replay."""
        self._forget()
        self._next = 0
        self._held.clear()
        self.wanted = 0

    def disconnected(self) -> None:
        """The connection was lost: a stream without incarnations may be another one when it is back."""
        if self.incarnation:
            self.wanted = self._next  # of the same incarnation, what was missed comes again
        else:
            self.lost()

    def _take(self, frames: Sequence[bytes], *, is_replay: bool) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            return
        topic, number, payload = frames
        sequence = int.from_bytes(number, "big")
        if not self._is_current(incarnation_of(topic)):
            return
        if sequence < self._next:
            return
        try:
            events = decode_batch(payload)
        except WireError:
            self.wanted = self._next
            return
        stands_alone = bool(events) and type(events[0]) is AllBlocksCleared
        if is_replay and sequence > self._next and not stands_alone and not self.incarnation:
            self._forget()  # what is missing can't be had any more
            self._next = sequence
        if sequence == self._next or stands_alone:
            self._apply(sequence, events)
        elif len(self._held) < MAX_HELD:
            self._held[sequence] = events
        self.wanted = self._next if self._held or sequence > self._next else None

    def _is_current(self, name: str) -> bool:
        """Return True for a message of the followed incarnation, or of a new one, followed from now on."""
        if name == self.incarnation:
            return True
        if name in self._retired:
            return False
        if self.incarnation:
            self._retired.append(self.incarnation)
        if self.incarnation is not None:
            self._forget()
        self.incarnation = name
        self._next = 0
        self._held.clear()
        return True

    def _close_replay(self) -> None:
        """Count as lost the messages still missing after a replay of an engine without incarnations."""
        if self._held and not self.incarnation:
            self._forget()
            self._next = min(self._held)
            self._catch_up()
        self.wanted = self._next if self._held else None

    # ------------------------------------------------------------------ contents of messages

    def _apply(self, sequence: int, events: list[Event]) -> None:
        self._execute(events)
        self._next = sequence + 1
        self._catch_up()

    def _catch_up(self) -> None:
        """Apply the held messages up to the next gap."""
        for early in [number for number in self._held if number < self._next]:
            del self._held[early]
        while self._next in self._held:
            self._execute(self._held.pop(self._next))
            self._next += 1

    def _execute(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._clear()
            elif event.medium == STATE_MEDIUM:
                self._note_states(event)
            elif event.medium not in (None, MEDIUM):
                continue  # of a memory below the one that an engine computes from
            elif isinstance(event, BlockStored):
                self._store(event)
            else:
                self._remove(event)

    def _store(self, event: BlockStored) -> None:
        self.block_size = event.block_size
        stored = []
        for block_hash, block in zip(event.block_hashes, self._name(event), strict=True):
            if block_hash in self._blocks:
                continue
            self._blocks[block_hash] = block
            if block.key is None:
                continue
            if block.key in self._known:
                self._counts[block.key] += 1
            else:
                self._known.add(block.key)
                stored.append(block.key)
        if stored and self._watcher is not None:
            self._watcher.stored(stored)

    def _note_states(self, event: BlockStored | BlockRemoved) -> None:
        """States of blocks that can be asked for come, one in each event, or go."""
        if isinstance(event, BlockStored):
            block = None if event.parent_block_hash is None else self._blocks.get(event.parent_block_hash)
            if block is None or block.key is None:
                return
            for name in event.block_hashes:
                if name in self._states:
                    continue
                self._states[name] = block.key
                self._num_states[block.key] += 1
                if self._num_states[block.key] == 1 and self._watcher is not None:
                    self._watcher.kept(block.key)
            return
        for name in event.block_hashes:
            key = self._states.pop(name, None)
            if key is not None:
                self._num_states[key] -= 1
                if not self._num_states[key] and self._watcher is not None:
                    self._watcher.dropped(key)

    def _name(self, event: BlockStored) -> list[_HeldBlock]:
        """The keys and chains of a run's blocks, as far as they can be known."""
        count = len(event.block_hashes)
        is_ours = bool(self.incarnation)
        published = [
            block_hash if is_ours and isinstance(block_hash, int) else None
            for block_hash in event.block_hashes
        ]
        chain: bytes | None = NO_CHAIN
        if event.parent_block_hash is not None:
            parent = self._blocks.get(event.parent_block_hash)
            chain = None if parent is None else parent.chain
        if chain is None or len(event.token_ids) != count * event.block_size or event.block_size < 1:
            return [_HeldBlock(key, None) for key in published]
        try:
            tokens = encode_tokens(event.token_ids)
        except InvalidRequestError:
            return [_HeldBlock(key, None) for key in published]
        links = each_identity(chains(event.block_size).chain(chain, tokens))
        if is_ours and event.cache_salt not in (None, PUBLIC_LABEL):
            return [_HeldBlock(key, link) for key, link in zip(published, links, strict=True)]
        owner = self._keys.owner(self._namespace(event))
        return [_HeldBlock(block_key(owner, link), link) for link in links]

    def _namespace(self, event: BlockStored) -> NamespaceKey:
        """As whose text a router may ask for it."""
        if self.incarnation and event.cache_salt == PUBLIC_LABEL:
            return PUBLIC
        return ("", event.cache_salt or "", event.lora_name or "")

    def _remove(self, event: BlockRemoved) -> None:
        removed = []
        for block_hash in event.block_hashes:
            block = self._blocks.pop(block_hash, None)
            if block is None or block.key is None:
                continue
            if self._counts.get(block.key):
                self._counts[block.key] -= 1
            else:
                self._known.discard(block.key)
                removed.append(block.key)
        if removed and self._watcher is not None:
            self._watcher.removed(removed)

    def _forget(self) -> None:
        self.num_forgotten += bool(self._blocks)
        self._clear()

    def _clear(self) -> None:
        self._blocks.clear()
        self._counts.clear()
        self._known.clear()
        self._states.clear()
        self._num_states.clear()
        if self._watcher is not None:
            self._watcher.cleared()
