# SPDX-License-Identifier: Apache-2.0
"""Figures of the parts around an engine: drafts, transfers, tiers, block events, replicas. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    errors: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    is_up: bool = True
    seconds_per_byte: float | None = None
    answer_s: float | None = None


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
