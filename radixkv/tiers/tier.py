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

from collections.abc import Sequence
from concurrent.futures import Future
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from radixkv.cache.block_run import BlockRun

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


class Tier(Protocol):
    """A memory below the pool.

    It may have, and what is not there is not missed: a `name` that people call it by; `selection`, what it is
    offered of that which ends (else all); `touch(run)`, which is told of blocks that were used, from wherever
    they came, so that they go last; `is_up`, whether it can be reached; `answer_s`, how long it takes from a
    RETRY to its answer; `failures`, how often which call failed without raising here; `dropped_blocks`, how
    many it lacked and had no room for, so that it did not say that it wants them.
    """

    def lookup(self, run: BlockRun) -> tuple[TierState, int]:
        """How many leading blocks of a run it has, or will have; 0 for RETRY and MISS."""

    def load(self, run: BlockRun) -> Future[Sequence[TierBlocks]]:
        """Fetch blocks that a lookup has just found. The future is cancelled by who gives them up.

        Returns:
            The future of the blocks in their order, in as many pieces as is convenient.
        """

    def wants(self, run: BlockRun) -> range:
        """Which blocks of a run that is cached it would keep: those it lacks, as many as it has time for.

        By their place in the run, without gaps (step 1).
        """

    def save(self, run: BlockRun, data: npt.NDArray[np.uint8]) -> None:
        """Keep these blocks.

        Args:
            data: uint8 [len(run), bytes of a block], the tier's from now on; see `Runner.save`.
        """
