# SPDX-License-Identifier: Apache-2.0
"""LeaseStates: the states that one request holds, from its admission to its end.

    0 ............ base .............. computed ............ end of the step
    | the state after these | inputs in the ring    | rows of the step
      is in the base's slot   (at most `GRID`)        [target]: the base once the step has run

A request holds its base's slot, and that of a target while the step that writes it runs: two at most. The
target of a failed step is freed, and the base is as good as before: nothing is restored.

Of a model that frees its windows, too, it also has the blocks of the window before the base and of what
follows, and a checkpoint is both: the state, and the window before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from radixkv.cache.node import Node
from radixkv.cache.states.checkpoint import GRID
from radixkv.cache.states.checkpoints import Checkpoints
from radixkv.cache.states.window_table import WindowTable

NO_SLOT = -1


class HeldState(NamedTuple):
    """A slot, and the tokens that its state sums up; `NO_SLOT`: the zero state before the first token."""

    position: int
    slot: int


NOTHING = HeldState(0, NO_SLOT)


class CommittedPath(Protocol):
    """The part of a lease that is in the tree: `tree_tokens` tokens up to the end of `node`.

    Attributes:
        shares: whether others may use what the lease commits.
    """

    node: Node
    tree_tokens: int
    shares: bool


class StateStep(NamedTuple):
    """States of one request in a step: its base, its target (the base itself: none), further checkpoints."""

    base: HeldState
    target: HeldState
    saves: list[HeldState]


@dataclass(slots=True, eq=False)
class LeaseStates:
    """Base, targets and wanted checkpoints of one lease.

    Attributes:
        keeper: the checkpoints of the tree, and the slots.
        base: the state after tokens whose steps have all run.
        windows: the window before the base, and what follows; None: the model frees no windows.
        wanted: positions, multiples of `GRID`, at which a checkpoint shall stay in the tree.
    """

    keeper: Checkpoints
    base: HeldState = NOTHING
    windows: WindowTable | None = None
    wanted: set[int] = field(default_factory=set)
    _targets: list[HeldState] = field(default_factory=list)  # of steps that have not been completed
    _saves: list[HeldState] = field(default_factory=list)

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
        """Return how many guesses may follow token `end`: a step with guesses crosses no grid point."""
        return max(0, self.base.position + GRID - end)

    def plan(self, end: int, *, ahead: bool = False) -> StateStep | None:
        """Take slots for the request's step up to token `end`, without its guesses. O(wanted).

        Args:
            ahead: the step before still runs, and gives this one its base.

        Returns:
            None: no slot can be had for the target. A wanted checkpoint without one is left out.
        """
        if not ahead:
            self.step_failed()  # what a step that was planned ahead and given up has left
        base = self._targets[-1] if self._targets else self.base
        target = base
        at = (end - 1) // GRID * GRID
        if at > base.position:
            slot = self.keeper.take_slot()
            if slot is None:
                return None
            target = HeldState(at, slot)
            self._targets.append(target)
        saves = []
        for position in sorted(p for p in self.wanted if base.position < p <= end and p != at):
            slot = self.keeper.take_slot()
            if slot is not None:
                saves.append(HeldState(position, slot))
        self._saves += saves
        return StateStep(base, target, saves)

    def unplan(self, step: StateStep) -> None:
        """Take back the latest `plan`, which returned `step`. O(slots)."""
        for save in step.saves:
            self._saves.remove(save)
            self.keeper.slots.drop(save.slot)
        if step.target is not step.base:
            self._targets.remove(step.target)
            self.keeper.slots.drop(step.target.slot)

    def step_done(self, lease: CommittedPath, end: int) -> None:
        """Complete the step up to token `end`: its target is the base, its wanted states are checkpoints."""
        kept = []
        for target in [target for target in self._targets if target.position < end]:
            self._targets.remove(target)
            if target.position in self.wanted:
                self.keeper.slots.share(target.slot)
                kept.append(target)
            self._rebase(target)
        for save in [save for save in self._saves if save.position <= end]:
            self._saves.remove(save)
            if save.position == end:  # the ring is empty from here on, without another slot
                self.keeper.slots.share(save.slot)
                self._rebase(save)
            kept.append(save)
        for state in sorted(kept):  # a checkpoint's worth is counted from those above it
            self._keep(lease, state)
        if kept:
            self.keeper.free_slots()
        if self.windows is not None:
            self.windows.free_before(self.base.position)
        if self.wanted:
            self.wanted = {position for position in self.wanted if position > self.base.position}

    def step_failed(self) -> None:
        """Free what steps that have not run, or failed, were to write. O(slots)."""
        for held in (*self._targets, *self._saves):
            self.keeper.slots.drop(held.slot)
        self._targets, self._saves = [], []

    def fork(self) -> LeaseStates:
        """Return the states of a fork: the same base."""
        if self.base.slot != NO_SLOT:
            self.keeper.slots.share(self.base.slot)
        windows = None if self.windows is None else self.windows.fork(self.base.position)
        return LeaseStates(self.keeper, self.base, windows)

    def close(self, lease: CommittedPath | None) -> None:
        """End the request: its base goes to the tree, where `lease` has its tokens there; None: nowhere."""
        self.step_failed()
        base, self.base = self.base, NOTHING
        if base.slot != NO_SLOT:
            if lease is None:
                self.keeper.slots.drop(base.slot)
            else:
                self._keep(lease, base)
        if self.windows is not None:
            self.windows.close()
        if lease is not None:
            self.keeper.free_slots()

    def held_slots(self) -> list[int]:
        """Return the slots that it holds, for `check`."""
        held = [*self._targets, *self._saves]
        if self.base.slot != NO_SLOT:
            held.append(self.base)
        return [state.slot for state in held]

    def _rebase(self, state: HeldState) -> None:
        if self.base.slot != NO_SLOT:
            self.keeper.slots.drop(self.base.slot)
        self.base = state

    def _keep(self, lease: CommittedPath, state: HeldState) -> None:
        """Give a slot, with one holder, to the tree; it is dropped where the tokens are not there."""
        if lease.shares and state.position <= lease.tree_tokens:
            window = () if self.windows is None else self.windows.before(state.position)
            self.keeper.add(lease.node, state.position, self.keeper.contents(state.slot, window))
        else:
            self.keeper.slots.drop(state.slot)
