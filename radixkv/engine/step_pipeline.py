# SPDX-License-Identifier: Apache-2.0
"""Steps on the device: launched, waited for, and where that pays, the next one launched before the wait.

    GPU     | step n              | step n + 1          | step n + 2
    host      plan n + 1, launch, |   give out n, plan n + 2, launch,  | give out n + 1
              wait for n          |   wait for n + 1                   |

The host processes a step's tokens (text, stops, deltas, the ends of requests) while the next one runs. A
request that ended or was aborted meanwhile is left out of that next step, which has computed it for nothing.
Prompts go on by their next chunks meanwhile, waiting requests join, and penalties count the chosen token on
the device. Grammars, forks, and admissions that displace somebody or wait for a tier or an image need the
tokens first: where a step has one of these, no step runs ahead. A few requests with drafts sit the next step
out.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from radixkv.engine.runner import Runner
from radixkv.errors import ENDS_PROCESS
from radixkv.sampling.device_arrays import to_device
from radixkv.sampling.device_counts import DeviceCounts
from radixkv.sampling.logits_processors import FedTokens
from radixkv.sampling.sampler import SampledToken, Sampling
from radixkv.scheduling.batch import Batch, Entry
from radixkv.scheduling.sequence import Sequence

MakeForks = Callable[[Sequence], abc.Sequence[Sequence]]


class StepFailedError(Exception):
    """Runner or sampler failed in a step.

    Attributes:
        batch: of the step, to be rolled back.
        error: what happened.
    """

    def __init__(self, batch: Batch, error: BaseException) -> None:
        super().__init__(f"{batch!r} failed: {error}")
        self.batch, self.error = batch, error


@dataclass(slots=True)
class LaunchedStep:
    """A step that runs on the device. Nothing of a request has changed for it yet.

    Attributes:
        batch: its entries are those that count: see `drop_surplus`.
        started: a clock reading, in seconds.
        logits: [S, V], of the batch's `logit_rows`.
        requests: every sample that gets tokens, new forks after their parent.
        drafts: the entries of requests with a draft.
        sampling: the choice of the tokens; None: no request gets one.
        kept: which of the rows of `sampling` count; None: all.
        fed: for a step launched ahead, the tokens of its leading entries; None: the host knew them.
        error: why it could not be launched ahead; None: it runs.
    """

    batch: Batch
    started: float
    logits: torch.Tensor
    requests: list[Sequence] = field(default_factory=list)
    drafts: dict[Sequence, Entry] = field(default_factory=dict)
    sampling: Sampling | None = None
    kept: abc.Sequence[int] | None = None
    fed: FedTokens | None = None
    error: BaseException | None = None

    def drop_surplus(self) -> None:
        """Leave out requests that got another token than the step was fed, or their last one. O(entries).

        The step before it has been waited for, and its tokens have been given out.
        """
        if self.fed is None or self.error is not None:
            return
        chosen, places = self.fed.chosen, self.fed.places
        fed = [chosen[place] for place in places] if chosen else [-1] * len(places)
        batch, entries = self.batch, self.batch.entries
        # A decode goes on if its request has got just the token that was fed, a chunk if its prompt has been
        # computed up to it.
        stays = [
            (request := entry.request).lease is not None
            and request.num_computed == (start := entry.start)
            and request.num_tokens == start + 1
            and request.last_token == token
            for entry, token in zip(entries, fed, strict=False)
        ]
        stays += [
            entry.request.lease is not None and entry.request.num_computed == entry.start
            for entry in entries[len(places) :]
        ]
        if not all(stays):
            sampled = [stayed for entry, stayed in zip(entries, stays, strict=True) if entry.samples]
            self.kept = kept = [row for row, stayed in enumerate(sampled) if stayed]
            counts = [entry.count for entry in entries]
            self.batch = replace(
                batch,
                entries=[entry for entry, stayed in zip(entries, stays, strict=True) if stayed],
                token_ids=batch.token_ids[np.repeat(stays, counts)],
                num_rows=sum(stays[: batch.num_rows]),
            )
            self.requests = [self.requests[row] for row in kept]


def launch(
    runner: Runner,
    batch: Batch,
    make_forks: MakeForks,
    started: float,
    *,
    after: LaunchedStep | None = None,
    keeps_logits: bool = False,
    memory: DeviceCounts | None = None,
) -> LaunchedStep:
    """Start a step, and the choice of its tokens.

    Args:
        make_forks: the other samples of a request whose prompt is complete; they share their parent's row.
        started: a clock reading, in seconds.
        after: the step whose tokens the batch's rows compute; None: the host knows them.
        keeps_logits: the next step may be launched before this one is waited for.
        memory: counts of tokens for penalties, on the device; None: there are none.

    Raises:
        BaseException: what runner and sampler raise.
    """
    fed = None if after is None else _feed(batch, after)
    step = LaunchedStep(batch, started, runner.execute(batch), fed=fed)
    step.requests = [entry.request for entry in batch.entries[: batch.num_rows]]
    rows = list(range(batch.num_rows))  # of the logits, the first of each request
    for entry, _, end in batch.logit_spans(batch.num_rows):
        if not entry.samples:
            continue
        request = entry.request
        step.requests.append(request)
        rows.append(end - 1 - len(entry.draft))
        if entry.draft:
            step.drafts[request] = entry
        if request.num_forks:
            forks = make_forks(request)
            step.requests.extend(forks)
            rows.extend([end - 1] * len(forks))
    # The next step may write its own to the same place. A GPU has read these by then; any others are copied.
    if keeps_logits and step.logits.device.type == "cpu" and step.logits.itemsize == 4:
        step.logits = step.logits.clone()
    if rows:
        guesses: list[abc.Sequence[int]] = [()] * len(rows)
        if step.drafts:
            guesses = [step.drafts[one].draft if one in step.drafts else () for one in step.requests]
        if fed is not None:  # prompts that end with the step come after its decodes
            fed = replace(fed, places=[*fed.places, *[-1] * (len(rows) - len(fed.places))])
        step.sampling = Sampling(step.logits, rows, step.requests, guesses, fed, memory)
    return step


def _feed(batch: Batch, after: LaunchedStep) -> FedTokens:
    """Give a batch's rows the tokens that a step chooses, and return them."""
    sampling = after.sampling
    if not batch.num_rows or sampling is None:
        return FedTokens([], [], after.logits.new_empty(0, dtype=torch.int64))
    fed = [entry.request for entry in batch.entries[: batch.num_rows]]
    rows = list(sampling.starts)
    if after.kept is not None:
        rows = [rows[at] for at in after.kept]
    if after.requests[: len(fed)] == fed:
        rows = rows[: len(fed)]
    else:
        places = dict(zip(after.requests, rows, strict=True))
        rows = [places[request] for request in fed]
    tokens = sampling.tokens
    chosen = batch.fed_tokens = tokens.index_select(0, to_device(rows, tokens.device))
    if batch.num_rows < batch.num_tokens:
        known = to_device(batch.token_ids[batch.num_rows :], tokens.device)
        batch.fed_tokens = torch.cat([chosen, known])
    return FedTokens(sampling.first_chosen, rows, chosen)


class StepPipeline:
    """The steps of one engine. Not thread-safe.

    Args:
        clock: seconds.
        make_forks: see `launch`.
        looks_ahead: whether the next step may be launched before one is waited for.
    """

    def __init__(
        self, runner: Runner, clock: Callable[[], float], make_forks: MakeForks, *, looks_ahead: bool
    ) -> None:
        self.looks_ahead = looks_ahead
        self._runner, self._clock, self._make_forks = runner, clock, make_forks
        self._ahead: LaunchedStep | None = None
        self._memory = DeviceCounts() if looks_ahead else None
        self._interruption: BaseException | None = None

    def launched_ahead(self) -> LaunchedStep | None:
        """Return the step that runs already; None: there is none, or none of its requests goes on."""
        step, self._ahead = self._ahead, None
        if step is not None:
            step.drop_surplus()
        return step if step is not None and step.batch.entries else None

    def launch(self, batch: Batch | None) -> LaunchedStep | None:
        """Start a step; None where the batch is None.

        Raises:
            StepFailedError: runner or sampler failed.
        """
        if batch is None:
            return None
        try:
            return launch(
                self._runner,
                batch,
                self._make_forks,
                self._clock(),
                keeps_logits=self.looks_ahead,
                memory=self._memory,
            )
        except BaseException as error:
            raise StepFailedError(batch, error) from error

    def launch_ahead(self, step: LaunchedStep, schedule: Callable[[Batch], Batch | None]) -> None:
        """Start the step after one that still runs, if it may be; its errors are raised in its turn.

        Args:
            schedule: plans the step after that of a batch; None: its tokens must be known first.
        """
        batch = schedule(step.batch) if self.looks_ahead and step.error is None else None
        if batch is None:
            return
        started = self._clock()
        try:
            self._ahead = launch(
                self._runner,
                batch,
                self._make_forks,
                started,
                after=step,
                keeps_logits=True,
                memory=self._memory,
            )
        except ENDS_PROCESS as error:  # this step is given up: nothing of it was given out
            self._interruption = error
        except BaseException as error:
            self._ahead = LaunchedStep(batch, started, step.logits, error=error)

    def wait(self, step: LaunchedStep) -> list[list[SampledToken]]:
        """Wait for a step's tokens: for each of its requests the accepted ones of its draft, and one more.

        Raises:
            StepFailedError: runner or sampler failed.
        """
        try:
            if step.error is not None:
                raise step.error
            if step.sampling is None:
                return []
            runs = step.sampling.runs()
            if self._runner.failure is not None:  # on a GPU, what it computed may be anything
                raise self._runner.failure
        except BaseException as error:
            raise StepFailedError(step.batch, error) from error
        return runs if step.kept is None else [runs[i] for i in step.kept]

    def raise_interruption(self) -> None:
        """Raise the interrupt or exit that came while a step was launched ahead."""
        error, self._interruption = self._interruption, None
        if error is not None:
            raise error

    def discard(self) -> None:
        """Give up the step that runs ahead: nothing of it was given out."""
        self._ahead = None
