# SPDX-License-Identifier: Apache-2.0
"""PromptProgress: what is known so far of one prompt and its answers, from the engine's deltas or its output.

Usage, metrics, traces, rate limits and the list of the latest requests all read this one record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from radixkv.engine.outputs import OutputDelta, PromptOutcome, RequestOutput
from radixkv.scheduling.request import RequestTimes

if TYPE_CHECKING:
    from radixkv.cache.reporting.explain import MissReport

MIN_RATED = 4  # tokens after the first one, for a rate,
MIN_STEPS = 2  # in so many steps


@dataclass(slots=True)
class SampleProgress:
    """One answer to a prompt; `latest_at` is when its latest tokens came, by the server's clock."""

    num_tokens: int = 0
    latest_at: float = 0.0
    finish_reason: str | None = None


@dataclass(slots=True)
class PromptProgress:
    """One prompt and its answers, as far as they have come.

    Attributes:
        num_tokens: of the prompt.
        num_samples: answers that were asked for.
        outcome: what the cache did for it; None: it was not admitted yet.
        times: seconds since the engine got it; None: nothing is known.
        arrived_at: when that was, by the server's monotonic clock.
        first_token_at: when the first token came, likewise.
        num_generated_tokens: of all samples, those of `best_of` that were not chosen included.
        samples: those that have begun, by their index.
    """

    num_tokens: int
    num_samples: int = 1
    outcome: PromptOutcome | None = None
    times: RequestTimes | None = None
    arrived_at: float = 0.0
    first_token_at: float | None = None
    num_generated_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    samples: dict[int, SampleProgress] = field(default_factory=dict)
    _rated_tokens: int = 0  # those after the first ones,
    _rated_steps: int = 0  # the steps that they came in,
    _rated_at: float = 0.0  # and when the last of them came

    @property
    def has_begun(self) -> bool:
        """Whether the engine has said anything of it."""
        return self.outcome is not None or bool(self.samples)

    @property
    def num_cached_tokens(self) -> int:
        return 0 if self.outcome is None else self.outcome.num_cached_tokens

    @property
    def report(self) -> MissReport | None:
        """Why the rest missed; None: not known, or prefix caching is off."""
        return None if self.outcome is None else self.outcome.cache_report

    @property
    def tokens_per_s(self) -> float | None:
        """The rate after the first token; None: not enough came to tell it."""
        # The tokens of one step come at once, and a few say more about the clock than about the engine.
        if self.first_token_at is None or self._rated_tokens < MIN_RATED or self._rated_steps < MIN_STEPS:
            return None
        spent = self._rated_at - self.first_token_at
        return self._rated_tokens / spent if spent > 0 else None

    def take_delta(self, delta: OutputDelta, now: float) -> float | None:
        """What a step added to a sample, read at `now`.

        Returns:
            Seconds since the sample's tokens before these; None: these are its first ones, or there are none.
        """
        sample = self.samples.setdefault(delta.index, SampleProgress())
        self.outcome = self.outcome or delta.prompt
        if delta.times is not None and (self.times is None or delta.index == 0):
            self._take_times(delta.times, now)
        self.accepted_draft_tokens += delta.accepted_draft_tokens
        self.rejected_draft_tokens += delta.rejected_draft_tokens
        sample.finish_reason = delta.finish_reason
        count = len(delta.token_ids)
        if not count:
            return None
        self.num_generated_tokens += count
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            self._rate(count, 1, now)
        since = now - sample.latest_at if sample.num_tokens else None
        sample.num_tokens += count
        sample.latest_at = now
        return since

    def take_output(self, output: RequestOutput, now: float) -> None:
        """The whole of it, read at `now`."""
        self.outcome = PromptOutcome(
            self.num_tokens,
            output.num_cached_tokens,
            output.num_cache_write_tokens,
            output.num_pinned_tokens,
            output.cache_report,
            tier_hits=output.tier_hits,
        )
        self.num_generated_tokens = output.num_generated_tokens
        self.accepted_draft_tokens = output.accepted_draft_tokens
        self.rejected_draft_tokens = output.rejected_draft_tokens
        for one in output.outputs:
            self.samples[one.index] = SampleProgress(len(one.token_ids), now, one.finish_reason or "abort")
        if output.times is not None:
            self._take_times(output.times, now)
            if output.times.first_token is not None:
                self.first_token_at = self.arrived_at + output.times.first_token
                later = output.num_generated_tokens - self.num_samples
                # A step gives one token, and the guesses that it found to be right.
                self._rate(later, later - output.accepted_draft_tokens, now)

    def _take_times(self, times: RequestTimes, now: float) -> None:
        """The last of these has just happened."""
        latest = times.finished or times.first_token or times.first_scheduled or 0.0
        self.times, self.arrived_at = times, now - latest

    def _rate(self, num_tokens: int, num_steps: int, now: float) -> None:
        self._rated_tokens += num_tokens
        self._rated_steps += num_steps
        self._rated_at = now
