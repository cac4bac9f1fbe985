# SPDX-License-Identifier: Apache-2.0
"""WindowSteps: the windows' part of the scheduler: block tables and slots of layers with a window.

Their blocks are of a pool of their own, and each request writes all rows of a step to its own ones, replayed
rows, too, whose K/V of other layers is shared. What a window needs is there after the step, as a state is, so
all else is as for states: `StateSteps`.
"""

from __future__ import annotations

import numpy as np

from radixkv.cache.states.checkpoints import Checkpoints
from radixkv.cache.states.lease_windows import LeaseWindows
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.batch_states import BatchWindows
from radixkv.scheduling.running import RunningRequests
from radixkv.scheduling.state_steps import StateSteps


class WindowSteps(StateSteps):
    """Plans the windows of one scheduler's steps."""

    def fill(self, batch: Batch, *, ahead: bool = False) -> bool:
        """Give a step its tables. False: a block is missing, which happens to steps planned ahead only."""
        tables = []
        positions, slots = batch.positions, np.empty(batch.num_tokens, np.int64)
        for entry, first in zip(batch.entries, batch.query_starts.tolist(), strict=False):
            lease = entry.request.lease
            assert lease is not None
            windows = lease.states
            assert isinstance(windows, LeaseWindows)
            size = lease.tree.block_size
            if not windows.plan(entry.start + entry.count):
                assert ahead, f"no block for the window of {entry.request!r}"
                return False
            assert windows.base.position <= entry.start, f"{entry!r} begins before {windows.base}"
            table = np.array(windows.table, np.int32)
            tables.append(table)
            at = positions[first : first + entry.count]
            slots[first : first + entry.count] = table[at // size].astype(np.int64) * size + at % size
        batch.windows = BatchWindows(tables, slots)
        return True


def make_state_steps(keeper: Checkpoints, running: RunningRequests, max_num_seqs: int) -> StateSteps:
    """Make the planner of a model's windows where they are freed, or of its states."""
    return (WindowSteps if keeper.frees_windows else StateSteps)(running, max_num_seqs)
