# SPDX-License-Identifier: Apache-2.0
"""GhostIndex: removed blocks by identity. Bounded, the oldest forgotten first.

Of a whole block its identity is remembered; of a partial one its tokens, by the identity that they follow. A
tree that was reset is kept unchanged and asked itself, see `radixkv.cache.invalidated_tree`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixkv.cache.block_identity import each_identity
from radixkv.cache.invalidated_tree import InvalidatedTree
from radixkv.cache.keys import TOKEN_BYTES
from radixkv.cache.node import Namespace
from radixkv.cache.radix_tree import RadixTree, Walk

_PIECE = 32  # nodes of a forgotten tree that are freed at a time
_PARTIAL = b"~"


@dataclass(eq=False, slots=True)
class GhostRecord:
    """Time, reason and cause of a removal; shared by the blocks of one removal."""

    reason: str  # `evicted`, `expired` or `reset`
    at: float  # clock seconds
    by: str  # what removed it
    number: int  # removals before it
    tail: bytes = b""  # the tokens of a partial block that was removed at the end


class GhostIndex:
    """Removed blocks, the latest `capacity` of them."""

    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self.capacity = capacity  # blocks remembered; 0 turns the index off
        self.clock = clock  # seconds
        self.count = 0  # removals since the start; 0: there is nothing to find
        self.any_partial = False  # whether partial blocks were among them
        self.former: InvalidatedTree | None = None  # the tree before the latest reset, while it is remembered
        self.former_record = GhostRecord("", 0.0, "", 0)  # of that reset
        # Trees without readers, to be freed by `free_some`.
        self.leaving: deque[InvalidatedTree] = deque()
        self._former_blocks = 0
        self._former_left = 0  # removals, in blocks, after which it is forgotten
        self._records: dict[bytes, GhostRecord] = {}  # a partial block by _PARTIAL and the identity before it
        # What each removal took, shallowest first, and how much that is; some of it was removed again later.
        self._removals: deque[tuple[GhostRecord, Sequence[bytes]]] = deque()
        self._num_removed = 0

    def __len__(self) -> int:
        """Blocks remembered; one removed by a reset, too, may count twice. O(1)."""
        return min(self.capacity, len(self._records) + self._former_blocks)

    def remember(
        self,
        ids: bytes | bytearray,
        partial: tuple[bytes, bytes] | None,
        reason: str,
        by: str,
    ) -> None:
        """Whole blocks of these identities, which follow one another, are about to go. O(blocks).

        `partial`: of a partial one after them, the identity that it follows and its tokens.
        """
        self.free_some()
        known = each_identity(ids)
        record = GhostRecord(reason, self.clock(), by, self.count)
        if partial is not None:
            self.any_partial = True
            known = (*known, _PARTIAL + partial[0])
            record.tail = partial[1]
        self.count += 1
        self._records.update(dict.fromkeys(known, record))
        self._removals.append((record, known))
        self._num_removed += len(known)
        if len(self._records) > self.capacity or self._num_removed > 2 * self.capacity:
            self._forget()
        self._former_left -= len(known)
        if self._former_left <= 0 and self.former is not None:
            self._replace_former(None)

    def _forget(self) -> None:
        """Forget the oldest removals. Amortised O(1) for each block removed."""
        records, removals = self._records, self._removals
        if self._num_removed > 2 * self.capacity:  # at least half of it was removed again later
            latest = [
                (record, [name for name in known if records.get(name) is record])
                for record, known in removals
            ]
            removals = self._removals = deque(entry for entry in latest if entry[1])
            self._num_removed = len(records)
        excess = len(records) - self.capacity
        while excess > 0:
            record, known = removals.popleft()
            for at, name in enumerate(known):
                if not excess:
                    removals.appendleft((record, known[at:]))
                    break
                self._num_removed -= 1
                if records.get(name) is record:
                    del records[name]
                    excess -= 1

    def remember_all(self, tree: InvalidatedTree, by: str) -> None:
        """A whole tree was reset: it is kept, and asked. Amortised O(1)."""
        if not self.capacity:
            self.leaving.append(tree)
            return
        self._replace_former(tree, tree.num_blocks)
        self.former_record = GhostRecord("reset", self.clock(), by, self.count)
        self.count += 1

    def _replace_former(self, tree: InvalidatedTree | None, num_blocks: int = 0) -> None:
        if self.former is not None:
            self.leaving.append(self.former)
        self.former, self._former_blocks, self._former_left = tree, num_blocks, self.capacity

    def free_some(self) -> None:
        """Go on freeing trees without readers; to be called now and then. O(1)."""
        if self.leaving and self.leaving[0].take_apart(_PIECE):
            self.leaving.popleft()
        elif self.leaving:
            self.leaving.rotate()

    def find_block(self, identity: bytes) -> GhostRecord | None:
        """Return the record of a whole block's removal; None: not known. O(1)."""
        return self._records.get(identity)

    def removal(
        self, tree: RadixTree, data: bytes, owner: Namespace, walk: Walk | None
    ) -> GhostRecord | None:
        """Return the record of the removal of the first block missed by a lookup in `owner`; None: not known.

        O(1); where all was reset O(tokens + path).
        """
        depth, inside = (0, 0) if walk is None else walk[1:3]
        start = depth * TOKEN_BYTES
        first = own = owner
        if owner.declared.prefixes and (shared := owner.declared.length_in(data)):
            first = owner.public
            own = first if start < shared else owner
        before = first.seed if walk is None else tree.identity_of_match(walk, own)
        following = data[start : start + tree.block_bytes]
        record = None
        if len(following) == tree.block_bytes:
            record = self._records.get(tree.identities.next(before, following))
        if record is None and self.any_partial:
            partial = self._records.get(_PARTIAL + before)
            if partial is not None and inside * TOKEN_BYTES < len(partial.tail):
                record = partial if following.startswith(partial.tail) else None
        former, reset = self.former, self.former_record
        if former is None or (record is not None and record.number > reset.number):
            return record
        return reset if former.had(data, first, own, depth, depth + inside) else record
