"""One step's attention as a list of work items, built on the host in vectorised numpy.

Every query row is an ordered fold over KV *segments* `[k * S, (k + 1) * S)` at absolute positions: each
segment gives a partial result (running maximum, sum, weighted values), and partials fold in order of k by
log-sum-exp. So who computes which segment, and beside which other rows, is scheduling: it never changes a
result.

    item = (query tokens, block table, segments [k, k'), final?)        one per KV head
      final:      the item holds every segment of its rows: it folds them as it goes and writes the output
      partial:    it stores one partial per (token, segment); the merge pass folds them afterwards

Three sources of items::

    long chunks      query tokens in tiles of `long_tile`, all their segments            final
    short requests   (decodes, few tokens) one tile, its own segments                    final, or split
    groups           tokens of short requests whose tables hold the same block at the
                     end of segment k, in tiles of `group_tile`, that one segment        partial

The last rule finds groups for any subset of the batch and at every depth, without walking a tree: a block has
one content, reached by one prefix, so two tables that hold it at the same index agree on everything before
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Columns of an item row.
TOKEN_START, TOKEN_COUNT, TABLE_START, SEGMENT_START, SEGMENT_END, IS_FINAL = range(6)
ITEM_WIDTH = 8


@dataclass(frozen=True)
class WorkSettings:
    """How work is cut; fixed per backend.

    Attributes:
        segment: S, KV positions per segment; a multiple of the block size.
        block_size: tokens per block.
        num_kv_heads: items run once per KV head.
        short_tile: query tokens of a tile of a short request or group; a longer request is a long chunk.
        long_tile: query tokens per tile of a long chunk.
        group_tile: query tokens per tile of a group; its items are listed with the long ones.
        parallel: items (times KV heads) that keep the machine busy; fewer than this, and segments are spread
            over more items.
        share: whether groups are formed.
        min_group: fewest requests of a group.
        load_cost, partial_cost: the cost model, in any one unit. Sharing a segment among m requests with t
            tokens saves `(m - tiles) * load_cost` and costs `t * partial_cost`.
        min_saving: least total saving of a step, same unit, for groups to be formed at all.
        growth: segments that contexts of short requests may grow by while the plan stays valid.
    """

    segment: int
    block_size: int
    num_kv_heads: int
    short_tile: int
    long_tile: int
    group_tile: int
    parallel: int
    share: bool = True
    min_group: int = 2
    load_cost: float = 1.0
    partial_cost: float = 0.0
    min_saving: float = 0.0
    growth: int = 0


@dataclass(frozen=True)
class WorkPlan:
    """Work of one step for one window.

    Attributes:
        short_items, long_items: int32 [n, 8], most work first.
        tokens: int32, the query tokens that items index by `TOKEN_START` and `TOKEN_COUNT`.
        partial_base: int32 [T]; the partial of token t and segment k is slot `partial_base[t] + k`.
        merge_tokens: int32, the tokens whose result is folded from partials.
        num_partials: slots needed.
        num_groups: (group, segment) pairs attended once for several requests.
    """

    short_items: np.ndarray
    long_items: np.ndarray
    tokens: np.ndarray
    partial_base: np.ndarray
    merge_tokens: np.ndarray
    num_partials: int
    num_groups: int


def expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts [2, 0, 3]: owners [0, 0, 2, 2, 2] and places within the owner [0, 1, 0, 1, 2]."""
    owner = np.arange(len(counts)).repeat(counts)
    before = counts.cumsum() - counts
    return owner, np.arange(len(owner)) - before[owner]


def build_work(
    settings: WorkSettings,
    query_starts: np.ndarray,
    context_lengths: np.ndarray,
    tables: np.ndarray,
    table_starts: np.ndarray,
    window: int | None,
) -> WorkPlan:
    """Cut one step into items.

    Args:
        query_starts: int [R + 1]. context_lengths: int [R].
        tables: int32 flat; request r's blocks start at `table_starts[r]`.
        window: visible positions, the query's own included; None: all.

    Cost: O(R + items) numpy work, plus one sort of the (request, segment) pairs that may be shared.
    """
    s = settings
    starts = np.asarray(query_starts, dtype=np.int64)
    contexts = np.asarray(context_lengths, dtype=np.int64)
    counts = starts[1:] - starts[:-1]
    first = contexts - counts
    low = np.zeros_like(first) if window is None else np.maximum(first - (window - 1), 0) // s.segment
    high = (contexts + (s.segment - 1)) // s.segment + s.growth
    num_tokens = int(starts[-1])
    is_long = counts > s.short_tile
    short = ((counts > 0) & ~is_long).nonzero()[0]
    long = is_long.nonzero()[0]

    shared = _find_groups(s, short, counts, contexts, low, tables, table_starts, window)
    tile_owner, tile = expand((counts[long] + (s.long_tile - 1)) // s.long_tile)
    rows = long[tile_owner]
    tile_first = tile * s.long_tile
    tile_count = np.minimum(s.long_tile, counts[rows] - tile_first)
    last = first[rows] + tile_first + tile_count
    tile_high = (last + (s.segment - 1)) // s.segment
    tile_low = np.zeros_like(last)
    if window is not None:
        tile_low = np.maximum(first[rows] + tile_first - (window - 1), 0) // s.segment

    run_request, run_low, run_high = _private_runs(short, low, high, shared, window)
    total = int((tile_high - tile_low).sum() + (run_high - run_low).sum() + len(shared.segment))
    per_item = max(1, -(-total * s.num_kv_heads // s.parallel))

    all_partial = np.zeros(len(counts), dtype=bool)
    all_partial[shared.request] = True
    long_items, long_split = _cut(
        tile_low, tile_high, per_item, starts[rows] + tile_first, tile_count, table_starts[rows], None
    )
    short_items, short_split = _cut(
        run_low,
        run_high,
        per_item,
        starts[run_request],
        counts[run_request],
        table_starts[run_request],
        all_partial[run_request],
    )
    all_partial[run_request[short_split]] = True
    group_items, group_tokens = _group_items(s, shared, starts, counts, num_tokens, table_starts)
    long_items = np.concatenate([long_items, group_items]) if len(group_items) else long_items

    # Slots of partials: every token of a request that was split, or of a split tile of a long chunk.
    reserve = np.zeros(num_tokens, dtype=np.int64)
    token_low = np.zeros(num_tokens, dtype=np.int64)
    if all_partial.any():
        requests = all_partial.nonzero()[0]
        owner, place = expand(counts[requests])
        token = starts[requests][owner] + place
        reserve[token] = (high - low)[requests][owner]
        token_low[token] = low[requests][owner]
    if long_split.any():
        owner, place = expand(tile_count[long_split])
        token = (starts[rows] + tile_first)[long_split][owner] + place
        reserve[token] = (tile_high - tile_low)[long_split][owner]
        token_low[token] = tile_low[long_split][owner]
    ends = reserve.cumsum()
    return WorkPlan(
        short_items=_longest_first(short_items),
        long_items=_longest_first(long_items),
        tokens=np.concatenate([np.arange(num_tokens, dtype=np.int32), group_tokens.astype(np.int32)]),
        partial_base=(ends - reserve - token_low).astype(np.int32),
        merge_tokens=reserve.nonzero()[0].astype(np.int32),
        num_partials=int(ends[-1]) if num_tokens else 0,
        num_groups=shared.num_groups,
    )


@dataclass(frozen=True)
class _Shared:
    """Accepted (request, segment) pairs, ordered by group; `start[g]` is where group g begins."""

    request: np.ndarray
    segment: np.ndarray
    start: np.ndarray
    num_groups: int


_NONE = np.zeros(0, dtype=np.int64)
_NOTHING_SHARED = _Shared(_NONE, _NONE, _NONE, 0)


def _find_groups(
    s: WorkSettings,
    short: np.ndarray,
    counts: np.ndarray,
    contexts: np.ndarray,
    low: np.ndarray,
    tables: np.ndarray,
    table_starts: np.ndarray,
    window: int | None,
) -> _Shared:
    """Groups of short requests that hold the same block at the end of the same whole segment."""
    if not s.share or len(short) < s.min_group:
        return _NOTHING_SHARED
    per_segment = s.segment // s.block_size
    if window is None:
        # Sharing is nested: who shares no first segment shares nothing. One small sort rules most out.
        short = short[contexts[short] >= s.segment]
        blocks = tables[table_starts[short] + (per_segment - 1)]
        order = blocks.argsort()
        same = blocks[order][1:] == blocks[order][:-1]
        keep = np.zeros(len(short), dtype=bool)
        keep[order[1:][same]] = True
        keep[order[:-1][same]] = True
        short = short[keep]
    if len(short) < s.min_group:
        return _NOTHING_SHARED
    owner, place = expand(np.maximum(contexts[short] // s.segment - low[short], 0))
    request = short[owner]
    segment = place + low[request]
    blocks = tables[table_starts[request] + (segment + 1) * per_segment - 1]
    key = (segment << 32) | blocks
    order = key.argsort()
    key = key[order]
    edges = np.ones(len(key) + 1, dtype=bool)
    np.not_equal(key[1:], key[:-1], out=edges[1:-1])
    begins = edges.nonzero()[0]
    begins, sizes = begins[:-1], begins[1:] - begins[:-1]
    request, segment = request[order], segment[order]
    worthwhile = sizes >= s.min_group
    if not worthwhile.any():
        return _NOTHING_SHARED
    tokens = np.add.reduceat(counts[request], begins)
    saving = (sizes - (tokens + s.group_tile - 1) // s.group_tile) * s.load_cost - tokens * s.partial_cost
    worthwhile &= saving > 0
    if not worthwhile.any() or saving[worthwhile].sum() < s.min_saving:
        return _NOTHING_SHARED
    kept = worthwhile.repeat(sizes)
    sizes = sizes[worthwhile]
    return _Shared(request[kept], segment[kept], sizes.cumsum() - sizes, len(sizes))


def _private_runs(
    short: np.ndarray, low: np.ndarray, high: np.ndarray, shared: _Shared, window: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs of segments that short requests attend by themselves: (request, first, end)."""
    if window is None or not shared.num_groups:
        taken = np.bincount(shared.request, minlength=len(low)) if shared.num_groups else np.zeros_like(low)
        begin, end = (low + taken)[short], high[short]
        some = begin < end
        return short[some], begin[some], end[some]
    # Under a window, requests enter a group at different segments: what is left may have holes.
    owner, place = expand((high - low)[short])
    request = short[owner]
    segment = place + low[request]
    width = int(high.max())
    private = ~np.isin(request * width + segment, shared.request * width + shared.segment)
    request, segment = request[private], segment[private]
    breaks = np.flatnonzero((np.diff(request) != 0) | (np.diff(segment) != 1)) + 1
    if not len(request):
        return _NONE, _NONE, _NONE
    begin = np.concatenate([[0], breaks])
    last = np.append(breaks, len(request)) - 1
    return request[begin], segment[begin], segment[last] + 1


def _cut(
    low: np.ndarray,
    high: np.ndarray,
    per_item: int,
    token_start: np.ndarray,
    token_count: np.ndarray,
    table_start: np.ndarray,
    partial: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Tiles with segments [low, high) into items of at most `per_item` segments; and which tiles are
    split."""
    pieces = (high - low + (per_item - 1)) // per_item
    split = pieces > 1
    owner, place = expand(pieces)
    items = np.zeros((len(owner), ITEM_WIDTH), dtype=np.int32)
    items[:, TOKEN_START] = token_start[owner]
    items[:, TOKEN_COUNT] = token_count[owner]
    items[:, TABLE_START] = table_start[owner]
    items[:, SEGMENT_START] = low[owner] + place * per_item
    items[:, SEGMENT_END] = np.minimum(items[:, SEGMENT_START] + per_item, high[owner])
    items[:, IS_FINAL] = ~(split if partial is None else split | partial)[owner]
    return items, split


def _group_items(
    s: WorkSettings,
    shared: _Shared,
    starts: np.ndarray,
    counts: np.ndarray,
    first_token: int,
    table_starts: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Items of the groups, and their token lists (which start at `first_token` of the plan's tokens)."""
    if not shared.num_groups:
        return np.zeros((0, ITEM_WIDTH), dtype=np.int32), _NONE
    owner, place = expand(counts[shared.request])
    tokens = starts[shared.request][owner] + place
    group_tokens = np.add.reduceat(counts[shared.request], shared.start)
    group_first = group_tokens.cumsum() - group_tokens
    group, tile = expand((group_tokens + s.group_tile - 1) // s.group_tile)
    items = np.zeros((len(group), ITEM_WIDTH), dtype=np.int32)
    items[:, TOKEN_START] = first_token + group_first[group] + tile * s.group_tile
    items[:, TOKEN_COUNT] = np.minimum(s.group_tile, group_tokens[group] - tile * s.group_tile)
    items[:, TABLE_START] = table_starts[shared.request[shared.start]][group]
    items[:, SEGMENT_START] = shared.segment[shared.start][group]
    items[:, SEGMENT_END] = items[:, SEGMENT_START] + 1
    return items, tokens


def _longest_first(items: np.ndarray) -> np.ndarray:
    """Most work first; the sort is stable, so that items of one segment stay neighbours."""
    if len(items) < 2:
        return items
    work = (items[:, SEGMENT_END] - items[:, SEGMENT_START]) * items[:, TOKEN_COUNT]
    return items[np.argsort(-work, kind="stable")]
