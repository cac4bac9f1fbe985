# SPDX-License-Identifier: Apache-2.0
"""Commands of rank 0 to the others, as arrays of int64: no object is pickled for a step.

| command | arguments ...                                                                  |
EXECUTE   T R W S has_rows G fed C V, then the columns of the batch, one after the other; C: checkpoints,
          V: rows with slots in the pool of windows, or -1 for none; then images, see `shared_images`
COPY      (source, target, slots) for each copy
SAVE      number of the save, then blocks
LOAD      blocks; a message with their bytes follows
STATES    slots; a message with the bytes of their states follows
SAVE_WINDOWS, LOAD_WINDOWS as SAVE and LOAD, for blocks of the pool of windows
WARM_UP   thorough
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.cache.pending_copies import Copy
from radixkv.scheduling.batch import Batch, BatchStates, BatchWindows, StateSave

Words: TypeAlias = "npt.NDArray[np.int64]"

_HEAD = 9
_STATE_ARRAYS = ("base_slots", "base_positions", "ring_rows", "target_slots", "target_positions")


class Command(IntEnum):
    """The first word of a message."""

    EXECUTE = 0
    COPY = 1
    SAVE = 2
    LOAD = 3
    WARM_UP = 4
    STATES = 5
    SAVE_WINDOWS = 6
    LOAD_WINDOWS = 7


def message(command: Command, *arguments: Sequence[int] | npt.NDArray[np.integer]) -> Words:
    """A command and its arguments, one after the other."""
    return np.concatenate([[np.int64(command)], *(np.asarray(each, np.int64) for each in arguments)])


def encode_batch(batch: Batch) -> Words:
    """A batch without what only rank 0 needs: its entries, and the tokens that are fed on the device."""
    rows = batch.write_rows
    groups = [np.asarray(group, np.int64).reshape(-1) for group in batch.copy_groups]
    states, windows = batch.states, batch.windows
    head = [
        batch.num_tokens,
        len(batch.context_lengths),
        len(batch.write_slots),
        len(batch.logit_rows),
        rows is not None,
        len(groups),
        batch.fed_tokens is not None,
        -1 if states is None else len(states.saves),
        -1 if windows is None else len(windows.write_slots),
    ]
    return message(
        Command.EXECUTE,
        head,
        batch.token_ids,
        batch.positions,
        batch.query_starts,
        batch.context_lengths,
        batch.write_slots,
        () if rows is None else rows,
        batch.logit_rows,
        [len(table) for table in batch.block_tables],
        [len(group) for group in groups],
        *batch.block_tables,
        *groups,
        *(() if states is None else _columns(states)),
        *(() if windows is None else _window_columns(windows)),
    )


def _columns(states: BatchStates) -> list[Words]:
    arrays = [getattr(states, name) for name in _STATE_ARRAYS]
    return [*arrays, np.asarray(states.saves, np.int64).reshape(-1)]


def _window_columns(windows: BatchWindows) -> list[Words]:
    tables = [np.asarray(table, np.int64) for table in windows.block_tables]
    return [windows.write_slots, np.array([len(table) for table in tables], np.int64), *tables]


def decode_batch(words: Words) -> tuple[Batch, bool, Words]:
    """The batch of the arguments of EXECUTE, whether its tokens are fed on the device, and what follows."""
    head = words[:_HEAD].tolist()
    num_tokens, num_entries, num_slots, num_logits, has_rows, num_groups, is_fed, num_saves, num_rows = head
    at = _HEAD

    def take(count: int) -> Words:
        nonlocal at
        at += count
        return words[at - count : at]

    token_ids, positions = take(num_tokens), take(num_tokens)
    starts, contexts = take(num_entries + 1), take(num_entries)
    slots = take(num_slots)
    rows = take(num_slots) if has_rows else None
    logit_rows = take(num_logits)
    table_lengths, group_lengths = take(num_entries).tolist(), take(num_groups).tolist()
    batch = Batch(
        entries=[],
        token_ids=token_ids,
        positions=positions,
        query_starts=starts.astype(np.int32),
        context_lengths=contexts.astype(np.int32),
        block_tables=[take(length).astype(np.int32) for length in table_lengths],
        write_slots=slots,
        write_rows=rows,
        logit_rows=logit_rows,
        copy_groups=[decode_copies(take(length)) for length in group_lengths],
    )
    if num_saves >= 0:
        states = BatchStates.empty(num_entries)
        for name in _STATE_ARRAYS:
            getattr(states, name)[:] = take(num_entries)
        states.saves = [StateSave(*save) for save in take(3 * num_saves).reshape(-1, 3).tolist()]
        batch.states = states
    if num_rows >= 0:
        write_slots, lengths = take(num_rows), take(num_entries).tolist()
        batch.windows = BatchWindows([take(length).astype(np.int32) for length in lengths], write_slots)
    return batch, bool(is_fed), words[at:]


def decode_copies(words: Words) -> list[Copy]:
    """The copies of the arguments of COPY."""
    return [(source, target, slots) for source, target, slots in words.reshape(-1, 3).tolist()]
