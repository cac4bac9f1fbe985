# SPDX-License-Identifier: Apache-2.0
"""Chunked attention (Llama 4): a token sees its own chunk of the positions, from the chunk's start on.

With chunks of whole blocks, a request is several requests to the kernels, one per chunk that has queries:
each has its rows of the batch and its part of the block table. Nothing else changes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import numpy as np
import torch

from radixkv_kernels.interface import Ahead, AttentionBackend, AttentionPlan, BlockTables
from radixkv_kernels.kv_cache import PagedKV


def cut_into_chunks(
    query_starts: np.ndarray,
    context_lengths: np.ndarray,
    tables: Sequence[np.ndarray],
    chunk: int,
    block: int,
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """The arguments of `AttentionBackend.plan`, with a request for each chunk that has queries.

    Args:
        tables: of each request, the blocks that its context needs at least.
        chunk, block: tokens of either; a chunk is a multiple of a block.
    """
    starts, lengths, parts = [0], [], []
    for r, end in enumerate(context_lengths.tolist()):
        count = int(query_starts[r + 1] - query_starts[r])
        first = end - count
        while first < end:
            base = first // chunk * chunk
            stop = min(base + chunk, end)
            starts.append(starts[-1] + stop - first)
            lengths.append(stop - base)
            parts.append(tables[r][base // block : -(-stop // block)])
            first = stop
    return np.asarray(starts, np.int32), np.asarray(lengths, np.int32), parts


class ChunkedBackend(AttentionBackend):
    """A backend whose layers attend within chunks of `chunk` positions.

    Args:
        inner: attends; its limit of requests must allow for the chunks of a step.

    Raises:
        ValueError: a chunk is not a multiple of a block.
    """

    def __init__(self, inner: AttentionBackend, chunk: int) -> None:
        super().__init__(inner.config)
        if chunk % inner.config.spec.block_size:
            raise ValueError(
                f"chunks of {chunk} tokens are no multiple of the block size, "
                f"{inner.config.spec.block_size}: choose a block size that divides them"
            )
        self._inner, self._chunk = inner, chunk

    def plan(
        self,
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        block_tables: BlockTables,
        ahead: Ahead | None = None,
    ) -> AttentionPlan:
        assert ahead is None, "no family has both chunks and tokens that see each other"
        size = self.config.spec.block_size
        tables = [np.asarray(table, np.int32) for table in block_tables]
        lengths = np.asarray(context_lengths)
        return self._inner.plan(
            *cut_into_chunks(np.asarray(query_starts), lengths, tables, self._chunk, size)
        )

    def write(
        self,
        kv: PagedKV,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        self._inner.write(kv, layer, key, value, slots, rows)

    def rotate_and_write(self, *args: Any, **options: Any) -> torch.Tensor:
        return self._inner.rotate_and_write(*args, **options)

    def attend(self, *args: Any, **options: Any) -> torch.Tensor:
        return self._inner.attend(*args, **options)

    def pad(
        self, plan: AttentionPlan, windows: Collection[int | None], rows: int, *, every_kernel: bool
    ) -> None:
        self._inner.pad(plan, windows, rows, every_kernel=every_kernel)

    def stage(self, plan: AttentionPlan, windows: Collection[int | None]) -> None:
        self._inner.stage(plan, windows)

    def launch_key(self, plan: AttentionPlan, windows: Collection[int | None]) -> Hashable:
        return self._inner.launch_key(plan, windows)

    def copy_blocks(self, kv: PagedKV, copies: Sequence[tuple[int, int, int]]) -> None:
        self._inner.copy_blocks(kv, copies)
