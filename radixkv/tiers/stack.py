"""TierStack: several tiers as one, the quickest first."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from radixkv.cache.block_run import BlockRun
from radixkv.tiers.tier import Tier, TierBlocks, TierState

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class OpenTier(Tier, Protocol):
    """A tier that belongs to one engine, and ends with it."""

    def flush(self, timeout: float) -> None:
        """Return when what was saved is kept, or so many seconds have passed."""
        ...

    def close(self) -> None:
        """Finish what was saved, and let go of files, threads and connections. May be called again."""
        ...


class TierStack:
    """Each block is asked of the tier that has the longest run from there on; of equals, of the first.

    What ends is offered to all: what came back from a slow tier is saved in the quick ones, too, where they
    want it. That is all there is of promotion.
    """

    def __init__(self, tiers: Sequence[OpenTier]) -> None:
        self.tiers = tuple(tiers)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.tiers))

    def lookup(self, run: BlockRun) -> tuple[TierState, int]:
        """See `radixkv.tiers.tier.Tier`. PENDING: some of them are being fetched."""
        state, count = TierState.HIT, 0
        for answer, _, part in self._parts(run):
            if answer is TierState.RETRY and not count:
                return answer, 0
            if answer is TierState.PENDING:
                state = answer
            count += len(part)
        return (state, count) if count else (TierState.MISS, 0)

    def load(self, run: BlockRun) -> Future[Sequence[TierBlocks]]:
        """See `radixkv.tiers.tier.Tier`."""
        return _joined([tier.load(part) for _, tier, part in self._parts(run) if len(part)])

    def wants(self, run: BlockRun) -> range:
        """See `radixkv.tiers.tier.Tier`: all that any of them wants."""
        wanted = [blocks for tier in self.tiers if (blocks := tier.wants(run))]
        return range(min(b.start for b in wanted), max(b.stop for b in wanted)) if wanted else range(0)

    def save(self, run: BlockRun, data: npt.NDArray[np.uint8]) -> None:
        """See `radixkv.tiers.tier.Tier`: each tier takes what it lacks."""
        for tier in self.tiers:
            tier.save(run, data)

    def flush(self, timeout: float) -> None:
        """See `OpenTier`; the time is for all of them together."""
        end = time.monotonic() + timeout
        for tier in self.tiers:
            tier.flush(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """See `OpenTier`."""
        for tier in self.tiers:
            tier.close()

    def _parts(self, run: BlockRun) -> Iterator[tuple[TierState, Tier, BlockRun]]:
        """Who has which blocks, in order; last, if somebody does not know yet, RETRY with no blocks."""
        while len(run):
            answers = [(*tier.lookup(run), tier) for tier in self.tiers]
            state, count, tier = max(answers, key=lambda answer: answer[1])
            if not count:
                unsure = [tier for state, _, tier in answers if state is TierState.RETRY]
                if unsure:
                    yield TierState.RETRY, unsure[0], run.part(0, 0)
                return
            yield state, tier, run.part(0, count)
            run = run.part(count, len(run))


def _joined(futures: Sequence[Future[Sequence[TierBlocks]]]) -> Future[Sequence[TierBlocks]]:
    """What several loads give, one after the other, when all have ended; up to the first that fails."""
    if len(futures) == 1:
        return futures[0]
    joined: Future[Sequence[TierBlocks]] = Future()
    lock, num_left = threading.Lock(), len(futures)

    def one_ended(_: Future[Sequence[TierBlocks]]) -> None:
        nonlocal num_left
        with lock:
            num_left -= 1
            if num_left:
                return
        if joined.set_running_or_notify_cancel():
            joined.set_result(list(_leading(futures)))

    def all_ended(_: Future[Sequence[TierBlocks]]) -> None:
        for future in futures:
            future.cancel()

    joined.add_done_callback(all_ended)
    for future in futures:
        future.add_done_callback(one_ended)
    return joined


def _leading(futures: Sequence[Future[Sequence[TierBlocks]]]) -> Iterator[TierBlocks]:
    for future in futures:
        if future.cancelled() or future.exception() is not None:
            return
        yield from future.result()
