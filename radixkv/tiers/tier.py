# SPDX-License-Identifier: Apache-2.0
"""Tier: a memory below the pool that keeps the K/V of whole blocks, such as a disk, and its contract.

`OpenTier` is one that an engine opens and closes, `TierStack` several of them in order.

    lookup   HIT       it has the K/V of the first n blocks                       -> load them
             PENDING   it is fetching them already                                -> load joins that
             RETRY     it does not know yet                                       -> ask again soon
             MISS      it lacks even the first one                                -> compute
    load     returns a future of the kept blocks, in order; if some are missing or it fails, compute the rest
    wants    returns the blocks of a cached text that it would keep
    save     keeps blocks that have been copied out

All calls are made by the engine's thread and must return at once; the work is done elsewhere. Futures may be
completed on any thread, in any order, late or never: the engine waits for none beyond its deadline. The
engine compares a tier's blocks with the requested tokens; the tier alone ensures the integrity of their
payload. A tier may serve several engines, one after the other or together.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from radixkv.cache.block_run import BlockRun
from radixkv.tiers.selection import Selection

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: What holds bytes.
Bytes: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[np.uint8]"


class TierState(Enum):
    """Availability of blocks in a tier."""

    HIT = "it has them"
    PENDING = "it is fetching them"
    RETRY = "it does not know yet"
    MISS = "it does not have them"


class TierBlocks(NamedTuple):
    """Blocks from a tier.

    Attributes:
        run: their tokens and namespace, as saved, or a part of that run.
        data: uint8 bytes of each block, as returned by `Runner.save`.
    """

    run: BlockRun
    data: Sequence[Bytes]


class BlocksBeforeDamage(TierBlocks):
    """Blocks from a tier, perhaps none, before a damaged one."""


class Tier(ABC):
    """Base class of a memory below the pool: four methods to implement, and others with defaults.

    Attributes:
        name: label in metrics and messages.
        selection: chooses which blocks of an ended request are offered to it; None: all.
        failures: call -> number of failures that raised nothing.
        keeps_states: it takes runs of states (`BlockRun.is_state`), too, and implements `last`.
    """

    name: str = "tier"
    selection: Selection | None = None
    failures: Mapping[str, int] = MappingProxyType({})
    keeps_states: bool = False

    @property
    def is_up(self) -> bool:
        """True if it can be reached."""
        return True

    @property
    def answer_s(self) -> float:
        """Seconds from a RETRY to its answer."""
        return 0.0

    @property
    def dropped_blocks(self) -> int:
        """Number of missing blocks left out of `wants` for lack of room."""
        return 0

    def touch(self, run: BlockRun) -> None:  # noqa: B027 - a tier without an order of use ignores it
        """Record that blocks were used, wherever they came from, so that they are evicted last."""

    @abstractmethod
    def lookup(self, run: BlockRun) -> tuple[TierState, int]:
        """Return the number of leading blocks of a run that it has or will have; 0 for RETRY and MISS."""

    def last(self, run: BlockRun) -> int | None:
        """Return the index of the last state of a run that it has, even with gaps before it; -1: none.

        None: it does not know yet, as with RETRY of a lookup.
        """
        return -1

    @abstractmethod
    def load(self, run: BlockRun) -> Future[Sequence[TierBlocks]]:
        """Fetch blocks that a lookup has just found. The caller cancels the future to abandon them.

        Returns:
            The future of the blocks in their order, in as many pieces as is convenient.
        """

    @abstractmethod
    def wants(self, run: BlockRun) -> range:
        """Return the blocks of a cached run to keep: blocks it lacks, as many as it has time for.

        A range of indices in the run, with step 1.
        """

    @abstractmethod
    def save(self, run: BlockRun, data: npt.NDArray[np.uint8]) -> None:
        """Keep these blocks.

        Args:
            data: uint8 [len(run), bytes of a block], the tier's from now on; see `Runner.save`.
        """


class OpenTier(Tier):
    """Tier that belongs to an engine, and closes with it."""

    @abstractmethod
    def flush(self, timeout: float) -> None:
        """Return when all saved blocks are kept, or after `timeout` seconds."""

    @abstractmethod
    def close(self) -> None:
        """Finish the saves, and release files, threads and connections. May be called again."""


class TierStack:
    """Tiers in order; a block comes from the first one that loads it sooner than it is computed.

    The texts of ended requests are offered to all: blocks from a slow tier are saved in the quick ones,
    too, if they want them. There is no other promotion.
    """

    def __init__(self, tiers: Sequence[OpenTier]) -> None:
        self.tiers = tuple(tiers)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.tiers))

    def flush(self, timeout: float) -> None:
        """See `OpenTier`; the time is shared by all tiers."""
        end = time.monotonic() + timeout
        for tier in self.tiers:
            tier.flush(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Close all tiers."""
        for tier in self.tiers:
            tier.close()
