# SPDX-License-Identifier: Apache-2.0
"""Steps run before the first request, so that no request waits for compiling, recording and first touches.

On a GPU a kernel is compiled at its first launch: for chunks and for decodes, for split contexts, for rows
that go to several slots, for copies of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from radixkv.scheduling.batch import Batch


def idle_batch(lengths: list[int], contexts: list[int], num_blocks: int, block_size: int) -> Batch:
    """Return a batch that computes the last `lengths` tokens of as many requests, and writes nothing.

    Args:
        contexts: tokens of each request, at least its length. Their blocks are any.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = np.arange(starts[-1], dtype=np.int64)
    first = np.array(contexts, dtype=np.int64) - lengths
    tables = [np.arange(r, r + -(-context // block_size)) % num_blocks for r, context in enumerate(contexts)]
    return Batch(
        entries=[],
        token_ids=np.zeros(len(rows), dtype=np.int64),
        positions=rows + np.repeat(first - starts[:-1], lengths),
        query_starts=starts,
        context_lengths=np.array(contexts, dtype=np.int32),
        block_tables=[table.astype(np.int32) for table in tables],
        write_slots=np.full(len(rows), -1, dtype=np.int64),
        write_rows=None,
        logit_rows=rows,
        copy_groups=[],
    )


def first_steps(
    max_num_tokens: int, max_num_seqs: int, max_model_len: int, num_blocks: int, block_size: int
) -> Iterator[Batch]:
    """Yield batches that launch every kernel of an engine with these limits, and write to two blocks."""

    def step(lengths: list[int], contexts: list[int]) -> Batch:
        batch = idle_batch(lengths, contexts, num_blocks, block_size)
        batch.logit_rows = batch.query_starts[1:].astype(np.int64) - 1
        return batch

    chunk = step([max_num_tokens], [max_num_tokens])
    count = min(2 * block_size, num_blocks * block_size, max_num_tokens)
    chunk.write_slots[:count] = np.arange(count)
    yield chunk
    # The longest context: split, and merged from its parts.
    yield step([1], [max_model_len])
    requests = min(max_num_seqs, max_num_tokens)
    yield step([1] * requests, [min(max_model_len, 1024)] * requests)
    if max_num_tokens > 1:  # a chunk with decodes; a row that goes to two slots, after a copy
        mixed = step([1, max_num_tokens - 1], [max_model_len, max_num_tokens - 1])
        mixed.write_slots = np.arange(min(2, block_size), dtype=np.int64)
        mixed.write_rows = np.zeros_like(mixed.write_slots)
        mixed.copy_groups = [[(0, 1, block_size)]] if num_blocks > 1 else []
        yield mixed
