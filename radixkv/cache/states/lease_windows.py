# SPDX-License-Identifier: Apache-2.0
"""LeaseWindows: the window blocks of one request of a model without states, from its admission to its end.

`base` is the last grid point that was computed: a fork or a later request can go on there. What lies before
the window of `base` is freed after each step, unless a checkpoint holds it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from radixkv.cache.states.checkpoint import GRID, Checkpoint
from radixkv.cache.states.checkpoints import Checkpoints
from radixkv.cache.states.lease_states import NO_SLOT, CommittedPath, HeldState, LeaseStates
from radixkv.cache.states.window_checkpoints import StateWindowCheckpoints, WindowCheckpoints
from radixkv.cache.states.window_pool import MAX_GUESSES
from radixkv.cache.states.window_table import WindowTable


class LeaseWindows:
    """The windows of one lease, with the interface of `LeaseStates` towards it.

    Args:
        end: tokens that it goes on after, a multiple of `GRID`.
        windows: the blocks before `end`.

    Attributes:
        base: the last grid point computed; it has no slot.
        wanted: positions, multiples of `GRID`, at which a checkpoint shall stay in the tree.
    """

    def __init__(self, keeper: WindowCheckpoints, end: int, windows: WindowTable) -> None:
        self.keeper, self.windows = keeper, windows
        self.base = HeldState(end, NO_SLOT)
        self.wanted: set[int] = set()

    def want(self, positions: Iterable[int]) -> None:
        """Keep checkpoints at the last grid points up to these positions, those after the base. O(n)."""
        self.wanted.update(at for at in (p - p % GRID for p in positions) if at > self.base.position)

    def want_ends(self, ends: Iterable[int]) -> None:
        """Keep checkpoints for texts that end at these positions, whether they are asked again or continued.

        A text that goes on can resume at its end, one that is asked again only before its last token: where
        the end is a grid point, both it and the one before are kept. O(n).
        """
        for end in ends:
            self.want((end - 1, end))

    def room_for_draft(self, end: int) -> int:
        """Return how many guesses may follow token `end`."""
        return MAX_GUESSES

    def step_done(self, lease: CommittedPath, end: int) -> None:
        """Complete the step up to token `end`: wanted windows are checkpoints, and past blocks are free."""
        if self.wanted:
            due = sorted(position for position in self.wanted if position <= end)
            for position in due:  # a checkpoint's worth is counted from those above it
                self._keep(lease, position)
            self.wanted.difference_update(due)
            if due:
                self.keeper.free_slots()
        base = end - end % GRID
        if base > self.base.position:
            self.base = HeldState(base, NO_SLOT)
            self.windows.free_before(base)

    def step_failed(self) -> None:
        """Do nothing: a step writes after the base, to blocks of this request alone."""

    def fork(self) -> LeaseWindows:
        """Return the windows of a fork, which computes the tokens after the base again."""
        at = self.base.position
        return LeaseWindows(self.keeper, at, self.windows.fork(at))

    def close(self, lease: CommittedPath | None) -> None:
        """End the request: the window before its base goes to the tree, unless `lease` is None."""
        if lease is not None and self.base.position:
            self._keep(lease, self.base.position)
        self.windows.close()
        if lease is not None:
            self.keeper.free_slots()

    def held_slots(self) -> Sequence[int]:
        """Return the blocks that it holds, for `check`."""
        return self.windows.held()

    def _keep(self, lease: CommittedPath, position: int) -> None:
        """Leave a checkpoint in the tree, where its tokens are there."""
        if lease.shares and position <= lease.tree_tokens:
            self.keeper.add(lease.node, position, self.keeper.pool.keep(self.windows.before(position)))


def begin(keeper: Checkpoints, checkpoint: Checkpoint | None) -> LeaseStates | LeaseWindows:
    """Return the states or windows of a request that resumes at a checkpoint; None: at its first token.

    O(1), with windows O(blocks of one).
    """
    end, slot = (0, NO_SLOT) if checkpoint is None else (checkpoint.end, checkpoint.slot)
    windows = None
    if isinstance(keeper, WindowCheckpoints):
        windows = WindowTable(keeper, end, () if checkpoint is None else keeper.pool.kept(slot))
        if not isinstance(keeper, StateWindowCheckpoints):
            return LeaseWindows(keeper, end, windows)
    if checkpoint is not None:
        slot = keeper.state_slot(checkpoint)
        keeper.slots.share(slot)
    return LeaseStates(keeper, HeldState(end, slot), windows)
