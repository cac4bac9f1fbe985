# SPDX-License-Identifier: Apache-2.0
"""A step's attention as a list of work items, built on the host in vectorised numpy.

Every query row is an ordered fold over KV *segments* `[k * S, (k + 1) * S)` at absolute positions: each
segment gives a partial result (running maximum, sum, weighted values), and partials fold in order of k by
log-sum-exp. So the choice of the item that computes a segment, and of the rows beside it, is scheduling: it
never changes a result.

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
    """Parameters of the cutting of work; fixed per backend.

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
    last_seen: np.ndarray,
) -> WorkPlan:
    """Cut one step into items.

    Args:
        query_starts: int [R + 1]. context_lengths: int [R].
        tables: int32 flat; request r's blocks start at `table_starts[r]`.
        window: visible positions, the query's own included; None: all.
        last_seen: int [T], the last position that each token sees.

    Cost: O(R + items) numpy work, plus one sort of the (request, segment) pairs that may be shared.
    """
    s = settings
    starts = np.asarray(query_starts, dtype=np.int64)
    contexts = np.asarray(context_lengths, dtype=np.int64)
    counts = starts[1:] - starts[:-1]
    first = contexts - counts
    low = np.zeros_like(first) if window is None else np.maximum(first - (window - 1), 0) // s.segment
    high = (contexts + (s.segment - 1)) // s.segment
    num_tokens = int(starts[-1])
    is_long = counts > s.short_tile
    short = ((counts > 0) & ~is_long).nonzero()[0]
    single = len(short) == num_tokens  # decodes only: a request's tokens are its one token

    shared = _find_groups(s, short, counts, contexts, low, tables, table_starts, window)
    tiles = (
        _NO_TILES
        if single
        else _long_tiles(s, is_long.nonzero()[0], starts, counts, first, window, last_seen)
    )
    run_request, run_low, run_high = _private_runs(short, low, high, shared, window)
    total = int((tiles.high - tiles.low).sum() + (run_high - run_low).sum()) + len(shared.segment)
    per_item = max(1, -(-total * s.num_kv_heads // s.parallel))

    partial = np.zeros(len(counts), dtype=bool)
    partial[shared.request] = True
    long_items, long_split = _cut(
        tiles.low, tiles.high, per_item, tiles.start, tiles.count, table_starts[tiles.request], None
    )
    short_items, short_split = _cut(
        run_low,
        run_high,
        per_item,
        starts[run_request],
        counts[run_request],
        table_starts[run_request],
        partial[run_request],
    )
    partial[run_request[short_split]] = True
    group_items, group_tokens = _group_items(s, shared, starts, counts, num_tokens, table_starts, single)
    long_items = np.concatenate([long_items, group_items]) if len(long_items) else group_items

    requests = partial.nonzero()[0]
    slots, token_low = _partial_slots(
        num_tokens,
        single,
        (starts[requests], counts[requests], low[requests], high[requests]),
        tuple(part[long_split] for part in (tiles.start, tiles.count, tiles.low, tiles.high)),
    )
    ends = slots.cumsum()
    return WorkPlan(
        short_items=longest_first(short_items),
        long_items=longest_first(long_items),
        tokens=np.concatenate([np.arange(num_tokens), group_tokens], dtype=np.int32, casting="same_kind"),
        partial_base=(ends - slots - token_low).astype(np.int32),
        merge_tokens=slots.nonzero()[0].astype(np.int32),
        num_partials=int(ends[-1]) if num_tokens else 0,
        num_groups=shared.num_groups,
    )


def _partial_slots(
    num_tokens: int, single: bool, *split: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return how many partials each token stores, and its first segment: int64 [num_tokens] each, 0 for most.

    `split` are runs of tokens whose segments are in several items, the requests and the tiles of long chunks:
    (first token, number of tokens, first segment, end segment).
    """
    slots, token_low = np.zeros((2, num_tokens), dtype=np.int64)
    for start, count, low, high in split:
        if len(start):
            owner, token = _tokens(start, count, single)
            slots[token] = (high - low)[owner]
            token_low[token] = low[owner]
    return slots, token_low


def _tokens(start: np.ndarray, count: np.ndarray, single: bool) -> tuple[np.ndarray | slice, np.ndarray]:
    """The query tokens of runs, and the run each belongs to; `single`: every count is 1."""
    if single:
        return slice(None), start
    owner, place = expand(count)
    return owner, start[owner] + place


_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class _Tiles:
    """Tiles of long chunks: first query token, number of them, segments [low, high), request."""

    start: np.ndarray
    count: np.ndarray
    low: np.ndarray
    high: np.ndarray
    request: np.ndarray


_NO_TILES = _Tiles(_NONE, _NONE, _NONE, _NONE, _NONE)


def _long_tiles(
    s: WorkSettings,
    long: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    first: np.ndarray,
    window: int | None,
    last_seen: np.ndarray,
) -> _Tiles:
    """Long chunks in tiles of `long_tile` tokens; `first` are positions of the requests' first queries."""
    if not len(long):
        return _NO_TILES
    owner, tile = expand((counts[long] + (s.long_tile - 1)) // s.long_tile)
    request = long[owner]
    offset = tile * s.long_tile
    count = np.minimum(s.long_tile, counts[request] - offset)
    position = first[request] + offset
    high = _most_in_runs(last_seen, starts[request] + offset, count).astype(np.int64) // s.segment + 1
    low = np.zeros_like(high)
    if window is not None:
        low = np.maximum(position - (window - 1), 0) // s.segment
    return _Tiles(starts[request] + offset, count, low, high, request)


def _most_in_runs(values: np.ndarray, start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the largest of the values [start, start + count) of each run; no run is empty."""
    edges = np.stack([start, start + count], axis=1).reshape(-1)
    if edges[-1] == len(values):
        edges = edges[:-1]
    most: np.ndarray = np.maximum.reduceat(values, edges)[::2]
    return most


@dataclass(frozen=True)
class _Shared:
    """Accepted (request, segment) pairs, ordered by group; `start[g]` is where group g begins."""

    request: np.ndarray
    segment: np.ndarray
    start: np.ndarray
    num_groups: int


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
        request, segment, begins = _nested_pairs(s, short, contexts, tables, table_starts, per_segment)
    else:
        request, segment, begins = _windowed_pairs(s, short, contexts, low, tables, table_starts, per_segment)
    if not len(begins):
        return _NOTHING_SHARED
    sizes = np.empty_like(begins)
    np.subtract(begins[1:], begins[:-1], out=sizes[:-1])
    sizes[-1] = len(request) - begins[-1]
    tokens = np.add.reduceat(counts[request], begins)
    saving = (sizes - (tokens + s.group_tile - 1) // s.group_tile) * s.load_cost - tokens * s.partial_cost
    worthwhile = (sizes >= s.min_group) & (saving > 0)
    if worthwhile.all():
        if saving.sum() < s.min_saving:
            return _NOTHING_SHARED
        return _Shared(request, segment, begins, len(begins))
    if not worthwhile.any() or saving[worthwhile].sum() < s.min_saving:
        return _NOTHING_SHARED
    kept = worthwhile.repeat(sizes)
    sizes = sizes[worthwhile]
    return _Shared(request[kept], segment[kept], sizes.cumsum() - sizes, len(sizes))


_Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]


def _nested_pairs(
    s: WorkSettings,
    short: np.ndarray,
    contexts: np.ndarray,
    tables: np.ndarray,
    table_starts: np.ndarray,
    per_segment: int,
) -> _Pairs:
    """(request, segment) pairs in groups of two and more, and where groups begin; everything visible.

    Sharing is nested: requests that share segment k share all before it. So rows of last blocks, sorted as
    words, bring every group of every depth together, and neighbours' common lengths tell all groups::

        A B C d        common with the row above: -  3  2  1        segment 0: all four
        A B C e                                                     segment 1: the first three
        A B f g                                                     segment 2: the first two
        A h i j
    """
    # One small sort rules most out: requests without a shared first segment share nothing.
    short = short[contexts[short] >= s.segment]
    blocks = tables[table_starts[short] + (per_segment - 1)]
    order = blocks.argsort()
    same = blocks[order][1:] == blocks[order][:-1]
    keep = np.zeros(len(short), dtype=bool)
    keep[order[1:][same]] = True
    keep[order[:-1][same]] = True
    short = short[keep]
    if len(short) < s.min_group:
        return _NONE, _NONE, _NONE
    whole = contexts[short] // s.segment
    width = int(whole.max())
    place = table_starts[short][:, None] + np.arange(per_segment - 1, width * per_segment, per_segment)
    if int(whole.min()) == width:
        last_blocks = tables[place]
    else:
        # Past a request's last whole segment lie tokens of its own.
        inside = np.arange(width) < whole[:, None]
        last_blocks = np.where(inside, tables.take(place, mode="clip"), -1 - short[:, None]).astype(np.int32)
    order = last_blocks.view(f"V{4 * width}")[:, 0].argsort()
    last_blocks = last_blocks[order]
    differ = last_blocks[1:] != last_blocks[:-1]
    common = np.where(differ.any(axis=1), differ.argmax(axis=1), width)
    depth = int(common.max())
    # joined[k, i]: rows i - 1 and i share segment k. A row is in a group if it is joined to either side.
    joined = np.zeros((depth, len(short) + 1), dtype=bool)
    np.less(np.arange(depth)[:, None], common, out=joined[:, 1:-1])
    above, below = joined[:, :-1], joined[:, 1:]
    member = (above | below).ravel().nonzero()[0]
    segment, row = np.divmod(member, len(short))
    begins = (~above).ravel()[member].nonzero()[0]
    return short[order][row], segment, begins


def _windowed_pairs(
    s: WorkSettings,
    short: np.ndarray,
    contexts: np.ndarray,
    low: np.ndarray,
    tables: np.ndarray,
    table_starts: np.ndarray,
    per_segment: int,
) -> _Pairs:
    """The same under a window, which starts in another segment for every request; also groups of one."""
    owner, place = expand(np.maximum(contexts[short] // s.segment - low[short], 0))
    if not len(owner):
        return _NONE, _NONE, _NONE
    request = short[owner]
    segment = place + low[request]
    key = (segment << 32) | tables[table_starts[request] + (segment + 1) * per_segment - 1]
    order = key.argsort()
    key = key[order]
    edges = np.ones(len(key), dtype=bool)
    np.not_equal(key[1:], key[:-1], out=edges[1:])
    return request[order], segment[order], edges.nonzero()[0]


def _private_runs(
    short: np.ndarray, low: np.ndarray, high: np.ndarray, shared: _Shared, window: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs of segments that short requests attend by themselves: (request, first, end)."""
    if window is None or not shared.num_groups:
        taken = np.bincount(shared.request, minlength=len(low)) if shared.num_groups else np.zeros_like(low)
        begin, end = (low + taken)[short], high[short]
        some = begin < end
        return short[some], begin[some], end[some]
    # Under a window, requests enter a group at different segments: the rest may have holes.
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


_NO_ITEMS = np.zeros((0, ITEM_WIDTH), dtype=np.int32)


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
    if not len(low):
        return _NO_ITEMS, np.zeros(0, dtype=bool)
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
    single: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Items of the groups, and their token lists (which start at `first_token` of the plan's tokens)."""
    if not shared.num_groups:
        return _NO_ITEMS, _NONE
    _, tokens = _tokens(starts[shared.request], counts[shared.request], single)
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


def longest_first(items: np.ndarray) -> np.ndarray:
    """Most work first; the sort is stable, so that items of one segment stay neighbours."""
    if len(items) < 2:
        return items
    work = (items[:, SEGMENT_END] - items[:, SEGMENT_START]) * items[:, TOKEN_COUNT]
    return items[np.argsort(-work, kind="stable")]
