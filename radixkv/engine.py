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

Abort, timeout and failure enter at one place each: `abort`, `_expire`, `_recover`. None of them leaks a block
or disturbs another request.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from radixkv.beam_driver import BeamDriver, Candidates, beam_sampling_params
from radixkv.beam_search import BeamSearch, BeamSearchParams
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.errors import (
    ContextLengthExceededError,
    EngineOverloadedError,
    InvalidRequestError,
)
from radixkv.execution.sampler import SampledToken, SamplingState, gather_logprobs, sample
from radixkv.output_processing import SampleOutput, name_logprobs
from radixkv.request import FinishReason, OutputDelta, RequestOutput, SamplingParams, TokenLogprobs
from radixkv.request_group import EngineStats, RequestGroup, StepResult, collect_output, rank_samples
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.request_state import Namespace, Request
from radixkv.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    import torch

    from radixkv.engine_builder import EngineSummary
    from radixkv.tokenization import Tokenizer

logger = logging.getLogger("radixkv")


class Runner(Protocol):
    """The model side of a step."""

    def execute(self, batch: Batch) -> torch.Tensor:
        """Logits [S, V] of `batch.logit_rows`."""
        ...


@dataclass(slots=True)
class _StepOutcome:
    """What the model and the sampler gave: a token for each of `requests`, candidates for each of `beams`."""

    logits: torch.Tensor
    requests: list[Request]
    sampled: list[SampledToken] = field(default_factory=list)
    beams: list[Request] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)


class Engine:
    """One model, one cache, one loop. Not thread-safe: `AsyncEngine` gives it a thread of its own.

    Args:
        config: the settings.
        runner: the model side; see `radixkv.execution.model_runner`.
        cache: the prefix cache over the runner's blocks.
        tokenizer: None for token-id prompts without text (tests, benchmarks).
        max_model_len: longest prompt plus output, in tokens.
        max_num_batched_tokens: token budget of a step.
        vocab_size: token ids must be below it; None: unchecked.
        end_token_ids: the model's end-of-sequence tokens.
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
        self.clock = clock
        self.summary: EngineSummary | None = None  # set by engine_builder
        self._max_num_batched_tokens = max_num_batched_tokens
        self.scheduler = self._make_scheduler()
        self._groups: dict[str, RequestGroup] = {}
        self._ids = itertools.count()
        self._seeds = itertools.count(config.seed if config.seed is not None else secrets.randbits(62))
        self._suspects: list[Request] = []
        self._beams = BeamDriver(self)
        self._result = StepResult()
        self._generated = self._finished = self._failed = self._aborted = self._rebuilds = 0
        self._model_time = self._gap_time = 0.0
        self._last_model_end: float | None = None

    def _make_scheduler(self) -> Scheduler:
        config = self.config
        return Scheduler(
            self.cache,
            max_num_batched_tokens=self._max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_tokens_per_request=config.max_tokens_per_request,
            policy=config.scheduling_policy,
            max_overtake=config.max_overtake,
        )

    # ------------------------------------------------------------------ requests in

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        namespace: Namespace = "",
        priority: int = 0,
    ) -> str:
        """Check a request and queue it.

        Args:
            prompt: text, or token ids.
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
        params = params or SamplingParams()
        text = prompt if isinstance(prompt, str) else None
        token_ids = self._tokenize(prompt)
        self.check_request(token_ids, params)
        # Ranking the samples of best_of needs their logprobs, whether or not the user asked for them.
        own = params
        if params.num_samples > params.n and params.logprobs is None:
            own = replace(params, logprobs=0)
        request = self._make_request(token_ids, own, request_id, namespace, priority)
        request.num_forks = params.num_samples - 1
        seed = params.seed if params.seed is not None else next(self._seeds)
        request.sampling_state = SamplingState(params, seed, token_ids, self._end_tokens(params))
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        return self._queue(request, RequestGroup(request.request_id, text, params, [request]))

    def add_beam_search(
        self,
        prompt: str | Sequence[int],
        params: BeamSearchParams,
        *,
        request_id: str | None = None,
        namespace: Namespace = "",
        priority: int = 0,
    ) -> str:
        """Queue a beam search; its prompt is computed once, its beams share blocks. As `add_request`.

        Beams are delivered together in the finished output, best first: there are no increments.
        """
        text = prompt if isinstance(prompt, str) else None
        token_ids = self._tokenize(prompt)
        own = beam_sampling_params(params.max_tokens)
        self.check_request(token_ids, own)
        if params.beam_width > self.config.max_num_seqs:
            raise InvalidRequestError(
                f"{params.beam_width} beams were asked for, but at most {self.config.max_num_seqs} requests "
                "run at once",
                param="beam_width",
            )
        request = self._make_request(token_ids, own, request_id, namespace, priority)
        search = BeamSearch(
            params,
            end_token_ids=self.end_token_ids,
            max_new_tokens=min(params.max_tokens, self.max_model_len - len(token_ids)),
        )
        return self._queue(request, RequestGroup(request.request_id, text, own, [request], beams=search))

    def _make_request(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        namespace: Namespace,
        priority: int,
    ) -> Request:
        if self.scheduler.num_waiting >= self.config.max_queue:
            raise EngineOverloadedError(
                f"{self.scheduler.num_waiting} requests are waiting, the most allowed (--max-queue); "
                "try again later"
            )
        request_id = request_id if request_id is not None else f"req-{next(self._ids)}"
        if request_id in self._groups:
            raise InvalidRequestError(f"a request with the id {request_id!r} is running already")
        request = Request(
            request_id, token_ids, params, namespace=namespace, priority=priority, arrival_s=self.clock()
        )
        request.output = self._make_output(request)
        return request

    def _queue(self, request: Request, group: RequestGroup) -> str:
        request.group = group
        self._groups[group.request_id] = group
        self.scheduler.add(request)
        return group.request_id

    def _tokenize(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError("this engine has no tokenizer: give token ids", param="prompt")
            return self.tokenizer.encode(prompt)
        return list(prompt)

    def check_request(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise what `add_request` would raise for this prompt; changes nothing."""
        if len(token_ids) == 0:
            raise InvalidRequestError("the prompt is empty; give at least one token", param="prompt")
        limit = self.vocab_size if self.vocab_size is not None else 2**31
        if min(token_ids) < 0 or max(token_ids) >= limit:
            bad = next(token for token in token_ids if not 0 <= token < limit)
            raise InvalidRequestError(
                f"token id {bad} is out of range: this model has ids 0 to {limit - 1}", param="prompt"
            )
        if len(token_ids) >= self.max_model_len:
            raise ContextLengthExceededError(
                f"the prompt has {len(token_ids)} tokens, but this model's context is {self.max_model_len} "
                f"tokens with at least one to generate; shorten it to {self.max_model_len - 1} tokens",
            )
        for name, ids in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if token >= limit:
                    raise InvalidRequestError(
                        f"{name} names token {token}, but this model has ids 0 to {limit - 1}", param=name
                    )
        samples = params.num_samples
        if samples > 1 and samples > self.config.max_num_seqs:
            raise InvalidRequestError(
                f"{samples} samples were asked for, but at most {self.config.max_num_seqs} run at once",
                param="n",
            )
        needed = -(-(len(token_ids) + 1) // self.cache.block_size)
        total = self.cache.stats.total_blocks - self.cache.stats.pinned_blocks
        if needed > total:
            raise ContextLengthExceededError(
                f"the prompt needs {needed} KV blocks of {self.cache.block_size} tokens, but only {total} can "
                "ever be free for it; shorten the prompt, or raise --kv-cache-memory or --num-blocks"
            )

    def _end_tokens(self, params: SamplingParams) -> list[int]:
        own = () if params.ignore_eos else self.end_token_ids
        return [*own, *params.stop_token_ids]

    def _make_output(self, request: Request) -> SampleOutput:
        params = request.params
        room = self.max_model_len - request.num_prompt_tokens
        return SampleOutput(
            params,
            self.tokenizer,
            frozenset() if params.ignore_eos else self.end_token_ids,
            room if params.max_tokens is None else min(params.max_tokens, room),
        )

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; its blocks are released at once. Unknown ids are ignored."""
        group = self._groups.get(request_id)
        if group is not None:
            for request in list(group.samples):
                if not request.is_finished:
                    self._aborted += 1
                    self._end(request, "abort")

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # ------------------------------------------------------------------ one step

    def step(self) -> StepResult:
        """Schedule, run, process: one model call at most."""
        self._expire()
        batch = self._schedule()
        if batch is not None:
            try:
                sampled = self._run(batch)
            except Exception as error:
                self._recover(batch, error)
            else:
                self._process(batch, sampled)
        if not self.has_work:
            self._last_model_end = None
        return self.take_result()

    def take_result(self) -> StepResult:
        """What has been added since the last step, for example by `abort`."""
        result, self._result = self._result, StepResult()
        return result

    def _schedule(self) -> Batch | None:
        only = self._suspects[0] if self._suspects else None
        try:
            result = self.scheduler.schedule(only=only)
        except AssertionError as error:
            self._rebuild(error)
            return None
        for request in result.stuck:
            self.fail(
                request,
                f"no KV block can be had for token {request.num_tokens + 1}: the cache has "
                f"{self.cache.stats.total_blocks} blocks, {self.cache.stats.pinned_blocks} of them pinned",
                code="out_of_kv_blocks",
            )
        if only is not None and result.batch is None:
            self._suspects.remove(only)
        return result.batch

    def _run(self, batch: Batch) -> _StepOutcome:
        started = self.clock()
        if self._last_model_end is not None:
            self._gap_time += started - self._last_model_end
        logits = self.runner.execute(batch)
        rows, requests = self._rows_to_sample(batch)
        searching = [i for i, request in enumerate(requests) if request.group.beams is not None]
        outcome = _StepOutcome(logits, requests)
        if searching:
            outcome.beams = [requests[i] for i in searching]
            outcome.candidates = self._beams.likeliest(logits, [rows[i] for i in searching], outcome.beams)
            plain = [i for i in range(len(requests)) if requests[i].group.beams is None]
            rows, outcome.requests = [rows[i] for i in plain], [requests[i] for i in plain]
        outcome.sampled = sample(logits, rows, outcome.requests)
        self._last_model_end = self.clock()
        self._model_time += self._last_model_end - started
        return outcome

    def _rows_to_sample(self, batch: Batch) -> tuple[list[int], list[Request]]:
        """The logits row of every sample that gets a token; forks share their parent's row."""
        rows: list[int] = []
        requests: list[Request] = []
        row = 0
        for entry in batch.entries:
            all_rows = entry.request.prompt_logprobs is not None
            num_rows = entry.count if all_rows else int(entry.samples)
            row += num_rows
            if not entry.samples:
                continue
            requests.append(entry.request)
            rows.append(row - 1)
            if entry.request.num_forks:
                forks = self._make_forks(entry.request)
                requests.extend(forks)
                rows.extend([row - 1] * len(forks))
        return rows, requests

    def _make_forks(self, parent: Request) -> list[Request]:
        """The other samples of a request whose prompt is complete; sample i draws with seed + i."""
        forks = []
        for i in range(1, parent.num_forks + 1):
            fork = Request(
                parent.request_id,
                parent.tokens.view(),
                parent.params,
                namespace=parent.namespace,
                priority=parent.priority,
                arrival_s=parent.times.arrival,
                index=i,
            )
            seed = parent.params.seed + i if parent.params.seed is not None else next(self._seeds)
            fork.sampling_state = parent.sampling_state.fork(seed)
            fork.output = self._make_output(fork)
            fork.times.first_scheduled = parent.times.first_scheduled
            fork.num_cached_tokens = parent.num_cached_tokens
            fork.cache_report = parent.cache_report
            fork.group = parent.group
            forks.append(fork)
        return forks

    def _process(self, batch: Batch, outcome: _StepOutcome) -> None:
        self.scheduler.complete(batch)
        self._clear_suspects(batch)
        now = self.clock()
        row = 0
        for entry in batch.entries:
            request = entry.request
            if request.times.first_scheduled is None:
                request.times.first_scheduled = now
            if request.prompt_logprobs is not None:
                self._collect_prompt_logprobs(request, entry.start, outcome.logits[row : row + entry.count])
                row += entry.count
            else:
                row += int(entry.samples)
        # Forks take their lease before their parent's next token is appended anywhere.
        for request in outcome.requests:
            if request.arrival_order < 0:
                self._admit_fork(request)
        for request, token in zip(outcome.requests, outcome.sampled, strict=True):
            request.num_forks = 0
            if not request.is_finished:
                self._append(request, token, now)
        if outcome.beams:
            self._beams.take(outcome.beams, outcome.candidates)

    def _admit_fork(self, fork: Request) -> None:
        parent: Request = fork.group.samples[0]
        assert parent.lease is not None
        fork.lease = parent.lease.fork()
        fork.num_computed = parent.num_computed
        fork.group.samples.append(fork)
        self.scheduler.add_fork(fork)

    def _append(self, request: Request, token: SampledToken, now: float) -> None:
        if token.token_id < 0:
            self.fail(request, "the model's logits are not numbers (NaN) for this request", "nan_logits")
            return
        request.tokens.append(token.token_id)
        self._generated += 1
        if request.times.first_token is None:
            request.times.first_token = now
        output: SampleOutput = request.output
        logprobs: list[TokenLogprobs] | None = None
        try:
            text = output.push(token.token_id)
            if token.logprobs is not None:
                logprobs = [name_logprobs(token.logprobs.chosen, token.logprobs.top, self._token_text)]
                output.record_logprobs(logprobs[0])
        except Exception as error:
            logger.exception("decoding token %d of %r failed", token.token_id, request)
            self.fail(request, f"decoding the output failed: {error}", "detokenization_failed")
            return
        self._emit(request, text, [token.token_id], logprobs)
        if output.finish_reason is not None:
            self._finish(request, output.finish_reason)

    def _token_text(self, token_id: int) -> str:
        return self.tokenizer.token_text(token_id) if self.tokenizer is not None else str(token_id)

    def _collect_prompt_logprobs(self, request: Request, start: int, logits: torch.Tensor) -> None:
        """Logits at position p give the logprob of the prompt's token p + 1."""
        num_top = request.params.prompt_logprobs
        assert request.prompt_logprobs is not None
        assert num_top is not None
        if len(request.prompt_logprobs) >= request.num_prompt_tokens:
            return
        end = min(start + len(logits), request.num_prompt_tokens - 1)
        first = len(request.prompt_logprobs) - 1  # position whose logits come next
        if end <= first:
            return
        tokens = request.tokens.view(first + 1, end + 1).tolist()
        for raw in gather_logprobs(logits[first - start : end - start], tokens, num_top):
            request.prompt_logprobs.append(name_logprobs(raw.chosen, raw.top, self._token_text))

    # ------------------------------------------------------------------ the end of a request

    def _emit(
        self,
        request: Request,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
    ) -> None:
        output: SampleOutput = request.output
        group: RequestGroup = request.group
        delta = OutputDelta(
            request.request_id,
            request.index,
            text,
            token_ids,
            logprobs,
            output.finish_reason,
            output.stop_reason,
            request.num_prompt_tokens,
            request.num_cached_tokens,
            group.error if output.finish_reason == "error" else None,
            group.error_code if output.finish_reason == "error" else None,
        )
        if not group.is_ranked or output.finish_reason in ("error", "abort"):
            self._result.deltas.append(delta)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a sample from outside the model: abort, timeout, failure."""
        text = request.output.abort(reason)
        self._emit(request, text, [], None)
        self._finish(request, reason, discard=reason == "error")

    def fail(self, request: Request, message: str, code: str) -> None:
        """End one request with an error; what it computed is not cached. Others are unharmed."""
        group: RequestGroup = request.group
        group.error, group.error_code = message, code
        for other in group.samples:
            if not other.is_finished:
                self._failed += 1
                self._end(other, "error")

    def _finish(self, request: Request, reason: FinishReason, *, discard: bool = False) -> None:
        request.finish_reason = reason
        request.times.finished = self.clock()
        self.scheduler.finish(request, discard=discard)
        self._finished += reason in ("stop", "length")
        if request in self._suspects:
            self._suspects.remove(request)
        group: RequestGroup = request.group
        if group.beams is not None:
            self._beams.forget(request)
        if group.is_finished:
            if group.is_ranked and reason in ("stop", "length"):
                self._emit_ranked(group)
            self._close_group(group, collect_output(group))

    def _close_group(self, group: RequestGroup, output: RequestOutput) -> None:
        self._groups.pop(group.request_id, None)
        self._result.finished.append(output)

    def finish_group(self, group: RequestGroup, output: RequestOutput) -> None:
        """A beam search is complete (called by its driver, which has released the beams)."""
        self._finished += 1
        if output.times is not None:
            output.times.finished = self.clock()
        self._close_group(group, output)

    def count_generated(self, num_tokens: int) -> None:
        """Tokens that were chosen outside the sampler."""
        self._generated += num_tokens

    def _emit_ranked(self, group: RequestGroup) -> None:
        """Deliver the n best of best_of samples, by mean logprob of their tokens."""
        for index, request in enumerate(rank_samples(group.samples)[: group.params.n]):
            output: SampleOutput = request.output
            self._result.deltas.append(
                OutputDelta(
                    group.request_id,
                    index,
                    output.text,
                    request.output_token_ids(),
                    list(output.logprobs) if group.params.logprobs is not None else None,
                    output.finish_reason,
                    output.stop_reason,
                    request.num_prompt_tokens,
                    request.num_cached_tokens,
                )
            )

    def _expire(self) -> None:
        limit = self.config.request_timeout_s
        if limit is None:
            return
        now = self.clock()
        for group in list(self._groups.values()):
            if now - group.samples[0].times.arrival > limit:
                self.fail(
                    group.samples[0],
                    f"the request took longer than {limit:g} s (--request-timeout)",
                    code="timeout",
                )

    # ------------------------------------------------------------------ faults

    def _recover(self, batch: Batch, error: Exception) -> None:
        """A step failed: nothing of it counts. Its requests run again, each alone, to find the guilty one."""
        logger.exception("a step of %d requests failed", len(batch.entries), exc_info=error)
        self._last_model_end = None
        alone = len(batch.entries) == 1
        for request in self.scheduler.withdraw(batch):
            if alone and request in self._suspects:
                self.fail(request, f"the model failed on this request: {error}", "step_failed")
            elif request not in self._suspects:
                self._suspects.append(request)

    def _clear_suspects(self, batch: Batch) -> None:
        if self._suspects:
            passed = {id(entry.request) for entry in batch.entries}
            self._suspects = [request for request in self._suspects if id(request) not in passed]

    def _rebuild(self, error: AssertionError) -> None:
        """A broken invariant: give up the cache's contents, keep every request."""
        logger.error("broken invariant, rebuilding the cache: %s", error, exc_info=error)
        self._rebuilds += 1
        requests = sorted(
            [*self.scheduler.waiting, *self.scheduler.running], key=lambda request: request.arrival_order
        )
        self.cache = self.cache.rebuilt()
        old = self.scheduler.stats
        self.scheduler = self._make_scheduler()
        self.scheduler.stats = old
        self._suspects = []
        for request in requests:
            request.lease = request.match = None
            request.num_computed = 0
            request.arrival_order = -1
            self.scheduler.add(request)

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
            num_rebuilds=self._rebuilds,
            cache=self.cache.stats,
        )

    def check(self) -> None:
        """Assert every invariant of cache and scheduler."""
        self.cache.check()
        self.scheduler.check()
