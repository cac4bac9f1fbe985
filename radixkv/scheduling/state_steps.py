# SPDX-License-Identifier: Apache-2.0
"""States and windows in the scheduler: slots, ring rows and window blocks of each step.

1. A request is admitted at its deepest checkpoint and replays cached tokens beyond it (`Lease.resume_at`).
2. When a step is built, `fill` takes a slot for each request that crosses a grid point, and for each wanted
   checkpoint. Two slots a request are enough for that: `Checkpoints.max_requests` bounds how many run.
3. When it has run, `completed` makes targets the bases, and wanted states checkpoints.
4. A request whose prompt another one is computing waits until that one has written a state at the end of
   their common prefix (`coming`): unlike K/V, a state is available only after the step.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from radixkv.cache.prefix_cache import Match
from radixkv.cache.states.checkpoint import GRID
from radixkv.cache.states.checkpoints import Checkpoints
from radixkv.cache.states.lease_states import NO_SLOT, LeaseStates, StateStep
from radixkv.cache.states.window_checkpoints import StateWindowCheckpoints, WindowCheckpoints
from radixkv.scheduling.batch import Batch, BatchStates, BatchWindows, Entry, StateSave
from radixkv.scheduling.running import RunningRequests
from radixkv.scheduling.sequence import Sequence


class StateSteps:
    """Plans the states of one scheduler's steps.

    Args:
        max_num_seqs: most running requests; also the number of ring rows.
    """

    def __init__(self, running: RunningRequests, max_num_seqs: int) -> None:
        self._running = running
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        # By arrival order; rows of requests that have left are taken back when none is free.
        self._rows: dict[int, int] = {}

    # ------------------------------------------------------------------ a step

    def fill(self, batch: Batch, *, ahead: bool = False) -> bool:
        """Give a step its states. False: a slot is missing, which happens to steps planned ahead only."""
        states = batch.states = BatchStates.empty(len(batch.entries))
        planned: list[tuple[LeaseStates, StateStep]] = []
        for r, entry in enumerate(batch.entries):
            lease = entry.request.lease
            assert lease is not None
            assert isinstance(lease.states, LeaseStates)
            step = lease.states.plan(entry.end, ahead=ahead)
            if step is None:
                assert ahead, f"no slot for the state of {entry.request!r}"
                for others, other in planned:
                    others.unplan(other)
                return False
            planned.append((lease.states, step))
            base, target, saves = step
            assert 0 <= entry.start - base.position <= GRID, f"{entry!r} does not go on from {base}"
            assert not entry.draft or entry.start + entry.count <= base.position + GRID, (
                f"{entry!r}: a guess crosses a grid point"
            )
            states.base_slots[r], states.base_positions[r] = base.slot, base.position
            states.target_slots[r] = NO_SLOT if target is base else target.slot
            states.target_positions[r] = target.position
            states.ring_rows[r] = self._row(entry.request)
            states.saves += [StateSave(r, save.position, save.slot) for save in saves]
        return True

    def _row(self, request: Sequence) -> int:
        row = self._rows.get(request.arrival_order)
        if row is None:
            if not self._free_rows:
                running = {other.arrival_order for other in self._running}
                for order in [order for order in self._rows if order not in running]:
                    self._free_rows.append(self._rows.pop(order))
            row = self._rows[request.arrival_order] = self._free_rows.pop()
        return row

    @staticmethod
    def completed(entries: Iterable[Entry]) -> None:
        """Record that a step has run: its states are there. O(entries)."""
        for entry in entries:
            lease = entry.request.lease
            if lease is not None and lease.states is not None:
                lease.states.step_done(lease, entry.end)

    @staticmethod
    def failed(entries: Iterable[Entry]) -> None:
        """Free the slots that a failed step was to write. O(entries)."""
        for entry in entries:
            lease = entry.request.lease
            if lease is not None and lease.states is not None:
                lease.states.step_failed()

    # ------------------------------------------------------------------ admission

    def coming(self, request: Sequence, match: Match) -> tuple[Sequence, int] | None:
        """Return the running request that computes a state at which this one could resume, and its position.

        It computes that state in this step, and is asked to leave it; None: nobody does. O(1) unless the K/V
        of a match reaches a grid point beyond its state; then O(tokens) for each prompt in progress.
        """
        at = min(match.num_tokens, request.num_tokens - 1) // GRID * GRID
        if at <= match.resume or request.needs_prompt_logits:
            return None
        tokens = request.tokens(0, at)
        for other in self._running.without_row:
            lease = other.lease
            if (
                lease is None
                or lease.states is None
                or not lease.states.base.position < at <= lease.num_committed
            ):
                continue
            if other.num_computed >= at or other.namespace != request.namespace:
                continue
            if other.num_tokens >= at and np.array_equal(other.tokens(0, at), tokens):
                lease.states.want((at,))
                return other, at
        return None


class WindowSteps(StateSteps):
    """Plans the windows of one scheduler's steps.

    Their blocks are of a pool of their own, and each request writes all rows of a step to its own ones,
    replayed rows, too, whose K/V of other layers is shared. The blocks of a window are there after the step,
    as a state is: all else is as for states.
    """

    def fill(self, batch: Batch, *, ahead: bool = False) -> bool:
        """Give a step its tables. False: a block is missing, which happens to steps planned ahead only."""
        tables = []
        positions, slots = batch.positions, np.empty(batch.num_tokens, np.int64)
        for entry, first in zip(batch.entries, batch.query_starts.tolist(), strict=False):
            lease = entry.request.lease
            assert lease is not None
            assert lease.states is not None
            windows, base = lease.states.windows, lease.states.base
            assert windows is not None
            size = lease.tree.block_size
            if not windows.reach(entry.start + entry.count):
                assert ahead, f"no block for the window of {entry.request!r}"
                return False
            assert base.position <= entry.start, f"{entry!r} begins before {base}"
            table = np.array(windows.ids, np.int32)
            tables.append(table)
            at = positions[first : first + entry.count]
            slots[first : first + entry.count] = table[at // size].astype(np.int64) * size + at % size
        batch.windows = BatchWindows(tables, slots)
        return True


class StateWindowSteps(WindowSteps):
    """Plans the states and the windows of one scheduler's steps."""

    def fill(self, batch: Batch, *, ahead: bool = False) -> bool:
        """Give a step its tables and states. False: a block or a slot is missing, see above."""
        return super().fill(batch, ahead=ahead) and StateSteps.fill(self, batch, ahead=ahead)


def make_state_steps(keeper: Checkpoints, running: RunningRequests, max_num_seqs: int) -> StateSteps:
    """Make the planner of a model's windows where they are freed, of its states, or of both."""
    if isinstance(keeper, StateWindowCheckpoints):
        return StateWindowSteps(running, max_num_seqs)
    return (WindowSteps if isinstance(keeper, WindowCheckpoints) else StateSteps)(running, max_num_seqs)
