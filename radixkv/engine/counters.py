# SPDX-License-Identifier: Apache-2.0
"""The engine's counters, and the snapshot of them that everybody else sees."""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv.cache.cache_stats import CacheStats
from radixkv.engine.counts import EventCounts, ReplicaCounts, SpeculationCounts, TierCounts, TransferCounts
from radixkv.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class EngineStats:
    """A snapshot of the engine's counters; tokens and requests since the start, times in seconds.

    Attributes:
        prompts_waiting_for_turn: waiting long prompts that begin after others
            (`radixkv.scheduling.long_prompts`).
        reserved_tokens: of running prompts, tokens that have blocks and are not computed.
        cache: the prefix cache's own snapshot.
        steps_ahead: steps launched before the tokens of the previous one were known.
        model_time_s: time in the model, sampling included.
        gap_time_s: time between two model calls while work was waiting.
        num_rebuilds: how often a broken invariant made the engine rebuild its cache.
        transfers: blocks loaded from tiers and saved to them; None: there is none.
        tiers: the same by tier, and how each is.
        events: block events published; None: they are not.
        speculation: drafts, and how many of their tokens were right.
        replicas: how each is, where these are the sums of several engines.
    """

    num_waiting: int
    num_running: int
    num_preemptions: int
    prompt_tokens: int
    cached_prompt_tokens: int
    computed_prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    finished_requests: int
    failed_requests: int
    aborted_requests: int
    steps: int
    steps_ahead: int
    model_time_s: float
    gap_time_s: float
    num_rebuilds: int
    cache: CacheStats
    prompts_waiting_for_turn: int = 0
    reserved_tokens: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    transfers: TransferCounts | None = None
    tiers: tuple[TierCounts, ...] = ()
    events: EventCounts | None = None
    replicas: tuple[ReplicaCounts, ...] = ()


@dataclass(slots=True)
class Counters:
    """Counts of the engine itself: samples by how they ended, seconds in and between model calls."""

    finished: int = 0
    failed: int = 0
    aborted: int = 0
    num_rebuilds: int = 0
    model_time_s: float = 0.0
    gap_time_s: float = 0.0
    _last_model_end: float | None = None

    def model_called(self, started: float, ended: float) -> float:
        """A model call came through, at these clock readings; its seconds since the one before it ended."""
        if self._last_model_end is not None:
            started = max(started, self._last_model_end)
            self.gap_time_s += started - self._last_model_end
        self.model_time_s += ended - started
        self._last_model_end = ended
        return ended - started

    def snapshot(
        self,
        scheduler: Scheduler,
        num_generated: int,
        cache: CacheStats,
        speculation: SpeculationCounts,
        transfers: TransferCounts | None = None,
        tiers: tuple[TierCounts, ...] = (),
        events: EventCounts | None = None,
    ) -> EngineStats:
        """These counts with those from the parts of the engine."""
        scheduled = scheduler.stats
        return EngineStats(
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_preemptions=scheduled.num_preemptions,
            prompt_tokens=scheduled.prompt_tokens,
            cached_prompt_tokens=scheduled.cached_prompt_tokens,
            computed_prompt_tokens=scheduled.computed_prompt_tokens,
            computed_tokens=scheduled.computed_tokens,
            generated_tokens=num_generated,
            finished_requests=self.finished,
            failed_requests=self.failed,
            aborted_requests=self.aborted,
            steps=scheduled.num_steps,
            steps_ahead=scheduled.num_steps_ahead,
            model_time_s=self.model_time_s,
            gap_time_s=self.gap_time_s,
            num_rebuilds=self.num_rebuilds,
            cache=cache,
            prompts_waiting_for_turn=scheduler.num_waiting_for_turn,
            reserved_tokens=scheduler.reserved_tokens,
            speculation=speculation,
            transfers=transfers,
            tiers=tiers,
            events=events,
        )

    def pause(self) -> None:
        """Exclude the time until the next model call from the gaps: there is no work, or something broke."""
        self._last_model_end = None
