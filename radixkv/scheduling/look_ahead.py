# SPDX-License-Identifier: Apache-2.0
"""LookAhead: plans the step after one that still runs. Decodes go on by one token each, whichever they get.

    step n        computes position p of a request and chooses its token p + 1; the host does not know it yet
    step n + 1    computes position p + 1, in a slot of the request's lease: of its last block, or of one that
                  is reserved for it

A lease gets the tokens of step n + 1 only when its request has them and the step has run. If step n chose the
request's last token, the slot is beyond the lease's count when the lease is released: it is in no prefix. The
next owner of the block, a later step or a load from a tier, writes to it after step n + 1, as runners execute
calls in order.
"""

from __future__ import annotations

from collections import Counter, abc

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv.scheduling.batch import Batch, Entry, build_batch
from radixkv.scheduling.policy import AdmissionPolicy, tenant_of
from radixkv.scheduling.running import RunningRequests
from radixkv.scheduling.sequence import Sequence
from radixkv.scheduling.step_plan import SchedulerStats


class LookAhead:
    """Plans steps ahead for one scheduler; the arguments are its parts."""

    def __init__(
        self,
        cache: PrefixCache,
        running: RunningRequests,
        policy: AdmissionPolicy,
        stats: SchedulerStats,
    ) -> None:
        self._cache, self._running, self._policy, self._stats = cache, running, policy, stats

    def plan(self, entries: abc.Sequence[Entry]) -> Batch | None:
        """The step after one with these entries; None: somebody has no room, or shares it with forks.

        Its token ids are not known, and are to be fed. O(entries).
        """
        size, rows = self._cache.block_size, []
        for entry in entries:
            request, position = entry.request, entry.start + entry.count
            if request.shares_blocks or not self._reserve(request, position + 1):
                return None
            rows.append(Entry(request, start=position, count=1, samples=True, num_logits=1))
        for row in rows:
            request, block = row.request, row.start // size
            assert request.lease is not None
            row.block_table = request.lease.block_table
            row.slot_offset = (int(row.block_table[block]) - block) * size
            request.last_scheduled_step = self._stats.num_steps
        for tenant, count in Counter([tenant_of(row.request.namespace) for row in rows]).items():
            self._policy.on_served(tenant, count)
        self._stats.num_steps += 1
        self._stats.num_steps_ahead += 1
        self._stats.computed_tokens += len(rows)
        return build_batch(rows, size, len(rows))

    def _reserve(self, request: Sequence, num_tokens: int) -> bool:
        """Give a request slots for `num_tokens` tokens, without preemption; False: too few blocks."""
        lease = request.lease
        assert lease is not None
        if len(lease.block_table) * self._cache.block_size >= num_tokens:
            return True
        # A block for each running request's next token stays.
        if self._cache.available_blocks(request.namespace) <= len(self._running):
            return False
        self._running.drop_row(request, flush=True)
        try:
            lease.reserve(num_tokens)
        except OutOfBlocks:
            return False
        return True
