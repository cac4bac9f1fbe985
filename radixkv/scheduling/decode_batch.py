"""Requests that write into a block they have already: the decodes whose step needs nothing from the cache.

Of sixteen decode steps of a request, fifteen put their token into the last block of its lease, which is there
and nobody else's. Such a request is in the decode batch: a row of a few arrays, from which their part of a
step's batch is built at once. Its lease is told of the tokens all together (`flush_tokens`) when the block is
full, when the request leaves, or when somebody else's prompt goes on with just these tokens (`continuation`).
So with a thousand decodes the cache is called for about sixty of them in a step.

    tokens of a request in the batch
    0 ............ lease.num_tokens ............ num_computed . num_tokens
    |  committed, shareable    |  K/V is there; the lease  |  to compute in
    |                          |  does not know yet        |  this step
                                <-- inside the lease's last block -->

Who may join is decided by `RunningRequests`: a request that shares no blocks with forks, so that no other
lease's operation changes its block table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.cache.keys import frame_namespace
from radixkv.scheduling.batch import DecodeRows, Entry
from radixkv.scheduling.sequence_state import NamespaceName, SequenceState, TokenBuffer

# Where a member's committed tokens end: namespace, identity of their whole blocks, tokens after these.
Key = tuple[tuple[str, ...], bytes, bytes]


@dataclass(slots=True)
class _Member:
    """What is remembered of one request in the batch."""

    row: int
    key: Key


class DecodeBatch:
    """The rows, in no particular order; joining and leaving are O(1).

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._members: dict[int, _Member] = {}  # by arrival order
        self._requests: list[SequenceState] = []
        self._entries: list[Entry] = []  # kept from step to step, only their start changes
        self._buffers: list[TokenBuffer] = []
        self._tables: list[npt.NDArray[np.int32]] = []
        self._positions = np.zeros(64, dtype=np.int64)  # of the token to compute, as of `unfit`
        self._slot_offsets = np.zeros(64, dtype=np.int64)  # slot - position, constant inside a block
        self._ends = np.zeros(64, dtype=np.int64)  # the position after the block
        self._num_by_namespace: dict[NamespaceName, int] = {}
        # Where the committed tokens of a request end, so that a prompt that ends there finds it.
        self._by_end: dict[Key, dict[int, SequenceState]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: SequenceState) -> bool:
        return request.arrival_order in self._members

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(list(self._requests))

    def join(self, request: SequenceState) -> None:
        """Take in a request whose lease has all its tokens, and room after them in its last block."""
        assert request.lease is not None
        end, row, size = request.num_tokens, len(self._requests), self._block_size
        assert end % size, f"{request!r} has no room in its last block"
        table = request.lease.block_table
        if row == len(self._ends):
            self._positions = np.resize(self._positions, 2 * row)
            self._slot_offsets = np.resize(self._slot_offsets, 2 * row)
            self._ends = np.resize(self._ends, 2 * row)
        start = end - end % size
        self._positions[row] = end
        self._slot_offsets[row] = int(table[-1]) * size - start
        self._ends[row] = start + size
        self._requests.append(request)
        self._buffers.append(request.tokens)
        self._entries.append(Entry(request, end, 1, samples=True, num_logits=1))
        self._tables.append(table)
        key = self._key(request, *request.lease.cached_identity, end)
        self._members[request.arrival_order] = _Member(row, key)
        self._by_end.setdefault(key, {})[request.arrival_order] = request
        namespace = request.namespace
        self._num_by_namespace[namespace] = self._num_by_namespace.get(namespace, 0) + 1

    def leave(self, request: SequenceState) -> bool:
        """Take a request out; False if it is not in. Its lease still has to be told of its tokens."""
        member = self._members.pop(request.arrival_order, None)
        if member is None:
            return False
        row, last = member.row, len(self._requests) - 1
        if row != last:  # the last row moves up
            moved = self._requests[row] = self._requests[last]
            self._entries[row] = self._entries[last]
            self._buffers[row] = self._buffers[last]
            self._tables[row] = self._tables[last]
            self._positions[row] = self._positions[last]
            self._slot_offsets[row] = self._slot_offsets[last]
            self._ends[row] = self._ends[last]
            self._members[moved.arrival_order].row = row
        self._requests.pop()
        self._entries.pop()
        self._buffers.pop()
        self._tables.pop()
        at_end = self._by_end[member.key]
        del at_end[request.arrival_order]
        if not at_end:
            del self._by_end[member.key]
        left = self._num_by_namespace[request.namespace] - 1
        if left:
            self._num_by_namespace[request.namespace] = left
        else:
            del self._num_by_namespace[request.namespace]
        return True

    def unfit(self) -> list[SequenceState]:
        """Those for which the coming step is no plain decode: above all, whose block is full. O(rows).

        To be called before a step; the others' positions are noted for `rows`.
        """
        count = len(self._requests)
        self._positions[:count] = [request.num_computed for request in self._requests]
        known = np.array([tokens.length for tokens in self._buffers], dtype=np.int64)
        full = (self._positions[:count] >= self._ends[:count]) | (known - self._positions[:count] != 1)
        return [self._requests[row] for row in np.flatnonzero(full).tolist()]

    def rows(self) -> DecodeRows:
        """Its part of a step's batch, once those of `unfit` have left. O(rows)."""
        count = len(self._requests)
        positions = self._positions[:count].copy()
        for entry, position in zip(self._entries, positions.tolist(), strict=True):
            entry.start = position
        return DecodeRows(
            entries=self._entries.copy(),
            token_ids=np.array([tokens.last for tokens in self._buffers], dtype=np.int64),
            positions=positions,
            slots=positions + self._slot_offsets[:count],
            block_tables=self._tables.copy(),
            num_by_namespace=self._num_by_namespace.copy(),
        )

    def continuation(
        self, request: SequenceState, num_matched: int, identity: bytes, num_whole: int
    ) -> SequenceState | None:
        """A member whose tokens go on where the cached prefix of a waiting `request` ends. O(1) if none.

        Args:
            num_matched: tokens of that prefix.
            identity, num_whole: of its whole blocks, and their tokens.

        Of several the one that agrees with it longest: where they agree, their tokens are one another's.
        """
        if not num_matched or num_matched + 1 >= request.num_tokens:
            return None
        tokens = request.tokens.view()
        found = self._by_end.get(self._key(request, identity, num_whole, num_matched))
        if found is None:
            return None
        best, longest = None, 0
        for member in found.values():
            end = min(member.num_tokens, len(tokens))
            if end - num_matched <= longest:
                continue
            theirs = member.tokens.view(num_matched, end)
            if theirs[0] != tokens[num_matched]:
                continue
            differ = theirs != tokens[num_matched:end]
            agree = int(differ.argmax()) if differ.any() else len(theirs)
            if agree > longest and np.array_equal(member.tokens.view(0, num_matched), tokens[:num_matched]):
                best, longest = member, agree
        return best

    @staticmethod
    def _key(request: SequenceState, identity: bytes, num_whole: int, num_tokens: int) -> Key:
        tail = request.tokens.view(num_whole, num_tokens)
        return frame_namespace(request.namespace), identity, tail.tobytes()

    def check(self) -> None:
        """Assert that rows, keys and leases agree."""
        assert len(self._members) == len(self._requests) == len(self._entries) == len(self._tables)
        assert sum(self._num_by_namespace.values()) == len(self._requests)
        assert sum(len(found) for found in self._by_end.values()) == len(self._requests)
        for row, request in enumerate(self._requests):
            assert self._members[request.arrival_order].row == row
            assert self._entries[row].request is request
            lease = request.lease
            assert lease is not None, f"{request!r} decodes without a lease"
            assert np.array_equal(lease.block_table, self._tables[row]), f"{request!r}: another block table"
            assert lease.num_tokens <= request.num_computed <= self._ends[row]
            assert len(self._tables[row]) * self._block_size == self._ends[row]


def flush_tokens(request: SequenceState) -> None:
    """Tell the lease of all tokens that were computed without it. O(those tokens), at most a block.

    They lie in its last block, so this never needs another one.
    """
    lease = request.lease
    if lease is not None and lease.num_tokens < request.num_computed:
        lease.append(request.tokens.view(lease.num_tokens, request.num_computed))
        lease.commit(request.num_computed)
