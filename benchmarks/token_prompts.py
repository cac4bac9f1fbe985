# SPDX-License-Identifier: Apache-2.0
"""A trace as prompts for an engine: tokens that are equal where its blocks are, and smaller where need be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from radixkv.cli.replay.trace import Trace


def scaled(
    trace: Trace, block_size: int, max_tokens: int | None = None, max_answer: int | None = None
) -> Trace:
    """A trace with blocks of another size, for a smaller model.

    Prompts and answers become shorter in proportion (of a token at least); which blocks are equal stays.

    Args:
        max_tokens: prompts are cut where prompt and answer would be longer.
        max_answer: longer answers are cut.
    """
    inputs = np.maximum(trace.input_lengths * block_size // trace.block_size, 1)
    outputs = np.maximum(trace.output_lengths * block_size // trace.block_size, 1)
    if max_answer is not None:
        outputs = np.minimum(outputs, max_answer)
    if max_tokens is not None:
        inputs = np.clip(inputs, 1, max_tokens - outputs)
    counts = np.diff(trace.offsets)
    kept = np.minimum(counts, -(-inputs // block_size))
    index_in_path = np.arange(trace.num_blocks) - np.repeat(trace.offsets[:-1], counts)
    offsets = np.zeros_like(trace.offsets)
    np.cumsum(kept, out=offsets[1:])
    return replace(
        trace,
        block_size=block_size,
        offsets=offsets,
        block_ids=trace.block_ids[index_in_path < np.repeat(kept, counts)],
        input_lengths=inputs,
        output_lengths=outputs,
    )


def token_prompts(trace: Trace, vocabulary: range) -> list[npt.NDArray[np.int32]]:
    """The prompts of a trace: random tokens, equal where its blocks are. O(tokens)."""
    rng = np.random.default_rng(0)
    low, high = vocabulary.start, vocabulary.stop
    blocks = rng.integers(low, high, (trace.num_unique, trace.block_size), dtype=np.int32)
    out = []
    for request, length in enumerate(trace.input_lengths.tolist()):
        known = blocks[trace.path(request)].reshape(-1)[:length]
        out.append(np.concatenate([known, rng.integers(low, high, length - len(known), dtype=np.int32)]))
    return out
