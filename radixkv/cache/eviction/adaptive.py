# SPDX-License-Identifier: Apache-2.0
"""Adaptive: an order of eviction that is learned while running, with LRU as its safety net.

The order
---------
Candidates are leaves. The worth of a leaf's last blocks is read from `ReuseStatistics` by their age and
their class, and a class is made of two things the tree knows:

- how often these blocks have been used (1, 2, 3, 4-6, 7-16, more): a tail that one request left, a
  conversation that was continued, a system prompt;
- the rhythm of the conversation: how long ago the deepest known block of the request's path had been used
  when that request came (never: a new conversation; seconds: an agent's loop; minutes: a person). Where a
  request names its session, the age of the session's last request says it better: the path's deepest block
  tells of a new conversation only the rhythm of the system prompt shared with all others.

Within a class, the leaves are kept by age; for each class and each bin of ages that has candidates, the
oldest one is looked at, and the one with the lowest worth goes. With falling hazards the order becomes LRU
within each class, with rising ones it keeps the longest waiting, and classes that are never used again
(one-hit tails) go at once.

The net
-------
`ShadowLRU` says, request by request, exactly what plain LRU would have hit. When the hits lost against it
exceed 0.15 % of the blocks asked for (and 64), the order is LRU until that much is allowed again.

Memory
------
For each cached block its number of uses, and by identity the same for up to 8 times the pool's blocks after
their eviction (less for large pools, see `_history_limit`): without that, a block evicted too early would
look like one that is never used.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from itertools import groupby
from typing import Any

from radixkv.cache.block_identity import IDENTITY_BYTES, each_identity
from radixkv.cache.eviction.index import CachedRun, EvictionIndex
from radixkv.cache.eviction.policy import EvictionPolicy, RemovalMemory
from radixkv.cache.eviction.reuse_statistics import EDGES, ReuseStatistics, age_bin
from radixkv.cache.eviction.shadow_lru import ShadowLRU

_RHYTHMS = 6  # never, and five ranges of three bins each
_USE_CLASSES = 6
_USES_CLASS = [0, 0, 1, 2, 3, 3, 3, *([4] * 10)]  # by number of uses; more: 5
_MANY_USES = len(_USES_CLASS)
_REFRESH_EVERY = 64  # requests
_TOLERANCE = 0.0015  # hits that may be lost against LRU, as a share of the blocks asked for
_FREE_TRIAL = 64  # blocks that may be lost on top of that, so that it can begin
_RETURN = 0.97  # of what may be lost: below this, the learned order is tried again
_MAX_SESSIONS = 65_536  # remembered, the latest ones
_BALANCE_DECAY = 0.999  # of both sides of that comparison, per refresh
_MIN_AGE = [math.ceil(edge - 1e-9) for edge in EDGES.tolist()]  # of each bin

Remembered = tuple[int, int, int]  # last request, rhythm, uses


def _class_of(uses: int, rhythm: int) -> int:
    return (_USES_CLASS[uses] if uses < _MANY_USES else _USE_CLASSES - 1) * _RHYTHMS + rhythm


def _identities(node: CachedRun, first: int, stop: int) -> tuple[bytes, ...]:
    """Return the identities of a node's blocks from index `first` to `stop`, as far as they are whole."""
    return each_identity(node.ids[first * IDENTITY_BYTES : stop * IDENTITY_BYTES])


def _history_limit(num_blocks: int) -> int:
    """Return how many evicted blocks to remember: 8 pools, at most the larger of 262,144 and 2 pools."""
    return max(min(8 * num_blocks, 262_144), 2 * num_blocks)


class _Run:
    """The policy's knowledge of a node's blocks."""

    __slots__ = ("parts", "request", "rhythm", "uses")

    def __init__(self, request: int, rhythm: int) -> None:
        self.request = request  # the last request that used them
        self.rhythm = rhythm  # that request's
        self.uses = 0  # requests that used the node since it was made
        # [end, birth] in order: the blocks up to index `end` (from the end of the part before) have been used
        # `uses - birth` times.
        self.parts: list[tuple[int, int]] = []

    @property
    def length(self) -> int:
        """Blocks."""
        return self.parts[-1][0] if self.parts else 0

    def tail_length(self) -> int:
        """Number of blocks at the end that share that class's number of uses."""
        parts = self.parts
        return parts[-1][0] - (parts[-2][0] if len(parts) > 1 else 0)

    def append(self, count: int, uses: int) -> None:
        """Append blocks that were used `uses` times so far."""
        end = self.length + count
        birth = self.uses - uses
        if self.parts and self.parts[-1][1] == birth:
            self.parts[-1] = (end, birth)
        else:
            self.parts.append((end, birth))

    def cut(self, length: int) -> list[tuple[int, int]]:
        """Keep the first `length` blocks; returns (count, uses) of the parts cut off, last one first."""
        gone = []
        parts = self.parts
        while parts and parts[-1][0] > length:
            end, birth = parts.pop()
            start = max(parts[-1][0] if parts else 0, length)
            gone.append((end - start, self.uses - birth))
            if start == length and length > (parts[-1][0] if parts else 0):
                parts.append((length, birth))
        return gone

    def split(self, length: int) -> _Run:
        """Take off the first `length` blocks as a run of its own."""
        upper = _Run(self.request, self.rhythm)
        upper.uses = self.uses
        upper.parts = [(min(end, length), birth) for end, birth in self.parts]
        while len(upper.parts) > 1 and upper.parts[-2][0] >= length:
            upper.parts.pop()
        self.parts = [(end - length, birth) for end, birth in self.parts if end > length]
        return upper

    def join(self) -> None:
        """Join parts whose number of uses no longer matters."""
        parts = self.parts
        while len(parts) > 1 and self.uses - parts[1][1] >= _MANY_USES:
            parts[0:2] = [(parts[1][0], parts[1][1])]


class Adaptive(EvictionPolicy):
    """Evict the leaf whose last blocks have the least learned worth; never much worse than LRU."""

    name = "adaptive"
    tracks_path = True

    def __init__(self) -> None:
        super().__init__()
        self._now = 0  # number of the latest request
        self._begun_at = -1  # the cache's use counter when it came
        self._rhythm: int | None = None  # of the latest request; None: not known yet
        self._session: Hashable | None = None  # of the request that comes next
        self._has_rhythm = False  # whether it is its session's
        self._sessions: OrderedDict[Hashable, int] = OrderedDict()  # the latest request of each
        self._statistics = ReuseStatistics(_USE_CLASSES * _RHYTHMS)
        self._shadow = ShadowLRU(1)
        self._history: OrderedDict[bytes, Remembered] = OrderedDict()
        self._history_limit = 8
        self._asked = 0.0  # blocks asked for
        self._lost = 0.0  # hits of LRU minus own hits
        self._is_guarded = False

    def __repr__(self) -> str:
        mode = "guarded" if self._is_guarded else "learned"
        return f"Adaptive({mode}, {self._lost:+.0f} blocks lost to LRU, {len(self._history)} remembered)"

    @property
    def counted_blocks(self) -> int:
        """Blocks that its statistics count: the cached and the remembered ones. O(requests counted apart)."""
        return self._statistics.counted_blocks

    @property
    def remembered_blocks(self) -> int:
        """Evicted blocks whose uses it remembers."""
        return len(self._history)

    def attach(self, num_blocks: int, block_size: int, ghosts: RemovalMemory) -> None:
        super().attach(num_blocks, block_size, ghosts)
        self._shadow = ShadowLRU(num_blocks)
        self._shadow.begin(self._now)  # blocks may be loaded before the first request has got its own
        self._history_limit = _history_limit(num_blocks)

    # ------------------------------------------------------------------ learning

    def _begin(self) -> None:
        """Begin a request: its first hook is `on_hit`, or `on_acquire` if it hits nothing."""
        if self._begun_at == self.tick:
            return
        self._begun_at = self.tick
        self._now += 1
        self._rhythm = self._rhythm_of_session()
        self._has_rhythm = self._rhythm is not None
        self._statistics.begin(self._now)
        self._shadow.begin(self._now)

    def on_session(self, session: Hashable | None) -> None:
        self._session = session

    def _rhythm_of_session(self) -> int | None:
        """Return the class of the time since the session's latest request; None: no session, or a new one."""
        session, self._session = self._session, None
        if session is None:
            return None
        before = self._sessions.pop(session, None)
        self._sessions[session] = self._now
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return None if before is None else self._rhythm_of(self._now - before)

    def on_acquire(self, num_tokens: int, num_hit_tokens: int) -> None:
        self._begin()
        self._asked += -(-num_tokens // self.block_size)
        allowed = _TOLERANCE * self._asked + _FREE_TRIAL
        self._is_guarded = self._lost > (allowed * _RETURN if self._is_guarded else allowed)
        if self._now % _REFRESH_EVERY == 0:
            self._statistics.refresh(self._now)
            self._asked *= _BALANCE_DECAY
            self._lost *= _BALANCE_DECAY

    def on_hit(self, node: CachedRun) -> None:
        self._begin()
        run = node.data
        if run is None:
            return
        now = self._now
        self._shorten(run, len(node.blocks))
        age = now - run.request
        if self._rhythm is None:  # the first node is the deepest
            self._rhythm = self._rhythm_of(age)
        if not age:
            return
        depth = node.start // self.block_size
        length = run.length
        self._lost -= length - self._shadow.holds(run.request, depth, length)
        self._shadow.forget(run.request, length)
        self._shadow.use(now, depth, length)
        before, start = run.rhythm, 0
        run.rhythm = self._rhythm
        statistics = self._statistics
        for end, birth in run.parts:
            uses = run.uses - birth
            statistics.use(run.request, _class_of(uses, before), age, end - start)
            statistics.add(now, _class_of(uses + 1, run.rhythm), end - start)
            start = end
        run.uses += 1
        run.request = now
        run.join()

    def on_insert(self, node: CachedRun, num_blocks: int) -> None:
        run = node.data
        first = len(node.blocks) - num_blocks
        if run is None:
            run = node.data = _Run(self._now, self._rhythm or 0)
        else:
            self._shorten(run, first)
            self._renew(run, node.start // self.block_size)
        found, deepest = self._recall(node, first)
        if deepest is not None and not self._has_rhythm:
            run.rhythm = self._rhythm_of(self._now - deepest)
        for count, uses in found:
            run.append(count, uses)
            self._statistics.add(self._now, _class_of(uses, run.rhythm), count)
        self._shadow.use(self._now, node.start // self.block_size + first, num_blocks)

    def _recall(self, node: CachedRun, first: int) -> tuple[list[tuple[int, int]], int | None]:
        """(count, uses with this one) of the blocks from `first` on, and the deepest one's last request."""
        recall = self._history.pop
        known = [recall(identity, None) for identity in _identities(node, first, len(node.blocks))]
        known += [None] * (len(node.blocks) - first - len(known))  # a partial block is not remembered
        stretches: list[tuple[int, int]] = []
        deepest: int | None = None
        depth = node.start // self.block_size + first
        for remembered, equal in groupby(known):
            count = len(list(equal))
            stretches.append((count, self._use_again(remembered, depth, count)))
            depth += count
            if remembered is not None:
                deepest = remembered[0]
        return stretches, deepest

    def _use_again(self, remembered: Remembered | None, depth: int, count: int) -> int:
        """Count blocks that are new, or computed again after eviction; return their uses with this."""
        if remembered is None:
            return 1
        request, rhythm, uses = remembered
        self._lost += self._shadow.holds(request, depth, count)
        self._shadow.forget(request, count)
        self._statistics.use(request, _class_of(uses, rhythm), self._now - request, count)
        return uses + 1

    def _renew(self, run: _Run, depth: int) -> None:
        """Renew a run to which a running request adds blocks: they are in use, but not used again."""
        if run.request == self._now:
            return
        length = run.length
        self._shadow.forget(run.request, length)
        self._shadow.use(self._now, depth, length)
        start = 0
        for end, birth in run.parts:
            block_class = _class_of(run.uses - birth, run.rhythm)
            self._statistics.add(run.request, block_class, start - end)
            self._statistics.add(self._now, block_class, end - start)
            start = end
        run.request = self._now

    @staticmethod
    def _rhythm_of(age: int) -> int:
        return 1 + min(age_bin(age) // 3, _RHYTHMS - 2)

    # ------------------------------------------------------------------ choosing

    def priority(self, node: CachedRun) -> Any:
        run = node.data
        if run is None or not run.parts:
            return (-1, 0)
        return (_class_of(run.uses - run.parts[-1][1], run.rhythm), run.request)  # of the last block

    def trim_limit(self, node: CachedRun) -> int:
        """Return the number of blocks at the node's end that are worth the same."""
        run = node.data
        return run.tail_length() if run is not None and run.parts else len(node.blocks)

    def victim(self, index: EvictionIndex) -> CachedRun:
        while True:
            node = self._cheapest_by_age(index) if self._is_guarded else self._cheapest(index)
            if node.entry[0] == self.priority(node):
                return node
            index.reprioritize(node)  # its last blocks went, and the ones before are of another class

    def _cheapest(self, index: EvictionIndex) -> CachedRun:
        """Return the oldest candidate of the class and bin of ages with the lowest worth."""
        now, worth = self._now, self._statistics.worth
        node: CachedRun | None = index.first()
        best, lowest, oldest = index.first(), float("inf"), 0
        while node is not None:
            block_class, request = node.entry[0]
            if block_class < 0:
                return node
            bin_of_age = age_bin(now - request)
            value = worth[block_class][bin_of_age]
            if value < lowest or (value == lowest and request < oldest):
                best, lowest, oldest = node, value, request
            if bin_of_age:
                node = index.first_from((block_class, now - _MIN_AGE[bin_of_age] + 1))
            else:
                node = index.first_from((block_class + 1, -1))
        return best

    def _cheapest_by_age(self, index: EvictionIndex) -> CachedRun:
        """Return the least recently used candidate."""
        node: CachedRun | None = index.first()
        best = index.first()
        while node is not None:
            if node.entry[0][1] < best.entry[0][1]:
                best = node
            node = index.first_from((node.entry[0][0] + 1, -1))
        return best

    # ------------------------------------------------------------------ decay

    def on_evict(self, node: CachedRun, num_blocks: int) -> None:
        run = node.data
        if run is None:
            return
        end = len(node.blocks)
        self._shorten(run, end)
        history = self._history
        for count, uses in run.cut(end - num_blocks):
            remembered = (run.request, run.rhythm, uses)
            whole = _identities(node, end - count, end)
            for identity in whole:
                old = history.pop(identity, None)
                if old is not None:  # a duplicate of a block that was computed twice
                    self._drop(old)
                history[identity] = remembered
            if len(whole) < count:
                self._drop(remembered)
            end -= count
        while len(history) > self._history_limit:
            self._drop(history.popitem(last=False)[1])

    def _drop(self, remembered: Remembered, count: int = 1) -> None:
        """Stop counting blocks."""
        request, rhythm, uses = remembered
        self._statistics.add(request, _class_of(uses, rhythm), -count)
        self._shadow.forget(request, count)

    def _shorten(self, run: _Run, length: int) -> None:
        """Stop counting blocks that left a node without eviction (discarded, rolled back)."""
        if run.length > length:
            for count, uses in run.cut(length):
                self._drop((run.request, run.rhythm, uses), count)

    def on_split(self, upper: CachedRun, lower: CachedRun) -> None:
        run = lower.data
        if run is not None:
            self._shorten(run, len(upper.blocks) + len(lower.blocks))
            upper.data = run.split(len(upper.blocks))

    def on_remove(self, node: CachedRun) -> None:
        if node.data is not None:
            self._shorten(node.data, 0)

    def on_reset(self) -> None:
        self._history = OrderedDict()
        self._statistics = ReuseStatistics(_USE_CLASSES * _RHYTHMS)
        self._statistics.begin(self._now)
        self._shadow = ShadowLRU(self.num_blocks)
        self._shadow.begin(self._now)
