"""Who gets what of a step: decodes, prompts in progress, waiting requests, longer chunks, and last drafts."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.scheduling.admission import Admission
from radixkv.scheduling.chunks import Chunks
from radixkv.scheduling.drafting import Drafting
from radixkv.scheduling.match_cache import MatchCache
from radixkv.scheduling.policy import AdmissionPolicy
from radixkv.scheduling.room import Room
from radixkv.scheduling.running import RunningRequests
from radixkv.scheduling.schedule_result import AdmissionResult
from radixkv.scheduling.sequence_state import SequenceState
from radixkv.scheduling.step_plan import StepPlan
from radixkv.scheduling.waiting_queue import WaitingQueue


class StepBuilder:
    """Fills a `StepPlan`.

    Args:
        max_num_seqs: most running requests.
        max_overtake: a running request that gets no token for more steps is promoted, where the policy does.
    """

    def __init__(
        self,
        cache: PrefixCache,
        waiting: WaitingQueue,
        running: RunningRequests,
        matches: MatchCache,
        chunks: Chunks,
        room: Room,
        admission: Admission,
        policy: AdmissionPolicy,
        drafting: Drafting | None,
        *,
        max_num_seqs: int,
        max_overtake: int,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._matches = matches
        self._chunks = chunks
        self._room = room
        self._admission = admission
        self._policy = policy
        self._drafting = drafting
        self._max_num_seqs = max_num_seqs
        self._max_overtake = max_overtake

    def fill_with(self, plan: StepPlan, request: SequenceState) -> None:
        """Schedule nothing but this request."""
        if not request.is_running:
            fits = AdmissionResult.ADMITTED
            if self._admission.foresee(plan, request) is fits:
                self._admission.admit(plan, request, others=False)
        elif request.num_to_compute and self._room.grow(plan, request):
            self._chunks.schedule(plan, request, self._chunks.size(plan, request, others=False))

    def fill(self, plan: StepPlan) -> None:
        """Schedule what there is to do."""
        entitled = self._make_room(plan) if len(self._waiting) else None
        prompts = self._schedule_decodes(plan)
        plan.num_prompts = len(prompts) + len(self._waiting)
        order: list[SequenceState] = []
        if len(self._waiting) and plan.sequence_slots > 0 and plan.budget > 0:
            order = self._waiting.in_order_of_trial(self._matches.matched_tokens)
            if entitled is not None:
                order = self._entitled_first(plan, entitled, order)
        if order:
            plan.set_reserve()
        if self._policy.ranks_prompts and prompts:
            first = min(self._policy.urgency(request)[0] for request in prompts)
            before = [request for request in order if self._policy.urgency(request)[0] < first]
            self._admission.admit_in_order(plan, before)
        self._schedule_prompts(plan, prompts)
        put_off = self._admission.admit_in_order(plan, order)
        plan.reserve = 0
        self._schedule_prompts(plan, [r for r in prompts if r.arrival_order not in plan.entries])
        self._spend_rest(plan, put_off)
        if self._drafting is not None and plan.budget > 0:
            self._drafting.fill(plan)
        if plan.is_empty and len(self._waiting):
            self._unblock(plan)
        self._waiting.count_passed(plan.latest_admitted, plan.held_up.values())
        if self._policy.promotes_oldest:
            self._promote_unserved(plan)

    def _schedule_decodes(self, plan: StepPlan) -> list[SequenceState]:
        """Give every decode that is not in the decode batch its token; returns the prompts in progress."""
        running = sorted(self._running.others, key=lambda request: request.arrival_order)
        if self._cache.available_blocks() <= len(running):
            # Someone may have to go: serve the most urgent first, so that nobody who is already in this
            # step is ever the victim.
            running.sort(key=self._policy.urgency)
        elif len(running) > plan.budget:
            running.sort(key=lambda request: request.last_scheduled_step)
        prompts: list[SequenceState] = []
        for request in running:
            to_compute = request.num_to_compute
            if request.lease is None:
                continue  # preempted a moment ago
            if to_compute > 1:
                prompts.append(request)
            elif plan.budget > 0 and self._room.grow(plan, request):
                self._chunks.schedule(plan, request, 1)
        return prompts

    def _schedule_prompts(self, plan: StepPlan, prompts: Sequence[SequenceState]) -> None:
        """Give prompts in progress their next chunks, as far as the reserve allows."""
        ordered = self._policy.order_prompts([request for request in prompts if request.lease is not None])
        for i, request in enumerate(ordered):
            room = plan.budget - plan.reserve
            if room <= 0:
                return
            others = i + 1 < len(ordered) or len(self._waiting) > 0
            if request.lease is not None and self._room.grow(plan, request):
                count = self._chunks.size(plan, request, others=others)
                self._chunks.schedule(plan, request, min(room, count))

    def _spend_rest(self, plan: StepPlan, put_off: list[SequenceState]) -> None:
        """Longer chunks; and a prompt that gets one may complete what another waits for: try those again."""
        while plan.budget > 0:
            before = plan.budget
            self._chunks.extend(plan, shortest_first=not self._policy.ranks_prompts)
            put_off = self._admission.admit_in_order(plan, put_off)
            if plan.budget == before:
                return

    def _make_room(self, plan: StepPlan) -> SequenceState | None:
        """Make sure that the one who has a claim fits, by preempting others if that helps; who it is."""
        request = self._waiting.entitled(self._running)
        if request is not None and len(self._running):
            result = self._admission.foresee(plan, request)
            if result not in (AdmissionResult.ADMITTED, AdmissionResult.IN_FLIGHT):
                self._displace(plan, request)
        return request

    def _entitled_first(
        self, plan: StepPlan, entitled: SequenceState, order: list[SequenceState]
    ) -> list[SequenceState]:
        """The order with the one for whom room was made at its head, or else the first of its line."""
        first = entitled
        if not plan.preempted:
            line = self._policy.line
            first = next((request for request in order if line(request) == line(entitled)), entitled)
        if order[0] is first:
            return order
        return [first, *(request for request in order if request is not first)]

    def _displace(self, plan: StepPlan, request: SequenceState) -> None:
        """Preempt others for a waiting request, if that makes it fit."""
        victims = self._policy.displaced_for(request, self._running)
        slots = plan.sequence_slots + sum(victim.num_sequence_slots for victim in victims)
        freed = sum(len(victim.lease.block_table) for victim in victims if victim.lease)
        if slots < min(request.num_sequence_slots, self._max_num_seqs):
            return
        if self._matches.fits(request, freed=freed) is not AdmissionResult.ADMITTED:
            return
        for victim in victims:
            self._room.preempt(plan, victim)
            if self._admission.foresee(plan, request) is AdmissionResult.ADMITTED:
                return

    def _unblock(self, plan: StepPlan) -> None:
        """Nothing could be scheduled although requests wait: find out who is in the way."""
        if plan.stuck:
            return
        assert not len(self._running), f"{list(self._running)} were left out of a step that has room"
        order = self._waiting.in_order_of_trial(self._matches.matched_tokens)
        self._admission.admit_in_order(plan, order)
        if plan.is_empty and order:
            plan.add_stuck(order[0])  # it does not fit, and nothing else runs

    def _promote_unserved(self, plan: StepPlan) -> None:
        """Promote running requests to which others have left no token of the budget for too long."""
        oldest = plan.number - self._max_overtake
        for request in self._running.others:
            if request.last_scheduled_step < oldest:
                request.is_promoted = True
