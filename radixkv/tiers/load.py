# SPDX-License-Identifier: Apache-2.0
"""A load of blocks, a waiting request's memory of its loads, and the verification of loaded data."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from radixkv.cache.block_run import BlockRun
from radixkv.cache.prefix_cache import Lease
from radixkv.cache.reporting.explain import TierHit
from radixkv.tiers.measured_tier import MeasuredTier
from radixkv.tiers.tier import Bytes, TierBlocks


@dataclass(slots=True, eq=False, repr=False)
class TierLoad:
    """Load of blocks. A waiting request treats it like a request that computes the tokens.

    Attributes:
        run: the blocks.
        lease: on all of the text up to their end; None: the load has ended.
        tier: who brings them.
        num_computed: where the blocks begin: tokens up to there are cached.
        started: a reading of the engine's clock.
        bytes_ahead: bytes queued in the tier before it, at the time of the call.
        deadline: when it is given up, if nothing has arrived; a reading of the engine's clock.
        rows: arrived data, verified to be of the same tokens; None: nothing yet.
        has_failed: it has ended, and some of the blocks are not there.
        refused: why they are not; None: nothing is known of that.
    """

    number: int
    run: BlockRun
    lease: Lease | None
    tier: MeasuredTier
    future: Future[Sequence[TierBlocks]]
    started: float
    deadline: float
    bytes_ahead: int = 0
    rows: list[Bytes] | None = None
    num_written: int = 0
    has_failed: bool = False
    refused: str | None = None
    num_computed: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_computed = self.run.start

    def __repr__(self) -> str:
        state = "ended" if self.lease is None else "under way" if self.rows is None else "arrived"
        return f"TierLoad({self.run!r}, {state})"


class NotLoaded(NamedTuple):
    """Blocks of a tier that were, or would be, computed nevertheless.

    Attributes:
        tier: its name.
        end: tokens up to the end of the last of them.
        reason: why, as `MissReport.reason` says it; None: it has no word for that.
    """

    tier: str
    end: int
    reason: str | None


@dataclass(slots=True, eq=False)
class TierWait:
    """A request's use of the tiers since it last ran.

    Attributes:
        deadline: until when it may wait for the next load; a reading of the clock.
        ask_at: when an undecided tier is asked again; None: never.
        asked: the name of that tier.
        model_s: of the engine, when it was looked at last.
        load: the last load it waited for.
        matched: tokens that were found when that wait began; with states, up to the nearest one.
        num_kv_tokens: tokens whose K/V was cached then.
        since: when that was, or up to when waits for an answer were counted.
        is_over: the tiers are not asked again.
        hits: blocks brought so far by each tier.
        not_loaded: blocks last left in a tier; None: none, as far as is known.
    """

    deadline: float
    ask_at: float | None = None
    asked: str = ""
    model_s: float = 0.0
    load: TierLoad | None = None
    matched: int = 0
    num_kv_tokens: int = 0
    since: float = 0.0
    is_over: bool = False
    hits: dict[str, TierHit] = field(default_factory=dict)
    not_loaded: NotLoaded | None = None

    def ask_again(self, tier: str, when: float, now: float) -> None:
        """Wait for a tier's decision."""
        self.asked, self.ask_at, self.since = tier, when, now

    def answered(self, now: float) -> None:
        """End the wait for a tier's decision, and count its time."""
        self._add(self.asked, 0, now - self.since)
        self.since = now

    def begin(self, load: TierLoad, matched: int, num_kv_tokens: int, now: float) -> None:
        """Wait for a load."""
        self.load, self.since, self.ask_at = load, now, None
        self.matched, self.num_kv_tokens = matched, num_kv_tokens

    def end(self, matched: int, now: float) -> None:
        """End the wait for a load; `cached` tokens are cached now."""
        load = self.load
        assert load is not None
        name = load.tier.name
        end = min(matched, load.run.start + load.num_written * load.run.block_size)
        self._add(name, max(0, end - self.matched), now - self.since)
        self.is_over |= load.has_failed
        if load.refused is not None:
            self.not_loaded = NotLoaded(name, load.run.end, load.refused)
        self.load = None

    def _add(self, tier: str, num_tokens: int, seconds: float) -> None:
        before = self.hits.get(tier, TierHit(tier, 0, 0.0))
        self.hits[tier] = TierHit(tier, before.num_tokens + num_tokens, before.seconds + seconds)


def rows_of(run: BlockRun, pieces: Sequence[TierBlocks]) -> list[Bytes]:
    """Return the data of a run's leading blocks, as far as they verify as the same text, without a gap.

    O(tokens) for each piece.
    """
    rows: list[Bytes] = []
    position, size = run.start, run.block_size
    for kept, data in pieces:
        is_next = kept.start == position and kept.end == position + len(data) * size
        if not is_next or not run.is_same_text(kept, kept.end):
            break
        rows.extend(data)
        position = kept.end
    return rows
