# SPDX-License-Identifier: Apache-2.0
"""The engine: owns cache, scheduler, runner and sampler, and steps them.

The life of a request:

 1. `add` checks it, tokenises the prompt and queues it. A bad request is refused here, before
    anything is held for it.
 2. `step` asks the scheduler for a batch. Admission gives the request its lease on cached and new blocks.
 3. The runner makes the batch's copies, writes its K/V into its slots and attends, all layers; it returns the
    logits of the rows that finish a request's known tokens.
 4. The sampler chooses tokens. The first token of a request with `n` samples forks it.
 5. Each token is decoded to text; stop conditions are checked; a delta goes out.
 6. A finished request releases its lease. Its computed prefix stays cached, evictable.

What steps bring to requests, and how these end, is in `radixkv.engine.live_requests`. What to do about faults
is decided in `radixkv.engine.live_requests` and done here, in `_rollback` and `_rebuild`. None of them leaks
a block or disturbs another request.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from radixkv.cache.keys import NamespaceName, TokenIds
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.reporting.explain import MissReport
from radixkv.engine.adapters import Adapters
from radixkv.engine.counts import Counters, EngineStats
from radixkv.engine.extensions import BlockTiers, Drafts, EventFeed, Grammars
from radixkv.engine.input_processor import InputProcessor, PromptLimits
from radixkv.engine.live_requests import FaultRecovery, LiveRequests
from radixkv.engine.output_processor import Sample, StepResult, sample_of
from radixkv.engine.runner import Runner
from radixkv.engine.step_pipeline import StepPipeline, decodes_that_go_on
from radixkv.errors import (
    ENDS_ENGINE,
    ContextLengthExceededError,
    EngineOverloadedError,
    InvalidRequestError,
)
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.policy import make_policy
from radixkv.scheduling.request import Failure, Prompt, Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.step_plan import SchedulerStats

if TYPE_CHECKING:
    from radixkv.engine.config import EngineConfig
    from radixkv.engine.startup import EngineSummary
    from radixkv.scheduling.length_classes import LengthClasses
    from radixkv.text.tokenizer import Tokenizer

logger = logging.getLogger("radixkv")

#: Set to 1, every step's plan is proven before it runs; a few per cent of a small model's step.
CHECK_STEPS = "RADIXKV_CHECK_STEPS"


class Engine:
    """A model, a cache, a loop. Not thread-safe: `AsyncEngine` gives it a thread of its own.

    Args:
        config: the settings.
        runner: the model side.
        cache: the prefix cache over the runner's blocks.
        tokenizer: None for token-id prompts without text (tests, benchmarks).
        max_model_len: longest prompt plus output, in tokens.
        context_length: the most that the model is made for, or the settings allow, where the cache's pool
            does not hold as much; None: `max_model_len`.
        max_num_batched_tokens: token budget of a step.
        vocab_size: token ids must be below it; None: unchecked.
        end_token_ids: the model's end-of-sequence tokens.
        model_fingerprint: identifies configuration, weights and dtype; empty: unknown.
        default_sampling: arguments of SamplingParams for requests that don't give them.
        clock: seconds, monotonic.
        drafts, grammars, tiers, events: see `radixkv.engine.extensions`; they end with the engine.
        adapters: see `radixkv.engine.adapters`.
        lengths: see `PromptLimits`.
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
        context_length: int | None = None,
        vocab_size: int | None = None,
        end_token_ids: Sequence[int] = (),
        model_name: str = "",
        model_fingerprint: str = "",
        default_sampling: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        drafts: Drafts | None = None,
        grammars: Grammars | None = None,
        tiers: BlockTiers | None = None,
        events: EventFeed | None = None,
        adapters: Adapters | None = None,
        lengths: LengthClasses | None = None,
    ) -> None:
        self.config = config
        self.runner = runner
        self.cache = cache
        self.tokenizer = tokenizer
        self.limits = PromptLimits(
            max_model_len=min(max_model_len, cache.num_blocks * cache.block_size),
            context_length=context_length or max_model_len,
            block_size=cache.block_size,
            vocab_size=vocab_size,
            lengths=lengths,
        )
        self.default_sampling = dict(default_sampling or {})
        self.end_token_ids = frozenset(end_token_ids)
        self.model_name = model_name
        self.model_fingerprint = model_fingerprint
        self.clock = clock
        self.summary: EngineSummary | None = None  # set by the builder
        self.adapters = adapters or Adapters()
        self.input_processor = self._make_input_processor(Grammars() if grammars is None else grammars)
        self._check_batch = _batch_check() if os.environ.get(CHECK_STEPS) == "1" else None
        self._drafts = drafts or Drafts()
        self._tiers = tiers or BlockTiers()
        self._events = events or EventFeed()
        self._scheduler_over = partial(
            Scheduler,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_tokens_per_request=config.max_tokens_per_request,
            policy=make_policy(config.scheduling_policy, weights=config.namespace_weights),
            max_overtake=config.max_overtake,
            long_prompt_tokens=config.long_prompt_tokens,
            max_long_overtake=config.max_long_overtake,
            drafter=self._drafts.proposer,
            clock=clock,
        )
        self._faults = FaultRecovery()
        self._counters = Counters()
        self._requests = LiveRequests(
            tokenizer, clock, self._tiers, self._faults, self._drafts, self._counters, lengths
        )
        self.scheduler = self._make_scheduler()
        looks_ahead = config.async_scheduling
        if looks_ahead is None:
            looks_ahead = runner.device_name.startswith("cuda")
        self._steps = StepPipeline(runner, clock, self.input_processor.forks, looks_ahead=looks_ahead)
        self._events.attach(cache)

    def _make_input_processor(self, grammars: Grammars) -> InputProcessor:
        itself, num_blocks = weakref.ref(self), self.cache.num_blocks

        def max_blocks(prompt: TokenIds, namespace: NamespaceName) -> int:
            # The processor outlives an engine that has failed, and must not keep its memory.
            engine = itself()
            return num_blocks if engine is None else engine.cache.max_blocks(prompt, namespace)

        return InputProcessor(
            self.limits,
            self.tokenizer,
            seed=self.config.seed,
            end_token_ids=self.end_token_ids,
            max_blocks=max_blocks,
            clock=self.clock,
            grammars=grammars,
            adapters=self.adapters,
        )

    def _make_scheduler(self, stats: SchedulerStats | None = None) -> Scheduler:
        self._drafts.attach(self.cache)
        waits = self._tiers.attach(self.cache)
        scheduler = self._scheduler_over(self.cache, tier_waits=waits, stats=stats)
        self._requests.attach(self.cache, scheduler)
        return scheduler

    # ------------------------------------------------------------------ requests in

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> str:
        """Make a request of a prompt and queue it; see `Request` for its options, and `add`."""
        return self.add(Request(prompt, params or SamplingParams(), **options))

    def add(self, request: Request) -> str:
        """Check a request and queue it.

        Returns:
            The request's id.

        Raises:
            InvalidRequestError: empty prompt, token id out of range, or a parameter out of range or refused.
            ContextLengthExceededError: the prompt leaves no room for a single token.
            EngineOverloadedError: the queue is full.
        """
        if request.samples:
            raise InvalidRequestError(f"{request!r} was taken before; make another Request")
        self.input_processor.prepare(request)
        request.namespace = self.cache.namespace_key(request.namespace)
        self.input_processor.begin(request)
        if not self.has_room:
            request.samples = []
            raise EngineOverloadedError(
                f"{self.scheduler.num_waiting} requests are waiting, the most allowed (--max-queue); "
                "try again later"
            )
        self._requests.add(request)
        return request.request_id

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; its blocks are released at once. Unknown ids are ignored."""
        for request in self._requests.unfinished(request_id):
            with self._repairing():  # each by itself: if one breaks something, the others still end
                self._requests.abort(request)

    def explain_by_tiers(
        self, report: MissReport, token_ids: TokenIds, namespace: NamespaceName
    ) -> MissReport | None:
        """Return a report of this moment with a tier's part of the missing tokens; None: it is undecided.

        Changes nothing. O(tokens).
        """
        return self._tiers.explain(report, token_ids, namespace)

    @property
    def has_room(self) -> bool:
        """Return True if the queue takes one more request."""
        return self.scheduler.num_waiting < self.config.max_queue

    @property
    def has_work(self) -> bool:
        """Return True if a step would do something, or a transfer is awaited."""
        return self.scheduler.has_work or self._tiers.is_due or self.runner.failure is not None

    @property
    def idle_s(self) -> float | None:
        """For how many seconds a step would do nothing, unless a request comes or a transfer ends.

        0.0: there is something to do now. None: there is no limit.
        """
        if self.runner.failure is not None or (self.scheduler.has_work and not self._tiers.is_blocked):
            return 0.0
        return self._tiers.idle_s()

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on any thread, when a transfer has ended or the runner failed: something is to do."""
        self._tiers.wake_with(wake)
        self.runner.on_failure(wake)

    def wait(self) -> None:
        """Sleep until a step would do something; for callers with nothing else to do."""
        idle_s = self.idle_s
        if idle_s != 0.0:
            self._tiers.wait(idle_s)

    def close(self, *, save: bool = True) -> None:
        """Give up all transfers between tier and cache; the engine is not used any more.

        A tier that was opened for it, from `config.kv_tier`, ends with it. May be called again.

        Args:
            save: first save the cached blocks in the tier, as far as that takes ten seconds.
        """
        try:
            self._tiers.close(save=save)
        finally:
            self.runner.close()
        self._events.close()

    @property
    def requests(self) -> list[Request]:
        """The unfinished requests, by arrival."""
        return self._requests.all()

    # ------------------------------------------------------------------ one step

    def step(self) -> StepResult:
        """Schedule, run, process the tokens of one step; the next one may run meanwhile.

        Raises:
            KeyboardInterrupt, SystemExit: the step was rolled back; the next one goes on.
            EngineStoppedError: the runner has failed for good; the engine can only be closed.
        """
        error: BaseException | None = self.runner.failure
        if error is not None:
            raise error
        with self._repairing():
            self._tiers.begin_step()
            if self.config.request_timeout_s is not None:
                self._requests.expire(self.config.request_timeout_s)
            step = self._steps.next(self._schedule, self._schedule_ahead)
            if step is not None:
                error = step.outcome.error
                if error is None:
                    seconds = self._counters.model_called(step.started, self.clock())
                    self._tiers.computed(step.batch, seconds)
                    self.scheduler.took(step.batch.num_tokens, seconds)
                    self._requests.take_step(step.batch, step.outcome)
                    if self._steps.looks_ahead:
                        self.scheduler.update_rows(entry.request for entry in step.batch.entries)
                else:
                    self._rollback(step.batch, error)
            self._tiers.end_step()
            self._events.keep_up(self.cache)
        if self._tiers.is_blocked or not self.has_work:
            self._counters.pause()
        error = self._steps.interruption or error
        if isinstance(error, ENDS_ENGINE):
            raise error
        return self.take_result()

    def take_result(self) -> StepResult:
        """Take the outputs added since the last step, for example by `abort`."""
        return self._requests.output.take_result()

    def _schedule(self) -> Batch | None:
        alone = self._faults.next_alone
        result = self.scheduler.schedule(only=alone)
        if self._check_batch is not None and result.batch is not None:
            self._check_batch(result.batch, self.cache.block_size)
        for request in result.stuck:
            self._end_stuck(sample_of(request))
        self._tiers.scheduled(anything=alone is not None or result.batch is not None or bool(result.stuck))
        if alone is not None and result.batch is None:
            self._faults.clear(alone)
        return self._marked(result.batch)

    def _schedule_ahead(self, batch: Batch) -> Batch | None:
        """The step after that of a batch whose tokens are not known; None where they must be known first."""
        if self._faults.next_alone is not None:
            return None
        going_on = decodes_that_go_on(batch.entries)
        if not going_on or self._drafts.would_guess(going_on):
            return None
        ahead = self.scheduler.schedule_ahead(going_on, len(batch.entries) - len(going_on))
        if self._check_batch is not None and ahead is not None:
            self._check_batch(ahead, self.cache.block_size)
        return self._marked(ahead)

    def _marked(self, batch: Batch | None) -> Batch | None:
        if batch is not None and self.limits.lengths is not None:
            self.limits.lengths.mark(batch, self.cache)
        return batch

    def _end_stuck(self, sample: Sample) -> None:
        """End a request for which no block can be had: an answer that has begun is as long as it can be."""
        if sample.is_finished:
            return
        if sample.num_tokens > sample.num_prompt_tokens:
            self._requests.end(sample, "length")
            return
        try:  # its ceiling may have been lowered since it came
            self.input_processor.check_quota(sample.request)
        except ContextLengthExceededError as error:
            failure = Failure(str(error), str(error.code))
        else:
            stats = self.cache.stats
            failure = Failure(
                f"the prompt needs {-(-sample.num_tokens // self.cache.block_size)} KV blocks, and so many "
                f"can't be had now: of {stats.total_blocks}, {stats.pinned_blocks} are pinned, and others' "
                "quotas keep theirs (floor_blocks); try again later, or shorten it",
                "out_of_kv_blocks",
            )
        self._requests.fail(sample, failure, discard=False)

    # ------------------------------------------------------------------ faults

    def _rollback(self, batch: Batch, error: BaseException) -> None:
        """Runner or sampler failed: nothing of the step counts, and its requests wait again."""
        self._counters.pause()
        requests = [sample_of(request) for request in self.scheduler.rollback(batch)]
        if not isinstance(error, ENDS_ENGINE):
            logger.error("a step of %d requests failed", len(batch.entries), exc_info=error)
        for request, failure in self._faults.step_failed(requests, error):
            self._requests.fail(request, failure)

    @contextmanager
    def _repairing(self) -> Iterator[None]:
        """Treat exceptions in this block as internal errors: no runner or sampler caused them."""
        try:
            yield
        except BaseException as error:
            self._rebuild(error)
            if isinstance(error, ENDS_ENGINE):
                raise

    def _rebuild(self, error: BaseException) -> None:
        """A broken invariant: give up the cache's contents, keep every request. O(waiting and running)."""
        logger.error("broken invariant, rebuilding the cache: %s", error, exc_info=error)
        self._counters.num_rebuilds += 1
        self._counters.pause()
        unfinished: list[Sample] = []
        for request in self.requests:
            request.forget_unborn_samples()
            unfinished.extend(request.unfinished())
        unfinished.sort(key=lambda sample: sample.arrival_order)
        self._tiers.drop_transfers()
        self.cache = self.cache.rebuilt()
        self._events.attach(self.cache)
        self._steps.discard()
        self.scheduler = self._make_scheduler(self.scheduler.stats)
        for sample in unfinished:
            sample.preempt()
            sample.was_added = False
            self.scheduler.add(sample)
        for request in self.requests:
            if request.is_finished:  # it broke while it ended
                self._requests.close(request)
        for sample, failure in self._faults.invariant_broke(unfinished, error):
            self._requests.fail(sample, failure)

    # ------------------------------------------------------------------ figures

    def stats(self) -> EngineStats:
        """A snapshot of all counters; cheap."""
        transfers, tiers = self._tiers.counts()
        return self._counters.snapshot(
            self.scheduler,
            self._requests.output.num_generated,
            self.cache.stats,
            self._drafts.snapshot(),
            transfers,
            tiers,
            self._events.counts,
        )

    def check(self) -> None:
        """Assert every invariant of cache and scheduler."""
        self.cache.check()
        self.scheduler.check()


def _batch_check() -> Callable[[Batch, int], None]:
    """Return what proves that the plan of a step is sound."""
    from radixkv.scheduling.batch_check import check_batch

    return check_batch
