"""What a step of the scheduler gave: its batch, who lost their blocks, and the counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from radixkv.scheduling.batch import Batch
from radixkv.scheduling.sequence_state import SequenceState


class AdmissionResult(Enum):
    """What came of trying to admit a waiting request: why it was not admitted, if it was not."""

    ADMITTED = "it runs"
    IN_FLIGHT = "its next tokens are being computed by another request"
    NO_SLOT = "too many requests run"
    NO_BLOCKS = "too few blocks are free or evictable"
    AT_CEILING = "its quota's ceiling leaves it too few blocks"
    NO_BUDGET = "what is left of the step is for shorter prompts"


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start, in tokens and requests."""

    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    computed_tokens: int = 0
    admitted: int = 0


@dataclass(slots=True)
class ScheduleResult:
    """What a call of `schedule` decided.

    Attributes:
        batch: the step's work, or None when there is nothing to run.
        preempted: requests that lost their lease and wait again.
        stuck: requests that need a block which can't be had even alone; the engine ends them.
    """

    batch: Batch | None
    preempted: list[SequenceState] = field(default_factory=list)
    stuck: list[SequenceState] = field(default_factory=list)
