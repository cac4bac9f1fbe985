# SPDX-License-Identifier: Apache-2.0
"""Seams of an engine: what may be added to it, each a base class that, by itself, adds nothing.

    Drafts       guesses of next tokens that a step checks         radixkv.speculation
    Grammars     compiled grammars that outputs must match         radixkv.grammar
    BlockTiers   memories below the pool that keep blocks          radixkv.tiers
    EventFeed    publication of the cache's block events           radixkv.cluster.events

`radixkv.entrypoints.builder` wires the real ones in. All of them are used on the engine's thread, `Grammars`
on any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from radixkv.cache.keys import NamespaceName, TokenIds
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.reporting.explain import MissReport
from radixkv.engine.counts import EventCounts, SpeculationCounts, TierCounts, TransferCounts
from radixkv.engine.output_processor import Sample
from radixkv.errors import InvalidRequestError
from radixkv.sampling.structured import StructuredOutputs
from radixkv.scheduling.batch import Batch, Entry
from radixkv.scheduling.scheduler import DraftProposer
from radixkv.scheduling.sequence_state import SequenceState
from radixkv.scheduling.tier_waits import TierWaits


class Drafts:
    """Guesses of the next tokens of requests.

    Attributes:
        proposer: asked by the scheduler; None: there are never any guesses.
    """

    proposer: DraftProposer | None = None

    def attach(self, cache: PrefixCache) -> None:
        """Begin again with this cache."""

    def would_guess(self, entries: Sequence[Entry]) -> bool:
        """True if one of these requests, whose step runs, may get a draft in the step after it."""
        return False

    def checked(self, request: Sample, num_draft_tokens: int, num_accepted: int) -> None:
        """Note that the first `num_accepted` tokens of a draft were right."""

    def ended(self, request: SequenceState) -> None:
        """Note the end of a request."""

    def snapshot(self) -> SpeculationCounts:
        """Return the counts so far."""
        return SpeculationCounts()


class Grammars:
    """Compiled grammars by tenant."""

    def submit(self, spec: StructuredOutputs, namespace: NamespaceName = "") -> Future[Any]:
        """Compile a grammar soon, for the tenant that `namespace` begins with.

        The future gives a `GrammarState`, or raises InvalidRequestError, which names the refused part.

        Raises:
            EngineOverloadedError: the tenant has too many grammars waiting, or has used its CPU time up.
        """
        raise InvalidRequestError("this engine compiles no grammars", param="structured")


class BlockTiers:
    """Memories below the pool, and the transfers between them and the cache."""

    is_blocked = False  # nothing can be scheduled before a transfer ends, or time passes

    def attach(self, cache: PrefixCache) -> TierWaits:
        """Begin again with this cache; return the scheduler's extension."""
        return TierWaits()

    def begin_step(self) -> None:
        """Take in arrived blocks."""

    def scheduled(self, *, anything: bool) -> None:
        """Note that a step has been scheduled, with work in it or without."""

    def computed(self, batch: Batch, seconds: float) -> None:
        """Note the time of a step."""

    def end_step(self) -> None:
        """Begin to copy out offered blocks."""

    def offer(self, token_ids: TokenIds, namespace: NamespaceName) -> None:
        """Offer the cached blocks of a request that has ended."""

    def explain(self, report: MissReport, token_ids: TokenIds, namespace: NamespaceName) -> MissReport | None:
        """Add to a report which missing tokens a tier has; None: that is not known yet. O(tokens)."""
        return report

    def requests_changed(self) -> None:
        """Note that a request has come or gone: the next step may do something."""

    @property
    def is_due(self) -> bool:
        """True if a step has something to do for a transfer."""
        return False

    def idle_s(self) -> float | None:
        """Return the seconds without work, unless a transfer ends; None: there is no limit."""
        return None

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on any thread, when a transfer has ended."""

    def wait(self, timeout: float | None) -> None:
        """Sleep until a transfer ends, at most `timeout_s` seconds; return at once if there is no tier."""

    def drop_transfers(self) -> None:
        """Give up all transfers: the cache is not used any more."""

    def close(self, *, save: bool) -> None:
        """Give up all transfers, and end the tiers opened for this engine, saving cached blocks before."""

    def counts(self) -> tuple[TransferCounts | None, tuple[TierCounts, ...]]:
        """Return the transfers so far, and the counts of each tier."""
        return None, ()


class EventFeed:
    """Publication of the blocks that the cache stores and removes."""

    def attach(self, cache: PrefixCache) -> None:
        """Publish this cache's events from now on."""

    def keep_up(self, cache: PrefixCache) -> None:
        """Go on publishing, after a step."""

    @property
    def counts(self) -> EventCounts | None:
        """The events so far; None: none are published."""
        return None

    def close(self) -> None:
        """Publish nothing more."""
