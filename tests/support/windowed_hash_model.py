# SPDX-License-Identifier: Apache-2.0
"""A model that frees its windows for engine tests: a paged hash model with a second memory for window blocks.

Each row writes a hash of all tokens up to it to its slot there. Every position that an entry sees through its
window is read back by the entry's table and compared at once: a block that was freed too early, shared
wrongly or never written is noted in `violations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from paged_language_model import PagedHashModel, prefix_hashes

from radixkv.cache.states.window_pool import WindowSpec
from radixkv.model.block_copy import BlockCopy
from radixkv.scheduling.batch import Batch


class BlocksOfHashes:
    """Blocks that hold a hash for each position; see `radixkv.engine.runner.WindowBlocks`."""

    def __init__(self, spec: WindowSpec, blocks: np.ndarray[Any, Any]) -> None:
        self.spec, self._blocks = spec, blocks

    def save(self, blocks: Sequence[int]) -> BlockCopy:
        return BlockCopy(self._blocks[list(blocks)].view(np.uint8))

    def load(self, blocks: Sequence[int], data: Sequence[Any]) -> None:
        if [len(row) for row in data] != [self.spec.block_bytes] * len(blocks):
            raise ValueError("the K/V of other windows")
        for block, row in zip(blocks, data, strict=True):
            self._blocks[block] = np.frombuffer(row, np.uint64)


class WindowedHashModel(PagedHashModel):
    """See above.

    Args:
        spec: of the windows.
        options: see `PagedHashModel`.
    """

    def __init__(self, num_blocks: int, block_size: int, spec: WindowSpec, **options: Any) -> None:
        super().__init__(num_blocks, block_size, **options)
        self.spec = spec
        self.seen = np.zeros(spec.num_blocks * block_size, np.uint64)
        self.windows = BlocksOfHashes(spec, self.seen.reshape(-1, block_size))

    def execute(self, batch: Batch) -> torch.Tensor:
        assert batch.windows is not None
        if batch.fed_tokens is not None:
            batch.token_ids[:] = batch.fed_tokens.numpy()
        slots = batch.windows.write_slots
        assert len(np.unique(slots)) == len(slots) == batch.num_tokens, "a slot of a window is written twice"
        hashes = [prefix_hashes(self._expected(batch, r)) for r in range(len(batch.entries))]
        own = [each[e.start :] for each, e in zip(hashes, batch.entries, strict=True)]
        self.seen[slots] = np.concatenate(own)
        for r, expected in enumerate(hashes):
            self._look(batch, r, expected)
        try:
            return super().execute(batch)
        except BaseException:
            self.seen[slots] = 1
            raise

    def _look(self, batch: Batch, r: int, expected: np.ndarray[Any, Any]) -> None:
        assert batch.windows is not None
        entry, table = batch.entries[r], batch.windows.block_tables[r]
        at = np.arange(max(0, entry.start - self.spec.tokens + 1), entry.start + entry.count)
        slots = table[at // self.block_size].astype(np.int64) * self.block_size + at % self.block_size
        differ = at[self.seen[slots] != expected[at]]
        if len(differ):
            text = f"{entry!r} sees other tokens through its window at {differ[:8].tolist()}"
            self.violations.append(text)
            raise AssertionError(text)
