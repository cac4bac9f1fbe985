"""ReportQueue: what acquires leave behind so that reports and advice can be made of it later.

An acquire appends one tuple. Every `BATCH` acquires, or when a report is read, the tuples are looked at
together: leases that still live learn what their report needs and are entered with the ghost index as readers
of the moment of their acquire; lookups that parted from something cached go to the advisor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

from radixkv.cache.insight.advisor import Advisor
from radixkv.cache.insight.explain import DueReport
from radixkv.cache.insight.ghost import GhostIndex
from radixkv.cache.keys import TOKEN_BYTES
from radixkv.cache.radix_tree import Walk
from radixkv.cache.retention.public_prefixes import PublicPrefixes

if TYPE_CHECKING:
    from radixkv.cache.lease import Lease

BATCH = 16


class ReportQueue:
    """The latest acquires of one cache.

    Attributes:
        latest: (lease, prompt, where the lookup ended, clock seconds, removals before), not looked at yet.
    """

    __slots__ = ("_advisor", "_ghosts", "_public", "latest")

    def __init__(self, ghosts: GhostIndex, advisor: Advisor, public: PublicPrefixes) -> None:
        self.latest: list[tuple[ref[Lease], bytes, Walk, float, int]] = []
        self._ghosts = ghosts
        self._advisor = advisor
        self._public = public
        ghosts.before_reading = self.flush

    def flush(self) -> None:
        """Look at the latest acquires. Amortised O(1) each."""
        latest = self.latest[:]
        self.latest.clear()
        public, advisor, watch = self._public, self._advisor, self._ghosts.watch
        for reference, data, walk, now, moment in latest:
            num_tokens = len(data) // TOKEN_BYTES
            found = walk[1] + walk[2]
            is_missing = found < num_tokens - 1
            lease = reference()
            if lease is not None:
                seed, mark = lease._space.seed, 0
                if public.prefixes:
                    seed, mark = public.seed_and_mark(data, lease._space, walk[1])
                if not (moment and is_missing):
                    moment = -1
                lease._due = DueReport(moment, walk, num_tokens, now, seed, mark, None)
                if moment >= 0:
                    watch(reference, moment)
            if is_missing and found and walk[5]:
                if advisor.to_skip:
                    advisor.to_skip -= 1
                else:
                    advisor.observe(data, walk)
