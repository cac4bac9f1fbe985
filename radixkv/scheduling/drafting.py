"""Drafts in a step: what prompts leave of its budget goes to guesses of the tokens that requests get next.

    known | draft ........ |        rows of one entry: each draft token's logits say what follows it
      t   | g1   g2   g3   |        chosen after t: g1, after g1: g2, after g2: x
                                    -> the request gets g1 g2 x; the K/V of g3 is overwritten later

A draft gets slots in its request's lease (`append`) and is not committed: nobody can match it, and what was
wrong is given back after the step (`Scheduler.accept`). Nobody is preempted for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.scheduling.admission import AdmissionControl
from radixkv.scheduling.batch import Entry
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


def add_drafts(
    plan: StepPlan,
    drafter: DraftProposer,
    cache: PrefixCache,
    running: RunningRequests,
    admission: AdmissionControl,
) -> None:
    """Give drafts to the requests that get a token in this step, while there is budget. O(requests)."""
    entries = [
        entry
        for entry in plan.entries.values()
        if entry.samples and not entry.request.num_forks and entry.num_logits == 1
    ]
    rows = running.row_requests()
    if not entries and not rows:
        return
    num_tokens = len(rows) + sum(entry.count for entry in plan.entries.values())
    drafter.begin(num_tokens, len(rows) + len(entries))
    for request in [*(entry.request for entry in entries), *rows]:
        if plan.budget <= 0:
            return
        draft = drafter.draft(request, plan.budget)
        if draft:
            if request.arrival_order not in plan.entries:
                admission.make_entry(plan, request)
            count = _add_draft(plan.entries[request.arrival_order], draft, cache, len(running))
            if count:
                plan.budget -= count
                drafter.granted(count)


def _add_draft(entry: Entry, draft: Sequence[int], cache: PrefixCache, num_running: int) -> int:
    """Append as much of a draft to an entry as there are blocks for; returns how many tokens."""
    request, lease = entry.request, entry.request.lease
    assert lease is not None
    if lease.shares_tail:
        return 0  # to be copied first, and what this step computes of it can't be
    size = cache.block_size
    room = len(lease.block_table) * size - lease.num_tokens
    if len(draft) > room:
        missing = -(-(len(draft) - room) // size)
        # A block for each running request's next token stays.
        spare = cache.available_blocks(request.namespace) - num_running
        draft = draft[: room + max(0, min(missing, spare)) * size]
    if draft:
        lease.append(draft)
        entry.draft = draft
        entry.count += len(draft)
        entry.num_logits = 1 + len(draft)
    return len(draft)
