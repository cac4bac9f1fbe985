"""A request as its user sees it: all its samples together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from radixkv.engine.sample_output import SampleOutput
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.sampling_state import SamplingState
from radixkv.scheduling.request import PrefixPin
from radixkv.scheduling.sequence_state import SequenceState


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ends before its time: a sentence for its user, and a code for programs."""

    message: str
    code: str


@dataclass(slots=True, eq=False, repr=False)
class Sample(SequenceState):
    """A request to the scheduler, with its text and stop conditions, its random stream, and its siblings.

    Its maker sets the first three.

    Attributes:
        accepted_draft_tokens: of its tokens, those that were guessed; of a stream, since its last delta.
        rejected_draft_tokens: guesses that were wrong, likewise.
    """

    group: RequestGroup = field(init=False)
    output: SampleOutput = field(init=False)
    sampling_state: SamplingState = field(init=False)
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0


def sample_of(request: SequenceState) -> Sample:
    """The scheduler gives back what it was given: all its requests are samples."""
    assert isinstance(request, Sample)
    return request


@dataclass(slots=True)
class RequestGroup:
    """All samples of one request, in the order of their indices.

    Attributes:
        prompt: its text; None for a prompt given as token ids.
        wants_deltas: it is sent step by step, not as a whole at its end.
        pins: what of its prompt is still to be pinned.
        failure: why it failed; None: it did not.
        num_pinned_tokens: prompt tokens that are pinned for it; None: none were to be.
        prompt_was_sent: a delta had what became of its prompt.
    """

    request_id: str
    prompt: str | None
    params: SamplingParams
    samples: list[Sample]
    wants_deltas: bool = False
    pins: Sequence[PrefixPin] = ()
    failure: Failure | None = None
    num_pinned_tokens: int | None = None
    prompt_was_sent: bool = False

    @property
    def is_finished(self) -> bool:
        return all(sample.is_finished for sample in self.samples)

    @property
    def is_ranked(self) -> bool:
        """With best_of > n nothing can be delivered before all samples are complete."""
        return self.params.num_samples > self.params.n

    @property
    def is_streamed(self) -> bool:
        """Whether each step's increment goes out."""
        return self.wants_deltas and not self.is_ranked

    @property
    def has_ended(self) -> bool:
        """Whether no sample will get anything more."""
        return all(sample.output.finish_reason is not None for sample in self.samples)

    def unfinished(self) -> list[Sample]:
        """The samples that still run or wait."""
        return [sample for sample in self.samples if not sample.is_finished]

    def forget_unborn_samples(self) -> None:
        """Drop samples that were about to be forked and have no token yet: they will be made again."""
        if self.samples and self.samples[0].num_forks:
            del self.samples[1:]
