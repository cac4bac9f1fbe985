# SPDX-License-Identifier: Apache-2.0
"""Proof that a step's plan is sound: what `RADIXKV_CHECK_STEPS=1` asserts of every batch before it runs.

A step copies, then writes all its rows, then attends. So that every row reads its own data,

 1. no slot is written twice;
 2. a row is written to its own position of its entry's block table, and to no other but for 3;
 3. every slot that an entry asked to be copied is given to it once: by a copy that runs before the step, or
    by a row of this step that computes the very same tokens, which no guess does;
 4. nothing that a copy reads or writes is written by a row, and no copy overwrites what another one reads;
 5. a block into which a guess is written is in no other block table;
 6. every row is written to a slot of its own of the windows, where they have a pool of their own;
 7. tokens of an image that see each other are all there once the step has written its own.

Nothing here is used while serving, unless it is asked for.
"""

from __future__ import annotations

import numpy as np

from radixkv.images.placed_image import chunk_end
from radixkv.scheduling.batch import Batch


def check_batch(batch: Batch, block_size: int) -> None:
    """Assert the seven points above. O(tokens + copied slots * tokens of their requests + blocks)."""
    rows = np.arange(batch.num_tokens) if batch.write_rows is None else batch.write_rows
    assert len(rows) == len(batch.write_slots), (
        f"{batch!r}: {len(rows)} rows for {len(batch.write_slots)} slots"
    )
    assert len(np.unique(batch.write_slots)) == len(batch.write_slots), f"{batch!r}: a slot is written twice"
    row_of_slot = dict(zip(batch.write_slots.tolist(), rows.tolist(), strict=True))
    is_own = _own_slots(batch, block_size)[rows] == batch.write_slots
    second = set(batch.write_slots[~is_own].tolist())
    given = _check_copies(batch, block_size, row_of_slot)
    assert second <= given, f"{batch!r}: rows are written where nobody asked for them"
    _check_guesses(batch, block_size)
    for entry in batch.entries:
        end = entry.start + entry.count
        assert chunk_end(entry.request.request.images, entry.start, end) == end, (
            f"{batch!r}: {entry.request!r} ends at {end}, inside an image whose tokens see each other"
        )
    if batch.windows is not None:
        slots = batch.windows.write_slots
        assert len(slots) == batch.num_tokens == len(np.unique(slots)), (
            f"{batch!r}: a window is written twice"
        )


def _own_slots(batch: Batch, block_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """int64 [T]: the slot of each row by its entry's block table."""
    own = np.empty(batch.num_tokens, dtype=np.int64)
    for r, table in enumerate(batch.block_tables):
        span = slice(batch.query_starts[r], batch.query_starts[r + 1])
        at = batch.positions[span]
        own[span] = table[at // block_size].astype(np.int64) * block_size + at % block_size
    return own


def _check_copies(batch: Batch, block_size: int, row_of_slot: dict[int, int]) -> set[int]:
    """Points 3 and 4; returns the slots that rows give to entries which asked for a copy."""
    source_of: dict[int, int] = {}  # by target slot
    for g, group in enumerate(batch.copy_groups):
        later = {target for other in batch.copy_groups[g:] for _, target, _ in other}
        for source, target, count in group:
            assert source not in later, f"{batch!r}: block {source} is overwritten before it was copied"
            for offset in range(count):
                slot = target * block_size + offset
                assert slot not in source_of, f"{batch!r}: slot {slot} is the target of two copies"
                assert slot not in row_of_slot, f"{batch!r}: slot {slot} is copied to and written"
                assert source * block_size + offset not in row_of_slot, (
                    f"{batch!r}: slot {source * block_size + offset} is written while it is copied"
                )
                source_of[slot] = source * block_size + offset
    given: set[int] = set()
    asked: set[int] = set()
    for entry, table in zip(batch.entries, batch.block_tables, strict=True):
        for source, target, count in entry.copies:
            if table[max(entry.start, entry.known) // block_size] != target:  # given up for an equal block
                asked.update(range(target * block_size, target * block_size + count))
                continue
            for offset in range(count):
                slot = target * block_size + offset
                asked.add(slot)
                if slot in row_of_slot:
                    _check_row(batch, block_size, row_of_slot[slot], slot)
                    given.add(slot)
                else:
                    assert source_of.get(slot) == source * block_size + offset, (
                        f"{batch!r}: {entry.request!r} does not get its copy of block {source}"
                    )
    assert source_of.keys() <= asked, f"{batch!r}: a copy runs that nobody asked for"
    return given


def _check_row(batch: Batch, block_size: int, row: int, slot: int) -> None:
    """A row that is written a second time holds the tokens of the entry that gets it."""
    giver = int(np.searchsorted(batch.query_starts, row, side="right")) - 1
    position = int(batch.positions[row])
    block = slot // block_size
    takers = [
        entry
        for entry, table in zip(batch.entries, batch.block_tables, strict=True)
        if position // block_size < len(table) and table[position // block_size] == block
    ]
    assert slot % block_size == position % block_size, f"{batch!r}: row {row} goes to another position"
    assert takers, f"{batch!r}: row {row} is copied into block {block}, which is in no block table"
    source = batch.entries[giver]
    assert position < source.end, f"{batch!r}: a guess of {source.request!r} is copied to {takers}"
    tokens = source.request.tokens(0, position + 1)
    for taker in takers:
        assert np.array_equal(taker.request.tokens(0, position + 1), tokens), (
            f"{batch!r}: {taker.request!r} gets tokens of {source.request!r}"
        )


def _check_guesses(batch: Batch, block_size: int) -> None:
    """Point 5."""
    owner: dict[int, int] = {}
    for r, entry in enumerate(batch.entries):
        if entry.draft:
            first, last = entry.end // block_size, (entry.start + entry.count - 1) // block_size
            for block in batch.block_tables[r][first : last + 1].tolist():
                assert block not in owner, f"{batch!r}: two guesses are written to block {block}"
                owner[block] = r
    if not owner:
        return
    guessed = np.fromiter(owner, dtype=np.int64)
    for r, table in enumerate(batch.block_tables):
        for block in table[np.isin(table, guessed)].tolist():
            assert owner[block] == r, (
                f"{batch!r}: a guess of {batch.entries[owner[block]].request!r} is written to block {block} "
                f"of {batch.entries[r].request!r}"
            )
