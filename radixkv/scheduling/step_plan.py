"""StepPlan: what a step holds so far, and what is left to give. A value, made and passed along by `schedule`.

    | decodes: one token each | prompts in progress: chunks | reserve: a quarter, for waiting prompts |
    |<------------------ spent: entries ----------------->|<------------- budget left ------------->|

The reserve is for the first few waiting prompts, and for short ones when many long prompts are in progress
already. What nobody takes goes back to the prompts of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv.scheduling.batch import Entry
from radixkv.scheduling.sequence_state import SequenceState

# A chunk smaller than this is not worth a place in the batch while more could be had.
MIN_CHUNK = 16


@dataclass(slots=True)
class StepPlan:
    """The step being built.

    Attributes:
        number: of the step, from 0.
        budget: tokens left.
        sequence_slots: how many more requests may run.
        num_decodes: tokens of the decode batch, which come before all entries and are no part of `budget`.
        reserve: tokens of the budget that are kept for waiting prompts.
        num_prompts: requests, running or waiting, that have prompt tokens to compute.
        entries: by arrival order, in the order in which they took and committed their blocks.
        latest_admitted: the largest arrival order among those admitted, by line.
        held_up: by arrival order, who did not fit while others after it were admitted.
        preempted: requests that lost their lease for others.
        stuck: requests that need a block which can't be had even alone.
    """

    number: int
    budget: int
    sequence_slots: int
    num_decodes: int = 0
    reserve: int = 0
    num_prompts: int = 1
    entries: dict[int, Entry] = field(default_factory=dict)
    latest_admitted: dict[str, int] = field(default_factory=dict)
    held_up: dict[int, SequenceState] = field(default_factory=dict)
    preempted: list[SequenceState] = field(default_factory=list)
    stuck: list[SequenceState] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.entries and not self.num_decodes

    @property
    def num_chunks(self) -> int:
        """Entries whose prompts go on after this step. O(entries)."""
        return sum(not entry.samples for entry in self.entries.values())

    def set_reserve(self) -> None:
        """Keep a quarter of what is left for waiting prompts, at least a worthwhile chunk, at most half."""
        self.reserve = min(max(MIN_CHUNK, self.budget // 4), self.budget // 2)

    def add_stuck(self, request: SequenceState) -> None:
        """No block can be had for the request, now or later."""
        if request not in self.stuck:
            self.stuck.append(request)

    def leave_decodes(self) -> None:
        """One of the decode batch is no part of it any more: its token is in the budget again."""
        self.num_decodes -= 1
        self.budget += 1
