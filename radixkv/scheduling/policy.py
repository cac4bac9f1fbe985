"""The orders of admission: which waiting request is tried first, and who is preempted first.

| policy     | order of admission                                                                    |
|------------|---------------------------------------------------------------------------------------|
| `prefix`   | longest cached prefix first inside each namespace, with a bound on overtaking         |
| `lpm`      | longest cached prefix first, without a bound (for comparison: it starves)             |
| `fcfs`     | arrival                                                                               |
| `priority` | smallest `priority` first, then arrival                                               |
| `fair`     | the tenant that has been served least for its weight first (virtual token counter,    |
|            | Sheng et al., OSDI 2024, arXiv 2401.00588), and its requests in the order of `prefix` |

`prefix` never lets one tenant's prompts decide when another's run: the places in the queue belong to
namespaces in arrival order, and a namespace's requests are sorted by cached prefix among its own places.

How long a request can be passed, under each policy, is bounded by `max_overtake` steps:

    prefix, fcfs     steps in which a request that arrived later was admitted before it
    fair             both of: steps in which a request of its tenant that arrived later was admitted before it
                     (then its tenant's are barred), and steps in which it was tried and did not fit, and one
                     tried after it was admitted (then all are)
    priority         both, too: the second for every request; the first for the oldest that waits, which is
                     then promoted to be the most urgent of all, for good. So one after n older ones is
                     promoted after (n + 1) * max_overtake such steps. A running request is promoted when
                     it got no tokens for so many steps.
    lpm              unbounded

A request that its own tenant's ceiling keeps waiting bars nobody but that tenant: others take no room of its.

(A strict bound for each request under `priority` would mean that a backlog of unimportant requests, grown old
together, goes before all urgent ones. Promoted one by one, they take one place in `max_overtake`.)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from radixkv.errors import ConfigError
from radixkv.scheduling.sequence_state import NamespaceName, SequenceState

Urgency = tuple[float, int]
MatchedTokens = Callable[[Sequence[SequenceState]], Sequence[int]]

# Waiting requests that are looked at in one step; those after them move up as they go.
LOOKAHEAD = 1024


class AdmissionPolicy:
    """First come, first served; the base of the other orders.

    Attributes:
        bounds_overtaking: a request that later ones of its line have overtaken in `max_overtake` steps is the
            first of its line to be tried, and nobody of it passes any more.
        bounds_holding_up: a request that did not fit while others after it were admitted, in `max_overtake`
            steps, is passed no more by those after it.
        promotes_oldest: the oldest waiting request is promoted once later ones were admitted before it in
            `max_overtake` steps.
        lets_short_pass: short prompts may pass long ones that wait for token budget, not for room.
        ranks_prompts: prompts in progress get their tokens by urgency, and more urgent waiting requests are
            admitted before them.
        keeps_order: the order among waiting requests never changes, so that the queue is kept in it.
        serves_tenants: each tenant's requests are a line of their own.
    """

    name = "fcfs"
    bounds_overtaking = True
    bounds_holding_up = False
    promotes_oldest = False
    lets_short_pass = False
    ranks_prompts = False
    keeps_order = False
    serves_tenants = False

    def line(self, request: SequenceState) -> str:
        """Which line the request stands in: there is one, or one for each tenant. O(1)."""
        return ""

    def merge(self, lines: Mapping[str, Collection[SequenceState]], limit: int) -> list[SequenceState]:
        """At most `limit` waiting requests, before they are ordered. O(limit).

        Args:
            lines: each line's requests in arrival order; none is empty.
        """
        return list(islice(next(iter(lines.values())), limit)) if lines else []

    def order(
        self, waiting: Sequence[SequenceState], matched_tokens: MatchedTokens
    ) -> Sequence[SequenceState]:
        """The order in which to try `waiting`, which is what `merge` gave.

        Args:
            matched_tokens: the lengths of the cached prefixes of some requests.
        """
        return waiting

    def order_prompts(self, prompts: list[SequenceState]) -> list[SequenceState]:
        """The order in which prompts in progress get tokens: one by turn, then the shortest rest first."""
        if len(prompts) > 1:
            turn = min(prompts, key=lambda request: (request.last_scheduled_step, request.arrival_order))
            prompts.sort(key=lambda request: (request is not turn, request.num_to_compute))
        return prompts

    def urgency(self, request: SequenceState) -> Urgency:
        """Smaller is more urgent; the least urgent running request is preempted first."""
        return (0, request.arrival_order)

    def may_pass(self, request: SequenceState, passed: SequenceState) -> bool:
        """Whether `request` may be admitted while `passed`, tried before it, does not fit."""
        return True

    def displaced_for(
        self, request: SequenceState, running: Iterable[SequenceState]
    ) -> Sequence[SequenceState]:
        """The running requests worth preempting for a waiting one that does not fit, who goes first first."""
        return ()

    def on_served(self, namespace: NamespaceName, num_tokens: int) -> None:
        """Told how many tokens of a namespace a step computes."""

    def on_arrival(self, request: SequenceState, tenants: Collection[str]) -> None:
        """Told of a new request, before it is queued, and of the tenants that have one there."""


def longest_prefix_first(waiting: Sequence[SequenceState], lengths: Sequence[int]) -> Sequence[SequenceState]:
    """Each namespace's places stay its own; in them, its longest cached prefixes come first, then arrival.

    O(n log n).
    """
    ranked = sorted(range(len(waiting)), key=[-length for length in lengths].__getitem__)
    first = waiting[0].namespace
    if all(request.namespace == first for request in waiting):
        return [waiting[i] for i in ranked]
    by_namespace: dict[NamespaceName, list[SequenceState]] = {}
    for i in reversed(ranked):
        by_namespace.setdefault(waiting[i].namespace, []).append(waiting[i])
    return [by_namespace[request.namespace].pop() for request in waiting]


class PrefixPolicy(AdmissionPolicy):
    """Longest cached prefix first among the requests of one namespace; O(n log n) for n looked at."""

    name = "prefix"
    lets_short_pass = True

    def order(
        self, waiting: Sequence[SequenceState], matched_tokens: MatchedTokens
    ) -> Sequence[SequenceState]:
        return longest_prefix_first(waiting, matched_tokens(waiting))


class PureLongestPrefixPolicy(PrefixPolicy):
    """Longest cached prefix first without a bound: the baseline that starves cold requests."""

    name = "lpm"
    bounds_overtaking = False
    lets_short_pass = False


class PriorityPolicy(AdmissionPolicy):
    """Smallest `priority` first, then arrival; promoted requests before all.

    A more urgent request may displace a less urgent one, never the other way round: nobody passes a more
    urgent request that waits for room, and room is made for it by preemption. A promoted one waits for room
    as the others do: it displaces whom its priority displaces, and is displaced by nobody.
    """

    name = "priority"
    bounds_overtaking = False
    bounds_holding_up = True
    promotes_oldest = True
    ranks_prompts = True
    keeps_order = True

    def order_prompts(self, prompts: list[SequenceState]) -> list[SequenceState]:
        prompts.sort(key=lambda request: (self._rank(request), request.last_scheduled_step))
        return prompts

    def _rank(self, request: SequenceState) -> float:
        return -math.inf if request.is_promoted else request.priority

    def urgency(self, request: SequenceState) -> Urgency:
        return (self._rank(request), request.arrival_order)

    def may_pass(self, request: SequenceState, passed: SequenceState) -> bool:
        return self._rank(request) <= self._rank(passed)

    def displaced_for(
        self, request: SequenceState, running: Iterable[SequenceState]
    ) -> Sequence[SequenceState]:
        victims = [
            other
            for other in running
            if not other.is_promoted and request.priority < other.priority and other.has_progressed
        ]
        return sorted(victims, key=self.urgency, reverse=True)


def tenant_of(namespace: NamespaceName) -> str:
    """Who is charged for a namespace: the whole of a string, the first part of a tuple.

    A tenant can divide its own part of the cache by a salt; that must not multiply its share.

    >>> tenant_of("ada"), tenant_of(("ada", "salt"))
    ('ada', 'ada')
    """
    if isinstance(namespace, str):
        return namespace
    return namespace[0] if namespace else ""


class FairPolicy(AdmissionPolicy):
    """Serve first the tenant with the least work done for its weight (see `tenant_of`), its own as `prefix`.

    A tenant of whom nothing runs need not wait for the end of what others run: place and room are made for
    one request of its own, by preempting the newest of the tenant that has most.

    Args:
        weights: tenant -> share; a tenant without an entry has weight 1.

    Raises:
        ConfigError: a weight is not above 0.
    """

    name = "fair"
    bounds_holding_up = True
    serves_tenants = True

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = dict(weights or {})
        for tenant, weight in self.weights.items():
            if not weight > 0:
                raise ConfigError(f"the weight of namespace {tenant!r} must be above 0, not {weight!r}")
        self.served: dict[str, float] = {}

    def line(self, request: SequenceState) -> str:
        return tenant_of(request.namespace)

    def merge(self, lines: Mapping[str, Collection[SequenceState]], limit: int) -> list[SequenceState]:
        """Places for the tenants' requests, in arrival order for each. O(limit * log tenants).

        Each request counts as served once it is tried, so that equal tenants take turns in one step.
        """
        if len(lines) <= 1:
            return super().merge(lines, limit)
        heap: list[tuple[float, int, SequenceState, str, Iterator[SequenceState]]] = []
        for tenant, requests in lines.items():
            rest = iter(requests)
            first = next(rest)
            heap.append((self.served.get(tenant, 0.0), first.arrival_order, first, tenant, rest))
        heapq.heapify(heap)
        merged: list[SequenceState] = []
        while heap and len(merged) < limit:
            level, _, request, tenant, rest = heap[0]
            merged.append(request)
            following = next(rest, None)
            if following is None:
                heapq.heappop(heap)
            else:
                level += request.num_tokens / self.weights.get(tenant, 1.0)
                heapq.heapreplace(heap, (level, following.arrival_order, following, tenant, rest))
        return merged

    def order(
        self, waiting: Sequence[SequenceState], matched_tokens: MatchedTokens
    ) -> Sequence[SequenceState]:
        # What is cached decides inside each namespace only, so that no tenant's place tells of another's.
        return longest_prefix_first(waiting, matched_tokens(waiting))

    def displaced_for(
        self, request: SequenceState, running: Iterable[SequenceState]
    ) -> Sequence[SequenceState]:
        """The newest of whichever tenant has most at the time, but nobody's last. O(n log n)."""
        by_tenant: dict[str, list[SequenceState]] = {}
        for other in running:
            by_tenant.setdefault(tenant_of(other.namespace), []).append(other)
        by_tenant.pop(tenant_of(request.namespace), None)
        heap = [(-len(own), tenant) for tenant, own in by_tenant.items() if len(own) > 1]
        heapq.heapify(heap)
        for own in by_tenant.values():
            own.sort(key=lambda other: (other.has_progressed, other.arrival_order))
        victims: list[SequenceState] = []
        while heap:
            _, tenant = heap[0]
            own = by_tenant[tenant]
            if len(own) > 1 and own[-1].has_progressed:
                victims.append(own.pop())
                heapq.heapreplace(heap, (-len(own), tenant))
            else:
                heapq.heappop(heap)
        return victims

    def order_prompts(self, prompts: list[SequenceState]) -> list[SequenceState]:
        served = self.served
        prompts.sort(key=lambda r: (served.get(tenant_of(r.namespace), 0.0), r.last_scheduled_step))
        return prompts

    def level(self, request: SequenceState) -> float:
        """How much its tenant has been served, for its weight."""
        return self.served.get(tenant_of(request.namespace), 0.0)

    def on_served(self, namespace: NamespaceName, num_tokens: int) -> None:
        tenant = tenant_of(namespace)
        weight = self.weights.get(tenant, 1.0)
        self.served[tenant] = self.served.get(tenant, 0.0) + num_tokens / weight

    def on_arrival(self, request: SequenceState, tenants: Collection[str]) -> None:
        # A tenant that was idle starts level with the least served active one: idling earns no credit.
        tenant = tenant_of(request.namespace)
        if tenant in tenants:
            return
        levels = [self.served.get(active, 0.0) for active in tenants]
        floor = min(levels) if levels else max(self.served.values(), default=0.0)
        self.served[tenant] = max(self.served.get(tenant, 0.0), floor)


def make_policy(name: str, *, weights: Mapping[str, float] | None = None) -> AdmissionPolicy:
    """The policy called `name`; `auto` is `prefix`.

    Raises:
        ConfigError: there is none of that name.
    """
    if name == FairPolicy.name:
        return FairPolicy(weights)
    if name == "auto":
        return PrefixPolicy()
    for policy in (PrefixPolicy, PureLongestPrefixPolicy, AdmissionPolicy, PriorityPolicy):
        if policy.name == name:
            return policy()
    raise ConfigError(f"unknown scheduling policy {name!r}; known: prefix, lpm, fcfs, priority, fair")
