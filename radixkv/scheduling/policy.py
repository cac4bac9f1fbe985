"""The orders of admission: which waiting request is tried first, and who is preempted first.

| policy     | order of admission                                                                    |
|------------|---------------------------------------------------------------------------------------|
| `prefix`   | longest cached prefix first inside each namespace, with a bound on overtaking         |
| `lpm`      | longest cached prefix first, without a bound (for comparison: it starves)             |
| `fcfs`     | arrival                                                                               |
| `priority` | smallest `priority` first, then arrival                                               |
| `fair`     | the namespace that has been served least for its weight first (virtual token counter, |
|            | Sheng et al., OSDI 2024, arXiv 2401.00588), then arrival                              |

`prefix` never lets one tenant's prompts decide when another's run: the places in the queue belong to
namespaces in arrival order, and a namespace's requests are sorted by cached prefix among its own places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from radixkv.errors import ConfigError
from radixkv.scheduling.request_state import Namespace, Request

Urgency = tuple[int, int]
MatchedTokens = Callable[[Request], int]

# Requests whose cached prefix is looked at in one step; those behind them wait their turn in arrival order.
LOOKAHEAD = 1024


class AdmissionPolicy:
    """First come, first served; the base of the other orders.

    Attributes:
        bounds_overtaking: whether `max_overtake` applies: a request that later ones have overtaken that
            often is tried first, and nobody passes it any more.
    """

    name = "fcfs"
    bounds_overtaking = True

    def order(self, waiting: Sequence[Request], matched_tokens: MatchedTokens) -> Sequence[Request]:
        """The order in which to try `waiting` (which comes in arrival order)."""
        return waiting

    def urgency(self, request: Request) -> Urgency:
        """Smaller is more urgent; the least urgent running request is preempted first."""
        return (0, request.arrival_order)

    def may_pass(self, request: Request, passed: Request) -> bool:
        """Whether `request` may be admitted while `passed`, tried before it, does not fit."""
        return True

    def on_served(self, namespace: Namespace, num_tokens: int) -> None:
        """Told how many tokens of a namespace a step computes."""

    def on_arrival(self, request: Request, waiting: Sequence[Request]) -> None:
        """Told of a new request, before it joins `waiting`."""


class PrefixPolicy(AdmissionPolicy):
    """Longest cached prefix first among the requests of one namespace; O(n log n) for n looked at."""

    name = "prefix"

    def order(self, waiting: Sequence[Request], matched_tokens: MatchedTokens) -> Sequence[Request]:
        ahead = waiting[:LOOKAHEAD]
        by_namespace: dict[Namespace, list[Request]] = {}
        for request in ahead:
            by_namespace.setdefault(request.namespace, []).append(request)
        for own in by_namespace.values():
            # Python's sort is stable: equal prefixes stay in arrival order.
            own.sort(key=matched_tokens, reverse=True)
        if len(by_namespace) == 1:
            ordered = next(iter(by_namespace.values()), [])
        else:
            places = {namespace: iter(own) for namespace, own in by_namespace.items()}
            ordered = [next(places[request.namespace]) for request in ahead]
        return [*ordered, *waiting[LOOKAHEAD:]]


class PureLongestPrefixPolicy(PrefixPolicy):
    """Longest cached prefix first without a bound: the baseline that starves cold requests."""

    name = "lpm"
    bounds_overtaking = False


class PriorityPolicy(AdmissionPolicy):
    """Smallest `priority` first, then arrival; nobody passes a more urgent request that waits for room."""

    name = "priority"
    bounds_overtaking = False

    def order(self, waiting: Sequence[Request], matched_tokens: MatchedTokens) -> Sequence[Request]:
        return sorted(waiting, key=self.urgency)

    def urgency(self, request: Request) -> Urgency:
        return (request.priority, request.arrival_order)

    def may_pass(self, request: Request, passed: Request) -> bool:
        return request.priority <= passed.priority


class FairPolicy(AdmissionPolicy):
    """Serve first the namespace with the least work done for its weight.

    Args:
        weights: namespace -> share; a namespace without an entry has weight 1.
    """

    name = "fair"
    bounds_overtaking = False

    def __init__(self, weights: Mapping[Namespace, float] | None = None) -> None:
        self.weights = dict(weights or {})
        for namespace, weight in self.weights.items():
            if not weight > 0:
                raise ConfigError(f"the weight of namespace {namespace!r} must be above 0, not {weight!r}")
        self.served: dict[Namespace, float] = {}

    def order(self, waiting: Sequence[Request], matched_tokens: MatchedTokens) -> Sequence[Request]:
        # Each request counts as served once it is tried, so that equal namespaces take turns in one step.
        own: dict[Namespace, list[Request]] = {}
        for request in waiting:
            own.setdefault(request.namespace, []).append(request)
        keyed: list[tuple[float, int, Request]] = []
        for namespace, requests in own.items():
            level, weight = self.served.get(namespace, 0.0), self.weights.get(namespace, 1.0)
            for request in requests:
                keyed.append((level, request.arrival_order, request))
                level += request.num_tokens / weight
        keyed.sort(key=lambda item: item[:2])
        return [item[2] for item in keyed]

    def on_served(self, namespace: Namespace, num_tokens: int) -> None:
        weight = self.weights.get(namespace, 1.0)
        self.served[namespace] = self.served.get(namespace, 0.0) + num_tokens / weight

    def on_arrival(self, request: Request, waiting: Sequence[Request]) -> None:
        # A namespace that was idle starts level with the least served active one: idling earns no credit.
        if any(other.namespace == request.namespace for other in waiting):
            return
        active = [self.served.get(other.namespace, 0.0) for other in waiting]
        floor = min(active, default=max(self.served.values(), default=0.0))
        self.served[request.namespace] = max(self.served.get(request.namespace, 0.0), floor)


def make_policy(name: str, *, weights: Mapping[Namespace, float] | None = None) -> AdmissionPolicy:
    """The policy called `name`.

    Raises:
        ConfigError: there is none of that name.
    """
    if name == FairPolicy.name:
        return FairPolicy(weights)
    for policy in (PrefixPolicy, PureLongestPrefixPolicy, AdmissionPolicy, PriorityPolicy):
        if policy.name == name:
            return policy()
    raise ConfigError(f"unknown scheduling policy {name!r}; known: prefix, lpm, fcfs, priority, fair")
