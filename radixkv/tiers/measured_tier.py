# SPDX-License-Identifier: Apache-2.0
"""MeasuredTier: a tier of an engine with measured costs, and the decision whether loading pays.

    loading n blocks    answer + (blocks queued before + n blocks) x seconds a byte + writing them
    computing them      n blocks x tokens x seconds a token

All rates are measured, the latest counting most. Blocks are loaded if that is quicker, and only as many at a
time as arrive in half the time that their request may wait: so a long prefix comes in pieces, and an estimate
may be wrong by half. A tier that has let a request wait in vain rests: it is not asked for a second, then
for two, up to half a minute; one that answers again is asked again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from radixkv.cache.block_run import BlockRun
from radixkv.engine.counts import TierCounts
from radixkv.tiers.speed import Speed
from radixkv.tiers.tier import Tier, TierState

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Bytes a second of a tier that has not brought anything yet: they only say how much is asked for first.
FIRST_BYTES_PER_S = 200e6
# Seconds that a tier rests after a load that came too late, first and at most.
REST_S = 1.0
MAX_REST_S = 30.0
# Seconds after which a tier that was too slow is measured again.
FORGET_S = 30.0

#: Why blocks that a tier has were computed, as `MissReport.reason` says it.
TOO_SLOW = "load_too_slow"
DAMAGED = "checksum"


class Found(NamedTuple):
    """Result of a lookup.

    Attributes:
        state: the tier's answer; MISS, too, if loading does not pay.
        num_blocks: leading ones to load.
        tier: the tier that has them, or is undecided.
        refused: the reason why its blocks are not loaded.
        num_kept: leading blocks that it has.
    """

    state: TierState
    num_blocks: int = 0
    tier: MeasuredTier | None = None
    refused: str | None = None
    num_kept: int = 0


class EngineSpeeds:
    """Costs to compare loads with: computing a prompt's token, and writing a byte."""

    def __init__(self) -> None:
        self.compute, self.write = Speed(), Speed()


class MeasuredTier:
    """Tier of an engine; exceptions of the tier are passed on. Not thread-safe.

    Args:
        clock: seconds.
        bytes_per_block, bytes_per_state: of the engine's.

    Attributes:
        coming_bytes: bytes requested and not yet arrived.
    """

    def __init__(
        self,
        tier: Tier,
        clock: Callable[[], float],
        speeds: EngineSpeeds,
        bytes_per_block: int,
        bytes_per_state: int = 0,
    ) -> None:
        self.tier = tier
        self.name = tier.name
        self.counts = TierCounts(self.name)
        self._clock = clock
        self._speeds = speeds
        self._block_bytes = bytes_per_block
        self._state_bytes = bytes_per_state
        self._bytes = Speed()
        self._slow_since: float | None = None  # when it was first too slow, since it was measured
        self.coming_bytes = 0
        self._rest_s = 0.0
        self._rests_until = -float("inf")

    def __repr__(self) -> str:
        return f"MeasuredTier({self.name}, {self._bytes})"

    def snapshot(self) -> TierCounts:
        """Return the counts as of now."""
        unasked = self.tier.dropped_blocks
        return replace(
            self.counts,
            offered_blocks=self.counts.offered_blocks + unasked,
            dropped_blocks=self.counts.dropped_blocks + unasked,
            errors=dict(Counter(self.counts.errors) + Counter(self.tier.failures)),
            refused=dict(self.counts.refused),
            is_up=self._clock() >= self._rests_until and self.tier.is_up,
            seconds_per_byte=self._bytes.seconds_per_unit,
            answer_s=self._answer_s,
        )

    # ------------------------------------------------------------------ lookups

    def lookup(self, run: BlockRun, wait_s: float) -> Found:
        """Look up the blocks of a run worth loading for a request that may wait `wait_s` seconds."""
        now = self._clock()
        if self._slow_since is not None and now - self._slow_since >= FORGET_S:
            self._bytes, self._slow_since = Speed(), None
        if now < self._rests_until:
            return Found(TierState.MISS)
        if not self._pays(len(run), run.block_size):
            self._note_slow()
            return Found(TierState.MISS)  # it was not asked, so no reason is given
        found = self.peek(run, wait_s)
        if found.num_kept:
            self.counts.hits += 1
        elif found.state is TierState.MISS:
            self.counts.misses += 1
        if found.refused is not None:
            self.refuse(found.refused)
        return found

    def peek(self, run: BlockRun, wait_s: float) -> Found:
        """Look up without counting, even if loading does not pay."""
        if self._clock() < self._rests_until:
            return Found(TierState.MISS)
        state, count = self.tier.lookup(run)
        if not isinstance(state, TierState):
            raise TypeError(f"lookup() of tier {self.name} gave {state!r:.80}, not a TierState")
        if state is TierState.RETRY:
            return Found(state, tier=self)
        if state is TierState.MISS or count <= 0:
            return Found(TierState.MISS)
        count = min(count, len(run))
        some = self._worthwhile(count, run.block_size, wait_s)
        return Found(state if some else TierState.MISS, some, self, None if some else TOO_SLOW, count)

    def last_state(self, run: BlockRun) -> int | None:
        """Return the index of the last state of a run that it has; -1: none (or it rests); None: unknown."""
        return -1 if self._clock() < self._rests_until else self.tier.last(run)

    def state_pays(self, num_tokens: int) -> bool:
        """Return True if a state is loaded sooner than `num_tokens` tokens are computed, as far as known."""
        compute_s = self._speeds.compute.seconds(num_tokens)
        return not compute_s or compute_s > self._answer_s + self._bytes.seconds(
            self.coming_bytes + self._state_bytes
        )

    def _bytes_of(self, run: BlockRun, count: int) -> int:
        return count * (self._state_bytes if run.is_state else self._block_bytes)

    def refuse(self, why: str) -> None:
        """Count blocks of the tier that are computed instead."""
        if why == TOO_SLOW:
            self._note_slow()
        self.counts.refused[why] = self.counts.refused.get(why, 0) + 1

    def _note_slow(self) -> None:
        if self._slow_since is None:
            self._slow_since = self._clock()

    def _worthwhile(self, count: int, block_size: int, wait_s: float) -> int:
        """Return the number of blocks, of `count`, to load now; 0: computing is quicker."""
        each = self._block_s
        if self._bytes.seconds_per_unit is None:
            each += self._block_bytes / FIRST_BYTES_PER_S
        room = wait_s / 2 - self._answer_s - self._bytes.seconds(self.coming_bytes)
        some = min(count, max(1, int(room / each)))
        in_time = self._bytes.seconds_per_unit is None or self._load_s(some) < wait_s
        return some if in_time and self._pays(some, block_size) else 0

    def _pays(self, count: int, block_size: int) -> bool:
        """Return True if blocks are loaded sooner than computed, as far as known."""
        compute_s = self._speeds.compute.seconds(count * block_size)
        return not compute_s or self._load_s(count) < compute_s

    def time_share(self, block_size: int) -> float:
        """Return the time of loading a block over that of computing it; 1.0 where that is unknown."""
        compute_s = self._speeds.compute.seconds(block_size)
        if not compute_s:
            return 1.0
        load_s = self._block_s
        if self._bytes.seconds_per_unit is None:
            load_s += self._block_bytes / FIRST_BYTES_PER_S
        return min(1.0, load_s / compute_s)

    def _load_s(self, count: int) -> float:
        """Predict the seconds to load `count` blocks, as far as known."""
        return self._answer_s + self._bytes.seconds(self.coming_bytes) + count * self._block_s

    @property
    def _answer_s(self) -> float:
        """Seconds that the tier's answers take, as the tier itself says."""
        return self.tier.answer_s

    @property
    def _block_s(self) -> float:
        """Seconds per block, as far as known."""
        return self._bytes.seconds(self._block_bytes) + self._speeds.write.seconds(self._block_bytes)

    # ------------------------------------------------------------------ loads

    def load(self, run: BlockRun) -> Future[Any]:
        """Fetch blocks; the caller must call `arrived` or `gave_up` once."""
        future = self.tier.load(run)
        self.counts.loads += 1
        self.coming_bytes += self._bytes_of(run, len(run))
        return future

    def arrived(self, run: BlockRun, num_blocks: int, bytes_ahead: int, seconds: float) -> None:
        """Record the end of a load of a run with the number of its arrived blocks.

        Args:
            bytes_ahead: bytes queued before it when it was requested.
        """
        self.coming_bytes -= self._bytes_of(run, len(run))
        if num_blocks:
            self._bytes.measured(bytes_ahead + self._bytes_of(run, num_blocks), seconds)
            self._rest_s, self._slow_since = 0.0, None
        if run.is_state:
            self.counts.loaded_states += num_blocks
        else:
            self.counts.loaded_blocks += num_blocks
        self.counts.loaded_bytes += self._bytes_of(run, num_blocks)
        self.counts.load_seconds += seconds

    def gave_up(self, run: BlockRun, late_s: float | None) -> None:
        """Record an abandoned load: late by this many seconds, or given up without fault."""
        self.coming_bytes -= self._bytes_of(run, len(run))
        if late_s is not None:
            self._bytes.measured(self._bytes_of(run, len(run)), late_s)
            self.rest()
            self.refuse(TOO_SLOW)

    def rest(self) -> None:
        """Pause lookups, for longer each time, until a load succeeds."""
        self._rest_s = min(max(REST_S, 2 * self._rest_s), MAX_REST_S)
        self._rests_until = self._clock() + self._rest_s

    # ------------------------------------------------------------------ saves, and what fails

    def selected(self, run: BlockRun) -> BlockRun:
        """Return the leading blocks of an ended request's text to save, and count them as used."""
        if self.tier.selection is not None:
            run = run.part(0, len(self.tier.selection.used(run)))
        self.touch(run)
        return run

    def wants(self, run: BlockRun) -> range:
        """Choose the blocks of a run to save: the missing ones."""
        wanted = self.tier.wants(run) if len(run) else range(0)
        if not run.is_state:
            self.counts.offered_blocks += len(wanted)
        return wanted

    def touch(self, run: BlockRun) -> None:
        """Record that a request has used these blocks."""
        if len(run):
            self.tier.touch(run)

    def save(self, run: BlockRun, data: npt.NDArray[np.uint8]) -> None:
        """Save blocks in the tier."""
        self.tier.save(run, data)
        if run.is_state:
            self.counts.saved_states += len(run)
        else:
            self.counts.saved_blocks += len(run)
        self.counts.saved_bytes += data.nbytes

    def dropped(self, num_blocks: int) -> None:
        """Count wanted blocks that are not saved."""
        self.counts.dropped_blocks += num_blocks

    def failed(self, what: str) -> None:
        """Record a failed call."""
        self.counts.errors[what] = self.counts.errors.get(what, 0) + 1
