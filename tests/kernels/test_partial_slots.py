# SPDX-License-Identifier: Apache-2.0
"""Partials: every (token, segment) is folded once and in order; their memory does not grow with contexts."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from radixkv_kernels import KVSpec, make_backend
from radixkv_kernels.triton.partial_slots import SLOT_BASE, place_partials
from radixkv_kernels.work_plan import (
    IS_FINAL,
    SEGMENT_END,
    SEGMENT_START,
    TABLE_START,
    TOKEN_COUNT,
    TOKEN_START,
    WorkSettings,
    build_work,
)
from tests.kernels.test_work_plan import BLOCK, SEGMENT, Requests, requests, tables_of

SETTINGS = WorkSettings(
    segment=SEGMENT, block_size=BLOCK, num_kv_heads=2, short_tile=4, long_tile=6, group_tile=3, parallel=1
)


@settings(max_examples=150, deadline=None)
@given(requests, st.sampled_from([None, 1, 40, 100]), st.sampled_from([1, 8, 500]), st.booleans())
def test_every_segment_is_folded_once_and_in_order(
    chosen: Requests, window: int | None, parallel: int, by_segment: bool
) -> None:
    starts, contexts, tables = tables_of(chosen)
    widths = np.array([len(t) for t in tables])
    flat, table_starts = np.concatenate([*tables, np.zeros(1, np.int32)]), widths.cumsum() - widths
    how = dataclasses.replace(SETTINGS, parallel=parallel)
    position = np.concatenate([np.arange(c - n, c) for (n, *_), c in zip(chosen, contexts, strict=True)])
    work = build_work(how, starts, contexts, flat, table_starts, window, position)
    expected: Counter[tuple[int, int]] = Counter()
    for item in np.concatenate([work.short_items, work.long_items]):
        for token in work.tokens[item[TOKEN_START] : item[TOKEN_START] + item[TOKEN_COUNT]].tolist():
            expected.update((token, k) for k in range(item[SEGMENT_START], item[SEGMENT_END]))
    placed = place_partials(work, how, int(starts[-1]), by_segment=by_segment)
    owner = np.arange(len(tables)).repeat(np.diff(starts))
    seen: Counter[tuple[int, int]] = Counter()
    held: dict[int, tuple[int, int, int]] = {}  # slot -> token, segments
    for item in np.concatenate([placed.short_items, placed.long_items]).tolist():
        tokens = placed.tokens[item[TOKEN_START] : item[TOKEN_START] + item[TOKEN_COUNT]].tolist()
        runs = [(item[SEGMENT_START], item[SEGMENT_END])]
        if by_segment:
            runs = [(k, k + 1) for k in range(*runs[0])]
        for j, (low, high) in enumerate(runs):
            for i, token in enumerate(tokens):
                seen.update((token, k) for k in range(low, high))
                table = tables[owner[token]]
                for block in range(low * SEGMENT // BLOCK, min(high * SEGMENT // BLOCK, len(table))):
                    assert flat[item[TABLE_START] + block] == table[block]
                if not item[IS_FINAL]:
                    slot = item[SLOT_BASE] + j * len(tokens) + i
                    assert slot not in held
                    held[slot] = (token, low, high)
    assert seen == expected
    assert sorted(held) == sorted(placed.slots.tolist()) == list(range(len(held)))
    for token, first, end in zip(
        placed.merge_tokens.tolist(), placed.merge_starts[:-1], placed.merge_starts[1:], strict=True
    ):
        own = [held.pop(slot) for slot in placed.slots[first:end].tolist()]
        assert all(one[0] == token for one in own)
        assert all(before[2] <= after[1] for before, after in itertools.pairwise(own))
    assert not held


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", ["chunk", "decodes", "shared", "nested"])
def test_memory_for_partials_does_not_grow_with_contexts(case: str, deterministic: bool) -> None:
    """Llama-3-8B's shape at 128k: a chunk of 2,048 tokens, decodes, and 64 of them on one prefix."""
    length, seqs = 131_072, 64
    spec = KVSpec(1, 8, 16, 8, 128, torch.bfloat16, torch.device("cpu"))
    backend = make_backend(
        *("triton",),
        num_query_heads=32,
        spec=spec,
        compute_dtype=torch.bfloat16,
        deterministic=deterministic,
        max_num_tokens=8192,
        max_num_seqs=256,
        max_model_len=length,
    )
    backend.settings = dataclasses.replace(backend.settings, parallel=528)
    blocks = np.arange(length // 16, dtype=np.int32)
    counts, tables = [1] * seqs, [blocks + len(blocks) * r for r in range(seqs)]
    if case == "chunk":
        counts, tables = [2048], [blocks]
    elif case == "shared":
        tables = [np.append(blocks[:-1], np.int32(10**6 + r)) for r in range(seqs)]
    elif case == "nested":
        tables = [
            np.append(blocks[: -1 - 64 * r], blocks[-1 - 64 * r :] + 10**6 * (r + 1)) for r in range(seqs)
        ]
    plan = backend.plan(
        np.array([0, *np.cumsum(counts)], dtype=np.int32),
        np.array([length] * len(counts), dtype=np.int32),
        tables,
    )
    work = plan.work(None)
    slots = len(work.slots)
    assert slots * 32 * (128 + 2) * 4 < 256 * 2**20
    if not deterministic:
        assert slots <= 4200
        assert (work.num_groups > 0) == (case in ("shared", "nested"))
