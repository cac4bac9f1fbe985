"""Admission: which waiting requests get a lease in a step, and why the others don't.

Admission is `PrefixCache.acquire`: the cached prefix is locked, blocks for the rest are allocated.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv.scheduling.chunks import Chunks
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.match_cache import MatchCache
from radixkv.scheduling.policy import AdmissionPolicy, tenant_of
from radixkv.scheduling.running import RunningRequests
from radixkv.scheduling.schedule_result import AdmissionResult, SchedulerStats
from radixkv.scheduling.sequence_state import NamespaceName, SequenceState
from radixkv.scheduling.step_plan import StepPlan
from radixkv.scheduling.waiting_queue import WaitingQueue

# With so many prompts in progress, the reserve of a step is for short prompts only.
MANY_PROMPTS = 4


class Admission:
    """Tries waiting requests in a given order.

    Args:
        max_num_seqs: most running requests.
    """

    def __init__(
        self,
        cache: PrefixCache,
        waiting: WaitingQueue,
        running: RunningRequests,
        in_flight: InFlightPrefixes,
        matches: MatchCache,
        chunks: Chunks,
        policy: AdmissionPolicy,
        stats: SchedulerStats,
        *,
        max_num_seqs: int,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._in_flight = in_flight
        self._matches = matches
        self._chunks = chunks
        self._policy = policy
        self._stats = stats
        self._max_num_seqs = max_num_seqs

    def foresee(self, plan: StepPlan, request: SequenceState) -> AdmissionResult:
        """What `admit` would give, with headroom in blocks. O(1) but for what has changed."""
        if request.producer is not None and self._in_flight.is_produced(request):
            return AdmissionResult.IN_FLIGHT
        if request.num_sequence_slots > plan.sequence_slots and plan.sequence_slots < self._max_num_seqs:
            found = AdmissionResult.NO_SLOT
        else:
            found = self._matches.fits(request)
        if found is not AdmissionResult.ADMITTED and not self._waiting.is_aged(request):
            return found
        if self._in_flight.is_coming(request, self._matches.match(request)):
            return AdmissionResult.IN_FLIGHT
        return found

    def admit_in_order(self, plan: StepPlan, ordered: Sequence[SequenceState]) -> list[SequenceState]:
        """Admit what fits, in this order; returns those that may yet be admitted in this step."""
        if plan.budget <= 0 or plan.sequence_slots <= 0:
            return []
        if not self._matches.any_fits(ordered):
            return []
        put_off: list[SequenceState] = []
        unfit: list[SequenceState] = []
        num_passed = 0  # of `unfit`: those before the last one admitted
        at_ceiling: dict[str, list[SequenceState]] = {}  # by tenant: others take no room of theirs
        barred: set[str] = set()  # tenants of whom nobody may be admitted any more
        held_back: set[NamespaceName] = set()
        for i, request in enumerate(ordered):
            if plan.budget <= 0 or plan.sequence_slots <= 0:
                break
            tenant = tenant_of(request.namespace)
            if request.lease is not None or tenant in barred:
                continue
            if unfit and not self._policy.may_pass(request, unfit[0]):
                break
            if tenant in at_ceiling and not self._policy.may_pass(request, at_ceiling[tenant][0]):
                continue
            result = self._try(plan, request, held_back, others=i + 1 < len(ordered))
            if result is AdmissionResult.ADMITTED:
                num_passed = len(unfit)
                plan.held_up.update((other.arrival_order, other) for other in at_ceiling.get(tenant, ()))
            elif result in (AdmissionResult.IN_FLIGHT, AdmissionResult.NO_BUDGET):
                put_off.append(request)
            elif result is AdmissionResult.AT_CEILING:
                at_ceiling.setdefault(tenant, []).append(request)
                if self._waiting.is_aged(request):
                    barred.add(tenant)
            elif self._waiting.bars_all(request):
                break
            else:
                unfit.append(request)
                if self._waiting.is_aged(request):
                    barred.add(tenant)
        plan.held_up.update((request.arrival_order, request) for request in unfit[:num_passed])
        return put_off

    def _try(
        self, plan: StepPlan, request: SequenceState, held_back: set[NamespaceName], *, others: bool
    ) -> AdmissionResult:
        result = self.foresee(plan, request)
        if result is not AdmissionResult.ADMITTED:
            return result
        if not self._may_use_reserve(plan, request, held_back):
            held_back.add(request.namespace)
            return AdmissionResult.NO_BUDGET
        return self.admit(plan, request, others=others)

    def _may_use_reserve(self, plan: StepPlan, request: SequenceState, held_back: set[NamespaceName]) -> bool:
        """Whether a request that fits may start although only the reserve of the budget is left.

        Args:
            held_back: namespaces of requests before it that may not. Where they are another tenant's, what is
                cached of this one's prompt must not decide.
        """
        if plan.budget > plan.reserve or not self._policy.lets_short_pass:
            return True
        if plan.num_chunks < MANY_PROMPTS or self._waiting.is_aged(request):
            return True
        size = request.num_tokens
        if held_back <= {request.namespace}:
            size -= self._matches.match(request).num_tokens
        return size <= plan.reserve

    def admit(self, plan: StepPlan, request: SequenceState, *, others: bool) -> AdmissionResult:
        """Take the request's blocks and its first chunk; nothing changes unless it is admitted."""
        skip = "prompt_logprobs" if request.needs_prompt_logits else None
        if skip is None and self._running.num_decodes:
            self._share_decodes(plan, request)
        match = self._matches.match(request)
        known = match.num_tokens
        try:
            lease = self._cache.acquire(
                request.tokens.encoded,
                request.namespace,
                match=match,
                skip=skip,
                cache_key_hint=request.cache_key_hint,
            )
        except OutOfBlocks:
            result = self._matches.refusal(request)
            if result is AdmissionResult.AT_CEILING and not self._running.num_of(
                tenant_of(request.namespace)
            ):
                plan.add_stuck(request)  # nobody else's end would give it a block
            return result
        self._waiting.remove(request)
        request.match = request.producer = None
        request.lease = lease
        request.num_computed = lease.num_cached_tokens
        self._running.add(request)
        plan.sequence_slots -= request.num_sequence_slots
        line, latest = self._policy.line(request), plan.latest_admitted
        latest[line] = max(latest.get(line, -1), request.arrival_order)
        if request.num_preemptions:
            request.resumed_at = request.num_tokens
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached_tokens = lease.num_cached_tokens
            request.num_cache_write_tokens = request.num_prompt_tokens - known if self._cache.enabled else 0
            request.cache_report = lease.report
            self._stats.admitted += 1
            self._stats.prompt_tokens += request.num_prompt_tokens
            self._stats.cached_prompt_tokens += lease.num_cached_tokens
        self._chunks.schedule(plan, request, self._chunks.size(plan, request, others=others))
        return AdmissionResult.ADMITTED

    def _share_decodes(self, plan: StepPlan, request: SequenceState) -> None:
        """Let a request about to be admitted share what the decode batch has added to its prefix."""
        match = self._matches.match(request)
        identity, num_whole = self._cache.identity(match)
        other = self._running.continuation(request, match.num_tokens, identity, num_whole)
        if other is not None:
            self._chunks.take_from_decodes(plan, self._running, other)
