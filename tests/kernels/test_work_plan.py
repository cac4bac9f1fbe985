# SPDX-License-Identifier: Apache-2.0
"""A step's work list: every visible (token, segment) is attended once, and all sharing is found."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

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

SEGMENT, BLOCK = 32, 16

Requests = list[tuple[int, int, int, int]]
requests = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 1, 1, 2, 5, 17]),  # query tokens
        st.integers(0, 260),  # cached tokens
        st.integers(0, 7),  # the earlier request it shares blocks with
        st.integers(0, 14),  # how many
    ),
    min_size=1,
    max_size=8,
)


def tables_of(chosen: Requests) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Query starts, contexts, tables; a block has one place and one prefix, as in a radix tree."""
    tables: list[np.ndarray] = []
    fresh = 0
    for r, (count, cached, source, common) in enumerate(chosen):
        need = -(-(count + cached) // BLOCK)
        shared = tables[source % r][: min(common, need)] if r else np.zeros(0, np.int32)
        own = np.arange(fresh, fresh + need - len(shared), dtype=np.int32)
        fresh += len(own)
        tables.append(np.concatenate([shared, own]).astype(np.int32))
    counts = np.array([c for c, *_ in chosen])
    contexts = np.array([count + cached for count, cached, *_ in chosen])
    return np.concatenate([[0], counts.cumsum()]), contexts, tables


@settings(max_examples=150, deadline=None)
@given(
    chosen=requests,
    window=st.sampled_from([None, 1, 40, 100]),
    parallel=st.sampled_from([1, 8, 500]),
    ahead=st.sampled_from([0, 9]),
)
def test_everything_visible_is_attended_once(
    chosen: Requests, window: int | None, parallel: int, ahead: int
) -> None:
    starts, contexts, tables = tables_of(chosen)
    widths = np.array([len(t) for t in tables])
    flat, table_starts = np.concatenate([*tables, np.zeros(1, np.int32)]), widths.cumsum() - widths
    work_settings = WorkSettings(
        segment=SEGMENT,
        block_size=BLOCK,
        num_kv_heads=2,
        short_tile=4,
        long_tile=6,
        group_tile=3,
        parallel=parallel,
    )
    owner = np.arange(len(tables)).repeat(np.diff(starts))
    position = np.concatenate([np.arange(c - n, c) for (n, *_), c in zip(chosen, contexts, strict=True)])
    last_seen = np.minimum(position + ahead, contexts[owner] - 1)
    work = build_work(work_settings, starts, contexts, flat, table_starts, window, last_seen)
    seen: Counter[tuple[int, int]] = Counter()
    final: set[int] = set()
    for item in np.concatenate([work.short_items, work.long_items]):
        for token in work.tokens[item[TOKEN_START] : item[TOKEN_START] + item[TOKEN_COUNT]].tolist():
            if item[IS_FINAL]:
                final.add(token)
            for k in range(item[SEGMENT_START], item[SEGMENT_END]):
                seen[token, k] += 1
                last = min((k + 1) * SEGMENT, int(last_seen[token]) + 1) - 1
                if last >= k * SEGMENT:
                    held = flat[item[TABLE_START] + last // BLOCK]
                    assert held == tables[owner[token]][last // BLOCK], "another request's block"
    assert max(seen.values(), default=1) == 1
    merged = set(work.merge_tokens.tolist())
    slots = set()
    for token in range(int(starts[-1])):
        at = int(position[token])
        low = 0 if window is None else max(0, at - window + 1) // SEGMENT
        for k in range(low, int(last_seen[token]) // SEGMENT + 1):
            assert seen[token, k] == 1, f"token {token}, segment {k}"
            if token in merged:
                slots.add(int(work.partial_base[token]) + k)
        assert (token in final) != (token in merged)
    assert len(slots) <= work.num_partials
    assert all(0 <= slot < work.num_partials for slot in slots)
    assert work.num_groups == count_groups(chosen, contexts, tables, window)


def count_groups(chosen: Requests, contexts: np.ndarray, tables: list[np.ndarray], window: int | None) -> int:
    """Worthwhile groups, the slow way: more requests than tiles of 3 tokens."""
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for (count, cached, *_), context, table in zip(chosen, contexts.tolist(), tables, strict=True):
        if not 0 < count <= 4:
            continue
        low = 0 if window is None else max(0, cached - window + 1) // SEGMENT
        for k in range(low, context // SEGMENT):
            members[k, int(table[(k + 1) * SEGMENT // BLOCK - 1])].append(count)
    return sum(1 for tokens in members.values() if len(tokens) > -(-sum(tokens) // 3))
