# SPDX-License-Identifier: Apache-2.0
"""Tier: a memory below the pool that keeps the K/V of whole blocks, such as a disk, and what it promises.

    lookup   HIT       it has the K/V of the first n blocks                       -> load them
             PENDING   it is fetching them already                                -> load joins that
             RETRY     it does not know yet                                       -> ask again soon
             MISS      it has not even the first one                              -> compute
    load     a future of what it kept, in the order of the blocks; fewer, or a failure: compute the rest
    wants    which blocks of a text that is cached it would keep
    save     keeps blocks that have been copied out

All calls are made by the engine's thread and must return at once; the work is done elsewhere. Futures may be
completed on any thread, in any order, late or never: nobody waits for one longer than the engine's deadline.
What a tier gives is compared with the tokens that were asked for; their payload's integrity is its own
affair. It may serve several engines, one after the other or together.
"""

from __future__ import annotations

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
    """What a tier says of blocks."""

    HIT = "it has them"
    PENDING = "it is fetching them"
    RETRY = "it does not know yet"
    MISS = "it does not have them"


class TierBlocks(NamedTuple):
    """Blocks as a tier kept them.

    Attributes:
        run: what they are, as it was saved, or a part of that.
        data: of each block what `Runner.save` gave, uint8.
    """

    run: BlockRun
    data: Sequence[Bytes]


class BlocksBeforeDamage(TierBlocks):
    """The same, perhaps none, where what was kept of the next block was found to be damaged."""


class Tier(ABC):
    """A memory below the pool: four methods to write, and others with defaults.

    Attributes:
        name: label of its metrics and messages.
        selection: chooses the blocks of an ended request to offer it; None: all.
        failures: call -> number of its failures that did not raise here.
    """

    name: str = "tier"
    selection: Selection | None = None
    failures: Mapping[str, int] = MappingProxyType({})

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
        """Number of missing blocks that it had no room for, and therefore did not ask for in `wants`."""
        return 0

    def touch(self, run: BlockRun) -> None:  # noqa: B027 - a tier without an order of use ignores it
        """Record that blocks were used, wherever they came from, so that they are evicted last."""

    @abstractmethod
    def lookup(self, run: BlockRun) -> tuple[TierState, int]:
        """How many leading blocks of a run it has, or will have; 0 for RETRY and MISS."""

    @abstractmethod
    def load(self, run: BlockRun) -> Future[Sequence[TierBlocks]]:
        """Fetch blocks that a lookup has just found. The future is cancelled by who gives them up.

        Returns:
            The future of the blocks in their order, in as many pieces as is convenient.
        """

    @abstractmethod
    def wants(self, run: BlockRun) -> range:
        """Which blocks of a run that is cached it would keep: those it lacks, as many as it has time for.

        By their place in the run, without gaps (step 1).
        """

    @abstractmethod
    def save(self, run: BlockRun, data: npt.NDArray[np.uint8]) -> None:
        """Keep these blocks.

        Args:
            data: uint8 [len(run), bytes of a block], the tier's from now on; see `Runner.save`.
        """
