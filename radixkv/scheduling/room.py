"""Room for what runs: slots for a request's next tokens, taken from less urgent requests if need be."""

from __future__ import annotations

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.match_cache import MatchCache
from radixkv.scheduling.policy import AdmissionPolicy
from radixkv.scheduling.preemption import choose_victim
from radixkv.scheduling.running import RunningRequests
from radixkv.scheduling.schedule_result import SchedulerStats
from radixkv.scheduling.sequence_state import SequenceState
from radixkv.scheduling.step_plan import StepPlan
from radixkv.scheduling.waiting_queue import WaitingQueue


class Room:
    """Grows leases, and preempts: a release, and back into the queue."""

    def __init__(
        self,
        cache: PrefixCache,
        waiting: WaitingQueue,
        running: RunningRequests,
        in_flight: InFlightPrefixes,
        matches: MatchCache,
        policy: AdmissionPolicy,
        stats: SchedulerStats,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._in_flight = in_flight
        self._matches = matches
        self._policy = policy
        self._stats = stats

    def grow(self, plan: StepPlan, request: SequenceState) -> bool:
        """Give the lease a slot for every known token, preempting others if need be.

        False if the request has none: it was preempted itself, or no block can be had even alone.
        """
        while request.lease is not None and request.lease.num_tokens < request.num_tokens:
            try:
                request.lease.append(request.tokens.view(request.lease.num_tokens))
                self._matches.touched()
            except OutOfBlocks as error:
                rivals = self._rivals(request, error)
                victim = choose_victim(rivals, plan.entries, self._policy)
                if victim is request and len(rivals) == 1:
                    plan.add_stuck(request)
                    return False
                self.preempt(plan, victim)
        return request.lease is not None

    def _rivals(self, request: SequenceState, error: OutOfBlocks) -> list[SequenceState]:
        """The running requests whose blocks could serve this one: at its ceiling, those of its quota."""
        _, below = self._cache.room(request.namespace)
        if below is None or below >= error.needed:
            return list(self._running)
        shares_quota, own = self._cache.shares_quota, request.namespace
        return [other for other in self._running if shares_quota(other.namespace, own)]

    def preempt(self, plan: StepPlan, request: SequenceState) -> None:
        """Release the lease and queue the request again; what it computed stays cached."""
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        plan.preempted.append(request)
        plan.sequence_slots += request.num_sequence_slots
        if self.rollback(request):
            plan.leave_decodes()

    def rollback(self, request: SequenceState) -> bool:
        """A running request waits again, without a lease; whether it was in the decode batch."""
        was_decoding = self._running.remove(request)
        self._waiting.put_back(request)
        self._in_flight.forget(request)
        self._matches.touched()
        lease = request.lease
        assert lease is not None
        request.preempt()
        lease.release()
        return was_decoding
