"""ReportQueue: what acquires leave behind so that reports and advice can be made of it later.

An acquire appends one tuple. Every `BATCH` acquires, or when a report is read, the tuples are looked at
together: leases that still live learn what their report needs and are entered with the ghost index as readers
of the moment of their acquire; lookups that parted from something cached go to the advisor.
"""

from __future__ import annotations

from typing import Protocol
from weakref import ref

from radixkv.cache.insight.advisor import Advisor
from radixkv.cache.insight.explain import DueReport
from radixkv.cache.insight.ghost import GhostIndex
from radixkv.cache.keys import TOKEN_BYTES
from radixkv.cache.node import Space
from radixkv.cache.retention.public_prefixes import PublicPrefixes
from radixkv.cache.tree_nodes import Walk

BATCH = 16


class ReportHolder(Protocol):
    """What a report is for: a lease. It may be gone before anybody asks."""

    def report_due(self, due: DueReport) -> None:
        """What the report needs is known now."""

    def complete_report(self) -> None:
        """The ghost index stands where it stood at the acquire: compose the report now."""


class ReportQueue:
    """The latest acquires of one cache."""

    __slots__ = ("_advisor", "_ghosts", "_latest", "_public")

    def __init__(self, ghosts: GhostIndex, advisor: Advisor, public: PublicPrefixes) -> None:
        # holder, namespace, prompt, where the lookup ended, clock seconds, removals before
        self._latest: list[tuple[ref[ReportHolder], Space, bytes, Walk, float, int]] = []
        self._ghosts = ghosts
        self._advisor = advisor
        self._public = public
        ghosts.before_reading = self.flush

    def note(self, holder: ReportHolder, space: Space, data: bytes, walk: Walk, at: float) -> None:
        """An acquire is about to take its blocks. Amortised O(1)."""
        self._latest.append((ref(holder), space, data, walk, at, self._ghosts.count))
        if len(self._latest) >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Look at the latest acquires. Amortised O(1) each."""
        if not self._latest:
            return
        latest = self._latest[:]
        self._latest.clear()
        public, advisor, watch = self._public, self._advisor, self._ghosts.watch
        for reference, space, data, walk, now, moment in latest:
            num_tokens = len(data) // TOKEN_BYTES
            found = walk[1] + walk[2]
            is_missing = found < num_tokens - 1
            holder = reference()
            if holder is not None:
                seed, mark = space.seed, 0
                if public.prefixes:
                    seed, mark = public.seed_and_mark(data, space, walk[1])
                if not (moment and is_missing):
                    moment = -1
                holder.report_due(DueReport(moment, walk, num_tokens, now, seed, mark, None))
                if moment >= 0:
                    watch(reference, moment)
            if is_missing and found and walk[5]:
                if advisor.to_skip:
                    advisor.to_skip -= 1
                else:
                    advisor.observe(data, walk, space)
