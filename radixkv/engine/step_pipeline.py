# SPDX-License-Identifier: Apache-2.0
"""StepPipeline: launches an engine's steps, and, where that is asked for, the next before one is waited for.

    GPU     | step n              | step n + 1          | step n + 2
    host      plan n + 1, launch, |   give out n, plan n + 2, launch,  | give out n + 1
              wait for n          |   wait for n + 1                   |

The host gives out a step's tokens (text, stops, deltas, the ends of requests) while the next one runs. A
request that ended, or was aborted, meanwhile was computed for nothing in that next step: it is left out of
it. Whatever needs the tokens first, such as admissions, drafts, penalties, grammars and forks, is planned
when they are known: then nothing runs ahead for a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from radixkv.engine.output_processor import Sample, sample_of
from radixkv.engine.runner import Runner
from radixkv.errors import ENDS_PROCESS
from radixkv.sampling.device_arrays import to_device
from radixkv.sampling.sampler import SampledToken, Sampling
from radixkv.scheduling.batch import Batch, Entry

if TYPE_CHECKING:
    import torch


MakeForks = Callable[[Sample], Sequence[Sample]]


@dataclass(slots=True)
class StepOutcome:
    """Results of runner and sampler: logits, and tokens for each of `requests`; or the `error` alone.

    Attributes:
        requests: every sample that gets tokens, new forks after their parent.
        runs: as many as `requests`: the accepted tokens of its draft, and one more.
        drafts: the entries of requests with a draft.
    """

    logits: torch.Tensor | None = None
    requests: list[Sample] = field(default_factory=list)
    runs: list[list[SampledToken]] = field(default_factory=list)
    drafts: dict[Sample, Entry] = field(default_factory=dict)
    error: BaseException | None = None


class LaunchedStep:
    """A step that runs, or has failed already. Nothing of a request changes in here.

    Args:
        make_forks: the other samples of a request whose prompt is complete; they share their parent's row.
        started: a clock reading, in seconds.
        after: the step whose tokens this one computes, a row for each request; None: the host knows them.
        keeps_logits: the next step may be launched before this one is waited for.

    Attributes:
        batch: its entries are the surviving ones: see `drop_surplus`.
        outcome: complete once `wait` has returned.
    """

    def __init__(
        self,
        runner: Runner,
        batch: Batch,
        make_forks: MakeForks,
        started: float,
        *,
        after: LaunchedStep | None = None,
        keeps_logits: bool = False,
    ) -> None:
        self.batch, self.started = batch, started
        self._runner = runner
        self.outcome = StepOutcome()
        self._sampling: Sampling | None = None
        self._kept: Sequence[int] | None = None  # which of its requests count; None: all
        self._fed_from: tuple[Sampling, list[int]] | None = None  # and the rows there
        try:
            if after is not None:
                self._feed(after)
            self._launch(runner, make_forks, keeps_logits=keeps_logits)
        except BaseException as error:
            self.outcome = StepOutcome(error=error)

    def _feed(self, after: LaunchedStep) -> None:
        sampling = after._sampling
        assert sampling is not None
        places = {request.arrival_order: row for row, request in enumerate(after.outcome.requests)}
        kept = range(len(places)) if after._kept is None else after._kept
        rows = [kept[places[entry.request.arrival_order]] for entry in self.batch.entries]
        self._fed_from = sampling, rows
        tokens = sampling.tokens
        self.batch.fed_tokens = tokens.index_select(0, to_device(rows, tokens.device))

    def _launch(self, runner: Runner, make_forks: MakeForks, *, keeps_logits: bool) -> None:
        outcome = self.outcome
        rows: list[int] = []  # of the logits, the first of each request
        logits = outcome.logits = runner.execute(self.batch)
        for entry, _, end in self.batch.logit_spans():
            if not entry.samples:
                continue
            request = sample_of(entry.request)
            outcome.requests.append(request)
            rows.append(end - 1 - len(entry.draft))
            if entry.draft:
                outcome.drafts[request] = entry
            if request.num_forks:
                forks = make_forks(request)
                outcome.requests.extend(forks)
                rows.extend([end - 1] * len(forks))
        if keeps_logits and logits.itemsize == 4:  # the sampler makes a copy of any others
            logits = logits.clone()  # the next step may write its own to the same place
        requests, drafts = outcome.requests, outcome.drafts
        guesses = [drafts[request].draft if request in drafts else () for request in requests]
        if rows:
            self._sampling = Sampling(logits, rows, requests, guesses, ahead=int(self.is_ahead))

    @property
    def is_ahead(self) -> bool:
        """True if it computes tokens that the host did not know at its launch."""
        return self._fed_from is not None

    def drop_surplus(self) -> None:
        """Leave out whose token has turned out to be another than was fed, or the last. O(entries).

        The step before it has been waited for, and its tokens have been given out.
        """
        if self._fed_from is None or self.outcome.error is not None:
            return
        sampling, rows = self._fed_from
        fed = [sampling.first_chosen[row] if sampling.first_chosen else -1 for row in rows]
        entries = self.batch.entries
        self._kept = kept = [i for i, entry in enumerate(entries) if _goes_on(entry, fed[i])]
        if len(kept) < len(entries):
            self.batch = replace(
                self.batch, entries=[entries[i] for i in kept], token_ids=self.batch.token_ids[kept]
            )
            self.outcome.requests = [self.outcome.requests[i] for i in kept]

    def wait(self) -> None:
        """Wait for the step's tokens."""
        if self._sampling is None:
            return
        try:
            runs = self._sampling.runs()
            if self._runner.failure is not None:  # on a GPU, what it computed may be anything
                raise self._runner.failure
            self.outcome.runs = runs if self._kept is None else [runs[i] for i in self._kept]
        except BaseException as error:
            self.outcome = StepOutcome(error=error)


def _goes_on(entry: Entry, fed: int) -> bool:
    """Return True if the request of a step launched ahead has got just the token that was fed."""
    request = entry.request
    return (
        request.lease is not None
        and request.num_computed == entry.start
        and request.num_tokens == entry.start + 1
        and request.last_token == fed
    )


class StepPipeline:
    """The steps of one engine. Not thread-safe.

    Args:
        clock: seconds.
        looks_ahead: whether the next step may be launched before one is waited for.

    Attributes:
        runner: what runs them.
    """

    def __init__(
        self, runner: Runner, clock: Callable[[], float], make_forks: MakeForks, *, looks_ahead: bool
    ) -> None:
        self.looks_ahead = looks_ahead
        self.runner, self._clock, self._make_forks = runner, clock, make_forks
        self._ahead: LaunchedStep | None = None

    def next(
        self, schedule: Callable[[], Batch | None], schedule_ahead: Callable[[Batch], Batch | None]
    ) -> LaunchedStep | None:
        """Run a step to its end; the one after it may run already then.

        Args:
            schedule: plans a step, all tokens being known; None: there is nothing to do.
            schedule_ahead: plans the step after that of a batch; None: its tokens must be known first.
        """
        step, self._ahead = self._ahead, None
        if step is not None:
            step.drop_surplus()
        if step is None or not step.batch.entries:
            batch = schedule()
            if batch is None:
                return None
            step = self._launch(batch)
        if self.looks_ahead and step.outcome.error is None:
            batch = schedule_ahead(step.batch)
            if batch is not None:
                self._ahead = self._launch(batch, after=step)
        step.wait()
        return step

    def _launch(self, batch: Batch, after: LaunchedStep | None = None) -> LaunchedStep:
        return LaunchedStep(
            self.runner,
            batch,
            self._make_forks,
            self._clock(),
            after=after,
            keeps_logits=self.looks_ahead,
        )

    @property
    def interruption(self) -> BaseException | None:
        """The interrupt or exit that came while a step was launched ahead; that step is given up."""
        error = None if self._ahead is None else self._ahead.outcome.error
        if not isinstance(error, ENDS_PROCESS):
            return None
        self._ahead = None
        return error

    def discard(self) -> None:
        """Give up what runs ahead: nothing of it has been told to anybody."""
        self._ahead = None


def decodes_that_go_on(entries: Sequence[Entry]) -> list[Entry] | None:
    """Of a step's entries those whose requests get more than its token; None: some tokens must be known.

    They must be where logits depend on them (penalties, grammars), where forks begin, and after drafts; and a
    prompt that is not complete goes on by a chunk.
    """
    going_on = []
    for entry in entries:
        request = sample_of(entry.request)
        if request.num_forks or request.sampling_state.processors:
            return None
        if entry.draft or not entry.samples or entry.num_logits != 1:
            return None
        if request.num_output_tokens + 1 < request.grows_until:
            going_on.append(entry)
    return going_on
