# SPDX-License-Identifier: Apache-2.0
"""Waiting requests, their order of trial, and counts of how often they were passed."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, islice

from sortedcontainers import SortedKeyList

from radixkv.scheduling.policy import BACKGROUND, AdmissionPolicy, Barred, MatchedTokens
from radixkv.scheduling.sequence import Sequence

# Most waiting requests that are looked at in one step.
LOOKAHEAD = 1024


class WaitingQueue:
    """Requests without a lease.

    Args:
        policy: the order of admission.
        max_overtake: steps in which a request may be passed; see `radixkv.scheduling.policy`.
    """

    def __init__(self, policy: AdmissionPolicy, max_overtake: int) -> None:
        self._policy = policy
        self._bound = max_overtake
        # By `policy.line`, then by arrival order; none is empty. Some lines are to be sorted when next read.
        self._lines: dict[str, dict[int, Sequence]] = {}
        self._unsorted: set[str] = set()
        self._length = 0
        # Kept beside them where the policy orders all that wait, so that nothing is sorted in a step.
        key = policy.sort_key()
        self._by_urgency = None if key is None else SortedKeyList(key=key)

    def __len__(self) -> int:
        return self._length

    def __contains__(self, request: Sequence) -> bool:
        return request.arrival_order in self._lines.get(self._policy.line(request), ())

    def add(self, request: Sequence) -> None:
        """Add a new request at the end. O(1); O(log n) or O(tenants) where the policy needs it."""
        if not request.is_background:
            self._policy.on_arrival(request, self._lines.keys() - {BACKGROUND})
        self.put_back(request)

    def put_back(self, request: Sequence) -> None:
        """Put a request that has run back in its old place. As `add`, and one sort later."""
        name = self._policy.line(request)
        line = self._lines.setdefault(name, {})
        if line and request.arrival_order < next(reversed(line)):
            self._unsorted.add(name)
        line[request.arrival_order] = request
        self._length += 1
        if self._by_urgency is not None:
            self._by_urgency.add(request)

    def remove(self, request: Sequence) -> None:
        """Take a request out, if it is in. O(1), or O(log n)."""
        name = self._policy.line(request)
        line = self._lines.get(name)
        if line is None or line.pop(request.arrival_order, None) is None:
            return
        self._length -= 1
        if not line:
            del self._lines[name]
            self._unsorted.discard(name)
        if self._by_urgency is not None:
            self._by_urgency.remove(request)

    def _line(self, name: str) -> Collection[Sequence]:
        """Return a line's requests in arrival order."""
        if name in self._unsorted:
            self._unsorted.remove(name)
            self._lines[name] = dict(sorted(self._lines[name].items()))
        return self._lines[name].values()

    def in_arrival_order(self) -> list[Sequence]:
        """Return all requests in arrival order. O(n), and one sort where there are several lines."""
        found = [request for name in self._lines for request in self._line(name)]
        if len(self._lines) > 1:
            found.sort(key=lambda request: request.arrival_order)
        return found

    @property
    def num_background(self) -> int:
        return len(self._lines.get(BACKGROUND, ()))

    @property
    def num_foreground(self) -> int:
        return self._length - self.num_background

    def foreground(self) -> Iterator[Sequence]:
        """Iterate over the requests that are no background requests, by line or by urgency."""
        if self._by_urgency is not None:
            return islice(self._by_urgency, self.num_foreground)
        return chain.from_iterable(self._line(name) for name in list(self._lines) if name != BACKGROUND)

    def firsts(self) -> Iterator[Sequence]:
        """Iterate over the first of each line but the background's, in the order that is kept. O(1) each."""
        if self._by_urgency is not None:
            return islice(self._by_urgency, min(1, self.num_foreground))
        return (next(iter(self._line(name))) for name in list(self._lines) if name != BACKGROUND)

    def in_order_of_trial(self, matched_tokens: MatchedTokens) -> list[Sequence]:
        """Return at most `LOOKAHEAD` requests in the order of trial, background requests last.

        O(n log n) for n looked at.
        """
        if self._by_urgency is not None:
            return list(islice(self._by_urgency, LOOKAHEAD))
        lines = {name: self._line(name) for name in list(self._lines)}
        background = lines.pop(BACKGROUND, None)
        order = self._ordered(lines, LOOKAHEAD, matched_tokens)
        if background is not None and len(order) < LOOKAHEAD:
            order += self._ordered({BACKGROUND: background}, LOOKAHEAD - len(order), matched_tokens)
        return order

    def _ordered(
        self, lines: Mapping[str, Collection[Sequence]], limit: int, matched_tokens: MatchedTokens
    ) -> list[Sequence]:
        """Return at most `limit` requests of these lines in the order of trial."""
        waiting = self._policy.merge(lines, limit)
        if not waiting:
            return []
        ordered = list(self._policy.order(waiting, matched_tokens))
        # A request is overtaken in every step in which a later one of its line is. So the aged ones are the
        # earliest (but for some that ran before), and their order reveals nothing about cached prefixes.
        overtaken, aged = self._policy.passed.overtaken, []
        if overtaken or self._bound <= 0:
            aged = [request for request in waiting if overtaken.get(request, 0) >= self._bound]
        return self._first_in_line(aged, ordered) if aged else ordered

    def _first_in_line(self, aged: abc.Sequence[Sequence], ordered: abc.Sequence[Sequence]) -> list[Sequence]:
        """Return `ordered` with the aged ones in the first places of their lines."""
        line = self._policy.line
        first = {request.arrival_order for request in aged}
        by_line: dict[str, list[Sequence]] = {}
        for request in chain(aged, (r for r in ordered if r.arrival_order not in first)):
            by_line.setdefault(line(request), []).append(request)
        if len(by_line) == 1:
            return next(iter(by_line.values()))
        turns = {name: iter(requests) for name, requests in by_line.items()}
        return [next(turns[line(request)]) for request in ordered]

    def barred_by(self, request: Sequence) -> Barred:
        """Return which requests may not pass this one any more. O(1)."""
        return self._policy.barred(request, self._bound)

    def count_passed(
        self,
        latest_admitted: Mapping[str, int],
        held_up: Iterable[Sequence],
        steps: Callable[[Sequence], int] = lambda request: 1,
    ) -> None:
        """Count the passed requests of a step. O(requests that arrived before the latest one admitted).

        Args:
            latest_admitted: the largest arrival order of the step's admissions, by line.
            held_up: requests that did not fit while others after them were admitted.
            steps: returns the number of steps for which this one counts, for an overtaken request.
        """
        passed = self._policy.passed
        for request in held_up:
            passed.held_up[request] = passed.held_up.get(request, 0) + 1
        for name, latest in latest_admitted.items():
            if name not in self._lines:
                continue
            for request in self._policy.overtaken(self._line(name), latest):
                num_steps = steps(request)
                passed.overtaken[request] = count = passed.overtaken.get(request, 0) + num_steps
                if self._by_urgency is None or name == BACKGROUND:
                    continue
                if count >= self._bound:
                    self._promote(request, self._by_urgency)
                if num_steps:  # one at a time: so a backlog takes one place in `max_overtake`
                    break

    @property
    def promotes(self) -> bool:
        """True if requests that waited too long are promoted, which changes a kept order only."""
        return self._by_urgency is not None

    def _promote(self, request: Sequence, by_urgency: SortedKeyList) -> None:
        """Put a request before all that are not promoted, from now on. O(log n)."""
        by_urgency.remove(request)  # its place depends on what changes
        self._policy.passed.promoted.add(request)
        by_urgency.add(request)

    def check(self) -> None:
        """Assert that no request in here holds a lease, and that all are counted."""
        for name, line in self._lines.items():
            assert line, "an empty line is kept"
            for order, request in line.items():
                assert request.arrival_order == order
                assert self._policy.line(request) == name
                assert request.lease is None, f"{request!r} waits with a lease"
        assert self._length == sum(len(line) for line in self._lines.values())
        if self._by_urgency is not None:
            assert [r.arrival_order for r in self.in_arrival_order()] == sorted(
                r.arrival_order for r in self._by_urgency
            )
