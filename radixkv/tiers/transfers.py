# SPDX-License-Identifier: Apache-2.0
"""Transfers: the loads and saves of an engine; see `loads.py` and `saves.py`.

An object of this class belongs to one cache. When that is rebuilt, or the engine ends, it is closed and
forgotten: later arrivals are dropped, and copies under way are not trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.engine.runner import Runner
from radixkv.tiers.checkpoint_memory import open_checkpoint_memory
from radixkv.tiers.loads import Loads
from radixkv.tiers.measured_tier import EngineSpeeds, MeasuredTier
from radixkv.tiers.saves import Saves
from radixkv.tiers.tier_states import TierStates
from radixkv.tiers.transfer_ends import TransferEnds
from radixkv.tiers.transfer_log import TransferLog


class Transfers:
    """Loads and saves of an engine, continued between steps. Used by the engine's thread only.

    Args:
        tiers: asked in this order.
        runner: has the blocks' contents.
        clock: seconds.
        wake: called, on any thread, when `collect` has something to do.

    Attributes:
        ends: reports of ended transfers.
        log: counts of the transfers.
        states: transfers of a model's states or kept windows; None: it has none.
    """

    def __init__(
        self,
        tiers: Sequence[MeasuredTier],
        cache: PrefixCache,
        runner: Runner,
        speeds: EngineSpeeds,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.log = log = TransferLog(clock)
        self.ends = ends = TransferEnds(clock, wake)
        keeper = cache.states
        self.states = states = None
        if keeper is not None:
            kept = open_checkpoint_memory(keeper, runner)
            self.states = states = TierStates(tiers, cache, keeper, kept, ends, log)
        self.saves = Saves(tiers, cache, runner, clock, ends, log, states)
        self.loads = Loads(tiers, cache, runner, self.saves, speeds, clock, ends, log, states)
        self._clock = clock

    def __repr__(self) -> str:
        return f"Transfers({len(self.loads)} loads, {len(self.saves)} saves)"

    @property
    def hold_blocks(self) -> bool:
        """True if loads are under way that may free room at their end. O(1)."""
        return bool(len(self.loads))

    @property
    def is_due(self) -> bool:
        """True if `collect` or `saves.start` has something to do now. O(1), or O(loads)."""
        if self.ends or self.loads.is_due or self.saves.is_due:
            return True
        deadline = self.loads.next_deadline
        return deadline is not None and deadline <= self._clock()

    def collect(self) -> None:
        """Continue with the transfers, between steps, once all committed tokens have been computed."""
        for number, when in self.ends.take():
            self.loads.ended(number, when)
            self.saves.ended(number)
            if self.states is not None:
                self.states.ended(number)
        self.loads.write()
        self.loads.give_up_late()

    def close(self) -> None:
        """Abandon all transfers without changing the cache, which is no longer used."""
        self.loads.close()
        self.saves.close()
        if self.states is not None:
            self.states.close()
