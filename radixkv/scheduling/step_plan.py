# SPDX-License-Identifier: Apache-2.0
"""StepPlan: a step's entries so far, and the rest of its budget. Made and passed along by `schedule`.

    | decodes: one token each | prompts in progress: chunks | reserve: a quarter, for waiting prompts |
    |<------------------ spent: entries ----------------->|<------------- budget left ------------->|

The reserve is for the first few waiting prompts, and for short ones when many long prompts are in progress
already. Prompts of the step get the unused part.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from radixkv.cache.keys import NamespaceName
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.states.checkpoint import GRID
from radixkv.cache.states.lease_states import LeaseStates
from radixkv.images.placed_image import chunk_end
from radixkv.scheduling.batch import Batch, Entry
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.sequence import Sequence

# A chunk smaller than this is not worth a place in the batch while more could be had.
MIN_CHUNK = 16
# Most tokens per step of a prompt whose logits are all wanted: they take vocabulary * 4 bytes each.
MAX_LOGITS_CHUNK = 512


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start, in tokens and requests."""

    num_steps: int = 0
    num_steps_ahead: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    computed_tokens: int = 0
    admitted: int = 0


@dataclass(slots=True)
class StepPlan:
    """The step being built.

    Attributes:
        number: of the step, from 0.
        budget: tokens left.
        sequence_slots: how many more requests may run.
        num_rows: decodes that are no entries; they come before all entries and are no part of `budget`.
        max_chunk: most tokens of a request in a step while others have prompt tokens to compute; None: half
            of the budget left at its turn.
        in_flight: receives the computed prefixes; None: nothing is shared.
        reserve: tokens of the budget that are kept for waiting prompts.
        num_prompts: requests, running or waiting, that have prompt tokens to compute.
        entries: by arrival order, in the order in which their blocks were allocated and committed.
        latest_admitted: the largest arrival order among those admitted, by line.
        held_up: by arrival order, requests that did not fit while later ones were admitted.
        preempted: requests that were preempted in this step, and wait again.
        stuck: requests that need a block which can't be had even alone; the engine ends them.
        room: by namespace, the known number of available blocks, until a lease is changed.
        is_ahead: the step before still runs: chunks are made shareable in their turn.
        matches_are_current: whether all waiting requests were looked up since a lease was changed.
        batch: the step's work once all is decided; None: there is nothing to run.
    """

    number: int
    budget: int
    sequence_slots: int
    num_rows: int
    max_chunk: int | None
    in_flight: InFlightPrefixes | None
    reserve: int = 0
    num_prompts: int = 1
    entries: dict[int, Entry] = field(default_factory=dict)
    latest_admitted: dict[str, int] = field(default_factory=dict)
    held_up: dict[int, Sequence] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    stuck: list[Sequence] = field(default_factory=list)
    room: dict[NamespaceName, tuple[int, int]] = field(default_factory=dict)
    is_ahead: bool = False
    matches_are_current: bool = False
    batch: Batch | None = None

    @property
    def is_empty(self) -> bool:
        return not self.entries and not self.num_rows

    @property
    def num_chunks(self) -> int:
        """Entries whose prompts go on after this step. O(entries)."""
        return sum(entry.start + entry.count < entry.request.num_tokens for entry in self.entries.values())

    def set_reserve(self) -> None:
        """Keep a quarter of the rest for waiting prompts, at least a worthwhile chunk, at most half."""
        self.reserve = min(max(MIN_CHUNK, self.budget // 4), self.budget // 2)

    def add_stuck(self, request: Sequence) -> None:
        """Record that no block can be had for a request, now or later."""
        if request not in self.stuck:
            self.stuck.append(request)

    def row_left(self) -> None:
        """Record that a row was dissolved: its token is in the budget again."""
        self.num_rows -= 1
        self.budget += 1

    def leases_changed(self) -> None:
        """Forget the known room and matches: a lease has changed."""
        self.room.clear()
        self.matches_are_current = False

    # ------------------------------------------------------------------ tokens

    def chunk(
        self,
        request: Sequence,
        *,
        shares_budget: bool,
        scheduled: int = 0,
        start: int | None = None,
        room: int | None = None,
    ) -> int:
        """Return the number of further tokens for a request: all it needs, within the budget and all caps.

        Chunks of models with states end at grid points, if they reach one and the prompt goes on. Where
        tokens of an image see each other, the first chunk of a step may exceed the budget for them: once in a
        step, as nothing is left then.

        Args:
            shares_budget: requests after it in this step have prompt tokens to compute, too.
            scheduled: tokens that it has in this step already.
            start: where its tokens in this step begin; None: after those that are computed.
            room: tokens of the budget that it may have; None: all that are left.
        """
        room = self.budget if room is None else room
        begin = (request.num_computed if start is None else start) + scheduled
        most = request.num_to_compute if start is None else request.num_tokens - start
        if request.needs_prompt_logits:
            most = min(most, MAX_LOGITS_CHUNK)
        if self.max_chunk is not None:
            if self.num_prompts > 1:
                most = min(most, self.max_chunk)
        elif shares_budget:
            most = min(most, max(self.budget // 2, MIN_CHUNK))
        count = min(most - scheduled, room)
        lease = request.lease
        if lease is not None and isinstance(lease.states, LeaseStates):
            end = begin + count
            on_grid = end - end % GRID
            # What a chunk has beyond a grid point is computed again with what follows there.
            if begin - scheduled < on_grid and end < request.num_tokens:
                count = max(0, on_grid - begin)
        if count > 0 and request.request.images:
            whole = chunk_end(request.request.images, begin, begin + count) - begin
            count = 0 if scheduled and whole > room else whole
        return count

    def add(self, request: Sequence, count: int) -> None:
        """Put `count` more tokens of a running request into the step, shareable unless it is ahead."""
        lease = request.lease
        assert lease is not None
        assert count > 0
        assert self.budget > 0
        entry = self.entries.get(request.arrival_order)
        if entry is None:
            start = request.num_computed
            entry = Entry(request, start=start, count=0, known=max(start, lease.num_committed))
            self.entries[request.arrival_order] = entry
            entry.copies = lease.take_copies(until_done=True)
        end = entry.start + entry.count
        # Less than `end`: a decode row has computed the tokens between. More: the request replays them.
        there = lease.num_committed
        if not self.is_ahead:
            there += lease.commit(end + count)
        redundant = min(count, max(0, there - end))
        assert not redundant or entry.redundant == entry.count, "an entry's slots changed within the step"
        entry.redundant += redundant
        entry.count += count
        is_last = entry.start + entry.count == request.num_tokens
        entry.samples = is_last and not request.params.samples_nothing
        entry.num_logits = entry.count if request.needs_prompt_logits else int(is_last)
        self.budget -= count
        self.leases_changed()
        request.last_scheduled_step = self.number
        if self.in_flight is not None:
            # Of a step ahead, the tokens after the committed ones are still to come.
            self.in_flight.announce(request, there if self.is_ahead else entry.start + entry.count)

    def lengthen(self, entry: Entry) -> None:
        """Give an entry's prompt as many further tokens as the budget allows."""
        request, lease = entry.request, entry.request.lease
        assert lease is not None
        more = self.chunk(request, shares_budget=False, scheduled=entry.count)
        # Where others have cached the continuation, committing more would replace the block where the entry
        # ends, one that this step is to write and perhaps to copy from. A step's writes are decided once:
        # the next step takes over theirs.
        if more > 0 and not lease.would_dedupe(entry.start + entry.count + more):
            self.add(request, more)

    def add_draft(self, entry: Entry, draft: abc.Sequence[int], cache: PrefixCache, num_running: int) -> int:
        """Append as much of a draft to an entry as there are blocks for; return the number of tokens.

        The K/V of a draft is not committed, so it can't be matched. No request is preempted for one.
        """
        request, lease = entry.request, entry.request.lease
        assert lease is not None
        if lease.shares_tail:
            return 0  # it is to be copied first, and tokens of this very step can't be
        size = cache.block_size
        room = len(lease.block_table) * size - lease.num_tokens
        if len(draft) > room:
            missing = -(-(len(draft) - room) // size)
            # A block for each running request's next token stays.
            spare = cache.available_blocks(request.namespace) - num_running
            draft = draft[: room + max(0, min(missing, spare)) * size]
        if lease.states is not None:
            draft = draft[: lease.states.room_for_draft(entry.end)]
        if draft:
            lease.append(draft)
            entry.draft = draft
            entry.count += len(draft)
            entry.num_logits = 1 + len(draft)
            self.budget -= len(draft)
        return len(draft)
