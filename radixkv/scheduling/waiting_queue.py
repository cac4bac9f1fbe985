"""The waiting requests: arrival order, the order in which they are tried, and how often they were passed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice

from sortedcontainers import SortedKeyList

from radixkv.scheduling.policy import LOOKAHEAD, AdmissionPolicy, FairPolicy, MatchedTokens
from radixkv.scheduling.running import RunningRequests
from radixkv.scheduling.sequence_state import SequenceState


class _Line:
    """Requests in arrival order: all that wait, or one tenant's."""

    __slots__ = ("_is_sorted", "requests")

    def __init__(self) -> None:
        self.requests: dict[int, SequenceState] = {}
        self._is_sorted = True

    def add(self, request: SequenceState) -> None:
        if self._is_sorted and self.requests:
            self._is_sorted = request.arrival_order > next(reversed(self.requests))
        self.requests[request.arrival_order] = request

    def in_order(self) -> Collection[SequenceState]:
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
        self._lines: dict[str, _Line] = {}  # by `policy.line`; none is empty
        self._length = 0
        # Kept beside them where the policy orders all that wait, so that nothing is sorted in a step.
        self._by_urgency = SortedKeyList(key=policy.urgency) if policy.keeps_order else None

    def __len__(self) -> int:
        return self._length

    def __contains__(self, request: SequenceState) -> bool:
        line = self._lines.get(self._policy.line(request))
        return line is not None and request.arrival_order in line.requests

    def add(self, request: SequenceState) -> None:
        """A new request, after all others. O(1); O(log n) or O(tenants) where the policy needs it."""
        self._policy.on_arrival(request, self._lines.keys())
        self._put(request)

    def put_back(self, request: SequenceState) -> None:
        """A request that ran before takes its old place. As `add`, and one sort later."""
        self._put(request)

    def _put(self, request: SequenceState) -> None:
        name = self._policy.line(request)
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = _Line()
        line.add(request)
        self._length += 1
        if self._by_urgency is not None:
            self._by_urgency.add(request)

    def remove(self, request: SequenceState) -> None:
        """Take a request out, if it is in. O(1), or O(log n)."""
        name = self._policy.line(request)
        line = self._lines.get(name)
        if line is None or line.requests.pop(request.arrival_order, None) is None:
            return
        self._length -= 1
        if not line.requests:
            del self._lines[name]
        if self._by_urgency is not None:
            self._by_urgency.remove(request)

    def in_arrival_order(self) -> list[SequenceState]:
        """All of them. O(n), and with several lines one sort of what is nearly sorted."""
        found = [request for line in self._lines.values() for request in line.in_order()]
        if len(self._lines) > 1:
            found.sort(key=lambda request: request.arrival_order)
        return found

    def most_urgent(self) -> SequenceState | None:
        """The first in the policy's order of urgency. O(1) where the order is kept."""
        if self._by_urgency is not None:
            return next(iter(self._by_urgency), None)
        return min(self.in_arrival_order(), key=self._policy.urgency, default=None)

    def entitled(self, running: RunningRequests) -> SequenceState | None:
        """Whom room is made for, if the policy makes room. O(1) where the order is kept; else O(tenants).

        The most urgent one; under `fair`, the first of the tenant served least of those of whom nothing runs.
        """
        policy = self._policy
        if policy.ranks_prompts:
            return self.most_urgent()
        if not isinstance(policy, FairPolicy):
            return None
        idle = [tenant for tenant in self._lines if not running.num_of(tenant)]
        if not idle:
            return None
        firsts = (next(iter(self._lines[tenant].in_order())) for tenant in idle)
        return min(firsts, key=lambda first: (policy.level(first), first.arrival_order))

    def in_order_of_trial(self, matched_tokens: MatchedTokens) -> list[SequenceState]:
        """At most `LOOKAHEAD` requests in the order in which to try them. O(n log n) for n looked at."""
        policy = self._policy
        if self._by_urgency is not None:
            return list(islice(self._by_urgency, LOOKAHEAD))
        lines = {name: line.in_order() for name, line in self._lines.items()}
        waiting = policy.merge(lines, LOOKAHEAD)
        if not waiting:
            return []
        ordered = policy.order(waiting, matched_tokens)
        if policy.bounds_overtaking:
            # A request is overtaken in every step in which a later one of its line is: so the aged ones are
            # the earliest (but for some that ran before), and their order tells nothing of what is cached.
            aged = [request for request in waiting if request.overtaken_steps >= self._max_overtake]
            if aged:
                ordered = self._before(aged, ordered)
        return list(ordered)

    def _before(self, aged: Sequence[SequenceState], ordered: Sequence[SequenceState]) -> list[SequenceState]:
        """`ordered`, with the aged ones in the first places of their lines."""
        line = self._policy.line
        first = {request.arrival_order for request in aged}
        by_line: dict[str, list[SequenceState]] = {}
        for request in chain(aged, (r for r in ordered if r.arrival_order not in first)):
            by_line.setdefault(line(request), []).append(request)
        if len(by_line) == 1:
            return next(iter(by_line.values()))
        turns = {name: iter(requests) for name, requests in by_line.items()}
        return [next(turns[line(request)]) for request in ordered]

    def is_aged(self, request: SequenceState) -> bool:
        """Whether nobody of its line may pass the request any more. O(1)."""
        return self.bars_all(request) or self._is_overtaken(request)

    def bars_all(self, request: SequenceState) -> bool:
        """Whether nobody may pass the request any more, of whatever line. O(1)."""
        policy = self._policy
        return (
            request.is_promoted
            or (policy.bounds_holding_up and request.held_up_steps >= self._max_overtake)
            or (not policy.serves_tenants and self._is_overtaken(request))
        )

    def _is_overtaken(self, request: SequenceState) -> bool:
        return self._policy.bounds_overtaking and request.overtaken_steps >= self._max_overtake

    def count_passed(self, latest_admitted: Mapping[str, int], held_up: Iterable[SequenceState]) -> None:
        """Account for one step. O(requests that arrived before the latest one admitted).

        Args:
            latest_admitted: the largest arrival order of the step's admissions, by line.
            held_up: requests that did not fit while others after them were admitted.
        """
        for request in held_up:
            request.held_up_steps += 1
        for name, latest in latest_admitted.items():
            line = self._lines.get(name)
            if line is None:
                continue
            if self._policy.bounds_overtaking:
                for request in line.in_order():
                    if request.arrival_order > latest:
                        break
                    request.overtaken_steps += 1
            if self._policy.promotes_oldest:
                self._count_oldest(line, latest)

    def _count_oldest(self, line: _Line, latest_admitted: int) -> None:
        """Count a step in which the oldest request was overtaken; promote it at the limit. O(promoted)."""
        oldest = next((r for r in line.in_order() if not r.is_promoted), None)
        if oldest is not None and oldest.arrival_order < latest_admitted:
            oldest.overtaken_steps += 1
            if oldest.overtaken_steps >= self._max_overtake:
                self.promote(oldest)

    def promote(self, request: SequenceState) -> None:
        """From now on the request comes before all that are not promoted. O(log n)."""
        if self._by_urgency is None or request not in self:
            request.is_promoted = True
            return
        self._by_urgency.remove(request)  # its place depends on what changes
        request.is_promoted = True
        self._by_urgency.add(request)

    def check(self) -> None:
        """Assert that nobody in here holds a lease, and that all are counted."""
        for name, line in self._lines.items():
            assert line.requests, "an empty line is kept"
            for order, request in line.requests.items():
                assert request.arrival_order == order
                assert self._policy.line(request) == name
                assert request.lease is None, f"{request!r} waits with a lease"
        assert self._length == sum(len(line.requests) for line in self._lines.values())
        if self._by_urgency is not None:
            assert [r.arrival_order for r in self.in_arrival_order()] == sorted(
                r.arrival_order for r in self._by_urgency
            )
