# SPDX-License-Identifier: Apache-2.0
"""BatchStates: base states of a step's state layers, and the states that the step writes.

A model with states (recurrent or convolutional layers) keeps the state after a whole number of grid steps
(`GRID` tokens) in a *slot*, for all its state layers together. Slots are write-once. The inputs of tokens
computed since a request's last slot, at most `GRID` tokens, are in its *ring row*.

    position    base              start              start + count
                 |--- ring: computed ---|--- rows of this step ---|
    state of     base_slots[r]                            target_slots[r] at the last grid point
                                                          that lies before start + count

A guess that proves wrong is taken back by a smaller `start` in the next step: the ring's length is
start - base, and is stored nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.cache.states.checkpoint import GRID
from radixkv.cache.states.lease_states import NO_SLOT

__all__ = ["GRID", "NO_SLOT", "BatchStates", "BatchWindows", "StateSave", "fold_position"]


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
        """Arrays for `num_entries` requests without anything before them and without targets."""
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


def fold_position(base: int, end: int) -> int:
    """Position of the base after a step up to `end` tokens: the last grid point below it, or the base."""
    return max(base, (end - 1) // GRID * GRID)
