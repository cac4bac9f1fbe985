# SPDX-License-Identifier: Apache-2.0
"""Response to a fault: decides which requests run alone, which are cleared, and which fail.

| what broke                      | what happens                                                            |
|---------------------------------|-------------------------------------------------------------------------|
| a step of the model or sampler  | nothing of it counts: its tokens are rolled back in the cache, and its  |
|                                 | requests are bisected: each runs again alone; one that fails alone      |
|                                 | ends with an error, one that comes through is cleared                   |
| scheduler, cache or bookkeeping | the cache is rebuilt empty and every request is queued again with the   |
|                                 | tokens it has; twice in a row, and the requests are bisected            |
| what belongs to one request:    | that request ends with an error (see `output_processor`)                |
| decoder, stop, sampling state   |                                                                         |

A request is never run again for tokens that were delivered: they are part of it by then.

Any `BaseException` is a fault: a panic in a library written in Rust is no `Exception`. Only an
interrupt and an exit (`ENDS_PROCESS`) are not: they pass through, after the step was rolled back,
so that the engine can go on. So does a runner's own end (`ENDS_ENGINE`), after which it can't.

Nothing in here acts: the engine rolls back, rebuilds and fails, by the results of these methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from radixkv.engine.sample import Sample
from radixkv.errors import ENDS_ENGINE
from radixkv.scheduling.request import Failure


class FaultRecovery:
    """The bisection of one engine: the requests that still have to run alone, in that order."""

    def __init__(self) -> None:
        self._to_run_alone: list[Sample] = []
        self._rebuilds_in_a_row = 0

    @property
    def next_alone(self) -> Sample | None:
        """The request to run alone in the next step; None: any may run."""
        return self._to_run_alone[0] if self._to_run_alone else None

    def step_failed(self, requests: Sequence[Sample], error: BaseException) -> list[tuple[Sample, Failure]]:
        """Record a failed step of these requests; return the failing ones: the one that was alone in it.

        The others are bisected.
        """
        if isinstance(error, ENDS_ENGINE):
            return []
        if len(requests) == 1 and requests[0] in self._to_run_alone:
            return [(requests[0], Failure(f"the model failed on this request: {error}", "step_failed"))]
        self._to_run_alone.extend(request for request in requests if request not in self._to_run_alone)
        return []

    def step_passed(self, requests: Iterable[Sample]) -> None:
        """A step of these requests came through: they are cleared. O(1) where nothing had failed."""
        self._rebuilds_in_a_row = 0
        if self._to_run_alone:
            passed = {id(request) for request in requests}
            self._to_run_alone = [request for request in self._to_run_alone if id(request) not in passed]

    def clear(self, request: Sample) -> None:
        """The request has ended, or can't run alone just now."""
        if request in self._to_run_alone:
            self._to_run_alone.remove(request)

    def invariant_broke(
        self, unfinished: Sequence[Sample], error: BaseException
    ) -> list[tuple[Sample, Failure]]:
        """Record that the cache was rebuilt for these requests; return the failing ones.

        The first time in a row, none: the contents of the cache may have been broken. Then the
        requests are bisected, and one that breaks it while it runs alone fails.
        """
        if isinstance(error, ENDS_ENGINE):
            return []
        self._rebuilds_in_a_row += 1
        if self._rebuilds_in_a_row == 1:
            self._to_run_alone = []
            return []
        alone = self.next_alone
        self._to_run_alone = [request for request in unfinished if request is not alone]
        if alone is None or alone.is_finished:
            return []
        return [(alone, Failure(f"the engine failed on this request: {error}", "internal_error"))]
