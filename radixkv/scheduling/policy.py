# SPDX-License-Identifier: Apache-2.0
"""The orders of admission: which waiting request is tried first, and who is preempted first.

| policy     | order of admission                                                                    |
|------------|---------------------------------------------------------------------------------------|
| `prefix`   | longest cached prefix first inside each namespace, with a bound on overtaking         |
| `fcfs`     | arrival                                                                               |
| `priority` | smallest `priority` first, then arrival                                               |
| `fair`     | the tenant that has been served least for its weight first (virtual token counter,    |
|            | Sheng et al., OSDI 2024, arXiv 2401.00588), and its requests in the order of `prefix` |

A policy is a class whose methods are its rules; by default, first come, first served. A new one is
listed in `POLICIES`, at the end of this file, and nowhere else. The rules that hold under every policy are in
`radixkv.scheduling.admission`.

A request may be passed for `max_overtake` steps:

    prefix, fcfs     in which a request that arrived later was admitted before it
    fair             in which one of its tenant that arrived later was (then its tenant's are barred), or in
                     which it did not fit and one tried after it was admitted (then all are)
    priority         the second for every request; the first for the oldest that waits (of long prompts, one
                     whose turn has come), which is then promoted to be the most urgent of all, for good, as a
                     running request is that got no tokens for so long. So a backlog of unimportant requests
                     takes one place in `max_overtake`

A request kept waiting by its own tenant's ceiling bars only that tenant: other tenants don't use its room.

Background requests (`Request.background`) are a class of their own under every policy: the last rank, in a
line of their own, never promoted, and no part of what their tenants were served.
"""

from __future__ import annotations

import heapq
import math
from collections import abc
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from enum import Enum
from itertools import islice, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING

from radixkv.errors import ConfigError

if TYPE_CHECKING:  # the command line lists the policies, and does without numpy
    from radixkv.cache.keys import NamespaceName
    from radixkv.scheduling.sequence import Sequence

Urgency = tuple[float, int]
MatchedTokens = Callable[[abc.Sequence["Sequence"]], abc.Sequence[int]]


#: Line of all background requests. No tenant's line: a name has no control character.
BACKGROUND = "\0background"


class Barred(Enum):
    """Bars admissions while a certain request waits."""

    NOBODY = "it may be passed"
    ITS_LINE = "those of its line"
    ALL = "all that wait"


def tenant_of(namespace: NamespaceName) -> str:
    """Return the tenant charged for a namespace: the whole of a string, the first part of a tuple.

    A tenant can divide its own part of the cache by a salt; that must not multiply its share.

    >>> tenant_of("ada"), tenant_of(("ada", "salt"))
    ('ada', 'ada')
    """
    if isinstance(namespace, str):
        return namespace
    return namespace[0] if namespace else ""


class PassedRequests:
    """Counts of how often requests were passed while they waited, for the bound on that.

    Attributes:
        overtaken: steps in which requests that arrived later were admitted.
        held_up: steps in which the request did not fit, and others tried after it were admitted.
        promoted: requests that come before all others from now on: they were passed often enough.
    """

    def __init__(self) -> None:
        self.overtaken: dict[Sequence, int] = {}
        self.held_up: dict[Sequence, int] = {}
        self.promoted: set[Sequence] = set()

    def forget(self, request: Sequence) -> None:
        """Drop the counts of a request that has ended. O(1)."""
        self.overtaken.pop(request, None)
        self.held_up.pop(request, None)
        self.promoted.discard(request)


class AdmissionPolicy:
    """First come, first served; the base of the other orders.

    Args:
        weights: tenant -> share, for orders that have shares.

    Attributes:
        passed: how often each request was passed; the queue counts.
    """

    name = "fcfs"

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = dict(weights or {})
        self.passed = PassedRequests()

    # ------------------------------------------------------------------ order of trial

    def line(self, request: Sequence) -> str:
        """Return the name of the request's line: there is one, or one for each tenant. O(1)."""
        return BACKGROUND if request.is_background else self.foreground_line(request)

    def foreground_line(self, request: Sequence) -> str:
        """Return the line of a request that is no background request. O(1)."""
        return ""

    def sort_key(self) -> Callable[[Sequence], Urgency] | None:
        """Return the sort key of the queue, if the order among waiting requests never changes.

        Then `merge` and `order` are not asked, and requests are promoted if they were overtaken too
        often, or have run without a token for as long.
        """
        return None

    def merge(self, lines: Mapping[str, Collection[Sequence]], limit: int) -> list[Sequence]:
        """Return at most `limit` waiting requests, before they are ordered. O(limit).

        Args:
            lines: each line's requests in arrival order; none is empty.
        """
        return list(islice(next(iter(lines.values())), limit)) if lines else []

    def order(self, waiting: abc.Sequence[Sequence], matched_tokens: MatchedTokens) -> abc.Sequence[Sequence]:
        """Return the result of `merge` in the order of trial.

        Args:
            matched_tokens: the lengths of the cached prefixes of some requests.
        """
        return waiting

    def rank(self, request: Sequence) -> float:
        """Return the request's class of urgency: a smaller one is tried earlier, and never passed."""
        return math.inf if request.is_background else 0

    def urgency(self, request: Sequence) -> Urgency:
        """Return rank and arrival: a smaller pair is more urgent."""
        return (self.rank(request), request.arrival_order)

    def fits_reserve(self, num_tokens: int, reserve: int) -> bool:
        """Return True if a prompt with `num_tokens` to compute may start in the reserve of a step."""
        return True

    # ------------------------------------------------------------------ bound on overtaking

    def overtaken(self, line: Iterable[Sequence], latest: int) -> Iterable[Sequence]:
        """Return the requests of a line that the admission of `latest` (by arrival) has overtaken."""
        return takewhile(lambda request: request.arrival_order <= latest, line)

    def barred(self, request: Sequence, bound: float) -> Barred:
        """Return which requests may not pass this one any more, once it was passed in `bound` steps. O(1)."""
        return Barred.ALL if self.passed.overtaken.get(request, 0) >= bound else Barred.NOBODY

    # ------------------------------------------------------------------ who is preempted

    def entitled(self, firsts: Iterable[Sequence], num_running: Callable[[str], int]) -> Sequence | None:
        """Return the waiting request that room is made for, if the policy makes room. O(lines).

        Args:
            firsts: the first of each line, in the order that the queue is kept in.
            num_running: how many requests of a tenant run, background requests left out.
        """
        return None

    def may_begin_early(self, request: Sequence, num_running: Callable[[str], int]) -> bool:
        """Return True if a long prompt need not wait for those in progress. O(1).

        Args:
            num_running: how many requests of a tenant run.
        """
        return False

    def displaced_for(self, request: Sequence, running: Iterable[Sequence]) -> abc.Sequence[Sequence]:
        """Return the running requests that may be preempted for a waiting one, the first victim first."""
        return ()

    def victim(self, rivals: Iterable[Sequence], in_step: Container[int]) -> Sequence:
        """Choose the running request to preempt when one of them needs a block. O(rivals).

        The highest rank first (under `priority`: the largest number). Of equals, a request that has got no
        token since it was last resumed is spared, so that every preemption is followed by progress; a request
        that asks for a block has just got a token, so there is always a candidate: itself. Then the latest
        arrival.

        Args:
            rivals: requests whose release would help, the one that needs a block included.
            in_step: arrival orders of requests with tokens in this step already: never chosen.
        """
        return max(
            (request for request in rivals if request.arrival_order not in in_step),
            key=lambda request: (self.rank(request), request.has_progressed, request.arrival_order),
        )

    # ------------------------------------------------------------------ among running requests

    def order_prompts(self, prompts: list[Sequence]) -> list[Sequence]:
        """Sort prompts in progress for the budget: one by turn, then those with the least to compute."""
        if len(prompts) > 1:
            turn = min(prompts, key=lambda request: (request.last_scheduled_step, request.arrival_order))
            prompts.sort(key=lambda request: (request is not turn, request.num_to_compute))
        return prompts

    # ------------------------------------------------------------------ events

    def on_served(self, tenant: str, num_tokens: int) -> None:
        """Record the number of tokens that a step computes for a tenant."""

    def on_arrival(self, request: Sequence, tenants: Collection[str]) -> None:
        """Record a new request, before it is queued.

        Args:
            tenants: tenants with waiting requests.
        """


def longest_prefix_first(
    waiting: abc.Sequence[Sequence], lengths: abc.Sequence[int]
) -> abc.Sequence[Sequence]:
    """Sort each namespace's requests in their own places: the longest cached prefix first, then arrival.

    O(n log n).
    """
    ranked = sorted(range(len(waiting)), key=lengths.__getitem__, reverse=True)  # equal ones stay as they are
    namespaces = [request.namespace for request in waiting]
    if namespaces.count(namespaces[0]) == len(namespaces):
        return [waiting[i] for i in ranked]
    by_namespace: dict[NamespaceName, list[Sequence]] = {}
    for i in reversed(ranked):
        by_namespace.setdefault(namespaces[i], []).append(waiting[i])
    return [by_namespace[namespace].pop() for namespace in namespaces]


class PrefixPolicy(AdmissionPolicy):
    """Longest cached prefix first among the requests of one namespace; O(n log n) for n looked at.

    Short prompts may pass long ones that wait for token budget, not for room.
    """

    name = "prefix"

    def order(self, waiting: abc.Sequence[Sequence], matched_tokens: MatchedTokens) -> abc.Sequence[Sequence]:
        return longest_prefix_first(waiting, matched_tokens(waiting))

    def fits_reserve(self, num_tokens: int, reserve: int) -> bool:
        return num_tokens <= reserve


class PriorityPolicy(AdmissionPolicy):
    """Smallest `priority` first, then arrival; promoted requests before all.

    A more urgent request may displace a less urgent one, never the other way round: no request passes a more
    urgent one that waits for room, and room is made for it by preemption. A promoted request waits for room
    like any other: it displaces the requests that its priority displaces, and is displaced by none.
    """

    name = "priority"

    def sort_key(self) -> Callable[[Sequence], Urgency]:
        return self.urgency

    def rank(self, request: Sequence) -> float:
        if request.is_background:
            return math.inf
        return -math.inf if request in self.passed.promoted else request.priority

    def overtaken(self, line: Iterable[Sequence], latest: int) -> Iterable[Sequence]:
        promoted = self.passed.promoted
        earlier = takewhile(lambda request: request.arrival_order <= latest, line)
        return (request for request in earlier if request not in promoted)

    def barred(self, request: Sequence, bound: float) -> Barred:
        passed = self.passed
        is_late = request in passed.promoted or passed.held_up.get(request, 0) >= bound
        return Barred.ALL if is_late else Barred.NOBODY

    def entitled(self, firsts: Iterable[Sequence], num_running: Callable[[str], int]) -> Sequence | None:
        return next(iter(firsts), None)

    def displaced_for(self, request: Sequence, running: Iterable[Sequence]) -> abc.Sequence[Sequence]:
        victims = [
            other
            for other in running
            if other not in self.passed.promoted
            and request.priority < other.priority
            and other.has_progressed
        ]
        return sorted(victims, key=self.urgency, reverse=True)

    def order_prompts(self, prompts: list[Sequence]) -> list[Sequence]:
        prompts.sort(key=lambda request: (self.rank(request), request.last_scheduled_step))
        return prompts


class FairPolicy(AdmissionPolicy):
    """Least served tenant first, for its weight (see `tenant_of`); its requests in the order of `prefix`.

    A tenant without running requests need not wait until a request of another tenant ends: a slot and room
    are made for one of its requests, by preempting the newest request of the tenant with the most.

    Args:
        weights: tenant -> share; a tenant without an entry has weight 1.

    Raises:
        ConfigError: a weight is not above 0.
    """

    name = "fair"

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        super().__init__(weights)
        for tenant, weight in self.weights.items():
            if not weight > 0:
                raise ConfigError(f"the weight of namespace {tenant!r} must be above 0, not {weight!r}")
        self.served: dict[str, float] = {}

    def foreground_line(self, request: Sequence) -> str:
        return tenant_of(request.namespace)

    def merge(self, lines: Mapping[str, Collection[Sequence]], limit: int) -> list[Sequence]:
        """Return places for the tenants' requests, in arrival order for each. O(limit * log tenants).

        Each request counts as served once it is tried, so that equal tenants take turns in one step.
        """
        if len(lines) <= 1:
            return super().merge(lines, limit)

        def places(tenant: str, requests: Iterable[Sequence]) -> Iterator[tuple[float, int, Sequence]]:
            level, weight = self.served.get(tenant, 0.0), self.weights.get(tenant, 1.0)
            for request in requests:
                yield level, request.arrival_order, request
                level += request.num_tokens / weight

        merged = heapq.merge(*(places(tenant, requests) for tenant, requests in lines.items()))
        return [request for _, _, request in islice(merged, limit)]

    def order(self, waiting: abc.Sequence[Sequence], matched_tokens: MatchedTokens) -> abc.Sequence[Sequence]:
        # Cached prefixes decide inside each namespace only, so that no tenant's position tells of another's.
        return longest_prefix_first(waiting, matched_tokens(waiting))

    def barred(self, request: Sequence, bound: float) -> Barred:
        if self.passed.held_up.get(request, 0) >= bound:
            return Barred.ALL
        return Barred.ITS_LINE if self.passed.overtaken.get(request, 0) >= bound else Barred.NOBODY

    def entitled(self, firsts: Iterable[Sequence], num_running: Callable[[str], int]) -> Sequence | None:
        """Return the first request of the least served tenant among those without running requests."""
        idle = (first for first in firsts if not num_running(tenant_of(first.namespace)))
        return min(idle, key=lambda first: (self._level(first), first.arrival_order), default=None)

    def may_begin_early(self, request: Sequence, num_running: Callable[[str], int]) -> bool:
        return not num_running(tenant_of(request.namespace))

    def displaced_for(self, request: Sequence, running: Iterable[Sequence]) -> abc.Sequence[Sequence]:
        """Return the newest requests of tenants with the most at the time, never a tenant's last one.

        O(n log n).
        """
        by_tenant: dict[str, list[Sequence]] = {}
        for other in running:
            by_tenant.setdefault(tenant_of(other.namespace), []).append(other)
        by_tenant.pop(tenant_of(request.namespace), None)
        victims = [
            (-count, tenant, other)
            for tenant, own in by_tenant.items()
            for count, other in enumerate(sorted(own, key=lambda r: (r.has_progressed, r.arrival_order)), 1)
            if count > 1 and other.has_progressed
        ]
        victims.sort(key=itemgetter(0, 1))
        return [other for _, _, other in victims]

    def order_prompts(self, prompts: list[Sequence]) -> list[Sequence]:
        prompts.sort(key=lambda request: (self._level(request), request.last_scheduled_step))
        return prompts

    def _level(self, request: Sequence) -> float:
        """Return the service of a request's tenant so far, divided by its weight."""
        return self.served.get(tenant_of(request.namespace), 0.0)

    def on_served(self, tenant: str, num_tokens: int) -> None:
        self.served[tenant] = self.served.get(tenant, 0.0) + num_tokens / self.weights.get(tenant, 1.0)

    def on_arrival(self, request: Sequence, tenants: Collection[str]) -> None:
        # A tenant that was idle starts level with the least served active one: idling earns no credit.
        tenant = tenant_of(request.namespace)
        if tenant in tenants:
            return
        levels = [self.served.get(active, 0.0) for active in tenants]
        floor = min(levels) if levels else max(self.served.values(), default=0.0)
        self.served[tenant] = max(self.served.get(tenant, 0.0), floor)


#: Name -> the policy; all that settings, the command line and the docs know of them is read here.
POLICIES: dict[str, type[AdmissionPolicy]] = {
    "auto": PrefixPolicy,  # a server with API keys of several tenants chooses `fair`
    **{policy.name: policy for policy in (PrefixPolicy, AdmissionPolicy, PriorityPolicy, FairPolicy)},
}


def make_policy(name: str, *, weights: Mapping[str, float] | None = None) -> AdmissionPolicy:
    """Return the policy called `name`.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown scheduling policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name](weights)
