# SPDX-License-Identifier: Apache-2.0
"""StepHook: the one seam between an engine and its extensions. An engine without extensions has no hooks.

| extension                                    | where                   | answers              |
|----------------------------------------------|-------------------------|----------------------|
| guesses of next tokens, which a step checks  | `radixkv.speculation`   | `drafter`            |
| memories below the pool that keep blocks     | `radixkv.tiers`         | `tier_loads`         |
| encodings of images, in pieces               | `image_encoding`        | `image_waits`        |
| compiled grammars that outputs must match    | `radixkv.grammar`       | `grammars`           |
| publication of the cache's block events      | `radixkv.cluster.events`|                      |

`radixkv.entrypoints.builder` makes the hooks of an engine. Hooks are used on the engine's thread, `Grammars`
on any.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from radixkv.cache.keys import NamespaceName, TokenIds
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.reporting.explain import MissReport
from radixkv.engine.counts import EngineStats
from radixkv.sampling.structured import StructuredOutputs
from radixkv.scheduling.batch import Batch, Entry
from radixkv.scheduling.seams import DraftProposer, ImageWaits, TierLoads
from radixkv.scheduling.sequence import Sequence


class Grammars(Protocol):
    """Compiled grammars by tenant."""

    def submit(self, spec: StructuredOutputs, namespace: NamespaceName = "") -> Future[Any]:
        """Compile a grammar soon, for the tenant that `namespace` begins with.

        The future gives a `GrammarState`, or raises InvalidRequestError, which names the refused part.

        Raises:
            EngineOverloadedError: the tenant has too many grammars waiting, or has used its CPU time up.
        """


class Drafts(DraftProposer, Protocol):
    """Proposer of drafts that the engine tells about its steps and their outcome."""

    def guessing(self, entries: abc.Sequence[Entry]) -> set[Sequence]:
        """Return the requests of a running step that may get a draft in the step after it."""

    def checked(self, request: Sequence, num_draft_tokens: int, num_accepted: int) -> None:
        """Record that the first `num_accepted` tokens of a draft were right."""


class StepHook:
    """Extension of an engine. A subclass overrides the methods that it needs; the others do nothing.

    Attributes:
        drafter: the scheduler's source of guesses; None: this hook is none.
        tier_loads: the scheduler's source of blocks that a tier has; None: this hook is none.
        image_waits: what requests with images wait for; None: this hook is none.
        grammars: the compiler of structured outputs; None: this hook is none.
    """

    drafter: Drafts | None = None
    tier_loads: TierLoads | None = None
    image_waits: ImageWaits | None = None
    grammars: Grammars | None = None

    def attach(self, cache: PrefixCache) -> None:
        """Work with this cache from now on; one that was attached before is not used any more."""

    def before_step(self) -> None:
        """Prepare for a step: nothing of it has been scheduled."""

    def computed(self, batch: Batch, seconds: float) -> None:
        """Take note of a step that has run; its tokens are given out after this call."""

    def after_step(self, cache: PrefixCache) -> None:
        """Go on with work of its own: the step's tokens have been given out."""

    def ended(self, sequence: Sequence, *, discarded: bool) -> None:
        """Take note that a sequence has ended and its lease is released.

        Args:
            discarded: the blocks that it computed are not to be trusted.
        """

    def explain(self, report: MissReport, token_ids: TokenIds, namespace: NamespaceName) -> MissReport | None:
        """Return a report with this extension's part of the missing tokens; None: not known yet."""
        return report

    def idle_s(self) -> float | None:
        """Return the seconds until a step has work for this hook; 0.0: it has some now; None: no limit.

        A wake-up may come before (`wake_with`).
        """
        return None

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on any thread, whenever `idle_s` may have become 0.0."""

    def wait(self, timeout: float | None) -> None:
        """Sleep until a wake-up, at most `timeout` seconds; return at once if none can come."""

    def add_counts(self, stats: EngineStats) -> None:
        """Write this extension's counts into a snapshot of an engine's."""

    def close(self, *, save: bool) -> None:
        """End with the engine. May be called again.

        Args:
            save: first save the cached blocks, where the hook keeps blocks.
        """
