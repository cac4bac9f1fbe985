"""Drafts in a step: what prompts leave of its budget goes to guesses of the tokens that requests get next.

    known | draft ........ |        rows of one entry: each draft token's logits say what follows it
      t   | g1   g2   g3   |        chosen after t: g1, after g1: g2, after g2: x
                                    -> the request gets g1 g2 x; the K/V of g3 is overwritten later

A draft gets slots in its request's lease (`append`) and is not committed: nobody can match it, and what was
wrong is given back after the step (`Scheduler.settle`). Nobody is preempted for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.scheduling.batch import Entry
from radixkv.scheduling.chunks import Chunks
from radixkv.scheduling.running import RunningRequests
from radixkv.scheduling.sequence_state import SequenceState
from radixkv.scheduling.step_plan import StepPlan


class DraftProposer(Protocol):
    """Guesses tokens."""

    def begin(self, num_rows: int, num_samples: int) -> None:
        """A step of so many rows, in which so many requests get a token, is about to get drafts."""
        ...

    def draft(self, request: SequenceState, most: int) -> Sequence[int]:
        """At most `most` tokens that the request may get after those it has; none where no guess pays."""
        ...

    def granted(self, num_tokens: int) -> None:
        """So many tokens of the latest draft are rows of the step now."""
        ...


class Drafting:
    """The last part of a step's building.

    Args:
        drafter: makes the guesses, and knows how many of them pay.
    """

    def __init__(
        self, cache: PrefixCache, running: RunningRequests, chunks: Chunks, drafter: DraftProposer
    ) -> None:
        self._cache = cache
        self._running = running
        self._chunks = chunks
        self._drafter = drafter

    def fill(self, plan: StepPlan) -> None:
        """Give drafts to the requests that get a token in this step, while there is budget. O(requests)."""
        sampling = [entry for entry in plan.entries.values() if self._may_draft(entry)]
        num_samples = plan.num_decodes + len(sampling)
        if not num_samples:
            return
        num_rows = plan.num_decodes + sum(entry.count for entry in plan.entries.values())
        self._drafter.begin(num_rows, num_samples)
        for entry in sampling:
            draft = self._drafter.draft(entry.request, plan.budget)
            if draft:
                self._add(plan, entry, draft)
            if plan.budget <= 0:
                return
        for request in self._running.decodes():
            draft = self._drafter.draft(request, plan.budget)
            if draft:
                self._chunks.take_from_decodes(plan, self._running, request)
                self._add(plan, plan.entries[request.arrival_order], draft)
            if plan.budget <= 0:
                return

    @staticmethod
    def _may_draft(entry: Entry) -> bool:
        return entry.samples and not entry.request.num_forks and entry.num_logits == 1

    def _add(self, plan: StepPlan, entry: Entry, draft: Sequence[int]) -> None:
        """Append a draft, as far as there are blocks for it, to an entry that ends with a known token."""
        request, lease = entry.request, entry.request.lease
        assert lease is not None
        if lease.shares_tail:
            return  # to be copied first, and what this step computes of it can't be
        size = self._cache.block_size
        room = len(lease.block_table) * size - lease.num_tokens
        if len(draft) > room:
            missing = -(-(len(draft) - room) // size)
            # A block for each running request's next token stays.
            spare = self._cache.available_blocks(request.namespace) - len(self._running)
            draft = draft[: room + max(0, min(missing, spare)) * size]
        if not draft:
            return
        lease.append(draft)
        entry.draft = draft
        entry.count += len(draft)
        entry.num_logits = 1 + len(draft)
        plan.budget -= len(draft)
        self._drafter.granted(len(draft))
