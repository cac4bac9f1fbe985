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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from radixkv.cache.pending_copies import Copy
from radixkv.scheduling.sequence_state import SequenceState

if TYPE_CHECKING:
    from radixkv.scheduling.batch_states import BatchStates, BatchWindows


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
        draft: the last tokens of the range when they are a guess: the request has not got them, their K/V is
            not committed, and the step's logits tell which of them are right.
    """

    request: SequenceState
    start: int
    count: int
    redundant: int = 0
    known: int = 0
    samples: bool = False
    num_logits: int = 0
    copies: Sequence[Copy] = ()
    draft: Sequence[int] = ()

    @property
    def end(self) -> int:
        """End of the tokens delivered to the request: the rest is its draft."""
        return self.start + self.count - len(self.draft)


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
        logit_rows: int64 [S], rows whose logits are needed, ascending.
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

    def logit_spans(self) -> Iterator[tuple[Entry, int, int]]:
        """Each entry with its rows [first, end) among the logits [S, V] that the model returns; O(R)."""
        end = 0
        for entry in self.entries:
            first, end = end, end + entry.num_logits
            yield entry, first, end

    def __repr__(self) -> str:
        counts = ",".join(str(entry.count) for entry in self.entries[:8])
        more = ",..." if len(self.entries) > 8 else ""
        return f"Batch({len(self.entries)} requests, {self.num_tokens} tokens: {counts}{more})"


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


def join_batches(decodes: Batch, rest: Batch) -> Batch:
    """Build a batch of decodes, a row each and without copies, and of the entries after them. O(tokens)."""
    if not decodes.entries:
        return rest
    count = len(decodes.entries)
    write_rows = rest.write_rows
    if write_rows is not None:
        write_rows = np.concatenate([decodes.logit_rows, write_rows + count])
    return Batch(
        entries=decodes.entries + rest.entries,
        token_ids=np.concatenate([decodes.token_ids, rest.token_ids]),
        positions=np.concatenate([decodes.positions, rest.positions]),
        query_starts=np.concatenate([decodes.query_starts[:-1], rest.query_starts + np.int32(count)]),
        context_lengths=np.concatenate([decodes.context_lengths, rest.context_lengths]),
        block_tables=decodes.block_tables + rest.block_tables,
        write_slots=np.concatenate([decodes.write_slots, rest.write_slots]),
        write_rows=write_rows,
        logit_rows=np.concatenate([decodes.logit_rows, rest.logit_rows + count]),
        copy_groups=rest.copy_groups,
        num_rows=count,
    )


def build_batch(entries: list[Entry], block_size: int) -> Batch:
    """Flatten the entries of a step; O(tokens), vectorised per entry.

    Block tables are the leases' own views: build the batch after the last lease operation of the step.

    Args:
        entries: in the order in which they took and committed their blocks.
    """
    counts = np.fromiter((entry.count for entry in entries), dtype=np.int32, count=len(entries))
    starts = np.fromiter((entry.start for entry in entries), dtype=np.int64, count=len(entries))
    query_starts = np.zeros(len(entries) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    num_tokens = int(query_starts[-1])
    # positions of all entries in one go: a running index, shifted per entry.
    positions = np.arange(num_tokens, dtype=np.int64) + np.repeat(starts - query_starts[:-1], counts)
    token_ids = np.empty(num_tokens, dtype=np.int64)
    slots = np.empty(num_tokens, dtype=np.int64)
    block_tables: list[npt.NDArray[np.int32]] = []
    logit_rows: list[int] = []
    for r, entry in enumerate(entries):
        request, first = entry.request, int(query_starts[r])
        assert request.lease is not None
        table = request.lease.block_table
        block_tables.append(table)
        if entry.count == 1:  # a decode: scalars are much cheaper than one-element arrays
            position = entry.start
            token_ids[first] = request.tokens(position, position + 1)[0]
            slots[first] = int(table[position // block_size]) * block_size + position % block_size
        else:
            rows = slice(first, first + entry.count)
            if entry.draft:
                known = entry.end - entry.start
                token_ids[first : first + known] = request.tokens(entry.start, entry.end)
                token_ids[first + known : first + entry.count] = entry.draft
            else:
                token_ids[rows] = request.tokens(entry.start, entry.start + entry.count)
            at = positions[rows]
            slots[rows] = table[at // block_size].astype(np.int64) * block_size + at % block_size
        if entry.redundant:
            slots[first : first + entry.redundant] = -1
        if entry.num_logits:
            end = first + entry.count
            logit_rows.extend(range(end - entry.num_logits, end))
    extra_rows: list[int] = []
    extra_slots: list[int] = []
    copy_groups: list[list[Copy]] = []
    if any(entry.copies for entry in entries):
        extra_rows, extra_slots, copy_groups = _resolve_copies(entries, query_starts, slots, block_size)
    write_rows: npt.NDArray[np.int64] | None = None
    if extra_rows or any(entry.redundant for entry in entries):
        write_rows = np.flatnonzero(slots >= 0)
        slots = slots[write_rows]
        write_rows = np.concatenate([write_rows, np.asarray(extra_rows, dtype=np.int64)])
        slots = np.concatenate([slots, np.asarray(extra_slots, dtype=np.int64)])
    return Batch(
        entries=entries,
        token_ids=token_ids,
        positions=positions,
        query_starts=query_starts,
        context_lengths=(starts + counts).astype(np.int32),
        block_tables=block_tables,
        write_slots=slots,
        write_rows=write_rows,
        logit_rows=np.asarray(logit_rows, dtype=np.int64),
        copy_groups=copy_groups,
    )


def _resolve_copies(
    entries: list[Entry],
    query_starts: npt.NDArray[np.int32],
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
    for entry, first in zip(entries, query_starts.tolist(), strict=False):
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
