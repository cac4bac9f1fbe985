"""What the engine does when something breaks: find the guilty request, spare the others, repair the cache.

| what broke                      | what happens                                                            |
|---------------------------------|-------------------------------------------------------------------------|
| a step of the model or sampler  | nothing of it counts: its tokens are withdrawn from the cache, its      |
|                                 | requests run again, each alone; one that fails alone ends with an error |
| scheduler, cache or bookkeeping | the cache is rebuilt empty and every request is queued again with the   |
|                                 | tokens it has; twice in a row, and the requests run one by one          |

A request is never run again for tokens that were delivered: they are part of it by then.

Any `BaseException` is a fault: a panic in a library written in Rust is one that is no `Exception`. Only an
interrupt and an exit (`ENDS_PROCESS`) pass through, after the step was taken back: the engine can go on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from radixkv.engine.request_group import Sample, sample_of
from radixkv.errors import ENDS_PROCESS
from radixkv.scheduling.batch import Batch

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine

logger = logging.getLogger("radixkv")


class FaultRecovery:
    """The suspects of one engine, and its repairs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.suspects: list[Sample] = []
        self.num_rebuilds = 0
        self._rebuilds_in_a_row = 0

    @property
    def next_suspect(self) -> Sample | None:
        """The request to run alone next, if any is under suspicion."""
        return self.suspects[0] if self.suspects else None

    def step_failed(self, batch: Batch, error: BaseException) -> None:
        """Nothing of the step counts; its requests become suspects, or, alone in it, guilty."""
        if isinstance(error, ENDS_PROCESS):
            self._engine.scheduler.withdraw(batch)
            return
        logger.exception("a step of %d requests failed", len(batch.entries), exc_info=error)
        alone = len(batch.entries) == 1
        for request in map(sample_of, self._engine.scheduler.withdraw(batch)):
            if alone and request in self.suspects:
                self._engine.fail(request, f"the model failed on this request: {error}", "step_failed")
            elif request not in self.suspects:
                self.suspects.append(request)

    def step_passed(self, batch: Batch) -> None:
        """The requests of this step are beyond suspicion."""
        self._rebuilds_in_a_row = 0
        if self.suspects:
            passed = {id(entry.request) for entry in batch.entries}
            self.suspects = [request for request in self.suspects if id(request) not in passed]

    def acquit(self, request: Sample) -> None:
        """The request has ended, or can't run alone just now."""
        if request in self.suspects:
            self.suspects.remove(request)

    def rebuild(self, error: BaseException) -> None:
        """A broken invariant: give up the cache's contents, keep every request. O(waiting and running)."""
        engine = self._engine
        logger.error("broken invariant, rebuilding the cache: %s", error, exc_info=error)
        self.num_rebuilds += 1
        self._rebuilds_in_a_row += not isinstance(error, ENDS_PROCESS)
        suspect = self.next_suspect
        unfinished: list[Sample] = []
        for group in engine.groups:
            first = group.samples[0] if group.samples else None
            if first is not None and first.num_forks:
                # It was about to fork: its other samples have no token yet, and will be made again.
                del group.samples[1:]
            unfinished.extend(request for request in group.samples if not request.is_finished)
        unfinished.sort(key=lambda request: request.arrival_order)
        engine.replace_cache(engine.cache.rebuilt())
        for request in unfinished:
            request.lose_lease()
            request.was_added = False
            engine.scheduler.add(request)
        for group in engine.groups:
            if group.is_finished:  # it broke while it ended
                engine.close_group(group)
        if suspect is not None and not suspect.is_finished and self._rebuilds_in_a_row > 1:
            engine.fail(suspect, f"the engine failed on this request: {error}", "internal_error")
        self.suspects = [r for r in unfinished if not r.is_finished] if self._rebuilds_in_a_row > 1 else []
