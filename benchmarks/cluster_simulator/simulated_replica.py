# SPDX-License-Identifier: Apache-2.0
"""SimulatedReplica: the real scheduler and the real prefix cache; only the model is missing.

Where nothing can happen but decodes (nobody waits, nobody ends, nobody comes), several steps are taken at
once: the scheduler is given drafts, which are all right, and the time is that of so many steps.
"""

from __future__ import annotations

import math
from array import array
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.cluster_simulator.step_cost import StepCost, work_of
from radixkv import PrefixCache
from radixkv.cache.reporting.events import BlockChanges
from radixkv.engine.config import SchedulerConfig
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch, Entry
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence

_MAX_STEPS_AHEAD = 256


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """Settings that all replicas share.

    Attributes:
        num_blocks: blocks of the pool.
        block_size: tokens per block.
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: most running requests.
        policy: of admission.
        eviction: policy of the cache.
    """

    num_blocks: int
    block_size: int
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    policy: str = "prefix"
    eviction: str = "lru"

    def holds(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens, answer included, can ever run."""
        return -(-num_tokens // self.block_size) <= self.num_blocks


@dataclass(slots=True)
class ServedRequest:
    """Times and counts of a request; seconds of simulated time. NaN: it did not happen.

    Attributes:
        prompt_tokens: how many.
        answer_token: what its answer is made of, which no other request has.
        replica: where it went; -1: nowhere.
        cached_tokens: of the prompt, found there.
        first_token_s, last_token_s: when these tokens of the answer were there.
    """

    arrival_s: float
    prompt_tokens: int
    answer_tokens: int
    answer_token: int
    replica: int = -1
    cached_tokens: int = 0
    refused: bool = False
    first_token_s: float = math.nan
    last_token_s: float = math.nan

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.arrival_s


class _StepsAhead:
    """Drafts that are always right: the tokens of the next steps, where these would be decodes alone."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.wanted = self.num_steps = 1  # how many steps at once; how many the present one is

    def begin(self, num_rows: int, num_samples: int) -> None:
        """A step is about to be built: one with a prompt, or without blocks to spare, is one step."""
        self.num_steps = 1
        if num_rows == num_samples:
            spare = self._cache.available_blocks() // num_rows - 1
            self.num_steps = max(1, min(self.wanted, spare * self._cache.block_size))

    def draft(self, request: Sequence, most: int) -> abc.Sequence[int]:
        """The request's own token, again and again."""
        return [request.last_token] * min(self.num_steps - 1, most)

    def granted(self, num_tokens: int) -> None:
        """All are right."""


class SimulatedReplica:
    """Simulated engine.

    Args:
        clock: seconds of simulated time.
        on_first_token, on_end: are told of the requests' numbers.
    """

    def __init__(
        self,
        config: ReplicaConfig,
        cost: StepCost,
        clock: Callable[[], float],
        on_first_token: Callable[[int], None],
        on_end: Callable[[int], None],
    ) -> None:
        self.cache = PrefixCache(
            config.num_blocks,
            config.block_size,
            config.eviction,
            clock=clock,
            ghost_blocks=0,
            explain=False,
        )
        self._ahead = _StepsAhead(self.cache)
        self._scheduler = Scheduler(
            self.cache,
            SchedulerConfig(
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                scheduling_policy=config.policy,
            ),
            drafter=self._ahead,
        )
        self._cost = cost
        self._on_first_token, self._on_end = on_first_token, on_end
        self._served: dict[str, tuple[int, ServedRequest]] = {}  # by request id, while they are here
        self._batch: Batch | None = None
        self._num_new = 0  # requests that have come since the last step began
        self._step_s = 0.0  # seconds of the steps under way
        self.busy_s = 0.0
        self.num_steps = 0
        self.gaps = array("d")  # seconds between tokens of an answer that follow each other
        self.resident: set[bytes] = set()  # identities of the blocks in its cache
        self.cache.subscribe(self._follow)

    @property
    def is_idle(self) -> bool:
        """True if it waits for requests."""
        return self._batch is None

    @property
    def num_preemptions(self) -> int:
        """Number of times that a running request lost its blocks."""
        return self._scheduler.stats.num_preemptions

    def add(self, number: int, tokens: npt.NDArray[np.int32], served: ServedRequest) -> None:
        """A request has come, `number` of the trace."""
        params = SamplingParams(max_tokens=served.answer_tokens)
        request = Sequence(Request(tokens, params, request_id=str(number)), arrival_s=served.arrival_s)
        self._served[request.request_id] = number, served
        self._scheduler.add(request)
        self._num_new += 1

    def begin_step(self, quiet_s: float, *, wakes: bool = False) -> float | None:
        """Schedule a step, or several decodes; returns their seconds, None: there is nothing to do.

        Args:
            quiet_s: for so long nothing comes.
            wakes: before it nothing was to be done.
        """
        self._ahead.wanted = self._steps_until(quiet_s)
        while self._scheduler.has_work:
            self._ahead.num_steps = 1
            plan = self._scheduler.schedule()
            for request in plan.stuck:
                self._scheduler.finish(request)
                self._served[request.request_id][1].refused = True
                self._remove(request)
            if plan.batch is not None:
                self._batch = plan.batch
                num_new, self._num_new = self._num_new, 0
                work = _work_ahead(plan.batch, self._ahead.num_steps, num_new, wakes=wakes)
                self._step_s = self._cost.seconds(work)
                self.busy_s += self._step_s
                self.num_steps += self._ahead.num_steps
                return self._step_s
            if not plan.stuck:
                break
        return None

    def _steps_until(self, quiet_s: float) -> int:
        """How many steps begin in this time, if all are decodes, before anybody ends."""
        running = self._scheduler.running
        if not running or self._scheduler.num_waiting:
            return 1
        context = float(sum(request.num_tokens for request in running))
        count = float(len(running))
        first_s = self._cost.seconds(np.array([1.0, count, count, context, context, 0.0, 0.0]))
        # what each takes more than the last
        more_s = self._cost.seconds(np.array([0.0, 0.0, 0.0, count, count, 0.0, 0.0]))
        left = min(_answer_tokens(request) - request.num_output_tokens for request in running)
        begun, passed = 0, 0.0
        while begun < min(left, _MAX_STEPS_AHEAD) and passed < quiet_s:
            passed += first_s + begun * more_s
            begun += 1
        return max(1, begun)

    def end_step(self, now: float) -> None:
        """The steps have run: those whose last token they computed get others."""
        batch, self._batch = self._batch, None
        assert batch is not None
        self._scheduler.complete(batch)
        for entry in batch.entries:
            if entry.samples:
                self._add_tokens(entry, now)

    def _add_tokens(self, entry: Entry, now: float) -> None:
        request, count = entry.request, 1 + len(entry.draft)
        number, served = self._served[request.request_id]
        began = now - self._step_s
        first = began + self._step_s / count
        if math.isnan(served.first_token_s):
            served.first_token_s, served.cached_tokens = first, request.num_cached_tokens
            self._on_first_token(number)
        else:
            self.gaps.append(first - served.last_token_s)
        self.gaps.extend([self._step_s / count] * (count - 1))
        served.last_token_s = now
        for _ in range(count):
            request.append(served.answer_token)
        if entry.draft:
            self._scheduler.accept(entry, len(entry.draft))
        if request.num_output_tokens >= served.answer_tokens:
            self._scheduler.finish(request)
            self._remove(request)

    def _remove(self, request: Sequence) -> None:
        number, _ = self._served.pop(request.request_id)
        self._on_end(number)

    def _follow(self, changes: BlockChanges) -> None:
        for gone in changes.removed:
            self.resident.difference_update(gone.block_hashes)
        for run in changes.stored:
            self.resident.update(run.block_hashes)


def _answer_tokens(request: Sequence) -> int:
    assert request.params.max_tokens is not None
    return request.params.max_tokens


def _work_ahead(batch: Batch, num_steps: int, num_requests: int, *, wakes: bool) -> npt.NDArray[np.float64]:
    """The work of a step; of several decodes, that of all of them. Their contexts grow by a token a step."""
    if num_steps == 1:
        return work_of(batch, num_requests, wakes=wakes)
    rows = float(len(batch.entries))
    context = float(batch.context_lengths.sum()) - rows * (num_steps - 1)  # of the first step
    read = num_steps * context + rows * num_steps * (num_steps - 1) / 2
    return np.array([num_steps, rows * num_steps, rows * num_steps, read, read, num_requests, wakes])
