# SPDX-License-Identifier: Apache-2.0
"""TierUse: the tiers of an engine and the transfers between them and its cache, step by step.

It also knows how long steps would do nothing, so that the engine's caller can sleep until a transfer ends.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import replace

from radixkv.cache.keys import NamespaceName, TokenIds
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.reporting.explain import MissReport
from radixkv.engine.counts import EngineStats
from radixkv.engine.hooks import StepHook
from radixkv.engine.runner import Runner
from radixkv.errors import ConfigError
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.sequence import Sequence
from radixkv.tiers.checkpoint_memory import bytes_per_checkpoint
from radixkv.tiers.load_waits import LoadWaits
from radixkv.tiers.measured_tier import EngineSpeeds, MeasuredTier
from radixkv.tiers.tier import Tier, TierStack
from radixkv.tiers.transfers import Transfers

#: Seconds for which the end of an engine may be held up by saving cached texts, and their number.
SAVE_AT_END_S = 10.0
MAX_SAVED_AT_END = 1000
#: Seconds for which tiers are asked for their part of an explained prompt, and between two tries.
ASK_TIERS_S = 0.2
ASK_AGAIN_S = 0.005
# A step with fewer tokens for each of its requests says little of a prompt's cost.
MIN_TOKENS_PER_ROW = 8


def _nobody_sleeps() -> None:
    """A callback at the end of unawaited transfers."""


class TierUse(StepHook):
    """An engine's use of a tier, or of several. Not thread-safe.

    Args:
        clock: seconds.
        load_deadline_s: longest that a request waits for blocks of the tier.
    """

    def __init__(
        self,
        tier: Tier | TierStack,
        runner: Runner,
        clock: Callable[[], float],
        load_deadline_s: float,
    ) -> None:
        tiers: abc.Sequence[Tier] = tier.tiers if isinstance(tier, TierStack) else (tier,)
        for one in tiers:
            if not isinstance(one, Tier):
                raise TypeError(
                    f"tier: {one!r:.80} is not a Tier; make its class a subclass of {Tier.__module__}.Tier"
                )
            if runner.windows is not None and not one.keeps_states:
                raise ConfigError(
                    f"the tier {one.name} keeps no windows, and this model needs them, since they are freed; "
                    "use --kv-tier, or --window-memory 0"
                )
            if runner.states is not None and not one.keeps_states:
                raise ConfigError(
                    f"the tier {one.name} keeps no states, and a hit of this model (it has recurrent or "
                    "convolutional layers) needs them; use --kv-tier host:SIZE, disk:PATH or redis:URL"
                )
        self._tier = tier
        self._runner = runner
        self._speeds = EngineSpeeds()
        sizes = runner.bytes_per_block, bytes_per_checkpoint(runner)
        self._tiers = [MeasuredTier(one, clock, self._speeds, *sizes) for one in tiers]
        self._clock = clock
        self._load_deadline_s = load_deadline_s
        self._wake: Callable[[], None] = _nobody_sleeps
        self._transfers: Transfers | None = None
        self.tier_loads: LoadWaits | None = None
        self._is_closed = False

    def attach(self, cache: PrefixCache) -> None:
        if self._transfers is not None:
            self._transfers.close()
        self._transfers = Transfers(self._tiers, cache, self._runner, self._speeds, self._clock, self._wake)
        self.tier_loads = LoadWaits(cache, self._transfers, self._clock, self._load_deadline_s)

    # ------------------------------------------------------------------ around a step

    def before_step(self) -> None:
        if self._transfers is not None:
            self._transfers.collect()

    def computed(self, batch: Batch, seconds: float) -> None:
        """Record a step's duration; the cost of a token is measured in steps that compute prompts."""
        if self.tier_loads is None or self._transfers is None:
            return
        self.tier_loads.model_s += seconds
        self._transfers.saves.patience.earn(seconds)
        if batch.num_tokens >= MIN_TOKENS_PER_ROW * len(batch.entries):
            self._speeds.compute.measured(batch.num_tokens, seconds)

    def after_step(self, cache: PrefixCache) -> None:
        if self._transfers is not None:
            self._transfers.saves.start()

    def ended(self, sequence: Sequence, *, discarded: bool) -> None:
        """Offer the cached blocks of a sequence to the tiers."""
        if self._transfers is not None and not discarded:
            self._transfers.saves.offer(sequence.encoded, sequence.namespace)

    def explain(self, report: MissReport, token_ids: TokenIds, namespace: NamespaceName) -> MissReport | None:
        return report if self.tier_loads is None else self.tier_loads.explain(report, token_ids, namespace)

    # ------------------------------------------------------------------ between steps

    def idle_s(self) -> float | None:
        if self._transfers is None or self.tier_loads is None:
            return None
        if self._transfers.is_due:
            return 0.0
        times = [when for when in (self._transfers.loads.next_deadline, self.tier_loads.next_lookup) if when]
        return max(0.0, min(times) - self._clock()) if times else None

    def wake_with(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        if self._transfers is not None:
            self._transfers.ends.wake = wake

    def wait(self, timeout: float | None) -> None:
        if self._transfers is not None:
            self._transfers.ends.wait(timeout)

    def close(self, *, save: bool) -> None:
        transfers, tier = self._transfers, self._tier
        if transfers is None:
            return
        if isinstance(tier, TierStack) and not self._is_closed:
            self._is_closed = True
            if save:
                self._save_cached(transfers, tier)
            tier.close()
        transfers.close()

    def _save_cached(self, transfers: Transfers, tier: TierStack) -> None:
        """Offer the last used first, since time may run out; then pass the order of use to the tiers."""
        saves = transfers.saves
        saves.saves_all = True
        end = self._clock() + SAVE_AT_END_S
        texts = saves.cached_texts(MAX_SAVED_AT_END)
        self._save_texts(texts, transfers, tier, end)
        for token_ids, namespace in reversed(texts):
            saves.touch(token_ids, namespace)

    def _save_texts(
        self,
        texts: abc.Sequence[tuple[TokenIds, NamespaceName]],
        transfers: Transfers,
        tier: TierStack,
        end: float,
    ) -> None:
        saves = transfers.saves
        for token_ids, namespace in texts:
            saves.offer(token_ids, namespace)
            saves.start()
            while len(saves) and (left := end - self._clock()) > 0:
                transfers.ends.wait(left)
                transfers.collect()
                saves.start()
            if (left := end - self._clock()) <= 0:
                return
            tier.flush(left)  # there is room for the next one

    def add_counts(self, stats: EngineStats) -> None:
        stats.transfers = None if self._transfers is None else replace(self._transfers.log.counts)
        stats.tiers = tuple([tier.snapshot() for tier in self._tiers])
