"""The waiting requests: arrival order, the order in which they are tried, and how often they were passed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from sortedcontainers import SortedKeyList

from radixkv.scheduling.policy import LOOKAHEAD, AdmissionPolicy, FairPolicy, MatchedTokens, tenant_of
from radixkv.scheduling.request_state import Request
from radixkv.scheduling.running import RunningRequests


class _ByArrival:
    """One tenant's requests."""

    __slots__ = ("_is_sorted", "requests")

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self._is_sorted = True

    def add(self, request: Request) -> None:
        if self._is_sorted and self.requests:
            self._is_sorted = request.arrival_order > next(reversed(self.requests))
        self.requests[request.arrival_order] = request

    def in_order(self) -> Iterable[Request]:
        """In arrival order."""
        if not self._is_sorted:
            self.requests = dict(sorted(self.requests.items()))
            self._is_sorted = True
        return self.requests.values()


class WaitingQueue:
    """Requests without a lease.

    Args:
        policy: the order of admission.
        max_overtake: steps in which a request may be passed; see `radixkv.scheduling.policy`.
    """

    def __init__(self, policy: AdmissionPolicy, max_overtake: int) -> None:
        self._policy = policy
        self._max_overtake = max_overtake
        self._by_arrival: dict[int, Request] = {}
        self._is_sorted = True
        # Kept beside it where the policy orders all that wait, so that nothing is sorted in a step.
        self._by_urgency = SortedKeyList(key=policy.urgency) if policy.keeps_order else None
        self._by_tenant: dict[str, _ByArrival] = {}

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __contains__(self, request: Request) -> bool:
        return request.arrival_order in self._by_arrival

    def add(self, request: Request) -> None:
        """A new request, behind all others. O(1); O(log n) or O(tenants) where the policy needs it."""
        self._policy.on_arrival(request, self._by_tenant.keys())
        self._put(request)

    def put_back(self, request: Request) -> None:
        """A request that ran before takes its old place. As `add`, and one sort later."""
        self._is_sorted = False
        self._put(request)

    def _put(self, request: Request) -> None:
        self._by_arrival[request.arrival_order] = request
        if self._by_urgency is not None:
            self._by_urgency.add(request)
        if self._policy.serves_tenants:
            self._by_tenant.setdefault(tenant_of(request.namespace), _ByArrival()).add(request)

    def remove(self, request: Request) -> None:
        """Take a request out, if it is in. O(1), or O(log n)."""
        if self._by_arrival.pop(request.arrival_order, None) is None:
            return
        if self._by_urgency is not None:
            self._by_urgency.remove(request)
        if self._policy.serves_tenants:
            tenant = tenant_of(request.namespace)
            own = self._by_tenant[tenant]
            del own.requests[request.arrival_order]
            if not own.requests:
                del self._by_tenant[tenant]

    def in_arrival_order(self) -> list[Request]:
        """All of them. O(n)."""
        self._sort()
        return list(self._by_arrival.values())

    def _sort(self) -> None:
        if not self._is_sorted:
            self._by_arrival = dict(sorted(self._by_arrival.items()))
            self._is_sorted = True

    def most_urgent(self) -> Request | None:
        """The first in the policy's order of urgency. O(1) where the order is kept."""
        if self._by_urgency is not None:
            return next(iter(self._by_urgency), None)
        self._sort()
        return min(self._by_arrival.values(), key=self._policy.urgency, default=None)

    def claimant(self, running: RunningRequests) -> Request | None:
        """Whom room is made for, if the policy makes room. O(1) where the order is kept; else O(tenants).

        The most urgent one; under `fair`, the first of the tenant served least of those of whom nothing runs.
        """
        policy = self._policy
        if policy.ranks_prompts:
            return self.most_urgent()
        if not isinstance(policy, FairPolicy):
            return None
        idle = [tenant for tenant in self._by_tenant if not running.has_tenant(tenant)]
        if not idle:
            return None
        firsts = (next(iter(self._by_tenant[tenant].in_order())) for tenant in idle)
        return min(firsts, key=lambda first: (policy.level(first), first.arrival_order))

    def in_order_of_trial(self, matched_tokens: MatchedTokens) -> list[Request]:
        """At most `LOOKAHEAD` requests in the order in which to try them. O(n log n) for n looked at."""
        policy = self._policy
        if self._by_urgency is not None:
            return list(islice(self._by_urgency, LOOKAHEAD))
        if isinstance(policy, FairPolicy):
            by_tenant = {tenant: own.in_order() for tenant, own in self._by_tenant.items()}
            return policy.merge(by_tenant, LOOKAHEAD)
        self._sort()
        waiting = list(islice(self._by_arrival.values(), LOOKAHEAD))
        if not waiting:
            return []
        ordered = policy.order(waiting, matched_tokens)
        if policy.bounds_overtaking:
            # A request is overtaken in every step in which a later one is: so the aged ones are the earliest
            # (but for some that ran before), and their order tells nothing of anybody's cached prefixes.
            aged = [request for request in waiting if request.overtaken_steps >= self._max_overtake]
            if aged:
                first = {request.arrival_order for request in aged}
                ordered = [*aged, *(r for r in ordered if r.arrival_order not in first)]
        return list(ordered)

    def is_aged(self, request: Request) -> bool:
        """Whether nobody may pass the request any more. O(1)."""
        policy, limit = self._policy, self._max_overtake
        return (
            request.is_promoted
            or (policy.bounds_overtaking and request.overtaken_steps >= limit)
            or (policy.bounds_holding_up and request.held_up_steps >= limit)
        )

    def count_passed(self, latest_admitted: int, held_up: Iterable[Request]) -> None:
        """Account for one step. O(requests that arrived before the latest one admitted).

        Args:
            latest_admitted: the largest arrival order of the step's admissions, or -1.
            held_up: requests that did not fit while others behind them were admitted.
        """
        for request in held_up:
            request.held_up_steps += 1
        if latest_admitted >= 0 and self._policy.bounds_overtaking:
            self._sort()
            for request in self._by_arrival.values():
                if request.arrival_order > latest_admitted:
                    break
                request.overtaken_steps += 1
        if latest_admitted >= 0 and self._policy.promotes_oldest:
            self._count_oldest(latest_admitted)

    def _count_oldest(self, latest_admitted: int) -> None:
        """Count a step in which the oldest request was overtaken; promote it at the limit. O(promoted)."""
        self._sort()
        oldest = next((r for r in self._by_arrival.values() if not r.is_promoted), None)
        if oldest is not None and oldest.arrival_order < latest_admitted:
            oldest.overtaken_steps += 1
            if oldest.overtaken_steps >= self._max_overtake:
                self.promote(oldest)

    def promote(self, request: Request) -> None:
        """From now on the request comes before all that are not promoted. O(log n)."""
        if self._by_urgency is None or request not in self:
            request.is_promoted = True
            return
        self._by_urgency.remove(request)  # its place depends on what changes
        request.is_promoted = True
        self._by_urgency.add(request)

    def check(self) -> None:
        """Assert that nobody in here holds a lease."""
        for order, request in self._by_arrival.items():
            assert request.arrival_order == order
            assert request.lease is None, f"{request!r} waits with a lease"
        if self._by_urgency is not None:
            assert {r.arrival_order for r in self._by_urgency} == self._by_arrival.keys()
        if self._policy.serves_tenants:
            assert sum(len(own.requests) for own in self._by_tenant.values()) == len(self._by_arrival)
