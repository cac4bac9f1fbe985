"""How many tokens of a request a step computes, and putting them into it."""

from __future__ import annotations

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.scheduling.batch import Entry
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.match_cache import MatchCache
from radixkv.scheduling.running import RunningRequests
from radixkv.scheduling.sequence_state import SequenceState
from radixkv.scheduling.step_plan import MIN_CHUNK, StepPlan

# Most tokens per step of a prompt whose logits are all wanted: they take vocabulary * 4 bytes each.
MAX_LOGITS_CHUNK = 512


class Chunks:
    """Gives running requests their tokens of a step.

    Args:
        max_tokens_per_request: most tokens of a request in a step while others have prompt tokens to compute;
            None: half of the budget that is left when its turn comes.
    """

    def __init__(
        self,
        cache: PrefixCache,
        in_flight: InFlightPrefixes,
        matches: MatchCache,
        max_tokens_per_request: int | None,
    ) -> None:
        self._cache = cache
        self._in_flight = in_flight
        self._matches = matches
        self._max_tokens = max_tokens_per_request

    def size(self, plan: StepPlan, request: SequenceState, *, others: bool, scheduled: int = 0) -> int:
        """How many more tokens the request gets: what it wants, within the budget and all caps.

        Args:
            others: requests after it in this step have prompt tokens to compute, too.
            scheduled: tokens that it has in this step already.
        """
        most = request.num_to_compute
        if request.needs_prompt_logits:
            most = min(most, MAX_LOGITS_CHUNK)
        if self._max_tokens is not None:
            if plan.num_prompts > 1:
                most = min(most, self._max_tokens)
        elif others:
            most = min(most, max(plan.budget // 2, MIN_CHUNK))
        return min(most - scheduled, plan.budget)

    def schedule(self, plan: StepPlan, request: SequenceState, count: int) -> None:
        """Put `count` more tokens of a running request into the step, and make them shareable."""
        lease = request.lease
        assert lease is not None
        assert 0 < count <= plan.budget
        entry = plan.entries.get(request.arrival_order)
        if entry is None:
            entry = Entry(request, start=request.num_computed, count=0)
            plan.entries[request.arrival_order] = entry
            entry.copies = lease.take_copies(until_done=True)
        end = entry.start + entry.count
        deferred = end - lease.num_committed  # by the decode batch: they are computed, and come first
        redundant = max(0, lease.commit(end + count) - deferred)
        assert not redundant or not entry.count, "an entry's slots changed within the step"
        entry.redundant += redundant
        entry.count += count
        entry.samples = entry.start + entry.count == request.num_tokens
        entry.num_logits = entry.count if request.needs_prompt_logits else int(entry.samples)
        plan.budget -= count
        self._matches.touched()
        request.last_scheduled_step = plan.number
        if self._cache.enabled:
            self._in_flight.announce(request, entry.start + entry.count)

    def take_from_decodes(self, plan: StepPlan, running: RunningRequests, request: SequenceState) -> None:
        """Make a request of the decode batch an entry of its own in this step: its lease knows its tokens."""
        running.leave_decodes(request)
        plan.leave_decodes()
        # The tokens fit into its last block, so nobody is preempted for them.
        assert request.lease is not None
        request.lease.append(request.tokens.view(request.lease.num_tokens))
        self.schedule(plan, request, 1)

    def extend(self, plan: StepPlan, *, shortest_first: bool) -> None:
        """Give what is left of the budget to the prompts of the step."""
        missing = [entry for entry in plan.entries.values() if not entry.samples]
        if shortest_first:
            missing.sort(key=lambda entry: entry.request.num_to_compute - entry.count)
        for entry in missing:
            more = self.size(plan, entry.request, others=False, scheduled=entry.count)
            if more > 0 and not self._would_dedupe(entry, more):
                self.schedule(plan, entry.request, more)

    @staticmethod
    def _would_dedupe(entry: Entry, count: int) -> bool:
        """Whether others have cached what follows the entry's tokens. O(block).

        Committing `count` more would then replace the block in which the entry ends, one that this step is to
        write and perhaps to copy from. What a step writes is decided once: the next step takes over theirs.
        """
        lease = entry.request.lease
        assert lease is not None
        return lease.would_dedupe(entry.start + entry.count + count)
