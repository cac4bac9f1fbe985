# SPDX-License-Identifier: Apache-2.0
"""LeaseWindows: the blocks of windows that one request holds, from its admission to its end.

    0 ........ first ............. base ......... end of the last step
    |  freed   | the window before | tokens since |
               | the grid point    |  (< `GRID`)  |

`base` is the last grid point that was computed: a fork or a later request can go on there. What lies before
the window of `base` is freed after each step, unless a checkpoint holds it, too.
Each request writes to blocks of its own, so no step waits for another, and nothing is copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from radixkv.cache.states.checkpoint import GRID, Checkpoint
from radixkv.cache.states.checkpoints import Checkpoints
from radixkv.cache.states.lease_states import NO_SLOT, CommittedPath, HeldState, LeaseStates
from radixkv.cache.states.window_checkpoints import WindowCheckpoints
from radixkv.cache.states.window_pool import MAX_GUESSES


class LeaseWindows:
    """The table of window blocks of one lease, with the interface of `LeaseStates` towards it.

    Args:
        end: tokens that it goes on after, a multiple of `GRID`.
        blocks: that hold the window before `end`.

    Attributes:
        base: the last grid point computed; it has no slot.
        wanted: positions, multiples of `GRID`, at which a checkpoint shall stay in the tree.
        table: block ids by block of the text; those before `first` are freed, and their ids mean nothing.
        first: index of the first block that is held.
    """

    def __init__(self, keeper: WindowCheckpoints, end: int = 0, blocks: Sequence[int] = ()) -> None:
        block_size = keeper.block_size
        self.keeper = keeper
        self.base = HeldState(end, NO_SLOT)
        self.wanted: set[int] = set()
        self.first = end // block_size - len(blocks)
        self.table = array("i", bytes(4 * self.first)) + array("i", blocks)
        self._block_size = block_size
        for block in blocks:
            keeper.pool.blocks.share(block)

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

    def plan(self, end: int) -> bool:
        """Have blocks for the tokens up to `end`, guesses included; False: requests hold all. O(blocks)."""
        count = -(-end // self._block_size)
        while len(self.table) > count:  # of guesses that were wrong
            self.keeper.pool.blocks.drop(self.table.pop())
        while len(self.table) < count:
            block = self.keeper.take_block()
            if block is None:
                return False
            self.table.append(block)
        return True

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
            self._free_before(self._first_block(base))

    def step_failed(self) -> None:
        """Do nothing: a step writes after the base, to blocks of this request alone."""

    def fork(self) -> LeaseWindows:
        """Return the windows of a fork, which computes the tokens after the base again."""
        at = self.base.position
        first = max(self.first, self._first_block(at))
        blocks = self.table[first : at // self._block_size]
        return LeaseWindows(self.keeper, at, blocks)

    def close(self, lease: CommittedPath | None) -> None:
        """End the request: the window before its base goes to the tree, unless `lease` is None."""
        if lease is not None and self.base.position:
            self._keep(lease, self.base.position)
        self._free_before(len(self.table))
        if lease is not None:
            self.keeper.free_slots()

    def held_slots(self) -> Sequence[int]:
        """Return the blocks that it holds, for `check`."""
        return self.table[self.first :]

    def _first_block(self, position: int) -> int:
        """Return the index of the first block that is seen from a position on."""
        return self.keeper.spec.window_before(position, self._block_size).start

    def _free_before(self, index: int) -> None:
        for block in self.table[self.first : index]:
            self.keeper.pool.blocks.drop(block)
        self.first = max(self.first, index)

    def _keep(self, lease: CommittedPath, position: int) -> None:
        """Leave a checkpoint in the tree, where its tokens are there."""
        if lease.shares and position <= lease.tree_tokens:
            first = self._first_block(position)
            assert self.first <= first, f"the window before {position} begins before block {self.first}"
            blocks = self.table[first : position // self._block_size]
            self.keeper.add(lease.node, position, self.keeper.pool.keep(blocks))


def begin(keeper: Checkpoints, checkpoint: Checkpoint | None) -> LeaseStates | LeaseWindows:
    """Return the states or windows of a request that resumes at a checkpoint; None: at its first token.

    O(1), with windows O(blocks of one).
    """
    if keeper.frees_windows:
        windows: WindowCheckpoints = keeper  # type: ignore[assignment]
        if checkpoint is None:
            return LeaseWindows(windows)
        return LeaseWindows(windows, checkpoint.end, windows.pool.kept(checkpoint.slot))
    if checkpoint is None:
        return LeaseStates(keeper)
    keeper.pool.share(checkpoint.slot)
    return LeaseStates(keeper, HeldState(checkpoint.end, checkpoint.slot))
