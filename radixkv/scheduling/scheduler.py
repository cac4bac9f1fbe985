# SPDX-License-Identifier: Apache-2.0
"""The scheduler: turns waiting and running requests into the next `Batch` under a token budget.

The life of a request in here:

 1. `add` puts it into the queue; one that can never fit is refused by the engine before.
 2. Each `schedule()` first gives every running request its tokens: one for a decode, a chunk for a prompt. A
    decode with room in its last block is a row (`running`), without a call of the cache. A decode that finds
    no block preempts the least urgent running request, which only releases its lease.
 3. With the budget that is left it admits waiting requests in the policy's order (`admission`): the cached
    prefix is locked, blocks for the rest are allocated. A request whose next tokens another one is computing
    waits for them (`in_flight_prefixes`).
 4. Scheduled tokens are committed at once: requests later in the same step share them already, since the
    step writes K and V before it attends.
 5. The rest of the budget is for longer chunks, and then for drafts: guesses of the tokens
    that follow, computed in the same step and shareable only once they have proved right.
 6. `complete` advances the computed lengths after the model has run, and `accept` by the drafts that were
    right; `rollback` takes a failed step back.
 7. `finish` releases the lease: the tokens stay cached, evictable.

Everything that is decided for a step is in one `StepPlan`, made by `schedule` and passed along.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable

from radixkv.cache.keys import NamespaceName
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.engine.config import SchedulerConfig
from radixkv.errors import OutOfBlocks
from radixkv.scheduling.admission import AdmissionControl, AdmissionResult
from radixkv.scheduling.batch import Batch, Entry, build_batch, drop_idle_copies
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.long_prompts import LongPrompts
from radixkv.scheduling.policy import AdmissionPolicy, make_policy, tenant_of
from radixkv.scheduling.reuse_guard import ReuseGuard
from radixkv.scheduling.running import RunningRequests
from radixkv.scheduling.seams import DraftProposer, ImageWaits, TierLoads
from radixkv.scheduling.sequence import Sequence
from radixkv.scheduling.state_steps import StateSteps, make_state_steps
from radixkv.scheduling.step_plan import SchedulerStats, StepPlan
from radixkv.scheduling.token_budget import TokenBudget
from radixkv.scheduling.waiting_queue import WaitingQueue

#: Beside other requests, background prompts get at most this part of a step's tokens: one in four.
BACKGROUND_SHARE = 4
#: Of a step's requests, one in so many may have a draft: they sit out a step that is planned ahead.
_IDLE_SHARE = 8


def in_two(requests: abc.Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Return the background requests apart from the others, which come first."""
    found: tuple[list[Sequence], list[Sequence]] = [], []
    for request in requests:
        found[request.is_background].append(request)
    return found


class Scheduler:
    """Admission, chunking, sharing and preemption over one `PrefixCache`. Not thread-safe.

    Args:
        config: the settings, with `max_num_batched_tokens` given; an engine's `EngineConfig` is one.
        policy: order of admission; None: the one that the settings name. An engine gives the same to the
            scheduler that it makes after a fault, so that what tenants were served still counts.
        drafter: guesses tokens for the requests that get one in a step; None: no guesses.
        tier_loads: lets requests wait for blocks that a tier has; None: there are no tiers.
        image_waits: lets requests wait for their images; None: the model takes none.
        clock: seconds, for the ages of prefixes in use (`reuse_guard`); None: there is no such guard.
        stats: counters to continue; None: new ones.
    """

    def __init__(
        self,
        cache: PrefixCache,
        config: SchedulerConfig,
        *,
        policy: AdmissionPolicy | None = None,
        drafter: DraftProposer | None = None,
        tier_loads: TierLoads | None = None,
        image_waits: ImageWaits | None = None,
        clock: Callable[[], float] | None = None,
        stats: SchedulerStats | None = None,
    ) -> None:
        self.cache = cache
        assert config.max_num_batched_tokens is not None, "the budget depends on the device"
        self.config = config
        self._budget = TokenBudget(config.max_num_batched_tokens)
        self.max_num_seqs = max_num_seqs = config.max_num_seqs
        if cache.states is not None:
            self.max_num_seqs = max_num_seqs = min(max_num_seqs, cache.states.max_requests)
        if policy is None:
            policy = make_policy(config.scheduling_policy, weights=config.namespace_weights)
        self.policy = policy
        self.stats = stats = stats or SchedulerStats()
        self._next_arrival = 0
        self._drafter = drafter
        self._tier_loads = tier_loads
        self._waiting = WaitingQueue(policy, config.max_overtake)
        self._running = RunningRequests(cache.block_size, stats)
        self._joined: list[Sequence] = []  # admitted to a step ahead whose turn has not come
        self._states: StateSteps | None = None
        if cache.states is not None:
            self._states = make_state_steps(cache.states, self._running, max_num_seqs)
        self._in_flight = InFlightPrefixes(cache, self._states)
        self._guard: ReuseGuard | None = None
        if clock is not None:
            self._guard = ReuseGuard(cache, budget=self._budget, clock=clock)
        self._long_prompts = LongPrompts(
            self._running,
            self._in_flight,
            policy,
            budget=self._budget,
            threshold=config.long_prompt_tokens,
            max_chunk=config.max_tokens_per_request,
            max_overtake=config.max_long_overtake,
            tier_loads=tier_loads,
            guard=self._guard,
        )
        self._admission = AdmissionControl(
            cache,
            self._waiting,
            self._running,
            self._in_flight,
            policy,
            stats,
            max_num_seqs=max_num_seqs,
            tier_loads=tier_loads,
            image_waits=image_waits,
            long_prompts=self._long_prompts if cache.enabled else None,
        )

    # ------------------------------------------------------------------ the queue

    @property
    def waiting(self) -> list[Sequence]:
        """Waiting requests in arrival order."""
        return self._waiting.in_arrival_order()

    @property
    def running(self) -> list[Sequence]:
        """Running requests in the order of their admission."""
        return list(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting_for_turn(self) -> int:
        """Number of long prompts that wait for others in progress (`long_prompts`). O(1)."""
        return self._long_prompts.num_waiting

    @property
    def reserved_tokens(self) -> int:
        """Tokens of running prompts that have blocks and are not computed. O(running)."""
        return sum(
            request.num_to_compute for request in self._running.without_row if request.num_to_compute > 1
        )

    @property
    def has_work(self) -> bool:
        return bool(len(self._running) or len(self._waiting))

    @property
    def waits_for_transfers(self) -> bool:
        """True if a tier's answer, or the end of a transfer, may let a waiting request run."""
        return self._admission.waits_for_transfers

    def is_produced(self, request: Sequence) -> bool:
        """Return True if another request, or a load, makes the next tokens of a waiting one. O(1)."""
        return self._in_flight.is_produced(request)

    def add(self, request: Sequence) -> None:
        """Put a new request at the end of the queue. O(1)."""
        self._number(request)
        self._waiting.add(request)

    def add_fork(self, fork: Sequence, parent: Sequence) -> None:
        """Add a fork: it runs beside its parent if a slot is free, else it waits and hits the same blocks."""
        self._number(fork)
        fork.was_admitted = parent.was_admitted
        if parent.lease is not None and len(self._running) < self.max_num_seqs:
            self._running.drop_row(parent, flush=True)
            parent.shares_blocks = fork.shares_blocks = True
            fork.lease = parent.lease.fork()
            states = fork.lease.states
            # The parent's ring is its own: a fork computes the tokens since the common base again.
            fork.num_computed = parent.num_computed if states is None else states.base.position
            fork.last_scheduled_step = self.stats.num_steps
            self._running.add(fork)
        else:
            self._waiting.add(fork)

    def _number(self, request: Sequence) -> None:
        assert not request.was_added, f"{request!r} was added before"
        request.arrival_order = self._next_arrival
        self._next_arrival += 1

    def requeue(self, request: Sequence, namespace: NamespaceName) -> None:
        """Let a running request wait again in its old place, to be computed in another namespace."""
        self._admission.put_back(request)
        request.namespace = namespace
        request.num_preemptions += 1

    def finish(self, request: Sequence, *, discard: bool = False) -> None:
        """Take a request out, waiting or running; its lease is released.

        Args:
            discard: forget the tokens it contributed to the cache.
        """
        self._waiting.remove(request)
        self._running.remove(request, flush=not discard)
        for rule in (self._in_flight, self._long_prompts, self._admission, self.policy.passed):
            rule.forget(request)
        request.release(discard=discard, done=request.request.session_done)

    # ------------------------------------------------------------------ one step

    def schedule(self, only: Sequence | None = None) -> StepPlan:
        """Choose the work of the next step, lock and allocate its blocks, and commit its tokens.

        Args:
            only: schedule nothing but this request (to find out who makes a step fail).

        Returns:
            The plan: its `batch` is the step's work, `stuck` lists requests for the caller to end.
        """
        if self._tier_loads is not None:
            self._tier_loads.begin_step()
        self._leave()  # a step ahead was given up
        running = self._running
        running.refresh_rows(dissolve=only is not None or len(running) > self.max_num_batched_tokens)
        taken = running.num_rows + sum([request.num_sequence_slots for request in running.without_row])
        plan = StepPlan(
            number=self.stats.num_steps,
            budget=self.max_num_batched_tokens - running.num_rows,
            sequence_slots=self.max_num_seqs - taken,
            num_rows=running.num_rows,
            max_chunk=self.config.max_tokens_per_request,
            in_flight=self._in_flight if self.cache.enabled else None,
        )
        if only is None:
            self._fill(plan)
        else:
            self._fill_with(plan, only)
        if not plan.is_empty:
            plan.batch = self._build_batch(plan)
        return plan

    def schedule_ahead(
        self, step: Batch, guessing: Callable[[abc.Sequence[Entry]], set[Sequence]] | None = None
    ) -> Batch | None:
        """Plan the step after one that still runs; None: the tokens of that one must be known first.

        Prompts go on by their next chunks, which are known; `begin_ahead` makes them shareable in their turn.
        Decodes go on by one token each, whichever they get:

            step n        computes position p of a request; the host does not know the chosen token yet
            step n + 1    computes position p + 1, in a slot of the lease's last block, or of a reserved one

        A lease gets the tokens of step n + 1 only when its request has them and the step has run. If step n
        chose the request's last token, the slot is beyond the lease's count when the lease is released: it is
        in no prefix. The next owner of the block, a later step or a load from a tier, writes to it after step
        n + 1, as runners execute calls in order.

        The tokens must be known where logits depend on them (grammars, say), where forks begin, and where
        many requests have drafts; a few of these sit the step out.

        Waiting requests join while there are slots (`_join`). One that takes the slot of a request that ends
        with step n does so a step later than it could, and no device stands idle for it.

        Args:
            step: the one that still runs.
            guessing: requests of some decodes whose next tokens would be guessed; None: there are no guesses.
        """
        running, waiting = self._running, self._waiting
        joins = len(waiting) > 0 and len(running) < self.max_num_seqs
        if len(waiting):
            if joins and not self._may_join(step):
                return None
            if self.policy.entitled(waiting.firsts(), running.num_foreground_of) is not None:
                return None
            if running.background and waiting.num_foreground:
                return None
        rows: list[Entry] = []
        prompts: list[Entry] = []
        ending: list[Sequence] = []
        idle: list[Sequence] = []
        for entry in step.entries:
            request, start = entry.request, entry.start + 1
            if start < entry.until:
                row = Entry(request, start, 1, 0, 0, True, 1)
                row.block_table, row.slot_offset, row.until = (
                    entry.block_table,
                    entry.slot_offset,
                    entry.until,
                )
                rows.append(row)
            elif not entry.samples:
                if entry.num_logits or request.params.samples_nothing:
                    return None
                prompts.append(entry)
            elif request.num_forks or not request.sampling_state.waits_in:
                return None
            elif entry.draft:
                idle.append(request)
            elif entry.num_logits != 1:
                return None
            elif request.num_output_tokens + 1 < request.grows_until:
                next_row = self._row_ahead(entry)
                if next_row is None:
                    return None
                rows.append(next_row)
            else:
                ending.append(request)
        if guessing is not None and rows:
            guessed = guessing(rows)
            idle += guessed
            rows = [row for row in rows if row.request not in guessed] if guessed else rows
        if not (rows or prompts) or len(idle) > len(step.entries) // _IDLE_SHARE:
            return None
        if len(rows) + len(prompts) + len(ending) + len(idle) != len(running):
            return None
        if ending and len(waiting) and not self._may_join(step):
            return None
        plan = self._plan_ahead(len(rows), len(prompts))
        if joins:
            plan.set_reserve()
        chunks = self._chunks_ahead(plan, prompts)
        if chunks is None:
            return None
        if joins:
            joined = self._join(plan)
            if not joined and plan.sequence_slots > 0:
                return None  # who can't join has to be looked at with all tokens known
            chunks += joined
        batch = build_batch(rows + chunks, self.cache.block_size, len(rows))
        if self._states is not None and not self._states.fill(batch, ahead=True):
            return None
        stats, others = self.stats, [*ending, *idle, *[chunk.request for chunk in chunks]]
        for tenant, count in running.num_by_tenant(without=others).items():
            self.policy.on_served(tenant, count)
        for chunk in chunks:
            if not chunk.request.is_background:
                self.policy.on_served(tenant_of(chunk.request.namespace), chunk.count)
            end = min(chunk.end, chunk.request.num_prompt_tokens)
            stats.computed_prompt_tokens += max(0, end - chunk.start)
            chunk.request.last_scheduled_step = stats.num_steps
        stats.num_steps += 1
        stats.num_steps_ahead += 1
        stats.computed_tokens += batch.num_tokens
        return batch

    def _row_ahead(self, entry: Entry) -> Entry | None:
        """Return the row after a decode that still runs; None: there is no place for it."""
        request, position, size = entry.request, entry.start + entry.count, self.cache.block_size
        if request.shares_blocks or not self._reserve_ahead(request, position + 1):
            return None
        lease, block = request.lease, position // size
        assert lease is not None
        request.last_scheduled_step = self.stats.num_steps
        row = Entry(request, position, 1, samples=True, num_logits=1)
        row.block_table = table = lease.block_table
        row.slot_offset = (int(table[block]) - block) * size
        row.until = min(
            # The block before this one was filled by the token before, and may yet be deduped.
            (block + 1) * size if position % size else position + 1,
            position + request.sampling_state.waits_in,
            request.num_prompt_tokens + request.grows_until - 1,
        )
        return row

    def _plan_ahead(self, num_rows: int, num_prompts: int) -> StepPlan:
        """Return an empty plan of a step after one that still runs."""
        running = self._running
        taken = running.num_rows + sum([request.num_sequence_slots for request in running.without_row])
        return StepPlan(
            number=self.stats.num_steps,
            budget=self.max_num_batched_tokens - num_rows,
            sequence_slots=self.max_num_seqs - taken,
            num_rows=num_rows,
            max_chunk=self.config.max_tokens_per_request,
            in_flight=self._in_flight if self.cache.enabled else None,
            num_prompts=num_prompts,
            is_ahead=True,
        )

    def _may_join(self, step: Batch) -> bool:
        """Return True if requests may be admitted to the step after one that still runs.

        A state or window at the end of a common prefix is left by a step that was asked for it before it was
        launched. So nobody joins beside a chunk of a prompt where the model has these.
        """
        return self._states is None or step.num_tokens == len(step.entries)

    def _join(self, plan: StepPlan) -> list[Entry]:
        """Admit waiting requests to a step after one that still runs; return their first chunks.

        Nobody is displaced, and nothing is committed yet. A prefix that the running step computes is in the
        cache already: if that step fails, who joined waits again (`_leave`).
        """
        admission = self._admission
        if self._tier_loads is not None:
            self._tier_loads.begin_step()
        self._long_prompts.begin_step()
        plan.num_prompts += len(self._waiting)
        plan.reserve = 0
        admission.admit_in_order(plan, admission.in_order(plan))
        self._waiting.count_passed(
            plan.latest_admitted, plan.held_up.values(), self._long_prompts.steps_overtaken
        )
        joined = list(plan.entries.values())
        self._joined += [entry.request for entry in joined]
        return joined

    def _leave(self) -> None:
        """Let requests wait again that joined a step which will not run, or not on what they build on."""
        joined, self._joined = self._joined, []
        for request in joined:
            if request.lease is not None:
                self._admission.put_back(request)

    def _chunks_ahead(self, plan: StepPlan, prompts: abc.Sequence[Entry]) -> list[Entry] | None:
        """Return the next chunks of prompts whose last ones still run; None: these must have run first.

        Nothing is committed yet: a request may end before their turn, and then they are nobody's.
        """
        if not prompts:
            return []
        is_shared = len(self._running.background) < len(self._running)
        if is_shared and any(entry.request.is_background for entry in prompts):
            return None  # what the others leave to them is decided with all that wait
        starts = {entry.request: entry.end for entry in prompts}
        ordered = self.policy.order_prompts(list(starts))
        chunks: list[Entry] = []
        for i, request in enumerate(ordered):
            start, lease = starts[request], request.lease
            assert lease is not None
            if (
                lease.num_committed != start
                or lease.has_pending_copies
                or lease.num_tokens < request.num_tokens
            ):
                return None
            shares_budget = i + 1 < len(ordered) or plan.reserve > 0
            room = plan.budget - plan.reserve
            count = plan.chunk(request, shares_budget=shares_budget, start=start, room=room)
            if count <= 0:
                return None
            chunks.append(Entry(request, start=start, count=count, known=start))
            plan.budget -= count
        for chunk in sorted(chunks, key=lambda chunk: chunk.request.num_tokens - chunk.end):
            room = plan.budget - plan.reserve
            more = plan.chunk(
                chunk.request, shares_budget=False, scheduled=chunk.count, start=chunk.start, room=room
            )
            chunk.count += max(0, more)
            plan.budget -= max(0, more)
        for chunk in chunks:
            request, lease = chunk.request, chunk.request.lease
            assert lease is not None
            chunk.samples = chunk.end == request.num_tokens
            chunk.num_logits = int(chunk.samples)
            # What others have cached is taken over, which changes the block table; forks begin with a token.
            if (chunk.samples and request.num_forks) or lease.would_dedupe(chunk.end):
                return None
        return chunks

    def begin_ahead(self, batch: Batch) -> None:
        """Make the chunks of a step that was planned ahead shareable: its turn has come. O(chunks)."""
        self._joined = []
        for entry in batch.entries[batch.num_rows :]:
            request, lease = entry.request, entry.request.lease
            if lease is not None and request.num_computed == entry.start:
                lease.commit(entry.end)
                if self.cache.enabled:
                    self._in_flight.announce(request, entry.end)

    def _reserve_ahead(self, request: Sequence, num_tokens: int) -> bool:
        """Give a request slots for `num_tokens` tokens, without preemption; False: too few blocks."""
        lease = request.lease
        assert lease is not None
        if lease.num_blocks * self.cache.block_size >= num_tokens:
            return True
        # A block for each running request's next token stays.
        if self.cache.available_blocks(request.namespace) <= len(self._running):
            return False
        self._running.drop_row(request, flush=True)
        try:
            lease.reserve(num_tokens)
        except OutOfBlocks:
            return False
        return True

    def _fill(self, plan: StepPlan) -> None:
        """Distribute the budget: decodes, prompts in progress, waiting requests, longer chunks, drafts."""
        admission, waiting = self._admission, self._waiting
        entitled = admission.make_room(plan)
        prompts = self._schedule_decodes(plan)
        plan.num_prompts = len(prompts) + len(waiting)
        order, order_behind = in_two(admission.in_order(plan, entitled))
        prompts, prompts_behind = in_two(prompts)
        if order:
            plan.set_reserve()
        admission.admit_in_order(plan, admission.more_urgent(order, prompts))
        self._schedule_prompts(plan, prompts)
        postponed = admission.admit_in_order(plan, order)
        plan.reserve = 0
        self._schedule_prompts(plan, [r for r in prompts if r.arrival_order not in plan.entries])
        self._spend_rest(plan, postponed)
        if prompts_behind or order_behind:
            self._fill_behind(plan, prompts_behind, order_behind)
        if self._drafter is not None and plan.budget > 0:
            self._add_drafts(plan, self._drafter)
        if plan.is_empty and len(waiting) and not plan.stuck:
            self._unblock(plan)
        waiting.count_passed(plan.latest_admitted, plan.held_up.values(), self._long_prompts.steps_overtaken)
        if waiting.promotes:
            for request in self._running.without_row:
                is_late = request.last_scheduled_step < plan.number - self.config.max_overtake
                if is_late and not request.is_background:
                    self.policy.passed.promoted.add(request)

    def _fill_behind(
        self, plan: StepPlan, prompts: abc.Sequence[Sequence], order: abc.Sequence[Sequence]
    ) -> None:
        """Give background requests what the others have left of the step.

        Beside others that run, they get a share of its tokens, so that steps stay short; none is admitted
        while one of the others waits.
        """
        kept_back = 0
        if len(self._running.background) < len(self._running):
            kept_back = max(0, plan.budget - self.max_num_batched_tokens // BACKGROUND_SHARE)
        plan.budget -= kept_back
        self._schedule_prompts(plan, prompts)
        postponed: list[Sequence] = []
        if not self._waiting.num_foreground:
            postponed = self._admission.admit_in_order(plan, order)
        self._spend_rest(plan, postponed)
        plan.budget += kept_back

    def _fill_with(self, plan: StepPlan, request: Sequence) -> None:
        """Schedule nothing but this request."""
        if not request.is_running:
            if self._admission.foresee(plan, request) is AdmissionResult.ADMITTED:
                self._admission.admit(plan, request, shares_budget=False, is_alone=True)
        elif request.num_to_compute and self._grow(plan, request):
            plan.add(request, plan.chunk(request, shares_budget=False))

    def _schedule_decodes(self, plan: StepPlan) -> list[Sequence]:
        """Give each decode without a row its token; return the prompts in progress."""
        running = sorted(self._running.without_row, key=lambda request: request.arrival_order)
        if self.cache.available_blocks() <= len(running):
            # One may have to be preempted: serve the most urgent first, so that no request already in this
            # step is ever the victim.
            running.sort(key=self.policy.urgency)
        elif len(running) > plan.budget:
            running.sort(key=lambda request: request.last_scheduled_step)
        prompts: list[Sequence] = []
        for request in running:
            if request.lease is None:
                continue  # preempted a moment ago
            if request.num_to_compute > 1:
                prompts.append(request)
            elif plan.budget > 0 and self._grow(plan, request):
                plan.add(request, 1)
        return prompts

    def _schedule_prompts(self, plan: StepPlan, prompts: abc.Sequence[Sequence]) -> None:
        """Give prompts in progress their next chunks, as far as the reserve allows."""
        ordered = self.policy.order_prompts([request for request in prompts if request.lease is not None])
        for i, request in enumerate(ordered):
            room = plan.budget - plan.reserve
            if room <= 0:
                return
            shares_budget = i + 1 < len(ordered) or len(self._waiting) > 0
            if request.lease is not None and self._grow(plan, request):
                plan.add(request, plan.chunk(request, shares_budget=shares_budget, room=room))

    def _spend_rest(self, plan: StepPlan, postponed: list[Sequence]) -> None:
        """Lengthen chunks, the shortest rest first. One may complete a prefix that others wait for."""
        rank = self.policy.rank
        while plan.budget > 0:
            before = plan.budget
            prompts = [entry for entry in plan.entries.values() if not entry.samples]
            prompts.sort(key=lambda entry: (rank(entry.request), entry.request.num_to_compute - entry.count))
            for entry in prompts:
                plan.lengthen(entry)
            postponed = self._admission.admit_in_order(plan, postponed)
            if plan.budget == before:
                return

    def _add_drafts(self, plan: StepPlan, drafter: DraftProposer) -> None:
        """Give drafts to the requests that get a token in this step, while there is budget. O(requests)."""
        entries = [
            entry
            for entry in plan.entries.values()
            if entry.samples and not entry.request.num_forks and entry.num_logits == 1
        ]
        rows = [row.request for row in self._running.rows()]
        if not entries and not rows:
            return
        num_tokens = len(rows) + sum(entry.count for entry in plan.entries.values())
        drafter.begin(num_tokens, len(rows) + len(entries))
        for request in [*(entry.request for entry in entries), *rows]:
            if plan.budget <= 0:
                return
            draft = drafter.draft(request, plan.budget)
            if draft:
                if request.arrival_order not in plan.entries:
                    self._admission.make_entry(plan, request)
                entry = plan.entries[request.arrival_order]
                count = plan.add_draft(entry, draft, self.cache, len(self._running))
                if count:
                    drafter.granted(count)

    def _unblock(self, plan: StepPlan) -> None:
        """Try again if nothing could be scheduled although requests wait; the first may be stuck."""
        assert not len(self._running), f"{self.running} were left out of a step that has room"
        order = self._admission.in_order(plan)
        self._admission.admit_in_order(plan, order)
        if plan.is_empty and order and not self._admission.waits_for_transfers:
            plan.add_stuck(order[0])  # it does not fit, and nothing else runs

    def _grow(self, plan: StepPlan, request: Sequence) -> bool:
        """Give the lease a slot for every known token; preempt other requests if need be.

        Returns:
            False: the request has no lease: it was preempted itself, or no block can be had even alone.
        """
        while request.lease is not None and request.lease.num_tokens < request.num_tokens:
            try:
                request.lease.append(request.encoded_part(request.lease.num_tokens))
            except OutOfBlocks as error:
                if self._give_up_transfer(request, error):
                    plan.leases_changed()
                    continue
                rivals = self._rivals(request, error)
                victim = self.policy.victim(rivals, plan.entries)
                if victim is request and len(rivals) == 1 and not self._admission.waits_for_transfers:
                    plan.add_stuck(request)
                    return False
                self._admission.preempt(plan, victim)
        return request.lease is not None

    def _rivals(self, request: Sequence, error: OutOfBlocks) -> list[Sequence]:
        """Return the running requests whose blocks could serve this one."""
        may_serve = self._admission.may_serve
        return [other for other in self._running if may_serve(other.namespace, request, error)]

    def _give_up_transfer(self, request: Sequence, error: OutOfBlocks) -> bool:
        """Stop a copy, or give up a load without a running request, for its blocks; False: there is none."""
        admission = self._admission
        return admission.stop_copy(request, error, at_once=True) or admission.give_up_load(request, error)

    def _build_batch(self, plan: StepPlan) -> Batch:
        rows, entries = self._running.rows(), list(plan.entries.values())
        self.stats.num_steps += 1
        self.stats.computed_tokens += len(rows) + sum(entry.count for entry in entries)
        for tenant, count in self._running.num_by_tenant(without=self._running.without_row).items():
            self.policy.on_served(tenant, count)
        for entry in entries:
            end = min(entry.start + entry.count, entry.request.num_prompt_tokens)
            self.stats.computed_prompt_tokens += max(0, end - entry.start)
            if not entry.request.is_background:
                self.policy.on_served(tenant_of(entry.request.namespace), entry.count)
        drop_idle_copies(entries, self.cache.block_size)
        batch = build_batch(rows + entries, self.cache.block_size, len(rows))
        if self._states is not None:
            self._states.fill(batch)
        self._running.make_rows(entries)
        return batch

    # ------------------------------------------------------------------ after the step

    def complete(self, batch: Batch) -> None:
        """Record that a step has run: its tokens have their K/V. Drafts are left to `accept`."""
        for entry in batch.entries[: batch.num_rows]:
            entry.request.num_computed = entry.start + 1
        for entry in batch.entries[batch.num_rows :]:
            request = entry.request
            request.num_computed = entry.end
            if request.lease is not None and request.lease.has_pending_copies:
                request.lease.copies_done()
        if self._states is not None:
            self._states.completed(batch.entries)

    @property
    def max_num_batched_tokens(self) -> int:
        """The most tokens of a step now."""
        return self._budget.num_tokens

    @max_num_batched_tokens.setter
    def max_num_batched_tokens(self, num_tokens: int) -> None:
        self._budget.num_tokens = num_tokens

    def lower_budget(self, num_tokens: int) -> bool:
        """Halve the token budget, or the size of a step that found no memory if that was smaller.

        Returns:
            False: that would be less than a block; the budget stays.
        """
        budget = min(self.max_num_batched_tokens, num_tokens) // 2
        if budget < self.cache.block_size:
            return False
        self.max_num_batched_tokens = budget
        return True

    def step_computed(self, num_tokens: int, seconds: float) -> None:
        """Record that a step of `num_tokens` took so many seconds."""
        if self._guard is not None:
            self._guard.computed(num_tokens, seconds)

    def update_rows(self, entries: Iterable[Entry]) -> None:
        """Bring rows up to date whose tokens were given out while the next step runs already. O(entries)."""
        self._running.update_rows(entries)

    def accept(self, entry: Entry, num_accepted: int) -> None:
        """Commit the first `num_accepted` tokens of an entry's draft; the rest of the draft was wrong.

        To be called once a step for each entry with a draft, after `complete` and before the request is
        finished. O(draft).
        """
        request, lease = entry.request, entry.request.lease
        if lease is not None:
            request.num_computed = entry.end + num_accepted
            lease.truncate(request.num_computed)
            lease.commit(request.num_computed)

    def rollback(self, batch: Batch) -> list[Entry]:
        """Roll back a failed step: its commits are withdrawn, its requests wait again.

        Returns:
            Its entries whose requests have not ended, of which the engine decides who may try again.
        """
        self._leave()
        if self._states is not None:
            self._states.failed(batch.entries)
        for entry in batch.entries:
            if entry.request.lease is not None:
                # Copies before its tokens may not have run, or come from this very step.
                copied = sum(slots for *_, slots in entry.copies)
                entry.request.lease.rollback(max(entry.start, entry.known) - copied)
        entries = [entry for entry in batch.entries if entry.request.lease is not None]
        for entry in entries:
            self._admission.put_back(entry.request)
        return entries

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
