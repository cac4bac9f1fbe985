"""Meter: what one generation used and how long it took, for its usage, its log line and the metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from radixkv.request import OutputDelta, RequestOutput, RequestTimes
from radixkv_server.generation.usage import Hint, Usage
from radixkv_server.http.request_record import RequestRecord
from radixkv_server.metrics.request_metrics import ServerMetrics, hit_class

if TYPE_CHECKING:
    from radixkv.cache.insight.explain import MissReport


@dataclass(slots=True)
class _Sample:
    num_tokens: int = 0
    latest_at: float = 0.0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    has_ended: bool = False


@dataclass(slots=True)
class _Prompt:
    """What a stream has told of one prompt."""

    num_tokens: int
    num_samples: int
    num_cached_tokens: int = 0
    num_cache_write_tokens: int = 0
    times: RequestTimes | None = None
    samples: dict[int, _Sample] = field(default_factory=dict)

    @property
    def hit(self) -> str:
        return hit_class(self.num_cached_tokens, self.num_tokens)


class Meter:
    """Measures one generation, from its outputs or from its deltas.

    Args:
        prompts: tokens and samples of each prompt.
        hints: what finds a hint for each prompt's miss report.

    Attributes:
        usage: token counts so far.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        record: RequestRecord,
        prompts: list[tuple[int, int]],
        hints: Sequence[Hint | None] = (),
    ) -> None:
        self.usage = Usage(prompt_tokens=sum(num_tokens for num_tokens, _ in prompts), hints=hints)
        self._metrics = metrics
        self._record = record
        self._prompts = [_Prompt(*prompt) for prompt in prompts]
        self._started = False  # whether the engine has said anything

    def take_output(self, index: int, output: RequestOutput) -> None:
        """A prompt's whole output."""
        prompt, tenant = self._prompts[index], self._record.tenant
        self._started = True
        self._take_cached(prompt, output.num_cached_tokens, output.num_cache_write_tokens, output.times)
        self._note_report(index, output.cache_report)
        self.usage.completion_tokens += output.num_generated_tokens
        self.usage.accepted_prediction_tokens += output.accepted_draft_tokens
        self.usage.rejected_prediction_tokens += output.rejected_draft_tokens
        for sample in output.outputs:
            num_tokens, reason = len(sample.token_ids), sample.finish_reason or "abort"
            prompt.samples[sample.index] = _Sample(num_tokens, has_ended=True)
            self._end_sample(reason, num_tokens)
        times = output.times
        if times is not None and times.first_token is not None and times.finished is not None:
            # When each token came is not known: they share the time between them.
            elapsed = max(0.0, times.finished - times.first_token)
            self._metrics.observe_tokens(tenant, prompt.hit, elapsed, len(output.outputs[0].token_ids) - 1)

    def first_tokens_came(self) -> None:
        """All outputs have been taken: count the time to the request's first token."""
        came = [
            (prompt.times.first_token, prompt.hit)
            for prompt in self._prompts
            if prompt.times is not None and prompt.times.first_token is not None
        ]
        if came:
            first, hit = min(came)
            self._metrics.observe_first_token(self._record.tenant, hit, first - self._record.started)

    def take_delta(self, index: int, delta: OutputDelta) -> None:
        """What a step added to a prompt's sample."""
        prompt, tenant = self._prompts[index], self._record.tenant
        self._started = True
        self._take_cached(prompt, delta.num_cached_tokens, delta.num_cache_write_tokens, delta.times)
        self._note_report(index, delta.cache_report)
        sample = prompt.samples.setdefault(delta.index, _Sample())
        self.usage.accepted_prediction_tokens += delta.accepted_draft_tokens - sample.accepted_draft_tokens
        self.usage.rejected_prediction_tokens += delta.rejected_draft_tokens - sample.rejected_draft_tokens
        sample.accepted_draft_tokens = delta.accepted_draft_tokens
        sample.rejected_draft_tokens = delta.rejected_draft_tokens
        if delta.token_ids:
            now = time.monotonic()
            if not self.usage.completion_tokens:
                self._metrics.observe_first_token(tenant, prompt.hit, now - self._record.started)
            self.usage.completion_tokens += len(delta.token_ids)
            if sample.num_tokens:
                elapsed = now - sample.latest_at
                self._metrics.observe_tokens(tenant, prompt.hit, elapsed, len(delta.token_ids))
            sample.num_tokens += len(delta.token_ids)
            sample.latest_at = now
        if delta.finish_reason is not None and not sample.has_ended:
            sample.has_ended = True
            self._end_sample(delta.finish_reason, sample.num_tokens)

    def close(self, *, left: bool = False) -> None:
        """The answer has ended: what its usage says goes to the log and the metrics.

        Args:
            left: the client went away. What the engine refused, without a word, is not counted otherwise.
        """
        tenant = self._record.tenant
        for prompt in self._prompts if self._started or left else ():
            for index in range(prompt.num_samples):
                sample = prompt.samples.get(index, _Sample())
                if not sample.has_ended:
                    self._end_sample("abort", sample.num_tokens)
            self._metrics.observe_prompt(tenant, prompt.hit, prompt.num_tokens, prompt.times)
        if self._started:
            self._record.usage_is(self.usage)
            self._record.times = self._prompts[0].times

    def _end_sample(self, reason: str, num_tokens: int) -> None:
        self._record.finish_reasons.append(reason)
        self._metrics.observe_sample(self._record.tenant, reason, num_tokens)

    def _take_cached(
        self, prompt: _Prompt, num_cached: int, num_written: int, times: RequestTimes | None
    ) -> None:
        """Count what the cache gave and got, which is known once the prompt is admitted."""
        before = (prompt.num_cached_tokens, prompt.num_cache_write_tokens)
        cached, written = max(before, (num_cached, num_written))
        self.usage.cached_tokens += cached - before[0]
        self.usage.cache_write_tokens += written - before[1]
        prompt.num_cached_tokens, prompt.num_cache_write_tokens = cached, written
        prompt.times = prompt.times or times

    def _note_report(self, index: int, report: MissReport | None) -> None:
        """Keep a prompt's report for the usage, and count it, once."""
        if report is not None and index not in self.usage.reports_by_prompt:
            self.usage.reports_by_prompt[index] = report
            self._metrics.observe_cache_report(self._record.tenant, report)
