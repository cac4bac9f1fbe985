# SPDX-License-Identifier: Apache-2.0
"""Unfinished requests of an engine: results of steps, ends of requests, and recovery from faults.

`FaultRecovery` decides which requests run alone, which are cleared, and which fail:

| what broke                      | what happens                                                            |
|---------------------------------|-------------------------------------------------------------------------|
| a step of the model or sampler  | nothing of it counts: its tokens are rolled back in the cache, and its  |
|                                 | requests are bisected: each runs again alone; one that fails alone      |
|                                 | ends with an error, one that comes as far as that step is cleared       |
| scheduler, cache or bookkeeping | the cache is rebuilt empty and every request is queued again with the   |
|                                 | tokens it has; twice in a row, and the requests are bisected            |
| what belongs to one request:    | that request ends with an error (see `output_processor`)                |
| decoder, stop, sampling state   |                                                                         |

A request is never run again for tokens that were delivered: they are part of it by then.

Any `BaseException` is a fault: a panic in a library written in Rust is no `Exception`. Only an
interrupt and an exit (`ENDS_PROCESS`) are not: they pass through, after the step was rolled back,
so that the engine can go on. So does a runner's own end (`ENDS_ENGINE`), after which it can't.
The engine acts: it rolls back, rebuilds and fails by the results of these methods.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.engine.counts import Counters
from radixkv.engine.hooks import Drafts, StepHook
from radixkv.engine.output_processor import OutputProcessor
from radixkv.engine.step_pipeline import LaunchedStep
from radixkv.errors import ENDS_ENGINE, InvalidRequestError
from radixkv.sampling.sampler import SampledToken
from radixkv.scheduling.batch import Batch, Entry
from radixkv.scheduling.request import Failure, FinishReason, Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence, TextSource

if TYPE_CHECKING:
    import torch

    from radixkv.scheduling.length_classes import LengthClasses


class FaultRecovery:
    """Decisions after faults: the requests that still have to run alone, in that order."""

    def __init__(self) -> None:
        # With the tokens to be computed until each is cleared: an earlier chunk may well come through.
        self._to_run_alone: dict[Sequence, int] = {}
        self._rebuilds_in_a_row = 0

    @property
    def next_alone(self) -> Sequence | None:
        """The next request to run alone; None: any may run."""
        return next(iter(self._to_run_alone), None)

    def step_failed(
        self, entries: abc.Sequence[Entry], error: BaseException
    ) -> list[tuple[Sequence, Failure]]:
        """Record a failed step; return the requests that fail: one that was alone in it."""
        if isinstance(error, ENDS_ENGINE):
            return []
        if len(entries) == 1 and (request := entries[0].request) in self._to_run_alone:
            return [(request, Failure(f"the model failed on this request: {error}", "step_failed"))]
        for entry in entries:
            self._to_run_alone.setdefault(entry.request, entry.end)
        return []

    def step_passed(self, entries: Iterable[Entry]) -> None:
        """Clear the requests of a step that came through. O(1) where nothing had failed."""
        self._rebuilds_in_a_row = 0
        if self._to_run_alone:
            for entry in entries:
                if self._to_run_alone.get(entry.request, 0) <= entry.end:
                    self.clear(entry.request)

    def clear(self, request: Sequence) -> None:
        """Clear a request that has ended, or can't run alone just now."""
        self._to_run_alone.pop(request, None)

    def invariant_broke(
        self, unfinished: abc.Sequence[Sequence], error: BaseException
    ) -> list[tuple[Sequence, Failure]]:
        """Record that the cache was rebuilt for these requests; return the failing ones.

        The first time in a row, none: the contents of the cache may have been broken. Then the
        requests are bisected, and one that breaks it while it runs alone fails.
        """
        if isinstance(error, ENDS_ENGINE):
            return []
        self._rebuilds_in_a_row += 1
        if self._rebuilds_in_a_row == 1:
            self._to_run_alone = {}
            return []
        alone = self.next_alone
        self._to_run_alone = {request: 0 for request in unfinished if request is not alone}
        if alone is None or alone.is_finished:
            return []
        return [(alone, Failure(f"the engine failed on this request: {error}", "internal_error"))]


class LiveRequests:
    """Requests from `add` until their last sample has ended. `attach` comes first.

    Args:
        tokenizer: names tokens in logprobs; None: by their ids.
        clock: seconds, monotonic.
        hooks: called when a sample ends.
        drafter: called when a draft has been checked; None: there are no drafts.
        faults: decides which requests run alone after a fault.
        counters: count how samples ended.
        lengths: see `radixkv.engine.input_processor.PromptLimits`.

    Attributes:
        output: results for their users.
    """

    def __init__(
        self,
        tokenizer: TextSource | None,
        clock: Callable[[], float],
        hooks: abc.Sequence[StepHook],
        faults: FaultRecovery,
        drafter: Drafts | None,
        counters: Counters,
        lengths: LengthClasses | None,
    ) -> None:
        self.output = OutputProcessor(tokenizer)
        self._clock = clock
        self._hooks = hooks
        self._faults = faults
        self._drafter = drafter
        self._counters = counters
        self._lengths = lengths
        self._by_id: dict[str, Request] = {}  # in the order of their arrival

    def attach(self, cache: PrefixCache, scheduler: Scheduler) -> None:
        """Schedule the requests with this scheduler from now on, over this cache."""
        self._cache, self._scheduler = cache, scheduler

    def all(self) -> list[Request]:
        """Return all requests by arrival."""
        return list(self._by_id.values())

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: there is one of its id.
        """
        if request.request_id in self._by_id:
            raise InvalidRequestError(f"a request with the id {request.request_id!r} is running already")
        self._by_id[request.request_id] = request
        self._scheduler.add(request.samples[0])

    def unfinished(self, request_id: str) -> list[Sequence]:
        """Return the samples of a request that still run or wait; none where the id is unknown."""
        request = self._by_id.get(request_id)
        return [] if request is None else request.unfinished()

    # ------------------------------------------------------------------ results of a step

    def process(self, step: LaunchedStep, runs: abc.Sequence[abc.Sequence[SampledToken]]) -> None:
        """Give every request its part of the step; end the completed ones.

        Args:
            runs: for each of the step's requests the accepted tokens of its draft, and one more.
        """
        batch = step.batch
        self._scheduler.complete(batch)
        self._faults.step_passed(batch.entries)
        now = self._clock()
        self._process_prompts(batch, step.logits, now)
        # Forks take their lease before their parent's next token is appended anywhere.
        for sample in step.requests:
            if not sample.was_added and not sample.request.is_finished:
                sample.request.samples.append(sample)
                self._scheduler.add_fork(sample, sample.request.samples[0])
        for sample, run in zip(step.requests, runs, strict=True):
            sample.num_forks = 0
            if sample.is_finished or not sample.was_added:
                continue
            if sample in step.drafts:
                self._count_draft(sample, len(step.drafts[sample].draft), len(run) - 1)
            self._pin(sample)
            num_tokens = sample.num_tokens
            failure = self.output.add_tokens(sample, run, now)
            if sample in step.drafts:
                # Of a run that ends early, by a stop string, say, the rest is no part of the request.
                self._scheduler.accept(step.drafts[sample], min(sample.num_tokens - num_tokens, len(run) - 1))
            if failure is not None:
                self.fail(sample, failure)
            elif sample.is_finished:
                self._finish(sample)
            elif sample.num_output_tokens >= sample.grows_until:
                assert self._lengths is not None
                most = self._lengths.move(sample, self._scheduler)
                sample.grows_until = min(sample.max_output_tokens, most)

    def _pin(self, sample: Sequence) -> None:
        """Pin the computed prompt's prefixes that its user asked for, as far as the budget goes."""
        request = sample.request
        if not request.pins or request.num_pinned_tokens is not None:
            return
        prompt = sample.tokens(0, sample.num_prompt_tokens)
        found = [
            self._cache.pin(prompt[: pin.num_tokens], sample.namespace, pin.ttl, at_least=True)
            for pin in request.pins
        ]
        request.num_pinned_tokens = max(0 if pin is None else pin.num_tokens for pin in found)

    def _count_draft(self, sample: Sequence, num_tokens: int, num_accepted: int) -> None:
        assert self._drafter is not None
        self._drafter.checked(sample, num_tokens, num_accepted)
        sample.accepted_draft_tokens += num_accepted
        sample.rejected_draft_tokens += num_tokens - num_accepted

    def _process_prompts(self, batch: Batch, logits: torch.Tensor, now: float) -> None:
        """Record when requests began, collect logprobs of prompts, and end requests that need no more.

        Rows have begun, and want a token. O(other entries).
        """
        for entry, first, end in batch.logit_spans(batch.num_rows):
            sample = entry.request
            if sample.times.first_scheduled is None:
                sample.times.first_scheduled = now
            if sample.needs_prompt_logits:
                start = entry.start + entry.count - entry.num_logits
                failure = self.output.add_prompt_logits(sample, start, logits[first:end])
                if failure is not None:
                    self.fail(sample, failure)
            if entry.samples or not sample.params.samples_nothing:
                continue
            if not (sample.num_to_compute or sample.is_finished):
                self._end_prompt(sample, logits[end - 1], now)

    def _end_prompt(self, sample: Sequence, logits: torch.Tensor, now: float) -> None:
        """End a request whose prompt has been computed, and that asked for nothing else."""
        failure = self.output.check_logits(logits)
        if failure is not None:
            self.fail(sample, failure)
            return
        self._pin(sample)
        self.output.end(sample, "length", now)
        self._finish(sample)

    # ------------------------------------------------------------------ the end of a request

    def abort(self, sample: Sequence) -> None:
        """End a sample because its user wants no more of it."""
        self._counters.aborted += 1
        self.end(sample, "abort")

    def fail(self, sample: Sequence, failure: Failure, *, discard: bool = True) -> None:
        """End one request, all its samples, with an error; others are unharmed.

        Args:
            discard: its computed blocks are not to be trusted, and not cached.
        """
        request = sample.request
        request.failure = failure
        for other in request.unfinished():
            self._counters.failed += 1
            self.end(other, "error", discard=discard)
        if discard:
            # Samples may have come to share what each computed, and a request may have been preempted before.
            for other in request.samples:
                keep = other.num_cached_tokens if other.namespace == request.namespace else 0
                self._cache.discard(other.tokens(), other.namespace, keep=keep)

    def end(self, sample: Sequence, reason: FinishReason, *, discard: bool = False) -> None:
        """End a sample from outside the model: abort, timeout, failure."""
        self.output.end(sample, reason, self._clock())
        self._finish(sample, discard=discard)

    def _finish(self, sample: Sequence, *, discard: bool = False) -> None:
        self._scheduler.finish(sample, discard=discard)
        for hook in self._hooks:
            hook.ended(sample, discarded=discard)
        self._counters.finished += sample.finish_reason in ("stop", "length")
        self._faults.clear(sample)
        if sample.request.is_finished:
            self.close(sample.request)

    def close(self, request: Request) -> None:
        """Deliver a request whose samples have all ended, once."""
        if self._by_id.pop(request.request_id, None) is not None:
            self.output.close(request)

    def expire(self, limit_s: float | None) -> None:
        """End the requests that are older than `limit_s` seconds; None: no limit. O(their number)."""
        if limit_s is None:
            return
        oldest = self._clock() - limit_s
        expired = []
        for request in self._by_id.values():  # in the order of their arrival
            if request.samples[0].times.arrival >= oldest:
                break
            expired.append(request.samples[0])
        failure = Failure(f"the request took longer than {limit_s:g} s (request_timeout_s)", "timeout")
        for sample in expired:
            self.fail(sample, failure, discard=False)
