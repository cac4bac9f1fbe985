"""The scheduler: turns waiting and running requests into the next `Batch` under a token budget.

The life of a request in here:

 1. `add` puts it into the queue; one that can never fit is refused by the engine before.
 2. Each `schedule()` first gives every running request its tokens: one for a decode, a chunk for a prompt.
    A decode that finds no block preempts the least urgent running request: a release, nothing else.
 3. With the budget that is left it admits waiting requests in the policy's order. Admission is
    `PrefixCache.acquire`: the cached prefix is locked, blocks for the rest are allocated.
    A request whose next tokens another one is computing waits for them (coalescing).
 4. What is scheduled is committed at once: requests later in the same step share it already, since the
    step writes K and V before it attends.
 5. `complete` advances the computed lengths after the model has run; `withdraw` takes a failed step back.
 6. `finish` releases the lease: the tokens stay cached, evictable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from radixkv.cache.prefix_cache import Match, PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv.scheduling.batch import Batch, Entry, build_batch
from radixkv.scheduling.policy import AdmissionPolicy, make_policy
from radixkv.scheduling.request_state import Namespace, Request

# A chunk smaller than this is not worth a place in the batch while more could be had.
MIN_CHUNK = 16


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start, in tokens and requests."""

    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    computed_tokens: int = 0
    admitted: int = 0
    coalesced: int = 0


@dataclass(slots=True)
class ScheduleResult:
    """What a call of `schedule` decided.

    Attributes:
        batch: the step's work, or None when there is nothing to run.
        preempted: requests that lost their lease and wait again.
        stuck: running requests that need a block which can't be had even alone; the engine ends them.
    """

    batch: Batch | None
    preempted: list[Request] = field(default_factory=list)
    stuck: list[Request] = field(default_factory=list)


class Scheduler:
    """Admission, chunking, coalescing and preemption over one `PrefixCache`. Not thread-safe.

    Args:
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: most running requests.
        max_tokens_per_request: cap on one request's prompt tokens in a step while others have prompt tokens
            to compute; None: half of the budget that is left when its turn comes.
        policy: an `AdmissionPolicy` or the name of one.
        max_overtake: most steps in which later requests are admitted before an earlier one.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int = 256,
        max_tokens_per_request: int | None = None,
        policy: str | AdmissionPolicy = "prefix",
        max_overtake: int = 32,
    ) -> None:
        self.cache = cache
        self.block_size = cache.block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_tokens_per_request = max_tokens_per_request
        self.policy = make_policy(policy) if isinstance(policy, str) else policy
        self.max_overtake = max_overtake
        self.stats = SchedulerStats()
        self._waiting: dict[int, Request] = {}  # arrival order -> request
        self._waiting_sorted = True
        self._running: dict[int, Request] = {}
        self._next_arrival = 0
        # Next token of every prompt being computed -> who computes it; see _is_coming.
        self._coming: dict[tuple[Namespace, int], Request] = {}
        self._coming_key: dict[int, tuple[Namespace, int]] = {}
        # State of the step being built.
        self._entries: dict[int, Entry] = {}
        self._budget = 0
        self._seats = 0

    # ------------------------------------------------------------------ the queue

    @property
    def waiting(self) -> list[Request]:
        """Waiting requests in arrival order."""
        if not self._waiting_sorted:
            self._waiting = dict(sorted(self._waiting.items()))
            self._waiting_sorted = True
        return list(self._waiting.values())

    @property
    def running(self) -> list[Request]:
        """Running requests in the order of their admission."""
        return list(self._running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue; O(1)."""
        self._number(request)
        self.policy.on_arrival(request, list(self._waiting.values()) if self.policy.name == "fair" else ())
        self._waiting[request.arrival_order] = request

    def add_fork(self, request: Request) -> None:
        """Take in a fork of a running request, which already holds a lease."""
        assert request.lease is not None
        self._number(request)
        self._running[request.arrival_order] = request

    def _number(self, request: Request) -> None:
        assert request.arrival_order < 0, f"{request!r} was added before"
        request.arrival_order = self._next_arrival
        self._next_arrival += 1

    def finish(self, request: Request, *, discard: bool = False, keep: int | None = None) -> None:
        """Take a request out, waiting or running; its lease is released.

        Args:
            discard: forget the tokens it contributed to the cache.
            keep: keep only its first `keep` tokens cached.
        """
        self._waiting.pop(request.arrival_order, None)
        self._running.pop(request.arrival_order, None)
        self._forget_coming(request)
        request.match = None
        if request.lease is not None:
            request.lease.release(discard=discard, keep=keep)
            request.lease = None

    # ------------------------------------------------------------------ one step

    def schedule(self, only: Request | None = None) -> ScheduleResult:
        """Choose the work of the next step, lock and allocate its blocks, and commit its tokens.

        Args:
            only: schedule nothing but this request (to find out who makes a step fail).
        """
        self._entries = {}
        self._budget = self.max_num_batched_tokens
        self._seats = self.max_num_seqs - sum(1 + request.num_forks for request in self._running.values())
        result = ScheduleResult(batch=None)
        if only is not None:
            self._schedule_alone(only, result)
        else:
            self._schedule_all(result)
        if self._entries:
            entries = list(self._entries.values())
            self._count(entries)
            result.batch = build_batch(entries, self.block_size)
        return result

    def _schedule_alone(self, request: Request, result: ScheduleResult) -> None:
        if not request.is_running:
            self._try_admit(request, others=False)
        elif self._grow(request, result):
            self._schedule_tokens(request, self._chunk(request, others=False))

    def _schedule_all(self, result: ScheduleResult) -> None:
        self._schedule_running(result)
        latest_admitted = -1
        # A prompt that gets the rest of the budget may complete what another one waits for: try again.
        while self._budget > 0:
            before = self._budget
            latest_admitted = max(latest_admitted, self._admit())
            self._extend_chunks()
            if self._budget == before or not self._waiting:
                break
        self._count_overtaken(latest_admitted)

    def _schedule_running(self, result: ScheduleResult) -> None:
        running = list(self._running.values())
        if self.cache.available_blocks() <= len(running):
            # Someone may have to go: serve the most urgent first, so that nobody who is already in this
            # step is ever the victim.
            running.sort(key=self.policy.urgency)
        prompts: list[Request] = []
        for request in running:
            if request.lease is None or request.num_to_compute == 0:
                continue  # preempted a moment ago; or a beam that waits for the others of its search
            if request.num_to_compute > 1:
                prompts.append(request)
            elif self._budget > 0 and self._grow(request, result):
                self._schedule_tokens(request, 1)
        prompts.sort(key=lambda request: request.last_scheduled_step)
        for i, request in enumerate(prompts):
            if self._budget <= 0:
                break
            if request.lease is None:
                continue
            others = i + 1 < len(prompts) or bool(self._waiting)
            if self._grow(request, result):
                self._schedule_tokens(request, self._chunk(request, others))

    def _grow(self, request: Request, result: ScheduleResult) -> bool:
        """Give the lease a slot for every known token, preempting others if need be."""
        assert request.lease is not None
        while request.lease is not None and request.lease.num_tokens < request.num_tokens:
            try:
                request.lease.append(request.tokens.view(request.lease.num_tokens))
            except OutOfBlocks:
                victim = self._victim()
                if victim is request and len(self._running) == 1:
                    result.stuck.append(request)
                    return False
                self._preempt(victim)
                result.preempted.append(victim)
        return request.lease is not None

    def _victim(self) -> Request:
        """The least urgent running request that has no tokens in this step yet."""
        return max(
            (r for r in self._running.values() if r.arrival_order not in self._entries),
            key=self.policy.urgency,
        )

    def _preempt(self, request: Request) -> None:
        """Release the lease and queue the request again; what it computed stays cached."""
        assert request.lease is not None
        request.lease.release()
        request.lease = None
        request.num_computed = 0
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        self._running.pop(request.arrival_order, None)
        self._forget_coming(request)
        request.match = None
        self._waiting[request.arrival_order] = request
        self._waiting_sorted = False
        self._seats += 1

    def _chunk(self, request: Request, others: bool) -> int:
        wanted = min(request.num_to_compute, self._budget)
        if not others:
            return wanted
        if self.max_tokens_per_request is not None:
            return min(wanted, self.max_tokens_per_request)
        return min(wanted, max(self._budget // 2, MIN_CHUNK))

    def _schedule_tokens(self, request: Request, count: int) -> None:
        """Put `count` more tokens of a running request into the step and make them shareable."""
        lease = request.lease
        assert lease is not None
        assert 0 < count <= self._budget
        entry = self._entries.get(request.arrival_order)
        if entry is None:
            entry = Entry(request, start=request.num_computed, count=0)
            self._entries[request.arrival_order] = entry
            entry.copies = lease.take_copies()
        redundant = lease.commit(entry.start + entry.count + count)
        if redundant:
            assert entry.redundant == entry.count, "redundant tokens lead the range"
            entry.redundant += redundant
        entry.count += count
        entry.samples = entry.start + entry.count == request.num_tokens
        self._budget -= count
        request.last_scheduled_step = self.stats.num_steps
        self._announce_coming(request, entry.start + entry.count)

    def _extend_chunks(self) -> None:
        """Give what is left of the budget to the prompts of this step."""
        for entry in list(self._entries.values()):
            if self._budget <= 0:
                return
            missing = entry.request.num_tokens - entry.start - entry.count
            if missing > 0:
                cap = self.max_tokens_per_request
                if cap is not None and len(self._entries) + len(self._waiting) > 1:
                    missing = min(missing, cap - entry.count)
                if missing > 0:
                    self._schedule_tokens(entry.request, min(missing, self._budget))

    # ------------------------------------------------------------------ admission

    def _admit(self) -> int:
        """Admit what fits, in the policy's order; the arrival order of the latest one admitted, or -1."""
        waiting = self.waiting
        if not waiting or self._seats <= 0:
            return -1
        ordered = self.policy.order(waiting, self._matched_tokens)
        if self.policy.bounds_overtaking:
            aged = [r for r in waiting if r.overtaken_steps >= self.max_overtake]
            if aged:
                first = {r.arrival_order for r in aged}
                ordered = [*aged, *(r for r in ordered if r.arrival_order not in first)]
        latest = -1
        passed: Request | None = None
        for i, request in enumerate(ordered):
            if self._budget <= 0 or self._seats <= 0:
                break
            if passed is not None and not self.policy.may_pass(request, passed):
                break
            others = i + 1 < len(ordered)
            if self._try_admit(request, others):
                latest = max(latest, request.arrival_order)
            elif self.policy.bounds_overtaking and request.overtaken_steps >= self.max_overtake:
                break  # nobody passes it any more
            elif passed is None or self.policy.urgency(request) < self.policy.urgency(passed):
                passed = request
        return latest

    def _matched_tokens(self, request: Request) -> int:
        return self._match(request).num_tokens

    def _match(self, request: Request) -> Match:
        """The request's cached prefix, looked up again only when the tree changed under it."""
        match = request.match
        if match is None or not self.cache.is_current(match):
            match = request.match = self.cache.match(request.tokens.view(), request.namespace)
        return match

    def _try_admit(self, request: Request, others: bool) -> bool:
        match = self._match(request)
        if self._is_coming(request, match.num_tokens):
            self.stats.coalesced += 1
            return False
        seats = min(1 + request.num_forks, self.max_num_seqs)
        if seats > self._seats:
            return False
        needed = -(-request.num_tokens // self.block_size) - match.num_tokens // self.block_size
        # One block of headroom for each running request: an admission must not cause a preemption at once.
        if self._running and needed + len(self._running) > self.cache.available_blocks(request.namespace):
            return False
        own_logits = request.prompt_logprobs is not None
        try:
            lease = self.cache.acquire(
                request.tokens.view(),
                request.namespace,
                match=match,
                skip="prompt_logprobs" if own_logits else None,
            )
        except OutOfBlocks:
            return False
        del self._waiting[request.arrival_order]
        request.match = None
        request.lease = lease
        request.num_computed = lease.num_cached_tokens
        self._running[request.arrival_order] = request
        self._seats -= seats
        if request.num_preemptions == 0 and request.num_step_failures == 0:
            request.num_cached_tokens = lease.num_cached_tokens
            request.cache_report = lease.report
            self.stats.admitted += 1
            self.stats.prompt_tokens += request.num_prompt_tokens
            self.stats.cached_prompt_tokens += lease.num_cached_tokens
        self._schedule_tokens(request, self._chunk(request, others))
        return True

    def _count_overtaken(self, latest_admitted: int) -> None:
        if latest_admitted < 0 or not self.policy.bounds_overtaking:
            return
        for request in self._waiting.values():
            if request.arrival_order < latest_admitted:
                request.overtaken_steps += 1

    # ------------------------------------------------------------------ coalescing

    @staticmethod
    def _prefix_key(request: Request, num_tokens: int) -> tuple[Namespace, int]:
        return request.namespace, xxhash.xxh3_64_intdigest(request.tokens.view(0, num_tokens))

    def _is_coming(self, request: Request, num_matched: int) -> bool:
        """Whether a running request is about to compute this one's first missing token.

        Only the token behind the match has to be looked up: whoever computes it has committed all before it,
        so the match ends exactly where that prompt's computed part ends. The last token of a prompt is
        always computed by the request itself.
        """
        if num_matched + 1 >= request.num_tokens or request.prompt_logprobs is not None:
            return False
        if not self._coming or not self.cache.enabled:
            return False
        provider = self._coming.get(self._prefix_key(request, num_matched + 1))
        return provider is not None and provider.is_running

    def _announce_coming(self, request: Request, num_scheduled: int) -> None:
        self._forget_coming(request)
        if num_scheduled < request.num_tokens and self.cache.enabled:
            key = self._prefix_key(request, num_scheduled + 1)
            if key not in self._coming:
                self._coming[key] = request
                self._coming_key[request.arrival_order] = key

    def _forget_coming(self, request: Request) -> None:
        key = self._coming_key.pop(request.arrival_order, None)
        if key is not None:
            del self._coming[key]

    # ------------------------------------------------------------------ after the step

    def _count(self, entries: list[Entry]) -> None:
        self.stats.num_steps += 1
        for entry in entries:
            self.stats.computed_tokens += entry.count
            end = min(entry.start + entry.count, entry.request.num_prompt_tokens)
            self.stats.computed_prompt_tokens += max(0, end - entry.start)
            self.policy.on_served(entry.request.namespace, entry.count)

    def complete(self, batch: Batch) -> None:
        """The model has run: the step's tokens have their K/V."""
        for entry in batch.entries:
            entry.request.num_computed = entry.start + entry.count

    def withdraw(self, batch: Batch) -> list[Request]:
        """The step failed: what it made shareable is withdrawn, its requests wait again.

        Returns the requests, so that the engine can decide which of them may try again.
        """
        for entry in batch.entries:
            if entry.request.lease is not None:
                entry.request.lease.withdraw(entry.start)
        requests = []
        for entry in batch.entries:
            request = entry.request
            if request.lease is not None:
                request.lease.release()
                request.lease = None
                request.num_computed = 0
                request.num_step_failures += 1
                self._requeue(request)
                requests.append(request)
        return requests

    def check(self, on_error: Callable[[str], None] | None = None) -> None:
        """Assert that waiting, running and the coalescing index agree."""
        for request in self._waiting.values():
            assert request.lease is None, f"{request!r} waits with a lease"
        for request in self._running.values():
            assert request.lease is not None, f"{request!r} runs without a lease"
            assert request.num_computed <= request.lease.num_tokens <= request.num_tokens
        for order, key in self._coming_key.items():
            assert self._coming[key].arrival_order == order
            assert order in self._running, "a request that does not run is announced"
        assert len(self._coming) == len(self._coming_key)

    def __repr__(self) -> str:
        return (
            f"Scheduler({self.policy.name}, {self.num_running} running, {self.num_waiting} waiting, "
            f"budget {self.max_num_batched_tokens})"
        )
