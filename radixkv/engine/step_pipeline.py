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

from radixkv.engine.model_step import LaunchedStep, MakeForks
from radixkv.engine.runner import Runner
from radixkv.engine.sample import sample_of
from radixkv.errors import ENDS_PROCESS
from radixkv.scheduling.batch import Batch, Entry


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
        if request.output.num_tokens + 1 < request.output.max_output_tokens:
            going_on.append(entry)
    return going_on
