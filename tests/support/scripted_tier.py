# SPDX-License-Identifier: Apache-2.0
"""A tier and copies that do what a test says, when it says so: nothing here has a thread or a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from paged_language_model import PagedHashModel

from radixkv.cache.block_run import BlockRun
from radixkv.model.block_copy import BlockCopy
from radixkv.tiers.tier import Tier, TierBlocks, TierState


class ScriptedTier(Tier):
    """Keeps what it is given; loads end when the test ends them.

    Args:
        at_once: loads end at once, as they should.

    Attributes:
        kept: identity of each block -> the run that it was saved with, its place there, its data.
        answer: called with a run and how many of its leading blocks are kept; what a lookup says.
        is_open: whether what ends is saved.
        loads: those that have not ended: the run asked for, and the future.
        num_lookups: how often it was asked.
    """

    keeps_states = True

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.kept: dict[bytes, tuple[BlockRun, int, Any]] = {}
        self.answer: Callable[[BlockRun, int], TierState] = lambda run, count: (
            TierState.HIT if count else TierState.MISS
        )
        self.is_open = True
        self.loads: list[tuple[BlockRun, Future[Any]]] = []
        self.num_lookups = 0

    def lookup(self, run: BlockRun) -> tuple[TierState, int]:
        self.num_lookups += 1
        count = 0
        while count < len(run) and run.identities[count] in self.kept:
            count += 1
        state = self.answer(run, count)
        return state, count if state in (TierState.HIT, TierState.PENDING) else 0

    def last(self, run: BlockRun) -> int | None:
        return max([i for i, identity in enumerate(run.identities) if identity in self.kept], default=-1)

    def load(self, run: BlockRun) -> Future[Any]:
        future: Future[Any] = Future()
        self.loads.append((run, future))
        if self.at_once:
            self.finish()
        return future

    def wants(self, run: BlockRun) -> range:
        missing = [i for i, identity in enumerate(run.identities) if identity not in self.kept]
        return range(missing[0], missing[-1] + 1) if missing and self.is_open else range(0)

    def save(self, run: BlockRun, data: np.ndarray[Any, Any]) -> None:
        assert len(data) == len(run)
        for i, identity in enumerate(run.identities):
            self.kept[identity] = (run, i, data[i])

    # ------------------------------------------------------------------ what the test does

    def pieces(self, run: BlockRun) -> list[TierBlocks]:
        """What is kept of a run."""
        found = [self.kept[identity] for identity in run.identities if identity in self.kept]
        return [TierBlocks(kept.part(i, i + 1), [data]) for kept, i, data in found]

    def finish(self, which: int = 0, result: Sequence[TierBlocks] | None = None) -> BlockRun:
        """End a load; None: with what is kept. Returns its run."""
        run, future = self.loads.pop(which)
        if future.set_running_or_notify_cancel():
            future.set_result(self.pieces(run) if result is None else result)
        return run

    def fail(self, which: int = 0, error: BaseException | None = None) -> BlockRun:
        """A load ends without anything."""
        run, future = self.loads.pop(which)
        if future.set_running_or_notify_cancel():
            future.set_exception(error or OSError("the disk is gone"))
        return run


class WildTier(ScriptedTier):
    """A tier of which everything is to be expected but the wrong bytes under the right name.

    Args:
        random: what it does next.
    """

    def __init__(self, random: np.random.Generator) -> None:
        super().__init__()
        self.random = random
        self.answer = self._say

    def _say(self, run: BlockRun, count: int) -> TierState:
        chance = self.random.random()
        if chance < 0.02:
            raise OSError("it does not answer")
        if chance < 0.2:
            return TierState.RETRY
        if chance < 0.25:
            return TierState.MISS
        if not count:  # it may promise what it does not have
            return TierState.HIT if chance > 0.98 else TierState.MISS
        return TierState.PENDING if chance < 0.5 else TierState.HIT

    def lookup(self, run: BlockRun) -> tuple[TierState, int]:
        state, count = super().lookup(run)
        return state, count and int(self.random.integers(1, count + 2))

    def last(self, run: BlockRun) -> int | None:
        chance = self.random.random()
        if chance < 0.03:
            raise OSError("it does not answer")
        if chance > 0.9:
            return None
        return len(run) - 1 if chance < 0.06 else super().last(run)  # it may promise that

    def load(self, run: BlockRun) -> Future[Any]:
        if self.random.random() < 0.03:
            raise OSError("it takes no more")
        return super().load(run)

    def wants(self, run: BlockRun) -> range:
        if self.random.random() < 0.03:
            raise OSError("it is full")
        wanted = super().wants(run)
        if self.random.random() < 0.3 and len(wanted) > 1:
            return range(wanted.start, int(self.random.integers(wanted.start, wanted.stop)))
        return wanted

    def act(self) -> None:
        """End some of the loads, some way, in some order; the others hang for now."""
        while self.loads and self.random.random() < 0.5:
            which = int(self.random.integers(len(self.loads)))
            pieces = self.pieces(self.loads[which][0])
            chance = self.random.random()
            if chance < 0.1:
                self.fail(which)
            elif chance < 0.15:
                self.loads.pop(which)  # it never ends
            elif chance < 0.2:
                self.finish(which, pieces[: len(pieces) // 2])
            elif chance < 0.25:
                self.finish(which, pieces[::-1])
            elif chance < 0.35:  # others' blocks
                kept = list(self.kept.values())
                others = [kept[int(self.random.integers(len(kept)))] for _ in pieces]
                self.finish(which, [TierBlocks(run.part(i, i + 1), [data]) for run, i, data in others])
            else:
                self.finish(which, pieces)
        if self.random.random() < 0.002:
            self.kept.clear()


class ScriptedCopy(BlockCopy):
    """A copy that is made by the test, or in part when it is stopped."""

    def __init__(self, model: SlowCopies, blocks: Sequence[int]) -> None:
        self.model = model
        self.blocks = list(blocks)
        rows = np.empty((len(blocks), model.bytes_per_block), np.uint8)

        def copy(row: int) -> None:
            rows[row] = model.contents([self.blocks[row]])[0]

        super().__init__(rows, copy)

    def stop(self, help_s: float = 0.0) -> None:
        self.model.helped(help_s)
        self._end = min(self._end, self._num_begun + self.model.num_copied_at_stop)
        self.run()
        super().stop()


class SlowCopies(PagedHashModel):
    """A model whose blocks are copied out when the test says so: they are read then, not before.

    Attributes:
        copies: those that the test has not made.
        copies_at_once: they are made when they are asked for.
        num_copied_at_stop: leading blocks that have been copied when a copy is stopped.
        helped_s: seconds for which somebody would have helped, of each stop.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.copies: list[ScriptedCopy] = []
        self.copies_at_once = False
        self.num_copied_at_stop = 0
        self.helped_s: list[float] = []

    def helped(self, seconds: float) -> None:
        """Somebody has waited so long for a copy."""
        self.helped_s.append(seconds)

    def save(self, blocks: Sequence[int]) -> BlockCopy:
        if self.copies_at_once:
            return super().save(blocks)
        self.copies.append(ScriptedCopy(self, blocks))
        return self.copies[-1]

    def finish_copy(self, which: int = 0, error: BaseException | None = None) -> list[int]:
        """Make one; returns its blocks."""
        copy = self.copies.pop(which)
        if error is None:
            copy.run()
        elif not copy.done():
            copy.set_exception(error)
        return copy.blocks
