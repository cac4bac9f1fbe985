"""The scheduler: turns waiting and running requests into the next `Batch` under a token budget.

The life of a request in here:

 1. `add` puts it into the queue; one that can never fit is refused by the engine before.
 2. Each `schedule()` first gives every running request its tokens (`step_builder`, `chunks`): one for a
    decode, a chunk for a prompt. A decode with room in its last block is a row of the decode batch
    (`running`), without a call of the cache. A decode that finds no block preempts the least urgent running
    request (`room`): a release, nothing else.
 3. With the budget that is left it admits waiting requests in the policy's order (`admission`): the cached
    prefix is locked, blocks for the rest are allocated. A request whose next tokens another one is computing
    waits for them (`in_flight_prefixes`).
 4. What is scheduled is committed at once: requests later in the same step share it already, since the
    step writes K and V before it attends.
 5. What is left of the budget is for drafts (`drafting`): guesses of the tokens that follow, computed in the
    same step and shareable only once they have proved right.
 6. `complete` advances the computed lengths after the model has run, and `settle` by the drafts that were
    right; `rollback` takes a failed step back.
 7. `finish` releases the lease: the tokens stay cached, evictable.

Everything that is decided for a step is in one `StepPlan`, made by `schedule` and passed along.
"""

from __future__ import annotations

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.scheduling.admission import Admission
from radixkv.scheduling.batch import Batch, DecodeRows, Entry, build_batch, drop_idle_copies
from radixkv.scheduling.chunks import Chunks
from radixkv.scheduling.drafting import Drafting, DraftProposer
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.match_cache import MatchCache
from radixkv.scheduling.policy import AdmissionPolicy, make_policy
from radixkv.scheduling.room import Room
from radixkv.scheduling.running import RunningRequests
from radixkv.scheduling.schedule_result import ScheduleResult, SchedulerStats
from radixkv.scheduling.sequence_state import SequenceState
from radixkv.scheduling.step_builder import StepBuilder
from radixkv.scheduling.step_plan import StepPlan
from radixkv.scheduling.waiting_queue import WaitingQueue


class Scheduler:
    """Admission, chunking, sharing and preemption over one `PrefixCache`. Not thread-safe.

    Args:
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: most running requests (sequence slots).
        max_tokens_per_request: cap on one request's prompt tokens in a step while others have prompt tokens
            to compute; None: half of the budget that is left when its turn comes.
        policy: an `AdmissionPolicy` or the name of one.
        max_overtake: most steps in which later requests are admitted before an earlier one; see `policy`.
        drafter: guesses tokens for the requests that get one in a step; None: nobody does.
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
        drafter: DraftProposer | None = None,
    ) -> None:
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_tokens_per_request = max_tokens_per_request
        self.policy = policy = make_policy(policy) if isinstance(policy, str) else policy
        self.max_overtake = max_overtake
        self.stats = stats = SchedulerStats()
        self._next_arrival = 0
        self._waiting = waiting = WaitingQueue(policy, max_overtake)
        self._running = running = RunningRequests(cache.block_size, stats)
        self._in_flight = in_flight = InFlightPrefixes(cache)
        self._matches = matches = MatchCache(cache, running)
        self._room = room = Room(cache, waiting, running, in_flight, matches, policy, stats)
        chunks = Chunks(cache, in_flight, matches, max_tokens_per_request)
        admission = Admission(
            cache, waiting, running, in_flight, matches, chunks, policy, stats, max_num_seqs=max_num_seqs
        )
        self._builder = StepBuilder(
            cache,
            waiting,
            running,
            matches,
            chunks,
            room,
            admission,
            policy,
            None if drafter is None else Drafting(cache, running, chunks, drafter),
            max_num_seqs=max_num_seqs,
            max_overtake=max_overtake,
        )

    # ------------------------------------------------------------------ the queue

    @property
    def waiting(self) -> list[SequenceState]:
        """Waiting requests in arrival order."""
        return self._waiting.in_arrival_order()

    @property
    def running(self) -> list[SequenceState]:
        """Running requests in the order of their admission."""
        return list(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(len(self._running) or len(self._waiting))

    def add(self, request: SequenceState) -> None:
        """Put a new request at the end of the queue; O(1)."""
        self._number(request)
        self._waiting.add(request)

    def add_fork(self, fork: SequenceState, parent: SequenceState) -> None:
        """Take in a fork: beside its parent if there is a place; else it waits, and hits the same blocks."""
        self._number(fork)
        fork.was_admitted = parent.was_admitted
        if parent.lease is not None and len(self._running) < self.max_num_seqs:
            self._running.leave_decodes(parent, tell=True)
            parent.shares_blocks = fork.shares_blocks = True
            fork.lease = parent.lease.fork()
            fork.num_computed = parent.num_computed
            fork.last_scheduled_step = self.stats.num_steps
            self._running.add(fork)
        else:
            self._waiting.add(fork)

    def _number(self, request: SequenceState) -> None:
        assert not request.was_added, f"{request!r} was added before"
        request.was_added = True
        request.arrival_order = self._next_arrival
        self._next_arrival += 1

    def finish(self, request: SequenceState, *, discard: bool = False, keep: int | None = None) -> None:
        """Take a request out, waiting or running; its lease is released.

        Args:
            discard: forget the tokens it contributed to the cache.
            keep: keep only its first `keep` tokens cached.
        """
        self._waiting.remove(request)
        self._running.remove(request, tell=not discard)
        self._in_flight.forget(request)
        lease, request.lease = request.lease, None
        request.match = request.producer = None
        if lease is not None:
            lease.release(discard=discard, keep=keep)

    # ------------------------------------------------------------------ one step

    def schedule(self, only: SequenceState | None = None) -> ScheduleResult:
        """Choose the work of the next step, lock and allocate its blocks, and commit its tokens.

        Args:
            only: schedule nothing but this request (to find out who makes a step fail).
        """
        plan = self._begin(dissolve=only is not None or len(self._running) > self.max_num_batched_tokens)
        if only is not None:
            self._builder.fill_with(plan, only)
        else:
            self._builder.fill(plan)
        batch = None if plan.is_empty else self._build_batch(plan)
        return ScheduleResult(batch, plan.preempted, plan.stuck)

    def _begin(self, *, dissolve: bool) -> StepPlan:
        running = self._running
        running.drop_full_rows(dissolve=dissolve)
        self._matches.touched()
        taken = running.num_decodes + sum([request.num_sequence_slots for request in running.others])
        return StepPlan(
            number=self.stats.num_steps,
            budget=self.max_num_batched_tokens - running.num_decodes,
            sequence_slots=self.max_num_seqs - taken,
            num_decodes=running.num_decodes,
        )

    def _build_batch(self, plan: StepPlan) -> Batch:
        entries, decodes = list(plan.entries.values()), self._running.decode_rows()
        self._count(entries, decodes)
        drop_idle_copies(entries, self.cache.block_size)
        batch = build_batch(entries, self.cache.block_size, decodes)
        self._running.fill_decodes(entries)
        return batch

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

    # ------------------------------------------------------------------ after the step

    def complete(self, batch: Batch) -> None:
        """The model has run: the step's tokens have their K/V. Drafts are left to `settle`."""
        for entry in batch.entries:
            entry.request.num_computed = entry.end
            lease = entry.request.lease
            if lease is not None and lease.has_pending_copies:
                lease.copies_done()
                self._matches.touched()

    def settle(self, entry: Entry, num_accepted: int) -> None:
        """The request has got the first `num_accepted` tokens of the entry's draft; the others were wrong.

        What was computed of the right ones is shareable from now on. To be called once a step for each entry
        with a draft, after `complete` and before the request is finished. O(draft).
        """
        request, lease = entry.request, entry.request.lease
        if lease is not None:
            request.num_computed = entry.end + num_accepted
            lease.truncate(request.num_computed)
            lease.commit(request.num_computed)
            self._matches.touched()

    def rollback(self, batch: Batch) -> list[SequenceState]:
        """The step failed: what it made shareable is withdrawn, its requests wait again.

        Returns the requests, so that the engine can decide which of them may try again.
        """
        for entry in batch.entries:
            if entry.request.lease is not None:
                # What was to be copied before its tokens may not be there, or come from this very step.
                copied = sum(slots for *_, slots in entry.copies)
                entry.request.lease.rollback(entry.start - copied)
        requests = [entry.request for entry in batch.entries if entry.request.lease is not None]
        for request in requests:
            self._room.rollback(request)
        return requests

    def check(self) -> None:
        """Assert that waiting, running and in-flight requests agree."""
        self._waiting.check()
        self._running.check()
        self._in_flight.check({request.arrival_order for request in self._running})

    def __repr__(self) -> str:
        return (
            f"Scheduler({self.policy.name}, {self.num_running} running, {self.num_waiting} waiting, "
            f"budget {self.max_num_batched_tokens})"
        )
