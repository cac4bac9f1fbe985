"""One step on the model side: the runner's logits, and the sampler's tokens of each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from radixkv.engine.request_group import Sample, sample_of
from radixkv.engine.runner import Runner
from radixkv.sampling.sampler import SampledToken, sample_runs
from radixkv.scheduling.batch import Batch, Entry

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class StepOutcome:
    """What runner and sampler gave: logits, and tokens for each of `requests`; or the `error` alone.

    Attributes:
        requests: every sample that gets tokens, new forks after their parent.
        runs: as many as `requests`: the accepted tokens of its draft, and one more.
        drafts: the entries of those that had one.
    """

    logits: torch.Tensor | None = None
    requests: list[Sample] = field(default_factory=list)
    runs: list[list[SampledToken]] = field(default_factory=list)
    drafts: dict[Sample, Entry] = field(default_factory=dict)
    error: BaseException | None = None


def run_step(runner: Runner, batch: Batch, make_forks: Callable[[Sample], Sequence[Sample]]) -> StepOutcome:
    """Run a batch and sample; what it gave, or why it failed. Nothing of a request changes in here.

    Args:
        make_forks: the other samples of a request whose prompt is complete; they share their parent's row.
    """
    requests: list[Sample] = []
    drafts: dict[Sample, Entry] = {}
    rows: list[int] = []  # of the logits, the first of each of `requests`
    try:
        logits = runner.execute(batch)
        for entry, _, end in batch.logit_spans():
            if not entry.samples:
                continue
            request = sample_of(entry.request)
            requests.append(request)
            rows.append(end - 1 - len(entry.draft))
            if entry.draft:
                drafts[request] = entry
            if request.num_forks:
                forks = make_forks(request)
                requests.extend(forks)
                rows.extend([end - 1] * len(forks))
        guesses = [drafts[request].draft if request in drafts else () for request in requests]
        return StepOutcome(logits, requests, sample_runs(logits, rows, requests, guesses), drafts)
    except BaseException as error:
        return StepOutcome(error=error)
