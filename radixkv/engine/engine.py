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

`radixkv.engine.live_requests` gives the results of steps to requests and ends these. It also decides what
follows a fault, which is done here, in `_recovery`: no fault leaks a block or disturbs another request.
Extensions are called before, in and after each step: `radixkv.engine.hooks`.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from radixkv.cache.keys import NamespaceName, TokenIds
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.reporting.explain import MissReport
from radixkv.engine.adapters import AdapterRegistry
from radixkv.engine.config import EngineConfig
from radixkv.engine.counts import Counters, EngineStats
from radixkv.engine.hooks import StepHook
from radixkv.engine.input_processor import InputProcessor, PromptLimits
from radixkv.engine.live_requests import FaultRecovery, LiveRequests
from radixkv.engine.output_processor import StepResult
from radixkv.engine.runner import GivesMemoryBack, Runner
from radixkv.engine.served_model import ServedModel
from radixkv.engine.startup import EngineSummary
from radixkv.engine.step_pipeline import LaunchedStep, StepFailedError, StepPipeline
from radixkv.engine.weights import (
    TAGS,
    NewWeights,
    PauseMode,
    Tag,
    WeightReader,
    check_level,
    check_mode,
    check_tags,
)
from radixkv.errors import (
    ENDS_ENGINE,
    ContextLengthExceededError,
    EngineOverloadedError,
    EnginePausedError,
    InvalidRequestError,
    OutOfDeviceMemoryError,
    WeightUpdateError,
)
from radixkv.sampling.sampler import SampledToken
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.batch_check import check_batch
from radixkv.scheduling.policy import make_policy
from radixkv.scheduling.request import Failure, Prompt, Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence
from radixkv.scheduling.step_plan import SchedulerStats

logger = logging.getLogger("radixkv")

#: Set to 1, every step's plan is proven before it runs; a few per cent of a small model's step.
CHECK_STEPS = "RADIXKV_CHECK_STEPS"


class Engine:
    """Model, cache and step loop. Not thread-safe: `AsyncEngine` gives it a thread of its own.

    Args:
        config: the settings, with `max_num_batched_tokens` given.
        runner: computes the model.
        cache: the prefix cache over the runner's blocks.
        model: the model's tokenizer, names and limits.
        clock: seconds, monotonic.
        hooks: extensions, which end with the engine; see `radixkv.engine.hooks`.
        adapters: LoRA adapters by name; None: the engine takes none.
        weights: reads other weights for the runner; None: it can be given none.

    Attributes:
        paused: how it was paused; None: it runs.
        asleep: parts of it whose memory was given back.
        is_sleeping: True from `sleep`, at whichever level, until all is awake.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        cache: PrefixCache,
        model: ServedModel,
        *,
        clock: Callable[[], float] = time.monotonic,
        hooks: abc.Sequence[StepHook] = (),
        adapters: AdapterRegistry | None = None,
        weights: WeightReader | None = None,
    ) -> None:
        self.config = config
        self.runner = runner
        self.cache = cache
        self.model = model
        self.limits = PromptLimits(
            max_model_len=min(model.max_model_len, cache.num_blocks * cache.block_size),
            context_length=model.context_length or model.max_model_len,
            block_size=cache.block_size,
            vocab_size=model.vocab_size,
            lengths=model.lengths,
            takes_images=model.image_processor is not None,
        )
        self.clock = clock
        self.summary: EngineSummary | None = None  # set by the builder
        self.hooks = tuple(hooks)
        self.adapters = adapters or AdapterRegistry()
        self.paused: PauseMode | None = None
        self.asleep: frozenset[Tag] = frozenset()
        self.is_sleeping = False
        self._weights = weights
        self._weights_path: str | None = None  # of those that it has; None: the model's own
        self._has_weights = True
        self.input_processor = self._make_input_processor()
        self._checks_steps = os.environ.get(CHECK_STEPS) == "1"
        self._drafter = next((hook.drafter for hook in hooks if hook.drafter is not None), None)
        self._is_blocked = False  # nothing can be scheduled before a transfer ends, or time passes
        self._scheduler_over = partial(
            Scheduler,
            config=config,
            policy=make_policy(config.scheduling_policy, weights=config.namespace_weights),
            drafter=self._drafter,
            clock=clock,
        )
        self._faults = FaultRecovery()
        self._counters = Counters()
        self._requests = LiveRequests(
            model.tokenizer, clock, self.hooks, self._faults, self._drafter, self._counters, model.lengths
        )
        self.scheduler = self._make_scheduler()
        looks_ahead = config.async_scheduling
        if looks_ahead is None:
            looks_ahead = runner.device_name.startswith("cuda")
        self._steps = StepPipeline(runner, clock, self.input_processor.forks, looks_ahead=looks_ahead)

    def _make_input_processor(self) -> InputProcessor:
        itself, num_blocks = weakref.ref(self), self.cache.num_blocks

        def max_blocks(prompt: TokenIds, namespace: NamespaceName) -> int:
            # The processor outlives an engine that has failed, and must not keep its memory.
            engine = itself()
            return num_blocks if engine is None else engine.cache.max_blocks(prompt, namespace)

        return InputProcessor(
            self.limits,
            self.model.tokenizer,
            seed=self.config.seed,
            end_token_ids=self.model.end_token_ids,
            max_blocks=max_blocks,
            clock=self.clock,
            grammars=next((hook.grammars for hook in self.hooks if hook.grammars is not None), None),
            adapters=self.adapters,
        )

    def _make_scheduler(self, stats: SchedulerStats | None = None) -> Scheduler:
        for hook in self.hooks:
            hook.attach(self.cache)
        tier_loads = next((hook.tier_loads for hook in self.hooks if hook.tier_loads is not None), None)
        image_waits = next((hook.image_waits for hook in self.hooks if hook.image_waits is not None), None)
        scheduler = self._scheduler_over(
            self.cache, tier_loads=tier_loads, image_waits=image_waits, stats=stats
        )
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
            raise InvalidRequestError(f"{request!r} was added before; make another Request")
        if self.asleep or self.paused in ("abort", "wait"):
            what = "sleeps: wake it up first" if self.asleep else "is paused: resume it, or try again later"
            raise EnginePausedError(f"the engine {what}")
        self.input_processor.prepare(request)
        request.namespace = self.cache.namespace_key(request.namespace)
        self.input_processor.begin(request)
        if not self.has_room:
            request.samples = []
            raise EngineOverloadedError(
                f"{self.scheduler.num_waiting} requests are waiting, the most allowed (max_queue); "
                "try again later"
            )
        self._requests.add(request)
        self._is_blocked = False
        return request.request_id

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; its blocks are released at once. Unknown ids are ignored."""
        self._is_blocked = False
        for request in self._requests.unfinished(request_id):
            with self._recovery():  # each by itself: if one breaks something, the others still end
                self._requests.abort(request)

    def explain_by_tiers(
        self, report: MissReport, token_ids: TokenIds, namespace: NamespaceName
    ) -> MissReport | None:
        """Return a report of this moment with a tier's part of the missing tokens; None: it is undecided.

        Changes nothing. O(tokens).
        """
        explained: MissReport | None = report
        for hook in self.hooks:
            if explained is not None:
                explained = hook.explain(explained, token_ids, namespace)
        return explained

    @property
    def has_room(self) -> bool:
        """Return True if the queue takes one more request."""
        return self.scheduler.num_waiting < self.config.max_queue

    @property
    def has_work(self) -> bool:
        """Return True if a step would do something, or a transfer is awaited."""
        if self.runner.failure is not None:
            return True
        return not self.is_frozen and (self.scheduler.has_work or self._hooks_idle_s == 0.0)

    @property
    def is_frozen(self) -> bool:
        """Return True if no step is made: the engine sleeps, or was paused with its requests."""
        return bool(self.asleep) or self.paused == "keep"

    @property
    def idle_s(self) -> float | None:
        """Seconds until a step has something to do, unless a request comes or a transfer ends before.

        0.0: it has now. None: there is no limit.
        """
        if self.runner.failure is not None:
            return 0.0
        if self.is_frozen:
            return None
        if self.scheduler.has_work and not self._is_blocked:
            return 0.0
        return self._hooks_idle_s

    @property
    def _hooks_idle_s(self) -> float | None:
        limits = [idle_s for hook in self.hooks if (idle_s := hook.idle_s()) is not None]
        return min(limits, default=None)

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on any thread, when a step has work: a transfer has ended, or the runner failed."""
        for hook in self.hooks:
            hook.wake_with(wake)
        self.runner.on_failure(wake)

    def wait(self) -> None:
        """Sleep until a step would do something; for callers with nothing else to do."""
        idle_s = self.idle_s
        if idle_s != 0.0:
            for hook in self.hooks:
                hook.wait(idle_s)

    def close(self, *, save: bool = True) -> None:
        """End the hooks and the runner; the engine is not used any more. May be called again.

        A tier that was opened for it, from `config.kv_tier`, ends with it.

        Args:
            save: first save the cached blocks in the tier, as far as that takes ten seconds.
        """
        with ExitStack() as stack:  # each ends, even if another one fails to
            stack.callback(self.runner.close)
            for hook in reversed(self.hooks):
                stack.callback(hook.close, save=save)

    @property
    def requests(self) -> list[Request]:
        """The unfinished requests, by arrival."""
        return self._requests.all()

    # ------------------------------------------------------------------ pauses, weights, sleep

    def pause(self, mode: PauseMode) -> None:
        """Take no requests until `resume`.

        Args:
            mode: `abort` ends those that run or wait; `wait` lets them end, by further steps; `keep` makes no
                step until `resume`, and takes requests meanwhile, which wait.

        Raises:
            InvalidRequestError: there is no such mode.
        """
        check_mode(mode)
        self.paused = mode
        self._is_blocked = False
        if mode == "abort":
            for request in self.requests:
                self.abort(request.request_id)

    def resume(self) -> None:
        """Go on after a pause; nothing happens while the engine sleeps, or if it runs."""
        if not self.asleep:
            self.paused, self.is_sleeping = None, False

    def read_weights(self, path: str | None) -> NewWeights:
        """Read other weights for the model, beside those that serve; see `WeightReader`. Any thread.

        Raises:
            WeightUpdateError: they can't be read, don't fit the model, or several ranks compute it.
        """
        if self._weights is None:
            raise WeightUpdateError(
                "This engine's weights can't be changed while it runs, since several ranks have a share of "
                "them (tensor_parallel): restart it with the new ones"
            )
        return self._weights.read(path)

    def use_weights(self, new: NewWeights) -> None:
        """Compute with other weights from the next step on.

        What was computed with the earlier ones is unreachable at once: all blocks are free, and namespaces
        get the new model's fingerprint. Requests that are there go on with the tokens they have; all of
        these are computed again.

        Raises:
            WeightUpdateError: they don't fit the model; nothing was changed.
        """
        with self._recovery():
            self._finish_step_ahead()
        if "weights" in self.asleep:
            assert isinstance(self.runner, GivesMemoryBack)
            self.runner.restore(weights=True, kv=False)
        new.install()
        self._weights_path, self._has_weights = new.path, True
        self.asleep -= {"weights"}
        earlier, fingerprint = self.model.fingerprint, new.fingerprint
        self.model = replace(self.model, fingerprint=fingerprint)
        for request in self.requests:
            for owner in (request, *request.samples):
                owner.namespace = _of_model(owner.namespace, earlier, fingerprint)
            for sample in request.samples:
                if sample.needs_prompt_logits:
                    sample.prompt_logprobs = [None]  # all of them by these weights
        self._start_over(self.cache.rebuilt(fingerprint))

    def sleep(self, level: int) -> None:
        """Give memory back until `wake_up`: of K/V, and at level 2 of the weights. It takes no requests.

        Cached prefixes are forgotten; requests that are there go on once it is awake. At level 0 it is only
        paused. On a GPU, level 1 moves weights to the CPU's memory; on a CPU they stay where they are.

        Raises:
            InvalidRequestError: there is no such level, or the runner can give back nothing.
        """
        check_level(level)
        if level and self._weights is None:
            raise InvalidRequestError(
                "several ranks (tensor_parallel) give no memory back: only sleep level 0", param="level"
            )
        self.paused, self.is_sleeping = self.paused or "keep", True
        if not level:
            return
        assert isinstance(self.runner, GivesMemoryBack)
        with self._recovery():
            self._finish_step_ahead()
        self._start_over(self.cache.rebuilt())
        if not self.asleep or (level == 2 and self._has_weights):
            self.runner.release(weights=level == 2)
        self.asleep = TAGS
        self._has_weights = self._has_weights and level < 2

    @property
    def lacks_weights(self) -> bool:
        """Return True if its weights were given up by `sleep`: `wake_up` needs them read again."""
        return not self._has_weights

    @property
    def weights_path(self) -> str | None:
        """Path of the weights that were read last; None: the model's own files."""
        return self._weights_path

    def wake_up(self, tags: abc.Collection[Tag] | None = None, weights: NewWeights | None = None) -> None:
        """Take memory again that `sleep` gave back; with the last part of it the engine resumes.

        Args:
            tags: parts to wake; None: all.
            weights: where the engine lacks them and they are to wake: read from `weights_path`.

        Raises:
            InvalidRequestError: there is no such part.
        """
        waking = check_tags(tags) & self.asleep
        if waking:
            assert isinstance(self.runner, GivesMemoryBack)
            if "weights" in waking and not self._has_weights:
                assert weights is not None, "the weights were given up: read them first"
                self.use_weights(weights)
            self.runner.restore(weights="weights" in waking, kv="kv_cache" in waking)
        self.asleep -= waking
        if not self.asleep:
            self.resume()

    def _finish_step_ahead(self) -> None:
        """Give out the tokens of a step that runs already, and launch none."""
        step = self._steps.launched_ahead()
        if step is not None:
            self.scheduler.begin_ahead(step.batch)
            self._process(step, self._steps.wait(step))

    # ------------------------------------------------------------------ one step

    def step(self) -> StepResult:
        """Schedule, run, process the tokens of one step; the next one may run meanwhile.

        Raises:
            KeyboardInterrupt, SystemExit: the step was rolled back; the next one goes on.
            EngineStoppedError: the runner has failed for good; the engine can only be closed.
        """
        if self.runner.failure is not None:
            raise self.runner.failure
        with self._recovery():
            for hook in self.hooks:
                hook.before_step()
            self._requests.expire(self.config.request_timeout_s)
            step = self._steps.launched_ahead()
            if step is None:
                step = self._steps.launch(self._schedule())
            else:
                self.scheduler.begin_ahead(step.batch)
            if step is not None:
                self._steps.launch_ahead(step, self._schedule_ahead)
                self._process(step, self._steps.wait(step))
            for hook in self.hooks:
                hook.after_step(self.cache)
        if self._is_blocked or not self.has_work:
            self._counters.pause()
        self._steps.raise_interruption()
        return self.take_result()

    def take_result(self) -> StepResult:
        """Take the outputs added since the last step, for example by `abort`."""
        return self._requests.output.take_result()

    def _schedule(self) -> Batch | None:
        """Plan a step whose tokens are all known; None: there is nothing to do."""
        alone = self._faults.next_alone
        plan = self.scheduler.schedule(only=alone)
        for request in plan.stuck:
            self._end_stuck(request)
        is_idle = alone is None and plan.batch is None and not plan.stuck
        self._is_blocked = is_idle and self.scheduler.waits_for_transfers
        if alone is not None and plan.batch is None:
            self._faults.clear(alone)
        return self._checked(plan.batch)

    def _schedule_ahead(self, batch: Batch) -> Batch | None:
        """Plan the step after one that runs; None: its tokens must be known first."""
        if self._faults.next_alone is not None:
            return None
        guessing = None if self._drafter is None else self._drafter.guessing
        return self._checked(self.scheduler.schedule_ahead(batch, guessing))

    def _checked(self, batch: Batch | None) -> Batch | None:
        """Return a planned batch with the length classes of its requests."""
        if batch is not None:
            if self._checks_steps:
                check_batch(batch, self.cache.block_size)
            if self.limits.lengths is not None:
                self.limits.lengths.mark(batch, self.cache)
        return batch

    def _process(self, step: LaunchedStep, runs: abc.Sequence[abc.Sequence[SampledToken]]) -> None:
        """Give the tokens of a step to its requests."""
        seconds = self._counters.model_called(step.started, self.clock())
        self.scheduler.step_computed(step.batch.num_tokens, seconds)
        for hook in self.hooks:
            hook.computed(step.batch, seconds)
        self._requests.process(step, runs)
        if self._steps.looks_ahead:
            self.scheduler.update_rows(step.batch.entries)

    def _end_stuck(self, sample: Sequence) -> None:
        """End a request that can get no block: an answer that has begun ends here, another one fails."""
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
        """Take a step back in which runner or sampler failed: its requests wait again."""
        self._counters.pause()
        entries = self.scheduler.rollback(batch)
        if isinstance(error, OutOfDeviceMemoryError) and self.scheduler.lower_budget(batch.num_tokens):
            logger.warning(
                "no memory for a step of %d tokens: steps have at most %d from now on. Lower "
                "--gpu-memory-utilization or --max-num-batched-tokens",
                batch.num_tokens,
                self.scheduler.max_num_batched_tokens,
            )
            return
        if not isinstance(error, ENDS_ENGINE):
            logger.error("a step of %d requests failed", len(batch.entries), exc_info=error)
        for request, failure in self._faults.step_failed(entries, error):
            self._requests.fail(request, failure)

    @contextmanager
    def _recovery(self) -> Iterator[None]:
        """Recover from what fails in this block: roll a failed step back, or else rebuild the cache.

        Raises:
            BaseException: what ends the process or the engine, once all is in order again.
        """
        try:
            yield
            return
        except StepFailedError as failed:
            error = failed.error
            with self._recovery():
                self._rollback(failed.batch, error)
        except BaseException as broken:
            error = broken
            self._rebuild(broken)
        if isinstance(error, ENDS_ENGINE):
            raise error

    def _rebuild(self, error: BaseException) -> None:
        """Give up the cache's contents after a broken invariant; keep every request. O(requests)."""
        logger.error("broken invariant, rebuilding the cache: %s", error, exc_info=error)
        self._counters.num_rebuilds += 1
        unfinished = self._start_over(self.cache.rebuilt())
        for request in self.requests:
            if request.is_finished:  # the fault came while it ended
                self._requests.close(request)
        for sample, failure in self._faults.invariant_broke(unfinished, error):
            self._requests.fail(sample, failure)

    def _start_over(self, cache: PrefixCache) -> list[Sequence]:
        """Put an empty cache in the place of this one, and queue all requests again; return their samples."""
        self._counters.pause()
        unfinished: list[Sequence] = []
        for request in self.requests:
            request.forget_unborn_samples()
            unfinished.extend(request.unfinished())
        unfinished.sort(key=lambda sample: sample.arrival_order)
        self.cache = cache
        self._steps.discard()
        budget = self.scheduler.max_num_batched_tokens  # what the device has memory for
        self.scheduler = self._make_scheduler(self.scheduler.stats)
        self.scheduler.max_num_batched_tokens = budget
        for sample in unfinished:
            sample.preempt()
            sample.arrival_order = -1
            self.scheduler.add(sample)
        self._is_blocked = False
        return unfinished

    # ------------------------------------------------------------------ figures

    def stats(self) -> EngineStats:
        """Return a snapshot of all counters; cheap."""
        output = self._requests.output
        stats = self._counters.snapshot(self.scheduler, output.num_generated, self.cache.stats)
        for hook in self.hooks:
            hook.add_counts(stats)
        return stats

    def check(self) -> None:
        """Assert every invariant of cache and scheduler."""
        self.cache.check()
        self.scheduler.check()


def _of_model(namespace: NamespaceName, earlier: str, model: str) -> NamespaceName:
    """Return a namespace with its model, if it names one, replaced."""
    if not isinstance(namespace, tuple) or len(namespace) < 4 or namespace[3] != earlier:
        return namespace
    return (*namespace[:3], model, *namespace[4:])
