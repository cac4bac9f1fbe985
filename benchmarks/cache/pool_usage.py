# SPDX-License-Identifier: Apache-2.0
"""PoolUsage: how much of the memory that running sequences hold has tokens in it, at one moment of a pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Use of a paged pool at one moment.

    Attributes:
        sequences: how many hold blocks.
        used_slots: slots with tokens.
        allocated_slots: slots in the blocks held.
    """

    sequences: int
    used_slots: int
    allocated_slots: int

    @property
    def waste(self) -> float:
        """Share of the allocated slots without a token; 0 for an empty pool."""
        return 1.0 - self.used_slots / self.allocated_slots if self.allocated_slots else 0.0


def measure_pool(
    leases: Iterable[tuple[int, npt.NDArray[np.int32]]], block_size: int, held_blocks: int
) -> PoolUsage:
    """Waste of a pool whose blocks are shared: every block counts once. O(blocks held).

    Args:
        leases: (tokens, block table) of each running sequence.
        block_size: slots per block.
        held_blocks: blocks that can't be had because they are held, as the pool counts them
            (`PrefixCache.stats.held_blocks`); more than the sequences' tables name is waste.

    Raises:
        ValueError: a table that does not fit its number of tokens, or names more blocks than are held.
    """
    count = 0
    full: list[npt.NDArray[np.int32]] = []
    partial: dict[int, int] = {}
    for tokens, table in leases:
        if len(table) != -(-tokens // block_size):
            raise ValueError(f"{tokens} tokens do not lie in {len(table)} blocks of {block_size}")
        count += 1
        full.append(table[: tokens // block_size])
        if tokens % block_size:
            block = int(table[-1])  # samples of one request may share their last block
            partial[block] = max(tokens % block_size, partial.get(block, 0))
    blocks = set(np.unique(np.concatenate(full)).tolist()) if full else set()
    # a prompt may end inside a block that another sequence fills
    used = len(blocks) * block_size + sum(fill for block, fill in partial.items() if block not in blocks)
    distinct = len(blocks | partial.keys())
    if distinct > held_blocks:
        raise ValueError(f"{distinct} blocks are in use, but only {held_blocks} are held")
    return PoolUsage(count, used, held_blocks * block_size)
