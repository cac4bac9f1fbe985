# SPDX-License-Identifier: Apache-2.0
"""Watched: the latest requests with their predictions, and sums over all."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from radixkv.cache.cache_stats import CacheStats
from radixkv.cache.reporting.reasons import Reason
from radixkv.cache.reporting.tree_walk import TreeSnapshot, TreeWalk
from radixkv.observe.audit.record import Record
from radixkv.observe.audit.rule_sets import RuleSet
from radixkv.observe.audit.rules import Begun, Observation, Rules
from radixkv_server.activity.hit_windows import (
    MAX_WINDOW_S,
    HitCounts,
    HitWindows,
    history_of,
    windows_of,
)
from radixkv_server.proxy.feed import Seen
from radixkv_server.proxy.fleet_state import UpstreamState

KEPT_REQUESTS = 500
MAX_RUNNING = 2000  # of more, the oldest are looked at when they end
SHOWN_CHARS = 600  # of a node, and of a prompt
MAX_SEEN_NODES = 20_000
FIRST_BYTE_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, float("inf"))


@dataclass(frozen=True, slots=True)
class WatchedRequest:
    """Request whose answer has ended.

    Attributes:
        place: its place in the order of requests.
        version: version of the `Watched` when it was added.
    """

    name: str
    place: int
    seen: Seen
    record: Record
    observation: Observation
    version: int

    def shortened(self) -> WatchedRequest:
        """Return it with only the shown parts: the beginnings of its first and its last text."""
        ends = (*self.record.blocks[:1], *self.record.blocks[1:][-1:])
        blocks = tuple(block._replace(text=block.text[:SHOWN_CHARS]) for block in ends)
        record = replace(
            self.record, body={}, blocks=blocks, tools=(), answer=(), other_answers=(), output=()
        )
        exchange = replace(self.seen.exchange, request=b"", response=b"")
        return replace(self, record=record, seen=replace(self.seen, exchange=exchange))

    @property
    def hit_counts(self) -> HitCounts:
        """Its counts, to be summed."""
        return HitCounts.of_prompt(self.observation.prompt_tokens, self.cached_tokens)

    @property
    def cached_tokens(self) -> int:
        """Cached tokens as reported by the answer, else as predicted."""
        reported = self.observation.reported_tokens
        return self.observation.cached_tokens if reported is None else reported

    @property
    def reason(self) -> Reason:
        """Reason for the miss; `upstream_missed`: the prompt was unchanged, and its entry had not expired."""
        observed = self.observation
        if observed.fault == "client" and observed.reason in (Reason.HIT, Reason.FIRST_SEEN):
            return Reason.CONCURRENT
        return Reason.UPSTREAM_MISSED if observed.fault == "provider" else observed.reason


class Watched:
    """Requests and sums, written by one thread, read by others."""

    def __init__(self, rule_set: RuleSet, memory_bytes: int) -> None:
        self.rule_set = rule_set
        self.version = 0
        self.missed: Counter[Reason] = Counter()  # reason -> tokens
        self._first_bytes = [0] * len(FIRST_BYTE_BOUNDS)
        self._first_seconds = 0.0
        self.num_dropped = 0
        self._rules = Rules(rule_set, memory_bytes=memory_bytes)
        self._latest: OrderedDict[str, WatchedRequest] = OrderedDict()
        self._num_asked = 0
        self._running: OrderedDict[int, tuple[int, Begun]] = OrderedDict()  # by their numbers
        self._hits = HitWindows()
        self._chars = self._tokens = 1
        self.states: Sequence[UpstreamState] = ()  # of several upstreams
        self._by_upstream: defaultdict[str, HitCounts] = defaultdict(HitCounts)
        self._lock = threading.Lock()

    def begin(self, seen: Seen, record: Record) -> None:
        """Take in a new request, which later ones can find. O(its size)."""
        with self._lock:
            self._running[seen.number] = (self._next_place(), self._rules.begin(record))
            if len(self._running) > MAX_RUNNING:
                self._running.popitem(last=False)

    def take(self, seen: Seen, record: Record) -> None:
        """Take in a request whose answer has ended, and compare it with the prediction. O(its size)."""
        with self._lock:
            place, begun = self._running.pop(seen.number, (0, None))
            if begun is None:
                place, observation = self._next_place(), self._rules.observe(record)
            else:
                observation = self._rules.end(begun, record)
            self.version += 1
            one = WatchedRequest(f"r{place}", place, seen, record, observation, self.version)
            self._latest[one.name] = one.shortened()
            if len(self._latest) > KEPT_REQUESTS:
                self._latest.popitem(last=False)
            self._count(one)

    def _next_place(self) -> int:
        self._num_asked += 1
        return self._num_asked

    def _count(self, one: WatchedRequest) -> None:
        record, observation = one.record, one.observation
        self._hits.count(one.hit_counts, time.monotonic())
        self._by_upstream[one.seen.upstream].add(one.hit_counts)
        self.missed[one.reason] += max(0, observation.prompt_tokens - one.cached_tokens)
        self.num_dropped = one.seen.num_dropped
        self._chars += sum(len(block.text) for block in record.blocks)
        self._tokens += observation.prompt_tokens
        if record.first_seconds is not None:
            self._first_seconds += record.first_seconds
            for at, bound in enumerate(FIRST_BYTE_BOUNDS):
                self._first_bytes[at] += record.first_seconds <= bound

    @property
    def num_running(self) -> int:
        """Number of requests whose answer has not ended."""
        return len(self._running)

    def take_states(self, states: Sequence[UpstreamState]) -> None:
        """Take in the states of upstreams."""
        self.states = states

    def of_upstream(self, address: str) -> HitCounts:
        """Return the sums over an upstream's requests."""
        with self._lock:
            return replace(self._by_upstream[address])

    @property
    def tokens_per_unit(self) -> float:
        """Ratio of prompt tokens to units of the tree."""
        return self._tokens / self._chars

    def latest(self, limit: int, after: int = 0) -> list[WatchedRequest]:
        """Return requests that ended after version `after`, newest first."""
        with self._lock:
            found = [one for one in self._latest.values() if one.version > after]
        return sorted(found, key=lambda one: -one.place)[:limit]

    def find(self, name: str) -> WatchedRequest | None:
        """Find one of the latest requests by its name."""
        return self._latest.get(name)

    def windows(self) -> dict[str, HitCounts]:
        """Return the sums over about the latest minutes, and over all."""
        with self._lock:
            return windows_of([self._hits], time.monotonic())

    def history(self) -> list[tuple[float, HitCounts]]:
        """Return the sums over each ten seconds of an hour, with their ages, oldest first."""
        with self._lock:
            return history_of([self._hits], MAX_WINDOW_S, time.monotonic())

    def first_bytes(self) -> tuple[tuple[float, ...], list[int], float]:
        """Return the histogram of seconds to the first byte: bounds, counts, and the sum."""
        with self._lock:
            return FIRST_BYTE_BOUNDS, list(self._first_bytes), self._first_seconds

    def stats(self) -> CacheStats:
        """Return the statistics of the tree."""
        with self._lock:
            return self._rules.cache.stats

    def snapshot(self, shown: int = SHOWN_CHARS) -> TreeSnapshot:
        """Return the tree, with the first units of each node; -1: all of them. O(nodes)."""
        with self._lock:
            walk = TreeWalk(self._rules.cache.tree, shown_tokens=shown, max_nodes=MAX_SEEN_NODES)
            while walk.advance():
                pass
            return TreeSnapshot(walk.nodes(), walk.is_complete, ranks_are_exact=False)
