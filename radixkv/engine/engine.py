"""The engine: owns cache, scheduler, model runner and sampler, and steps them.

The life of a request:

 1. `add_request` checks it, tokenises the prompt and queues it. A bad request is refused here, before
    anything is held for it.
 2. `step` asks the scheduler for a batch. Admission gives the request its lease on cached and new blocks.
 3. The model runner writes the batch's K/V into its slots and attends, all layers; it returns the logits of
    the rows that finish a request's known tokens.
 4. The sampler chooses tokens. The first token of a request with `n` samples forks it.
 5. Each token is decoded to text; stop conditions are checked; a delta goes out.
 6. A finished request releases its lease. What it computed stays cached, evictable.

Abort and timeout enter at one place each, `abort` and `_expire`; faults go to
`radixkv.engine.fault_recovery`. None of them leaks a block or disturbs another request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.fault_recovery import FaultRecovery
from radixkv.engine.input_processor import Prompt, RequestIntake
from radixkv.engine.output_processor import name_logprobs
from radixkv.engine.request_group import (
    EngineStats,
    RequestGroup,
    Sample,
    StepResult,
    collect_output,
    make_delta,
    ranked_deltas,
    sample_of,
)
from radixkv.errors import ENDS_PROCESS, EngineOverloadedError, InvalidRequestError
from radixkv.request import FinishReason, SamplingParams, TokenLogprobs
from radixkv.sampling.sampler import SampledToken, gather_logprobs, sample
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.policy import make_policy
from radixkv.scheduling.request_state import Namespace
from radixkv.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    import torch

    from radixkv.engine.builder import EngineSummary
    from radixkv.text.tokenizer import Tokenizer

logger = logging.getLogger("radixkv")


class Runner(Protocol):
    """The model side of a step."""

    def execute(self, batch: Batch) -> torch.Tensor:
        """Logits [S, V] of `batch.logit_rows`."""
        ...


@dataclass(slots=True)
class _StepOutcome:
    """What the model and the sampler gave: a token for each of `requests`; or the `error`."""

    logits: torch.Tensor | None = None
    requests: list[Sample] = field(default_factory=list)
    sampled: list[SampledToken] = field(default_factory=list)
    error: BaseException | None = None


class Engine:
    """One model, one cache, one loop. Not thread-safe: `AsyncEngine` gives it a thread of its own.

    Args:
        config: the settings.
        runner: the model side; see `radixkv.model.runner`.
        cache: the prefix cache over the runner's blocks.
        tokenizer: None for token-id prompts without text (tests, benchmarks).
        max_model_len: longest prompt plus output, in tokens.
        max_num_batched_tokens: token budget of a step.
        vocab_size: token ids must be below it; None: unchecked.
        end_token_ids: the model's end-of-sequence tokens.
        model_fingerprint: identifies configuration, weights and dtype; empty: unknown.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        runner: Runner,
        cache: PrefixCache,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        max_num_batched_tokens: int,
        vocab_size: int | None = None,
        end_token_ids: Sequence[int] = (),
        model_name: str = "",
        model_fingerprint: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.runner = runner
        self.cache = cache
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.end_token_ids = frozenset(end_token_ids)
        self.model_name = model_name
        self.model_fingerprint = model_fingerprint
        self.clock = clock
        self.summary: EngineSummary | None = None  # set by engine_builder
        self.intake = RequestIntake(
            config,
            tokenizer,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            end_token_ids=self.end_token_ids,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            clock=clock,
        )
        policy = make_policy(config.scheduling_policy, weights=config.namespace_weights)
        self.scheduler = Scheduler(
            cache,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_tokens_per_request=config.max_tokens_per_request,
            policy=policy,
            max_overtake=config.max_overtake,
        )
        self._groups: dict[str, RequestGroup] = {}
        self._faults = FaultRecovery(self)
        self._result = StepResult()
        self._generated = self._finished = self._failed = self._aborted = 0
        self._model_time = self._gap_time = 0.0
        self._last_model_end: float | None = None

    def replace_cache(self, cache: PrefixCache) -> None:
        """Go on with an empty cache and scheduler; the caller queues the requests again."""
        old = self.scheduler
        self.cache = cache
        self.scheduler = Scheduler(
            cache,
            max_num_batched_tokens=old.max_num_batched_tokens,
            max_num_seqs=old.max_num_seqs,
            max_tokens_per_request=old.max_tokens_per_request,
            policy=old.policy,
            max_overtake=old.max_overtake,
        )
        self.scheduler.stats = old.stats

    # ------------------------------------------------------------------ requests in

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        namespace: Namespace = "",
        priority: int = 0,
    ) -> str:
        """Check a request and queue it.

        Args:
            prompt: text, token ids (a sequence or an array), or what `intake.encode` made of them.
            request_id: must be unused among unfinished requests; None: a fresh one.
            namespace: requests share cached prefixes only inside one namespace.
            priority: smaller is more urgent, under the `priority` policy.

        Returns:
            The request's id.

        Raises:
            InvalidRequestError: empty prompt, token id out of range, or a parameter out of range.
            ContextLengthExceededError: the prompt leaves no room for a single token.
            EngineOverloadedError: the queue is full.
        """
        group = self.intake.sampling_group(
            prompt, params or SamplingParams(), request_id=request_id, namespace=namespace, priority=priority
        )
        return self._queue(group)

    def _queue(self, group: RequestGroup) -> str:
        if not self.has_room:
            raise EngineOverloadedError(
                f"{self.scheduler.num_waiting} requests are waiting, the most allowed (--max-queue); "
                "try again later"
            )
        if group.request_id in self._groups:
            raise InvalidRequestError(f"a request with the id {group.request_id!r} is running already")
        self._groups[group.request_id] = group
        self.scheduler.add(group.samples[0])
        return group.request_id

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; its blocks are released at once. Unknown ids are ignored."""
        group = self._groups.get(request_id)
        if group is not None:
            try:
                for request in list(group.samples):
                    if not request.is_finished:
                        self._aborted += 1
                        self._end(request, "abort")
            except BaseException as error:
                self._faults.rebuild(error)
                if isinstance(error, ENDS_PROCESS):
                    raise

    @property
    def has_room(self) -> bool:
        """Whether the queue takes one more request."""
        return self.scheduler.num_waiting < self.config.max_queue

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def groups(self) -> list[RequestGroup]:
        """The unfinished requests, by arrival."""
        return list(self._groups.values())

    # ------------------------------------------------------------------ one step

    def step(self) -> StepResult:
        """Schedule, run, process: one model call at most."""
        outcome = None
        try:
            self._expire()
            batch = self._schedule()
            if batch is not None:
                outcome = self._run(batch)
                self._process(batch, outcome)
        except BaseException as error:
            # Not the model: the model's own failures are in the outcome. Something of ours is broken.
            self._last_model_end = None
            self._faults.rebuild(error)
            if isinstance(error, ENDS_PROCESS):
                raise
        if not self.has_work:
            self._last_model_end = None
        if outcome is not None and isinstance(outcome.error, ENDS_PROCESS):
            raise outcome.error
        return self.take_result()

    def take_result(self) -> StepResult:
        """What has been added since the last step, for example by `abort`."""
        result, self._result = self._result, StepResult()
        return result

    def _schedule(self) -> Batch | None:
        only = self._faults.next_suspect
        result = self.scheduler.schedule(only=only)
        for request in result.stuck:
            self.fail(
                sample_of(request),
                f"no KV block can be had for token {request.num_tokens + 1}: the cache has "
                f"{self.cache.stats.total_blocks} blocks, {self.cache.stats.pinned_blocks} of them pinned",
                code="out_of_kv_blocks",
            )
        if only is not None and result.batch is None:
            self._faults.acquit(only)
        return result.batch

    def _run(self, batch: Batch) -> _StepOutcome:
        """Model and sampler: what they gave, or why they failed."""
        started = self.clock()
        if self._last_model_end is not None:
            self._gap_time += started - self._last_model_end
        try:
            outcome = self._execute(batch)
        except BaseException as error:
            self._last_model_end = None
            return _StepOutcome(error=error)
        self._last_model_end = self.clock()
        self._model_time += self._last_model_end - started
        return outcome

    def _execute(self, batch: Batch) -> _StepOutcome:
        logits = self.runner.execute(batch)
        rows, requests = self._rows_to_sample(batch)
        return _StepOutcome(logits, requests, sample(logits, rows, requests))

    def _rows_to_sample(self, batch: Batch) -> tuple[list[int], list[Sample]]:
        """The logits row of every sample that gets a token; forks share their parent's row."""
        rows: list[int] = []
        requests: list[Sample] = []
        for entry, _, end in batch.logit_spans():
            if not entry.samples:
                continue
            request = sample_of(entry.request)
            requests.append(request)
            rows.append(end - 1)
            if request.num_forks:
                forks = self.intake.forks(request)
                requests.extend(forks)
                rows.extend([end - 1] * len(forks))
        return rows, requests

    def _process(self, batch: Batch, outcome: _StepOutcome) -> None:
        if outcome.error is not None or outcome.logits is None:
            assert outcome.error is not None
            self._faults.step_failed(batch, outcome.error)
            return
        self.scheduler.complete(batch)
        self._faults.step_passed(batch)
        now = self.clock()
        for entry, first, end in batch.logit_spans():
            request = sample_of(entry.request)
            if request.times.first_scheduled is None:
                request.times.first_scheduled = now
            if request.needs_prompt_logits:
                start = entry.start + entry.count - entry.num_logits
                self._collect_prompt_logprobs(request, start, outcome.logits[first:end])
        # Forks take their lease before their parent's next token is appended anywhere.
        for request in outcome.requests:
            if not request.was_added and not request.group.is_finished:
                request.group.samples.append(request)
                self.scheduler.add_fork(request, request.group.samples[0])
        for request, token in zip(outcome.requests, outcome.sampled, strict=True):
            request.num_forks = 0
            if not request.is_finished and request.was_added:
                self._append(request, token, now)

    def _append(self, request: Sample, token: SampledToken, now: float) -> None:
        if token.token_id < 0:
            self.fail(request, "the model's logits are not numbers (NaN) for this request", "nan_logits")
            return
        output = request.output
        logprobs: list[TokenLogprobs] | None = None
        try:
            request.sampling_state.accept(token.token_id)
        except ENDS_PROCESS:
            raise
        except BaseException as error:
            logger.error("the sampling state of %r failed", request, exc_info=error)
            self.fail(request, f"sampling failed on this request: {error}", "sampling_failed")
            return
        request.tokens.append(token.token_id)
        self._generated += 1
        if request.times.first_token is None:
            request.times.first_token = now
        try:
            text = output.push(token.token_id)
            if token.logprobs is not None:
                logprobs = [name_logprobs(token.logprobs.chosen, token.logprobs.top, self._token_text)]
                output.record_logprobs(logprobs[0])
        except ENDS_PROCESS:
            raise
        except BaseException as error:
            self._fail_decoding(request, error)
            return
        self._emit(request, text, [token.token_id], logprobs)
        if output.finish_reason is not None:
            self._finish(request, output.finish_reason)

    def _fail_decoding(self, request: Sample, error: BaseException) -> None:
        logger.error("decoding the output of %r failed", request, exc_info=error)
        self.fail(request, f"decoding the output failed: {error}", "detokenization_failed")

    def _token_text(self, token_id: int) -> str:
        return self.tokenizer.token_text(token_id) if self.tokenizer is not None else str(token_id)

    def _collect_prompt_logprobs(self, request: Sample, start: int, logits: torch.Tensor) -> None:
        """Logits at position p give the logprob of the prompt's token p + 1."""
        num_top = request.params.prompt_logprobs
        assert request.prompt_logprobs is not None
        assert num_top is not None
        end = min(start + len(logits), request.num_prompt_tokens - 1)
        first = len(request.prompt_logprobs) - 1  # position whose logits come next
        if end <= first:
            return
        tokens = request.tokens.view(first + 1, end + 1).tolist()
        found = gather_logprobs(logits[first - start : end - start], tokens, num_top)
        try:
            named = [name_logprobs(raw.chosen, raw.top, self._token_text) for raw in found]
        except ENDS_PROCESS:
            raise
        except BaseException as error:
            self._fail_decoding(request, error)
            return
        request.prompt_logprobs.extend(named)

    # ------------------------------------------------------------------ the end of a request

    def _emit(
        self,
        request: Sample,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
    ) -> None:
        if not request.group.is_ranked or request.output.finish_reason in ("error", "abort"):
            self._result.deltas.append(make_delta(request, text, token_ids, logprobs))

    def _end(self, request: Sample, reason: FinishReason, *, discard: bool = False) -> None:
        """End a sample from outside the model: abort, timeout, failure."""
        try:
            text = request.output.abort(reason)
        except ENDS_PROCESS:
            raise
        except BaseException:  # the decoder is what has failed: its last half character is lost
            text = ""
        self._emit(request, text, [], None)
        self._finish(request, reason, discard=discard)

    def fail(self, request: Sample, message: str, code: str, *, discard: bool = True) -> None:
        """End one request, all its samples, with an error; others are unharmed.

        Args:
            discard: what it computed is not to be trusted, and not cached.
        """
        group = request.group
        group.error, group.error_code = message, code
        for other in list(group.samples):
            if not other.is_finished:
                self._failed += 1
                self._end(other, "error", discard=discard)
        if discard:
            # Samples may have come to share what each computed, and a request may have been preempted before.
            for other in group.samples:
                self.cache.discard(other.tokens.view(), other.namespace, keep=other.num_cached_tokens)

    def _finish(self, request: Sample, reason: FinishReason, *, discard: bool = False) -> None:
        request.finish_reason = reason
        request.times.finished = self.clock()
        self.scheduler.finish(request, discard=discard)
        self._finished += reason in ("stop", "length")
        self._faults.acquit(request)
        group = request.group
        if group.is_finished:
            self.close_group(group)

    def close_group(self, group: RequestGroup) -> None:
        """All samples of a request have ended: deliver it."""
        if self._groups.pop(group.request_id, None) is None:
            return
        if group.is_ranked and all(s.finish_reason in ("stop", "length") for s in group.samples):
            self._result.deltas.extend(ranked_deltas(group))
        self._result.finished.append(collect_output(group))

    def _expire(self) -> None:
        limit = self.config.request_timeout_s
        if limit is None:
            return
        oldest = self.clock() - limit
        expired = []
        for group in self._groups.values():  # in the order of their arrival
            if group.samples[0].times.arrival >= oldest:
                break
            expired.append(group.samples[0])
        for request in expired:
            message = f"the request took longer than {limit:g} s (--request-timeout)"
            self.fail(request, message, "timeout", discard=False)

    # ------------------------------------------------------------------ figures

    def stats(self) -> EngineStats:
        """A snapshot of all counters; cheap."""
        scheduler = self.scheduler.stats
        return EngineStats(
            num_waiting=self.scheduler.num_waiting,
            num_running=self.scheduler.num_running,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.prompt_tokens,
            cached_prompt_tokens=scheduler.cached_prompt_tokens,
            computed_prompt_tokens=scheduler.computed_prompt_tokens,
            computed_tokens=scheduler.computed_tokens,
            generated_tokens=self._generated,
            finished_requests=self._finished,
            failed_requests=self._failed,
            aborted_requests=self._aborted,
            steps=scheduler.num_steps,
            model_time_s=self._model_time,
            gap_time_s=self._gap_time,
            num_rebuilds=self._faults.num_rebuilds,
            cache=self.cache.stats,
        )

    def check(self) -> None:
        """Assert every invariant of cache and scheduler."""
        self.cache.check()
        self.scheduler.check()
