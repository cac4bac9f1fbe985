"""The waiting requests: arrival order, the order in which they are tried, and how often they were passed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from radixkv.scheduling.policy import LOOKAHEAD, AdmissionPolicy, MatchedTokens
from radixkv.scheduling.request_state import Request


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

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __contains__(self, request: Request) -> bool:
        return request.arrival_order in self._by_arrival

    def add(self, request: Request) -> None:
        """A new request, behind all others. O(1); under the `fair` policy O(waiting)."""
        self._policy.on_arrival(request, self._by_arrival.values())
        self._by_arrival[request.arrival_order] = request

    def put_back(self, request: Request) -> None:
        """A request that ran before takes its old place. O(1), and one sort later."""
        self._by_arrival[request.arrival_order] = request
        self._is_sorted = False

    def remove(self, request: Request) -> None:
        """Take a request out, if it is in. O(1)."""
        self._by_arrival.pop(request.arrival_order, None)

    def in_arrival_order(self) -> list[Request]:
        """All of them. O(n)."""
        self._sort()
        return list(self._by_arrival.values())

    def _sort(self) -> None:
        if not self._is_sorted:
            self._by_arrival = dict(sorted(self._by_arrival.items()))
            self._is_sorted = True

    def in_order_of_trial(self, matched_tokens: MatchedTokens) -> list[Request]:
        """At most `LOOKAHEAD` requests in the order in which to try them. O(n log n) for n looked at.

        All that wait are looked at only by policies for which the first `LOOKAHEAD` arrivals do not decide.
        """
        self._sort()
        ready = (request for request in self._by_arrival.values() if not request.is_paused)
        waiting = list(ready if self._policy.looks_at_all else islice(ready, LOOKAHEAD))
        if not waiting:
            return []
        ordered = self._policy.order(waiting, matched_tokens)
        if self._policy.bounds_overtaking:
            # A request is overtaken in every step in which a later one is: so the aged ones are the earliest
            # (but for some that ran before), and their order tells nothing of anybody's cached prefixes.
            aged = [request for request in waiting if request.overtaken_steps >= self._max_overtake]
            if aged:
                first = {request.arrival_order for request in aged}
                ordered = [*aged, *(r for r in ordered if r.arrival_order not in first)]
        return list(ordered[:LOOKAHEAD])

    def is_aged(self, request: Request) -> bool:
        """Whether nobody may pass the request any more. O(1)."""
        policy, limit = self._policy, self._max_overtake
        return (policy.bounds_overtaking and request.overtaken_steps >= limit) or (
            policy.bounds_holding_up and request.held_up_steps >= limit
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

    def check(self) -> None:
        """Assert that nobody in here holds a lease."""
        for order, request in self._by_arrival.items():
            assert request.arrival_order == order
            assert request.lease is None, f"{request!r} waits with a lease"
