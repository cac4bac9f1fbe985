"""GhostIndex: what was here and is gone. Bounded, the oldest forgotten first, and cheap to write to.

Removing blocks must be quick, asking why a prompt missed may take a little longer. So a removal is only
noted: the tokens that went (the leaf's own, no copy), the prefix state they follow, when, why. The notes are
hashed, in their order, when somebody asks; those that age out unasked never are. What remains are hashes.

    notes     [removal 7] [removal 8] [removal 9]        not hashed yet; at most `capacity` blocks
    readers              ^ 8: a report not read yet       what it finds must not depend on removals 8 and 9

A *reader* is a lease whose report is due: its `complete_report` is called when the notes before its moment
have been hashed and those after it have not. So a report read late tells of the moment of its acquire, even
when the same blocks came and went since.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

import xxhash

from radixkv.cache.insight.prefix_hash import PrefixHasher, RunHashes, State
from radixkv.cache.keys import TOKEN_BYTES
from radixkv.cache.node import Node

_MAX_READERS = 1024

_hash = xxhash.xxh3_64_intdigest


def _nothing() -> None:
    """Nobody waits."""


class Former(Protocol):
    """A whole tree that was forgotten at once; see `radixkv.cache.retired`."""

    def had(
        self, data: bytes | bytearray, num_tokens: int, seed: int, mark: int, depth: int, found: int
    ) -> bool:
        """Whether the block behind the first `depth` tokens of a prompt was in it; see `GhostIndex.find`."""

    def take_apart(self, num_nodes: int) -> bool:
        """Nobody asks any more: free some of its nodes; True when none is left."""


class GhostRecord:
    """When, why and by what a run of blocks was removed; shared by the blocks of one removal.

    Attributes:
        reason: `evicted`, `expired` or `reset`.
        at: clock seconds.
        by: what removed it.
        policy_data: what the policy's `ghost_data` returned.
        moment: removals before it.
    """

    __slots__ = ("at", "by", "moment", "policy_data", "reason")

    def __init__(self, reason: str, at: float, by: str, policy_data: Any = None, moment: int = 0) -> None:
        self.moment = moment
        self.reason = reason
        self.at = at
        self.by = by
        self.policy_data = policy_data

    def __repr__(self) -> str:
        return f"GhostRecord({self.reason} by {self.by} at {self.at:g})"


class RemovedRun:
    """A node's tokens when blocks began to leave it, and what is needed to hash them; shared by its notes."""

    __slots__ = ("hashes", "key", "mark", "notes", "state")

    def __init__(self, state: State, key: bytes | bytearray, mark: int) -> None:
        self.state = state
        self.key = key
        self.mark = mark
        self.notes = 0  # that are not hashed yet
        self.hashes: RunHashes | None = None  # None: none of its notes has been hashed


# Run, first, count, end, GhostRecord's; for a whole tree None, 0, count, blocks, GhostRecord's with the tree.
Note = tuple[RemovedRun | None, int, int, int, str, float, str, Any]
_PIECE = 32  # nodes of a forgotten tree that are freed at a time


class GhostIndex:
    """Removed blocks by prefix hash, the latest `capacity` of them.

    Args:
        block_bytes: bytes of a block's token ids.
        capacity: blocks remembered; 0 turns the index off.

    Attributes:
        count: removals noted since the start, the moment now; 0: there is nothing to find.
        leaving: trees that nobody asks about any more, to be freed by `free_some`.
        before_reading: called before notes are hashed or forgotten: the last chance to `watch`.
    """

    def __init__(self, block_bytes: int, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.before_reading: Callable[[], None] = _nothing
        self.hasher = PrefixHasher(block_bytes)
        self._size = block_bytes
        self._notes: deque[Note] = deque()
        self._noted_blocks = 0
        self._noted_bytes = 0
        self._byte_limit = max(1 << 20, 3 * capacity * block_bytes)
        self._readers: deque[tuple[int, ref[Any]]] = deque()
        self._records: OrderedDict[int, GhostRecord] = OrderedDict()
        self._partials: OrderedDict[int, tuple[int, int, GhostRecord]] = OrderedDict()
        self._former: Former | None = None  # the tree before the latest reset
        self._former_record = GhostRecord("", 0.0, "")
        self._former_blocks = 0
        self._former_left = 0  # removals, in blocks, after which it is forgotten
        self.leaving: deque[Former] = deque()

    def __len__(self) -> int:
        """Blocks remembered; one removed several times may count as often. O(1)."""
        known = len(self._records) + len(self._partials) + self._former_blocks
        return min(self.capacity, known + self._noted_blocks)

    def __repr__(self) -> str:
        return f"GhostIndex({len(self)} of {self.capacity} blocks)"

    # ------------------------------------------------------------------ writing

    def remember_all(self, tree: Former, num_blocks: int, reason: str, at: float, by: str) -> None:
        """A whole tree was forgotten: it is kept, and asked, instead of hashing it. Amortised O(1)."""
        if not self.capacity:
            self.leaving.append(tree)
            return
        size = max(1, num_blocks)
        self._notes.append((None, 0, size, num_blocks, reason, at, by, tree))
        self.count += 1
        self._noted_blocks += size
        if self._noted_blocks > self.capacity:
            self._make_room()

    def _replace_former(self, tree: Former | None, num_blocks: int = 0) -> None:
        if self._former is not None:
            self.leaving.append(self._former)
        self._former, self._former_blocks, self._former_left = tree, num_blocks, self.capacity

    def free_some(self) -> None:
        """Go on freeing what nobody asks about any more; to be called now and then. O(1)."""
        if self.leaving and self.leaving[0].take_apart(_PIECE):
            self.leaving.popleft()
        elif self.leaving:
            self.leaving.rotate()

    def remember(
        self, node: Node, num_blocks: int, reason: str, at: float, by: str, data: Any = None
    ) -> None:
        """The last `num_blocks` blocks of `node` are about to go. O(1), once per parent O(its tokens).

        The node must not be changed afterwards except by trimming it, until it is protected again.
        """
        if not self.capacity:
            return
        self.free_some()
        total = len(node.blocks)
        run: RemovedRun | None = node.removal
        if run is None:
            parent = node.parent
            assert parent is not None
            state = parent.prefix_state or self.hasher.state_behind(parent)
            whole = num_blocks == total
            mark = self.hasher.mark(node) if self.hasher.has_public else 0
            run = RemovedRun(state, node.key if whole else bytes(node.key), mark)
            if not whole:
                node.removal = run
        if not run.notes:
            self._noted_bytes += len(run.key) + len(run.state[1])
        run.notes += 1
        self._notes.append((run, total - num_blocks, num_blocks, len(node.key), reason, at, by, data))
        self.count += 1
        self._noted_blocks += num_blocks
        if self._noted_blocks > self.capacity or self._noted_bytes > self._byte_limit:
            self._make_room()

    def watch(self, reader: ref[Any], moment: int) -> None:
        """A reader asks about a moment, not before the latest asked about; it is told in time. O(1)."""
        readers = self._readers
        readers.append((moment, reader))
        if len(readers) > _MAX_READERS:
            self._readers = readers = deque([entry for entry in readers if entry[1]() is not None])
            if len(readers) > _MAX_READERS // 2:
                self.catch_up(readers[len(readers) // 2][0])

    def _make_room(self) -> None:
        """Too much is noted: hash what a report still depends on, and forget the oldest of the rest."""
        self.before_reading()
        readers, notes = self._readers, self._notes
        while readers:
            moment, reference = readers[0]
            if reference() is None:
                readers.popleft()
            else:
                self.catch_up(moment)
        if self._noted_bytes > self._byte_limit:
            self.catch_up()
        while notes and self._noted_blocks - notes[0][2] >= self.capacity:
            note = self._take_first()
            self._records.clear()  # older than what was just forgotten
            self._partials.clear()
            self._replace_former(None)
            if note[0] is None:
                self.leaving.append(note[7])

    def _take_first(self) -> Note:
        note = self._notes.popleft()
        run = note[0]
        self._noted_blocks -= note[2]
        if run is None:
            return note
        run.notes -= 1
        if not run.notes:
            self._noted_bytes -= len(run.key) + len(run.state[1])
        return note

    def catch_up(self, moment: int | None = None) -> None:
        """Hash what was noted up to a moment (None: now), and tell the readers on the way.

        O(blocks noted).
        """
        self.before_reading()
        if moment is None:
            moment = self.count
        readers = self._readers
        while True:
            hashed = self.count - len(self._notes)
            while readers and readers[0][0] <= hashed:
                reader = readers.popleft()[1]()
                if reader is not None:
                    reader.complete_report()
            if hashed >= moment:
                return
            self._hash(self._take_first())

    def _hash(self, note: Note) -> None:
        """O(blocks of the note); once for a run O(its tokens)."""
        run, first, num_blocks, end, reason, at, by, data = note
        record = GhostRecord(reason, at, by, data, self.count - len(self._notes))
        if run is None:
            self._replace_former(record.policy_data, end)
            record.policy_data = None
            self._former_record = record
            return
        self._former_left -= num_blocks
        if self._former_left <= 0 and self._former is not None:
            self._replace_former(None)
        records, key, mark = self._records, run.key, run.mark
        if run.hashes is None:
            run.hashes = self.hasher.run(run.state)
        first += max(0, num_blocks - self.capacity)
        whole = end - end % self._size
        for value in run.hashes.of_blocks(key, first, whole // self._size):
            value ^= mark
            records[value] = record
            records.move_to_end(value)
        if whole < end:
            tail = bytes(key[whole:end])
            partial = run.hashes.partial_key(key, whole) ^ mark
            self._partials[partial] = (len(tail), _hash(tail), record)
            self._partials.move_to_end(partial)
        while len(records) + len(self._partials) > self.capacity:
            (records or self._partials).popitem(last=False)

    # ------------------------------------------------------------------ reading

    def find(
        self, data: bytes | bytearray, num_tokens: int, seed: int, depth: int, found: int, mark: int = 0
    ) -> GhostRecord | None:
        """What removed the block behind the first `depth` tokens of a prompt; None: not known. O(depth).

        Only what has been hashed is found, see `catch_up`.

        Args:
            data: begins with the prompt, of `num_tokens` tokens.
            depth: tokens found in whole blocks.
            found: tokens found at all; a remembered partial block must reach beyond them.
            mark: see `PrefixHasher.mark`, for the block in question.
        """
        record = self._find_run(data, num_tokens, seed, depth, found, mark)
        former, reset = self._former, self._former_record
        if former is None or (record is not None and record.moment > reset.moment):
            return record
        return reset if former.had(data, num_tokens, seed, mark, depth, found) else record

    def _find_run(
        self, data: bytes | bytearray, num_tokens: int, seed: int, depth: int, found: int, mark: int
    ) -> GhostRecord | None:
        records = self._records
        start = depth * TOKEN_BYTES
        end = start + self._size
        stop = num_tokens * TOKEN_BYTES
        if end <= stop and records:
            record = records.get(self.hasher.of_prompt(data, seed, end) ^ mark)
            if record is not None:
                return record
        if self._partials:
            entry = self._partials.get(self.hasher.partial_key(data, seed, start) ^ mark)
            if entry is not None:
                length, digest, record = entry
                if (
                    found * TOKEN_BYTES < start + length <= stop
                    and _hash(data[start : start + length]) == digest
                ):
                    return record
        return None

    def find_block(self, node: Node, index: int) -> GhostRecord | None:
        """What removed the whole block at `index` of a node earlier. O(blocks before it in the node)."""
        if not self.count:
            return None
        self.catch_up()
        if (index + 1) * self._size > len(node.key):
            return None
        return self._records.get(self.hasher.of_block(node, index))

    def clear(self) -> None:
        """Forget all ghosts."""
        self.catch_up()
        self._records.clear()
        self._partials.clear()
        self._replace_former(None)
