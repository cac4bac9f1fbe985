# SPDX-License-Identifier: Apache-2.0
"""A step's flattened work: `Batch`, and its construction from the scheduler's picks.

There are no prefill and decode phases in here, only lengths: entry r of the batch computes tokens
[start, start + count) of its request, whatever they are.

The columns of all entries lie one after the other (T = sum of counts):

    token_ids   | r0 r0 r0 r0 | r1 | r2 | r3 r3 |
    query_starts  0             4    5    6       8

A token's K/V is written before any query of the step attends, layer by layer, so requests of one step may
read each other's blocks. When a copy-on-write's source slots are computed in this very step, copying before
the step would copy nothing: those slots are instead written twice (`write_rows` names a row several times).
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.cache.pending_copies import Copy
from radixkv.cache.states.checkpoint import GRID
from radixkv.cache.states.lease_states import NO_SLOT
from radixkv.scheduling.sequence import Sequence


@dataclass(slots=True)
class Entry:
    """Tokens [start, start + count) of one request, computed in this step.

    Attributes:
        redundant: leading tokens of the range whose K/V is already in the cache (another request computed
            the same tokens, or they are replayed): they are computed, and not written.
        known: tokens of the request whose K/V is there before the step, or is copied in it; `start`, unless
            the request replays some of them.
        samples: whether the last token's logits choose the request's next token.
        num_logits: of how many of its last rows the logits are needed: 1 to sample (or, where nothing is, to
            see that they are numbers) and one more for each token of the draft, all of them for the logprobs
            of a prompt, 0 inside a prompt.
        copies: copy-on-write of this entry's lease, to run before its tokens are written: the last tokens
            before `known`.
        block_table: of its lease, for a row, which is kept from step to step (`radixkv.scheduling.running`);
            other entries' are looked up when the batch is built.
        slot_offset: slot - position of a row's token.
        until: the first position at which the row after this one has to be looked at: it needs another block,
            say, or its request ends there; 0: at once.
        draft: the last tokens of the range when they are a guess: the request has not got them, their K/V is
            not committed, and the step's logits tell which of them are right.
    """

    request: Sequence
    start: int
    count: int
    redundant: int = 0
    known: int = 0
    samples: bool = False
    num_logits: int = 0
    copies: abc.Sequence[Copy] = ()
    draft: abc.Sequence[int] = ()
    block_table: npt.NDArray[np.int32] | None = None
    slot_offset: int = 0
    until: int = 0

    @property
    def end(self) -> int:
        """End of the tokens delivered to the request: the rest is its draft."""
        return self.start + self.count - len(self.draft)


class StateSave(NamedTuple):
    """A checkpoint that a step leaves besides its target: a fold out of place.

    Attributes:
        row: index of the entry in the batch.
        position: tokens that the state sums up: a multiple of `GRID`, base < position <= start + count.
        slot: where it goes.
    """

    row: int
    position: int
    slot: int


@dataclass(slots=True)
class BatchStates:
    """States that a step reads and writes; host arrays, one element for each of the batch's R entries.

    A model with states (recurrent or convolutional layers) keeps the state after a whole number of grid steps
    (`GRID` tokens) in a *slot*, for all its state layers together. Slots are write-once. The inputs of tokens
    computed since a request's last slot, at most `GRID` tokens, are in its *ring row*.

        position    base              start              start + count
                     |--- ring: computed ---|--- rows of this step ---|
        state of     base_slots[r]                            target_slots[r] at the last grid point
                                                              that lies before start + count

    A guess that proves wrong is taken back by a smaller `start` in the next step: the ring's length is
    start - base, and is stored nowhere.

    Attributes:
        base_slots: int32 [R], slot with the state after `base_positions` tokens; -1: the zero state, at
            position 0.
        base_positions: int64 [R], multiples of `GRID`; 0 <= start - base <= `GRID`.
        ring_rows: int32 [R], the ring of each request, in [0, most running requests).
        target_slots: int32 [R], where the state after `target_positions` tokens goes, which is the request's
            base from then on; -1: the step crosses no grid point.
        target_positions: int64 [R], the last multiple of `GRID` below start + count, where it is larger than
            the base; else the base. After the step the ring holds the inputs from there on.
        saves: further checkpoints. They change neither base nor ring.
    """

    base_slots: npt.NDArray[np.int32]
    base_positions: npt.NDArray[np.int64]
    ring_rows: npt.NDArray[np.int32]
    target_slots: npt.NDArray[np.int32]
    target_positions: npt.NDArray[np.int64]
    saves: list[StateSave] = field(default_factory=list)

    @classmethod
    def empty(cls, num_entries: int) -> BatchStates:
        """Return arrays for `num_entries` requests without anything before them and without targets."""
        return cls(
            base_slots=np.full(num_entries, NO_SLOT, np.int32),
            base_positions=np.zeros(num_entries, np.int64),
            ring_rows=np.zeros(num_entries, np.int32),
            target_slots=np.full(num_entries, NO_SLOT, np.int32),
            target_positions=np.zeros(num_entries, np.int64),
        )


@dataclass(slots=True)
class BatchWindows:
    """Tables and slots of a step in the pool of windows.

    Attributes:
        block_tables: R int32 arrays, as `Batch.block_tables`. Ids of blocks before a request's window mean
            nothing, and may be other requests' by now.
        write_slots: int64 [T], the slot of each row.
    """

    block_tables: list[npt.NDArray[np.int32]]
    write_slots: npt.NDArray[np.int64]


@dataclass(slots=True)
class Batch:
    """Input of the model runner for one step; host arrays.

    Attributes:
        entries: R entries, in the order of the columns; valid until the next step is built.
        token_ids: int64 [T]
        positions: int64 [T], absolute; above 32 bits the class of the sequence's length (`LengthClasses`).
        query_starts: int32 [R + 1]
        context_lengths: int32 [R], tokens with K/V once this step has written its own.
        block_tables: R int32 arrays.
        write_slots: int64 [N], slot = block * block_size + offset.
        write_rows: int64 [N], the row of T that goes to each slot; None: row i to slot i, N = T.
        logit_rows: int64 [S], rows whose logits are needed, in the order of the returned logits: ascending,
            unless the runner has moved the entries.
        copy_groups: copies to run before the step, group after group; inside a group no source is a target,
            and no block is a target twice. Nothing that they read or write is written by the step.
        fed_tokens: a tensor int64 [T] on the runner's device that takes the place of `token_ids`, where the
            host does not know these yet; None: it does.
        num_rows: entries at the beginning that are decodes of one token, and copy nothing.
        states: states that the step reads and writes; None: the model has no state layers.
        windows: tables and slots of layers with windows; None: they are those of all layers.
    """

    entries: list[Entry]
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    query_starts: npt.NDArray[np.int32]
    context_lengths: npt.NDArray[np.int32]
    block_tables: list[npt.NDArray[np.int32]]
    write_slots: npt.NDArray[np.int64]
    write_rows: npt.NDArray[np.int64] | None
    logit_rows: npt.NDArray[np.int64]
    copy_groups: list[list[Copy]]
    fed_tokens: Any = None
    num_rows: int = 0
    states: BatchStates | None = None
    windows: BatchWindows | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def logit_spans(self, start: int = 0) -> Iterator[tuple[Entry, int, int]]:
        """Yield each entry with its rows [first, end) of the logits [S, V] that the model returns. O(R).

        Args:
            start: the first entry; those before it are rows, or there are none.
        """
        end = start
        for entry in self.entries[start:]:
            first, end = end, end + entry.num_logits
            yield entry, first, end

    def __repr__(self) -> str:
        counts = ",".join(str(entry.count) for entry in self.entries[:8])
        more = ",..." if len(self.entries) > 8 else ""
        return f"Batch({len(self.entries)} requests, {self.num_tokens} tokens: {counts}{more})"


def fold_position(base: int, end: int) -> int:
    """Return the base after a step up to `end` tokens: the last grid point below it, or the base."""
    return max(base, (end - 1) // GRID * GRID)


def drop_idle_copies(entries: list[Entry], block_size: int) -> None:
    """Leave out copies into blocks that their entry has given up since, for equal ones that others committed.

    A copy's source is the beginning of the block in which the entry's known tokens end. Where its table
    names another block there, the target is free by now, or another's, or holds other tokens of the entry;
    it is copied to only if another copy reads it. O(copies).
    """
    sources = {source for entry in entries for source, _, _ in entry.copies}
    for entry in entries:
        if entry.copies:
            assert entry.request.lease is not None
            target = entry.request.lease.block_table[max(entry.start, entry.known) // block_size]
            entry.copies = [copy for copy in entry.copies if copy[1] in sources or copy[1] == target]


def build_batch(entries: list[Entry], block_size: int, num_rows: int = 0) -> Batch:
    """Flatten the entries of a step. O(tokens), vectorised over all rows and over each other entry.

    Block tables are the leases' own views: build the batch after the last lease operation of the step.

    Args:
        entries: in the order in which their blocks were allocated and committed.
        num_rows: leading entries that compute the last token of their request, with a known place: see
            `Entry.block_table`.
    """
    rows, others = entries[:num_rows], entries[num_rows:]
    num_tokens = num_rows + sum([entry.count for entry in others])
    query_starts = np.arange(len(entries) + 1, dtype=np.int32)
    token_ids = np.empty(num_tokens, dtype=np.int64)
    positions = np.empty(num_tokens, dtype=np.int64)
    slots = np.empty(num_tokens, dtype=np.int64)
    # Comprehensions: twice as fast as `attrgetter` where the rows are in no cache of the processor.
    token_ids[:num_rows] = np.fromiter([entry.request.last_token for entry in rows], np.int64, num_rows)
    positions[:num_rows] = np.fromiter([entry.start for entry in rows], np.int64, num_rows)
    slots[:num_rows] = np.fromiter([entry.slot_offset for entry in rows], np.int64, num_rows)
    slots[:num_rows] += positions[:num_rows]
    block_tables = [entry.block_table for entry in rows if entry.block_table is not None]
    logit_rows: list[int] = []  # of the others
    first = num_rows
    for r, entry in enumerate(others, num_rows):
        end = first + entry.count
        query_starts[r + 1] = end
        block_tables.append(
            _fill(entry, token_ids[first:end], positions[first:end], slots[first:end], block_size)
        )
        logit_rows.extend(range(end - entry.num_logits, end))
        first = end
    context_lengths = positions[query_starts[1:] - 1].astype(np.int32) + np.int32(1)
    extra_rows: list[int] = []
    extra_slots: list[int] = []
    copy_groups: list[list[Copy]] = []
    if any(entry.copies for entry in others):
        firsts = query_starts[num_rows:].tolist()
        extra_rows, extra_slots, copy_groups = _resolve_copies(others, firsts, slots, block_size)
    write_rows: npt.NDArray[np.int64] | None = None
    if extra_rows or any(entry.redundant for entry in others):
        write_rows = np.flatnonzero(slots >= 0)
        slots = slots[write_rows]
        write_rows = np.concatenate([write_rows, np.asarray(extra_rows, dtype=np.int64)])
        slots = np.concatenate([slots, np.asarray(extra_slots, dtype=np.int64)])
    return Batch(
        entries=entries,
        token_ids=token_ids,
        positions=positions,
        query_starts=query_starts,
        context_lengths=context_lengths,
        block_tables=block_tables,
        write_slots=slots,
        write_rows=write_rows,
        logit_rows=np.concatenate(
            [np.arange(num_rows, dtype=np.int64), np.asarray(logit_rows, dtype=np.int64)]
        ),
        copy_groups=copy_groups,
        num_rows=num_rows,
    )


def _fill(
    entry: Entry,
    token_ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    block_size: int,
) -> npt.NDArray[np.int32]:
    """Write an entry's part of the columns; return its block table."""
    request, start, end = entry.request, entry.start, entry.end
    assert request.lease is not None
    table = request.lease.block_table
    if entry.count == 1:  # scalars are much cheaper than one-element arrays
        positions[0] = start
        token_ids[0] = request.tokens(start, start + 1)[0]
        slots[0] = int(table[start // block_size]) * block_size + start % block_size
    else:
        positions[:] = np.arange(start, start + entry.count)
        token_ids[: end - start] = request.tokens(start, end)
        if entry.draft:
            token_ids[end - start :] = entry.draft
        slots[:] = table[positions // block_size].astype(np.int64) * block_size + positions % block_size
    if entry.redundant:
        slots[: entry.redundant] = -1
    return table


def _resolve_copies(
    entries: list[Entry],
    firsts: list[int],
    slots: npt.NDArray[np.int64],
    block_size: int,
) -> tuple[list[int], list[int], list[list[Copy]]]:
    """Split copies into copies before the step and slots to write a second time in it.

    The source of a copy is held until the step has run, so whichever entry writes to it computes the very
    tokens that are to be copied. They are the last ones of the copied slots:

        source   | computed before | computed in this step |
        target   | copied          | written a second time |

    A source that is itself a target of this step is read in a later group.
    """
    row_of_slot: dict[int, int] = {}
    for entry, first in zip(entries, firsts, strict=False):
        for row in range(first, first + entry.count - len(entry.draft)):
            row_of_slot[int(slots[row])] = row
    row_of_slot.pop(-1, None)  # what is not written
    extra_rows: list[int] = []
    extra_slots: list[int] = []
    groups: list[list[Copy]] = []
    targets: set[int] = set()
    for entry in entries:
        for source, target, num_slots in entry.copies:
            start, goal = source * block_size, target * block_size
            before = num_slots
            while before and start + before - 1 in row_of_slot:
                before -= 1
            for offset in range(before, num_slots):
                row = row_of_slot[goal + offset] = row_of_slot[start + offset]
                extra_rows.append(row)
                extra_slots.append(goal + offset)
            if before:
                if not groups or source in targets or target in targets:
                    groups.append([])
                    targets = set()
                groups[-1].append((source, target, before))
                targets.add(target)
    return extra_rows, extra_slots, groups
