"""A load of blocks, what a request remembers that may wait for one, and what of the loaded is believed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from radixkv.cache.block_run import BlockRun
from radixkv.cache.prefix_cache import Lease
from radixkv.tiers.tier import Bytes, TierBlocks


class TierLoad:
    """Blocks that are being loaded. To a request that waits for them it is who computes their tokens.

    Attributes:
        run: the blocks.
        lease: on all of the text up to their end; None: the load has ended.
        num_scheduled: where the blocks begin: tokens up to there are cached.
        deadline: when it is given up, if nothing has arrived; a reading of the engine's clock.
        has_failed: it has ended, and some of the blocks are not there.
    """

    __slots__ = (
        "deadline",
        "future",
        "has_failed",
        "lease",
        "num_scheduled",
        "num_written",
        "number",
        "rows",
        "run",
    )

    def __init__(
        self, number: int, run: BlockRun, lease: Lease, future: Future[Sequence[TierBlocks]], deadline: float
    ) -> None:
        self.number = number
        self.run = run
        self.lease: Lease | None = lease
        self.future = future
        self.deadline = deadline
        self.num_scheduled = run.start
        self.rows: list[Bytes] | None = None  # what has arrived, and was found to be of the same tokens
        self.num_written = 0
        self.has_failed = False

    def __repr__(self) -> str:
        state = "ended" if self.lease is None else "under way" if self.rows is None else "arrived"
        return f"TierLoad({self.run!r}, {state})"


class TierWait:
    """What one request has asked of the tier since it last ran.

    Attributes:
        deadline: until when it may wait; a reading of the clock.
        ask_at: when the tier is asked again.
        load: what it has waited for last.
        is_over: the tier is not asked again.
    """

    __slots__ = ("ask_at", "deadline", "is_over", "load")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.ask_at = -float("inf")
        self.load: TierLoad | None = None
        self.is_over = False


def rows_of(run: BlockRun, pieces: Sequence[TierBlocks]) -> list[Bytes]:
    """The data of a run's leading blocks, as far as what was kept is of the same text, without a gap.

    O(tokens) for each piece.
    """
    rows: list[Bytes] = []
    position, size = run.start, run.block_size
    for kept, data in pieces:
        is_next = kept.start == position and kept.end == position + len(data) * size
        if not is_next or not run.is_same_text(kept, kept.end):
            break
        rows.extend(data)
        position = kept.end
    return rows
