"""The scheduler: turns waiting and running requests into the next `Batch` under a token budget.

The life of a request in here:

 1. `add` puts it into the queue; one that can never fit is refused by the engine before.
 2. Each `schedule()` first gives every running request its tokens: one for a decode, a chunk for a prompt.
    A decode with room in its last block goes by the lane (`decode_lane`), without a call of the cache.
    A decode that finds no block preempts the least urgent running request: a release, nothing else.
 3. With the budget that is left it admits waiting requests in the policy's order. Admission is
    `PrefixCache.acquire`: the cached prefix is locked, blocks for the rest are allocated.
    A request whose next tokens another one is computing waits for them (coalescing).
 4. What is scheduled is committed at once: requests later in the same step share it already, since the
    step writes K and V before it attends.
 5. `complete` advances the computed lengths after the model has run; `withdraw` takes a failed step back.
 6. `finish` releases the lease: the tokens stay cached, evictable.

How a step's budget is spent, where there is more to do than it holds:

    | decodes: one token each | prompts in progress: chunks | reserve: a quarter, for waiting prompts |

The reserve is for the first few waiting prompts, and for short ones when many long prompts are in progress
already. What nobody takes goes back to the prompts of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv.scheduling.batch import Batch, DecodeRows, Entry, build_batch
from radixkv.scheduling.cache_view import CacheView
from radixkv.scheduling.coalescing import ComingTokens
from radixkv.scheduling.decode_lane import DecodeLane, settle
from radixkv.scheduling.policy import AdmissionPolicy, make_policy
from radixkv.scheduling.preemption import choose_displaced, choose_victim
from radixkv.scheduling.request_state import Namespace, Request
from radixkv.scheduling.schedule_result import Obstacle, ScheduleResult, SchedulerStats
from radixkv.scheduling.waiting_queue import WaitingQueue

# A chunk smaller than this is not worth a place in the batch while more could be had.
MIN_CHUNK = 16
# With so many prompts in progress, the reserve of a step is for short prompts only.
MANY_PROMPTS = 4
# Most tokens per step of a prompt whose logits are all wanted: they take vocabulary * 4 bytes each.
MAX_LOGITS_CHUNK = 512


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
        self._waiting = WaitingQueue(self.policy, max_overtake)
        self._running: dict[int, Request] = {}  # arrival order -> request
        self._off_lane: dict[int, Request] = {}  # those of them that are not in the lane
        self._lane = DecodeLane(self.block_size)
        self._next_arrival = 0
        self._coming = ComingTokens()
        # State of the step being built.
        self._entries: dict[int, Entry] = {}
        self._budget = 0
        self._reserve = 0
        self._num_prompts = 1  # that have tokens to compute, running or waiting
        self._seats = 0
        self._view = CacheView(cache)
        self._latest_admitted = -1
        self._held_up: dict[int, Request] = {}

    # ------------------------------------------------------------------ the queue

    @property
    def waiting(self) -> list[Request]:
        """Waiting requests in arrival order."""
        return self._waiting.in_arrival_order()

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
        return bool(self._running or len(self._waiting))

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue; O(1)."""
        self._number(request)
        self._waiting.add(request)

    def add_fork(self, fork: Request, parent: Request) -> None:
        """Take in a fork: beside its parent if there is a place; else it waits, and hits the same blocks."""
        self._number(fork)
        fork.was_admitted = parent.was_admitted
        if parent.lease is not None and len(self._running) < self.max_num_seqs:
            self._leave_lane(parent)
            settle(parent)
            parent.shares_blocks = fork.shares_blocks = True
            fork.lease = parent.lease.fork()
            fork.num_computed = parent.num_computed
            fork.last_scheduled_step = self.stats.num_steps
            self._running[fork.arrival_order] = self._off_lane[fork.arrival_order] = fork
        else:
            self._waiting.add(fork)

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
        self._waiting.remove(request)
        self._leave_lane(request)
        self._off_lane.pop(request.arrival_order, None)
        self._running.pop(request.arrival_order, None)
        self._coming.forget(request)
        request.match = request.provider = None
        if not discard:
            settle(request)
        lease, request.lease = request.lease, None
        if lease is not None:
            lease.release(discard=discard, keep=keep)

    # ------------------------------------------------------------------ one step

    def schedule(self, only: Request | None = None) -> ScheduleResult:
        """Choose the work of the next step, lock and allocate its blocks, and commit its tokens.

        Args:
            only: schedule nothing but this request (to find out who makes a step fail).
        """
        self._entries = {}
        self._held_up = {}
        self._latest_admitted = -1
        self._thin_lane(all_of_it=only is not None)
        self._budget = self.max_num_batched_tokens - len(self._lane)
        self._reserve = 0
        self._num_prompts = 1
        self._seats = self.max_num_seqs - len(self._lane)
        self._seats -= sum([request.num_seats for request in self._off_lane.values()])
        self._view.touched()
        result = ScheduleResult(batch=None)
        if only is not None:
            self._schedule_alone(only, result)
        else:
            self._schedule_all(result)
        if self._has_work_in_step:
            entries, decodes = list(self._entries.values()), self._lane.rows()
            self._count(entries, decodes)
            result.batch = build_batch(entries, self.block_size, decodes)
            self._fill_lane(entries)
        return result

    @property
    def _has_work_in_step(self) -> bool:
        return bool(self._entries or len(self._lane))

    # ------------------------------------------------------------------ the lane of plain decodes

    def _thin_lane(self, *, all_of_it: bool) -> None:
        """Take out of the lane whose next token needs a block; everybody, if there is no token for each."""
        if all_of_it or len(self._running) > self.max_num_batched_tokens:
            for request in self._lane:
                self._leave_lane(request)
                settle(request)
        else:
            for request in self._lane.unfit():
                self._leave_lane(request)

    def _leave_lane(self, request: Request) -> bool:
        if not self._lane.leave(request):
            return False
        request.last_scheduled_step = self.stats.num_steps - 1
        self._off_lane[request.arrival_order] = request
        return True

    def _fill_lane(self, entries: list[Entry]) -> None:
        """Put into the lane whose next token will have a place in the last block of its lease."""
        for entry in entries:
            request = entry.request
            if (
                entry.samples
                and request.tokens.length % self.block_size
                and not request.shares_blocks
                and request.num_seats == 1
                and not request.is_beam
            ):
                del self._off_lane[request.arrival_order]
                self._lane.join(request)

    def _share_with(self, request: Request) -> None:
        """Let a request about to be admitted share what decodes in the lane have added to its prefix."""
        for other in self._lane.continuations(request, self._view.match(request).num_tokens):
            self._leave_lane(other)
            self._budget += 1
            # The tokens fit into its last block, so nobody is preempted for them.
            assert other.lease is not None
            other.lease.append(other.tokens.view(other.lease.num_tokens))
            self._schedule_tokens(other, 1)

    def _schedule_alone(self, request: Request, result: ScheduleResult) -> None:
        if not request.is_running:
            if not request.is_paused and self._obstacle(request) is None:
                self._admit(request, others=False)
        elif request.num_to_compute and self._grow(request, result):
            self._schedule_tokens(request, self._chunk(request, others=False))

    def _schedule_all(self, result: ScheduleResult) -> None:
        if len(self._waiting) and self.policy.ranks_prompts:
            self._displace(result)
        prompts = self._schedule_decodes(result)
        self._num_prompts = len(prompts) + len(self._waiting)
        order: list[Request] = []
        if len(self._waiting) and self._seats > 0 and self._budget > 0:
            order = self._waiting.in_order_of_trial(self._view.matched_tokens)
        if order:
            self._reserve = min(max(MIN_CHUNK, self._budget // 4), self._budget // 2)
        if self.policy.ranks_prompts and prompts:
            first = min(self.policy.urgency(request)[0] for request in prompts)
            self._admit_waiting([request for request in order if self.policy.urgency(request)[0] < first])
        self._schedule_prompts(prompts, result)
        put_off = self._admit_waiting(order)
        self._reserve = 0
        self._schedule_prompts([r for r in prompts if r.arrival_order not in self._entries], result)
        # A prompt that gets more of the budget may complete what another one waits for: try again.
        while self._budget > 0:
            before = self._budget
            self._extend_chunks()
            put_off = self._admit_waiting(put_off)
            if self._budget == before:
                break
        if not self._has_work_in_step and len(self._waiting):
            self._unblock(result)
        self._waiting.count_passed(self._latest_admitted, self._held_up.values())
        if self.policy.promotes_oldest:
            self._promote_unserved()

    def _promote_unserved(self) -> None:
        """Promote running requests to which others have left no token of the budget for too long."""
        oldest = self.stats.num_steps - self.max_overtake
        for request in self._off_lane.values():
            if request.last_scheduled_step < oldest and not request.is_paused:
                request.is_promoted = True

    def _schedule_decodes(self, result: ScheduleResult) -> list[Request]:
        """Give every decode that is not in the lane its token; returns the prompts in progress."""
        running = sorted(self._off_lane.values(), key=lambda request: request.arrival_order)
        if self.cache.available_blocks() <= len(running):
            # Someone may have to go: serve the most urgent first, so that nobody who is already in this
            # step is ever the victim.
            running.sort(key=self.policy.urgency)
        elif len(running) > self._budget:
            running.sort(key=lambda request: request.last_scheduled_step)
        prompts: list[Request] = []
        for request in running:
            to_compute = request.num_to_compute
            if request.lease is None or to_compute == 0:
                continue  # preempted a moment ago; or a beam that waits for the others of its search
            if to_compute > 1:
                prompts.append(request)
            elif self._budget > 0 and self._grow(request, result):
                self._schedule_tokens(request, 1)
        return prompts

    def _schedule_prompts(self, prompts: list[Request], result: ScheduleResult) -> None:
        """Give prompts in progress their next chunks, as far as the reserve allows."""
        prompts = self.policy.order_prompts([request for request in prompts if request.lease is not None])
        for i, request in enumerate(prompts):
            room = self._budget - self._reserve
            if room <= 0:
                return
            others = i + 1 < len(prompts) or len(self._waiting) > 0
            if request.lease is not None and self._grow(request, result):
                self._schedule_tokens(request, min(room, self._chunk(request, others)))

    def _chunk(self, request: Request, others: bool) -> int:
        """Tokens of a request in this step; less than it wants if others have prompt tokens, too.

        Args:
            others: there are such behind it in this step.
        """
        wanted = min(request.num_to_compute, self._budget)
        if request.needs_prompt_logits:
            wanted = min(wanted, MAX_LOGITS_CHUNK)
        if self.max_tokens_per_request is not None:
            return min(wanted, self.max_tokens_per_request) if self._num_prompts > 1 else wanted
        return min(wanted, max(self._budget // 2, MIN_CHUNK)) if others else wanted

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
        end = entry.start + entry.count
        deferred = end - lease.num_committed  # by the lane: they are computed, and come first
        redundant = max(0, lease.commit(end + count) - deferred)
        assert not redundant or not entry.count, "an entry's slots changed within the step"
        entry.redundant += redundant
        entry.count += count
        entry.samples = entry.start + entry.count == request.num_tokens
        entry.num_logits = entry.count if request.needs_prompt_logits else int(entry.samples)
        self._budget -= count
        self._view.touched()
        request.last_scheduled_step = self.stats.num_steps
        if self.cache.enabled:
            self._coming.announce(request, entry.start + entry.count)

    def _extend_chunks(self) -> None:
        """Give what is left of the budget to the prompts of this step, the shortest rest first."""
        missing: list[tuple[int, Entry]] = []
        for entry in self._entries.values():
            rest = entry.request.num_tokens - entry.start - entry.count
            if rest > 0:
                missing.append((rest, entry))
        if not self.policy.ranks_prompts:
            missing.sort(key=lambda item: item[0])
        cap = self.max_tokens_per_request if self._num_prompts > 1 else None
        for rest, entry in missing:
            if cap is not None:
                rest = min(rest, cap - entry.count)
            if entry.request.needs_prompt_logits:
                rest = min(rest, MAX_LOGITS_CHUNK - entry.count)
            rest = min(rest, self._budget)
            if rest > 0 and not self._would_dedupe(entry, rest):
                self._schedule_tokens(entry.request, rest)

    def _would_dedupe(self, entry: Entry, count: int) -> bool:
        """Whether others have cached what follows the entry's tokens. O(tokens).

        Committing `count` more would then replace the block in which the entry ends, one that this step is to
        write and perhaps to copy from. What a step writes is decided once: the next step takes over theirs.
        """
        end = entry.start + entry.count
        tokens = entry.request.tokens.view(0, end + count)
        return self.cache.match(tokens, entry.request.namespace).num_tokens > end

    # ------------------------------------------------------------------ room, and preemption

    def _grow(self, request: Request, result: ScheduleResult) -> bool:
        """Give the lease a slot for every known token, preempting others if need be."""
        while request.lease is not None and request.lease.num_tokens < request.num_tokens:
            try:
                request.lease.append(request.tokens.view(request.lease.num_tokens))
                self._view.touched()
            except OutOfBlocks as error:
                rivals = self._rivals(request, error)
                victim = choose_victim(rivals, self._entries, self.policy)
                if victim is request and len(rivals) == 1:
                    result.stuck.append(request)
                    return False
                self._preempt(victim, result)
        return request.lease is not None

    def _rivals(self, request: Request, error: OutOfBlocks) -> list[Request]:
        """The running requests whose blocks could serve this one: under a quota, those of its namespace."""
        stats = self.cache.stats
        running = list(self._running.values())
        if stats.free_blocks + stats.cached_blocks >= error.needed:
            return [other for other in running if other.namespace == request.namespace]
        return running

    def _preempt(self, request: Request, result: ScheduleResult) -> None:
        """Release the lease and queue the request again; what it computed stays cached."""
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        result.preempted.append(request)
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        if self._leave_lane(request):
            self._budget += 1
        settle(request)
        del self._off_lane[request.arrival_order]
        del self._running[request.arrival_order]
        self._waiting.put_back(request)
        self._coming.forget(request)
        self._seats += request.num_seats
        self._view.touched()
        request.match = request.provider = None
        request.num_computed = 0
        lease, request.lease = request.lease, None
        assert lease is not None
        lease.release()

    def _displace(self, result: ScheduleResult) -> None:
        """Preempt less urgent requests for the most urgent waiting one, if that makes it fit."""
        request = self._waiting.most_urgent() if self._running else None
        if request is None or self._obstacle(request) in (None, Obstacle.COMING):
            return
        victims = choose_displaced(request, self._running.values(), self.policy)
        seats = self._seats + sum(victim.num_seats for victim in victims)
        blocks = self._view.available(request) + sum(len(v.lease.block_table) for v in victims if v.lease)
        if seats < min(request.num_seats, self.max_num_seqs) or blocks < self._view.blocks_needed(
            request, len(self._running)
        ):
            return
        for victim in victims:
            self._preempt(victim, result)
            if self._obstacle(request) is None:
                return

    def _unblock(self, result: ScheduleResult) -> None:
        """Nothing could be scheduled although requests wait: find out who is in the way."""
        if result.stuck:
            return
        for request in list(self._running.values()):
            # Only beams that wait for others of their search hold blocks without computing anything.
            assert request.is_paused, f"{request!r} was left out of a step that has room"
            self._preempt(request, result)
        order = self._waiting.in_order_of_trial(self._view.matched_tokens)
        self._admit_waiting(order)
        if not self._has_work_in_step and order:
            result.stuck.append(order[0])  # it does not fit, and nothing else runs

    # ------------------------------------------------------------------ admission

    def _obstacle(self, request: Request) -> Obstacle | None:
        """What keeps a waiting request from being admitted now; O(1) but for what has changed."""
        if request.provider is not None and self._coming.is_provided(request):
            return Obstacle.COMING
        found: Obstacle | None = None
        view, num_running, seats = self._view, len(self._running), request.num_seats
        if seats > self._seats and self._seats < self.max_num_seqs:
            found = Obstacle.SEATS
        elif num_running and view.blocks_needed(request, num_running) > view.available(request):
            found = Obstacle.BLOCKS
        if found is not None and not self._waiting.is_aged(request):
            return found
        if self._coming.is_coming(request, view.match(request).num_tokens):
            self.stats.coalesced += 1
            return Obstacle.COMING
        return found

    def _admit_waiting(self, ordered: Sequence[Request]) -> list[Request]:
        """Admit what fits, in this order; returns those that may yet be admitted in this step."""
        if self._budget <= 0 or self._seats <= 0 or not self._view.any_fits(ordered, len(self._running)):
            return []
        put_off: list[Request] = []
        unfit: list[Request] = []
        num_passed = 0  # of `unfit`: those before the last one admitted
        held_back: set[Namespace] = set()
        for i, request in enumerate(ordered):
            if self._budget <= 0 or self._seats <= 0:
                break
            if request.lease is not None:
                continue
            if unfit and not self.policy.may_pass(request, unfit[0]):
                break
            obstacle = self._obstacle(request)
            if obstacle is None and not self._may_use_reserve(request, held_back):
                held_back.add(request.namespace)
                put_off.append(request)
                continue
            if obstacle is None and not self._admit(request, others=i + 1 < len(ordered)):
                obstacle = Obstacle.BLOCKS
            if obstacle is None:
                num_passed = len(unfit)
            elif obstacle is Obstacle.COMING:
                put_off.append(request)
            elif self._waiting.is_aged(request):
                break  # nobody passes it any more
            else:
                unfit.append(request)
        self._held_up.update((request.arrival_order, request) for request in unfit[:num_passed])
        return put_off

    def _may_use_reserve(self, request: Request, held_back: set[Namespace]) -> bool:
        """Whether a request that fits may start although only the reserve of the budget is left.

        Args:
            held_back: namespaces of requests before it that may not. Where they are another tenant's, what is
                cached of this one's prompt must not decide.
        """
        if self._budget > self._reserve or not self.policy.lets_short_pass:
            return True
        in_progress = sum(not entry.samples for entry in self._entries.values())
        if in_progress < MANY_PROMPTS or self._waiting.is_aged(request):
            return True
        size = request.num_tokens
        if held_back <= {request.namespace}:
            size -= self._view.match(request).num_tokens
        return size <= self._reserve

    def _admit(self, request: Request, *, others: bool) -> bool:
        """Take the request's blocks and its first chunk; False, and nothing changed, if it does not fit."""
        skip = "prompt_logprobs" if request.needs_prompt_logits else None
        if skip is None and len(self._lane):
            self._share_with(request)
        try:
            lease = self.cache.acquire(
                request.tokens.view(), request.namespace, match=self._view.match(request), skip=skip
            )
        except OutOfBlocks:
            return False
        self._waiting.remove(request)
        request.match = request.provider = None
        request.lease = lease
        request.num_computed = lease.num_cached_tokens
        self._running[request.arrival_order] = self._off_lane[request.arrival_order] = request
        self._seats -= request.num_seats
        self._latest_admitted = max(self._latest_admitted, request.arrival_order)
        if request.num_preemptions:
            request.resumed_at = request.num_tokens
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached_tokens = lease.num_cached_tokens
            request.cache_report = lease.report
            self.stats.admitted += 1
            self.stats.prompt_tokens += request.num_prompt_tokens
            self.stats.cached_prompt_tokens += lease.num_cached_tokens
        self._schedule_tokens(request, self._chunk(request, others))
        return True

    # ------------------------------------------------------------------ after the step

    def _count(self, entries: list[Entry], decodes: DecodeRows) -> None:
        self.stats.num_steps += 1
        self.stats.computed_tokens += len(decodes.entries)
        for namespace, count in decodes.num_by_namespace.items():
            self.policy.on_served(namespace, count)
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
                # What was to be copied before its tokens may not be there, or come from this very step.
                copied = sum(slots for *_, slots in entry.copies)
                entry.request.lease.withdraw(entry.start - copied)
        requests = [entry.request for entry in batch.entries if entry.request.lease is not None]
        for request in requests:
            self._requeue(request)
        return requests

    def check(self) -> None:
        """Assert that waiting, running and the coalescing index agree."""
        self._waiting.check()
        for request in self._running.values():
            assert request.lease is not None, f"{request!r} runs without a lease"
            assert request.lease.num_tokens <= request.num_tokens
            if request not in self._lane:
                assert request.num_computed <= request.lease.num_tokens
            assert (request in self._lane) is not (request.arrival_order in self._off_lane)
        assert len(self._lane) + len(self._off_lane) == len(self._running)
        self._lane.check()
        self._coming.check(self._running)

    def __repr__(self) -> str:
        return (
            f"Scheduler({self.policy.name}, {self.num_running} running, {self.num_waiting} waiting, "
            f"budget {self.max_num_batched_tokens})"
        )
