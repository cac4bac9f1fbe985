"""Tier waits: lets a request wait for blocks that a tier has, instead of computing their tokens.

A request is about to be admitted; its cached prefix ends before the end of its prompt:

    another's load brings the next block  ->  it waits for that, as for a request that computes its prefix
    the tier says HIT or PENDING          ->  a load is started, and the request waits for it
    the tier says RETRY                   ->  it waits, and the tier is asked again a little later
    MISS, a failure, no room, or too late ->  it is admitted, and computes what is missing

It holds nothing while it waits, and is looked up again when the load has ended: what was loaded is part of
its cached prefix then. No request waits longer than its deadline, counted from when it was first put off.
"""

from __future__ import annotations

from collections.abc import Callable

from radixkv.cache.keys import NamespaceName
from radixkv.cache.prefix_cache import Match, PrefixCache
from radixkv.scheduling.sequence_state import SequenceState
from radixkv.tiers.load import TierWait
from radixkv.tiers.tier import TierState
from radixkv.tiers.transfers import Transfers

# Seconds after which a tier that did not know is asked again.
RETRY_S = 0.005


class TierWaits:
    """Decides who waits.

    Args:
        clock: seconds.
        deadline_s: longest that a request may wait.

    Attributes:
        next_lookup: when a tier that did not know is to be asked again, as of the last step; None: nobody
            waits for that.
    """

    def __init__(
        self, cache: PrefixCache, transfers: Transfers, clock: Callable[[], float], deadline_s: float
    ) -> None:
        self._cache = cache
        self._transfers = transfers
        self._clock = clock
        self._deadline_s = deadline_s
        self.next_lookup: float | None = None

    def begin_step(self) -> None:
        """Requests are about to be tried."""
        self.next_lookup = None

    @property
    def somebody_waits(self) -> bool:
        """Whether a request of this step was put off, or may be able to run when transfers have ended."""
        return self.next_lookup is not None or self._transfers.hold_blocks

    def give_up_load(self, is_rival: Callable[[NamespaceName], bool]) -> bool:
        """A request that runs needs blocks: give up a load that has not arrived; False: there is none.

        Args:
            is_rival: whether blocks of a namespace would help.
        """
        return self._transfers.give_up_load(is_rival)

    def holds_up(self, request: SequenceState, match: Match) -> bool:
        """Whether a request that could be admitted is to wait. O(tokens after the match) where it asks."""
        if request.needs_prompt_logits:
            return False
        wait, transfers = request.tier_wait, self._transfers
        now = self._clock()
        if wait is None:
            wait = request.tier_wait = TierWait(now + self._deadline_s)
        elif wait.load is not None:  # that has ended, or the request would not be tried
            wait.is_over |= wait.load.has_failed
            wait.load = None
        if now >= wait.deadline or (wait.is_over and not transfers.num_loads):
            return False
        if now < wait.ask_at and not transfers.num_loads:
            self._note_lookup(wait.ask_at)
            return True
        run = self._cache.block_leases.missing(match)
        if not len(run):
            return False
        found = transfers.load_of(run)
        if found is not None:
            load, end = found
            load.deadline = min(load.deadline, wait.deadline)
        elif wait.is_over:
            return False
        elif now < wait.ask_at:
            self._note_lookup(wait.ask_at)
            return True
        else:
            state, count = transfers.lookup(run)
            if state is TierState.RETRY:
                wait.ask_at = min(now + RETRY_S, wait.deadline)
                self._note_lookup(wait.ask_at)
                return True
            run = run.part(0, count)
            started = transfers.start_load(run, match, wait.deadline) if count else None
            if started is None:
                wait.is_over = True
                return False
            load, end = started, run.end
        request.producer, request.produced_until = wait.load, _ = load, end
        return True

    def _note_lookup(self, when: float) -> None:
        self.next_lookup = when if self.next_lookup is None else min(self.next_lookup, when)
