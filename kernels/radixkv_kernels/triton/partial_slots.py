# SPDX-License-Identifier: Apache-2.0
"""Slots of the partial results of a step's items, and the partials that each token's result is folded from.

    item with base b and n tokens, partial j of its token i:     slot b + j * n + i

By segments (deterministic mode) an item has one partial for each of its segments; otherwise one in all. So
memory grows with the items, as many as keep the machine busy, not with the length of contexts.
To the same end, items of one group of requests over neighbouring segments are joined into longer ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixkv_kernels.work_plan import (
    IS_FINAL,
    SEGMENT_END,
    SEGMENT_START,
    TOKEN_COUNT,
    TOKEN_START,
    WorkPlan,
    WorkSettings,
    expand,
    longest_first,
)

#: Column of an item: its first slot.
SLOT_BASE = 6


@dataclass(frozen=True)
class PlacedWork:
    """A work plan with its slots.

    Attributes:
        short_items, long_items: int32 [n, 8], most work first.
        tokens: as in `WorkPlan`.
        merge_tokens: int32 [m], the tokens whose result is folded from partials.
        merge_starts: int32 [m + 1]; token i folds `slots[merge_starts[i] : merge_starts[i + 1]]`, in order.
        slots: int32, each slot once.
        num_groups: as in `WorkPlan`.
    """

    short_items: np.ndarray
    long_items: np.ndarray
    tokens: np.ndarray
    merge_tokens: np.ndarray
    merge_starts: np.ndarray
    slots: np.ndarray
    num_groups: int


def place_partials(
    work: WorkPlan, settings: WorkSettings, num_tokens: int, *, by_segment: bool
) -> PlacedWork:
    """Give every partial item its slots. O(slots log slots) numpy work."""
    short, long = work.short_items, work.long_items
    if not by_segment:
        long = _join_group_items(long, short, work.tokens, settings, num_tokens)
    items = np.concatenate([short, long])
    partials = (items[:, SEGMENT_END] - items[:, SEGMENT_START]) if by_segment else np.ones_like(items[:, 0])
    sizes = np.where(items[:, IS_FINAL] != 0, 0, partials * items[:, TOKEN_COUNT]).astype(np.int64)
    items[:, SLOT_BASE] = sizes.cumsum() - sizes
    item, place = expand(sizes)
    partial, index = np.divmod(place, np.maximum(items[item, TOKEN_COUNT], 1))
    token = work.tokens[items[item, TOKEN_START] + index]
    # Slots are numbered in the order of items, so that the order of the pairs is a list of slots.
    slots = np.lexsort((items[item, SEGMENT_START] + partial, token))
    merge_tokens, counts = np.unique(token, return_counts=True)
    return PlacedWork(
        items[: len(short)],
        items[len(short) :],
        work.tokens,
        merge_tokens.astype(np.int32),
        np.concatenate([[0], counts.cumsum()]).astype(np.int32),
        slots.astype(np.int32),
        work.num_groups,
    )


def _join_group_items(
    long: np.ndarray, short: np.ndarray, tokens: np.ndarray, settings: WorkSettings, num_tokens: int
) -> np.ndarray:
    """The long items, joined with items of the same tokens over neighbouring segments as far as the machine
    stays busy."""
    # Their lists of tokens come after the tokens themselves.
    is_group = long[:, TOKEN_START] >= num_tokens
    groups = long[is_group]
    if len(groups) < 2:
        return long
    total = sum(int((own[:, SEGMENT_END] - own[:, SEGMENT_START]).sum()) for own in (long, short))
    longest = max(1, -(-total * settings.num_kv_heads // settings.parallel))
    place = np.arange(groups[:, TOKEN_COUNT].max())
    members = tokens.take(groups[:, TOKEN_START][:, None] + place, mode="clip")
    members[place >= groups[:, TOKEN_COUNT][:, None]] = -1
    order = np.lexsort((groups[:, SEGMENT_START], members[:, 0]))
    groups, members = groups[order], members[order]
    begins = np.ones(len(groups), dtype=bool)
    begins[1:] = (groups[1:, SEGMENT_START] != groups[:-1, SEGMENT_END]) | (members[1:] != members[:-1]).any(
        axis=1
    )
    first = begins.nonzero()[0]
    run = begins.cumsum() - 1
    begins |= (np.arange(len(groups)) - first[run]) % longest == 0
    first = begins.nonzero()[0]
    last = np.append(first[1:], len(groups)) - 1
    # Requests that share a segment share all before it: the table of the last one holds them all.
    joined = groups[last]
    joined[:, SEGMENT_START] = groups[first, SEGMENT_START]
    joined[:, [TOKEN_START, TOKEN_COUNT]] = groups[first][:, [TOKEN_START, TOKEN_COUNT]]
    return longest_first(np.concatenate([long[~is_group], joined]))
