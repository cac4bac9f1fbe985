# SPDX-License-Identifier: Apache-2.0
"""Figures of the parts around an engine: drafts, transfers, tiers, block events, replicas. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv.cache.cache_stats import CacheStats
from radixkv.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class SpeculationCounts:
    """Drafts and their outcome since the start, as vLLM counts them.

    Attributes:
        num_drafts: how often a request had a draft in a step.
        num_draft_tokens: guesses that were computed.
        num_accepted_tokens: guesses that were right.
        accepted_per_pos: the same by their position in the draft, from its first on.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)

    def observe(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count a draft that was checked."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        missing = num_draft_tokens - len(self.accepted_per_pos)
        if missing > 0:
            self.accepted_per_pos += [0] * missing
        for position in range(num_accepted):
            self.accepted_per_pos[position] += 1

    def snapshot(self) -> SpeculationCounts:
        """Return a copy that stays as it is."""
        return SpeculationCounts(
            self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens, list(self.accepted_per_pos)
        )


@dataclass(slots=True)
class TransferCounts:
    """Loads and saves of an engine's tiers since the start.

    Attributes:
        loads: started; `loaded_blocks` of them were committed.
        failed_loads: loads that gave fewer blocks than asked for, or none.
        late_loads: of these, those given up at the deadline.
        saved_blocks: given to a tier, counted once for each.
        failed_saves: copies, or calls of the tier, that failed.
        stopped_saves: copies that were stopped for requests that needed their blocks.
    """

    loads: int = 0
    loaded_blocks: int = 0
    failed_loads: int = 0
    late_loads: int = 0
    saved_blocks: int = 0
    failed_saves: int = 0
    stopped_saves: int = 0


@dataclass(slots=True)
class TierCounts:
    """Work of one tier since the start.

    Attributes:
        hits, misses: lookups of blocks after a request's match that found some, or none; a long prefix comes
            in several pieces, with one each.
        loads, loaded_blocks, loaded_bytes, load_seconds: arrivals, and the seconds from asking to arrival.
        offered_blocks: worth saving, and not in it: `saved_blocks` (and `saved_bytes`) of them were given to
            it, `dropped_blocks` were not, for the memory was needed, or it had no time; others are to come.
        loaded_states, saved_states: the same of states; their bytes are among the others.
        errors: call -> how often it failed: `look up`, `load`, `save`.
        refused: reason for computing blocks that it has -> how often.
        is_up: False: it rests, or says itself that it can't be reached.
        seconds_per_byte, answer_s: as measured; None: not yet.
    """

    name: str
    hits: int = 0
    misses: int = 0
    loads: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    offered_blocks: int = 0
    saved_blocks: int = 0
    saved_bytes: int = 0
    dropped_blocks: int = 0
    loaded_states: int = 0
    saved_states: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    is_up: bool = True
    seconds_per_byte: float | None = None
    answer_s: float | None = None


@dataclass(frozen=True, slots=True)
class ImageCounts:
    """Work on the images of prompts since the start.

    Attributes:
        encoded: images that the model's tower has run on; those inside cached prefixes are not.
        encode_s: seconds that this took.
        hits, misses: images behind the cached prefixes of requests that were to begin, whose encodings were
            there, and that were waited for.
        evicted: encodings that made room for others.
        kept_bytes: of the encodings that are kept.
    """

    encoded: int = 0
    encode_s: float = 0.0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EventCounts:
    """Block events published so far.

    Attributes:
        batches: heartbeats included.
        blocks: stored and removed.
        dropped_blocks: blocks not published one by one, because too many waited.
        waiting_blocks: to be published.
        replays: answered.
    """

    batches: int = 0
    blocks: int = 0
    dropped_blocks: int = 0
    waiting_blocks: int = 0
    replays: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """State of one of several replicas.

    Attributes:
        is_open: it takes requests; False: it is drained, ill, or not ready yet.
        blocks: that it holds, by its events.
        queue_s: seconds until it has computed all prompts that were sent there.
        running: requests that were sent there and have not ended.
        prefill_rate: prompt tokens a second, as measured.
        requests: sent there so far.
        retries: requests that it failed before their first token, served by others.
    """

    name: str
    is_open: bool
    blocks: int
    queue_s: float
    running: int
    prefill_rate: float
    requests: int
    retries: int


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
        images: images encoded; None: the model takes none.
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
    images: ImageCounts | None = None
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
        """Count a model call by its clock readings; return its seconds, from the end of the one before."""
        if self._last_model_end is not None:
            started = max(started, self._last_model_end)
            self.gap_time_s += started - self._last_model_end
        self.model_time_s += ended - started
        self._last_model_end = ended
        return ended - started

    def snapshot(self, scheduler: Scheduler, num_generated: int, cache: CacheStats) -> EngineStats:
        """Return these counts, and the scheduler's and the cache's; hooks add their own."""
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
        )

    def pause(self) -> None:
        """Exclude the time until the next model call from the gaps: there is no work, or something broke."""
        self._last_model_end = None
