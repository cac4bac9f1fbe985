# SPDX-License-Identifier: Apache-2.0
"""Progress of a request's prompts and answers, and its usage, the sum of them.

Usage, metrics, traces, rate limits and the list of the latest requests all read these records, which follow
the engine's deltas or its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from radixkv.cache.reporting.explain import MissReport
from radixkv.engine.outputs import OutputDelta, PromptOutcome, RequestOutput
from radixkv.scheduling.request import RequestTimes

MIN_RATED = 4  # fewest tokens after the first one for a rate,
MIN_STEPS = 2  # and fewest steps that they came in


@dataclass(slots=True)
class SampleProgress:
    """Answer to a prompt; `latest_at` is the time of its latest tokens, by the server's clock."""

    num_tokens: int = 0
    latest_at: float = 0.0
    finish_reason: str | None = None


@dataclass(slots=True)
class PromptProgress:
    """Prompt and its answers so far.

    Attributes:
        num_tokens: tokens of the prompt.
        num_samples: number of requested answers.
        outcome: the cache's work for it; None: it has not been admitted yet.
        times: times in seconds since its arrival in the engine; None: not known.
        arrived_at: time of that arrival, by the server's monotonic clock.
        first_token_at: time of the first token, likewise.
        num_generated_tokens: tokens of all samples, including samples of `best_of` that were not chosen.
        samples: samples that have begun, by their index.
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
    _rated_tokens: int = 0  # tokens after the first ones,
    _rated_steps: int = 0  # the steps that they came in,
    _rated_at: float = 0.0  # and the time of the last of them

    @property
    def has_begun(self) -> bool:
        """True once the engine has reported anything."""
        return self.outcome is not None or bool(self.samples)

    @property
    def num_cached_tokens(self) -> int:
        return 0 if self.outcome is None else self.outcome.num_cached_tokens

    @property
    def report(self) -> MissReport | None:
        """Report on the miss; None: not known, or prefix caching is off."""
        return None if self.outcome is None else self.outcome.cache_report

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token; None: too few tokens to tell."""
        # The tokens of one step come at once, and a few say more about the clock than about the engine.
        if self.first_token_at is None or self._rated_tokens < MIN_RATED or self._rated_steps < MIN_STEPS:
            return None
        spent = self._rated_at - self.first_token_at
        return self._rated_tokens / spent if spent > 0 else None

    def take_delta(self, delta: OutputDelta, now: float) -> float | None:
        """Count a step's addition to a sample, read at `now`.

        Returns:
            Seconds since the sample's previous tokens; None: there are none before, or none in this step.
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
        """Count a whole output, read at `now`."""
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
        """Take in times in seconds, ascending; the last is now."""
        latest = times.finished or times.first_token or times.first_scheduled or 0.0
        self.times, self.arrived_at = times, now - latest

    def _rate(self, num_tokens: int, num_steps: int, now: float) -> None:
        self._rated_tokens += num_tokens
        self._rated_steps += num_steps
        self._rated_at = now


#: Makes an addition to a prompt's miss report; None: nothing.
Hint = Callable[["MissReport"], str | None]


@dataclass(slots=True)
class Usage:
    """Token counts of an HTTP request so far, summed over its prompts and samples.

    Attributes:
        prompts: progress of each prompt, from which the counts are read.
        hint: adds to the report on a miss; None: nothing does.
        written_end: number of leading tokens of a prompt that can count as written; None: all.
    """

    prompts: Sequence[PromptProgress] = ()
    hint: Hint | None = None
    written_end: int | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose K/V came from the cache."""
        return sum(prompt.num_cached_tokens for prompt in self.prompts)

    @property
    def by_tier(self) -> dict[str, tuple[int, float]] | None:
        """Cached tokens by memory, with the seconds spent waiting for them.

        `memory` is the cache itself. None: the engine has no tiers.
        """
        hits = [prompt.outcome.tier_hits for prompt in self.prompts if prompt.outcome]
        if all(found is None for found in hits):
            return None
        sums: dict[str, tuple[int, float]] = {"memory": (self.cached_tokens, 0.0)}
        for hit in (hit for found in hits for hit in found or ()):
            tokens, seconds = sums.get(hit.tier, (0, 0.0))
            sums[hit.tier] = tokens + hit.num_tokens, seconds + hit.seconds
            sums["memory"] = sums["memory"][0] - hit.num_tokens, 0.0
        return sums

    @property
    def cache_write_tokens(self) -> int:
        """Prompt tokens that this request added to the cache.

        0 where prefix caching is off; on Messages, those up to the last breakpoint. Elsewhere, with
        `cached_tokens`, it adds up to `prompt_tokens`, but for tokens that had to be computed again although
        they are cached.
        """
        return sum(_written(prompt, self.written_end) for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(prompt.num_generated_tokens for prompt in self.prompts)

    @property
    def accepted_prediction_tokens(self) -> int:
        """Completion tokens from accepted guesses; see `EngineConfig.speculation`."""
        return sum(prompt.accepted_draft_tokens for prompt in self.prompts)

    @property
    def rejected_prediction_tokens(self) -> int:
        """Rejected guesses, which are not part of the completion."""
        return sum(prompt.rejected_draft_tokens for prompt in self.prompts)

    @property
    def pinned_tokens(self) -> int | None:
        """Prompt tokens pinned within the budget; None: no pins were requested."""
        pinned = [prompt.outcome.num_pinned_tokens for prompt in self.prompts if prompt.outcome]
        asked = [count for count in pinned if count is not None]
        return sum(asked) if asked else None

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons of the samples that have ended."""
        samples = (sample for prompt in self.prompts for sample in prompt.samples.values())
        return [sample.finish_reason for sample in samples if sample.finish_reason is not None]

    @property
    def misses(self) -> list[tuple[MissReport, str | None]]:
        """Reports on the misses of each prompt, with hints.

        Empty where the engine does not say.
        """
        reports = [prompt.report for prompt in self.prompts if prompt.report is not None]
        return [(report, None if self.hint is None else self.hint(report)) for report in reports]


def _written(prompt: PromptProgress, end: int | None) -> int:
    written = 0 if prompt.outcome is None else prompt.outcome.num_cache_write_tokens
    return written if end is None else max(0, min(written, end - prompt.num_cached_tokens))
