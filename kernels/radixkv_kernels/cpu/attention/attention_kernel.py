# SPDX-License-Identifier: Apache-2.0
"""The CPU attention kernel: reads cache blocks in place, compiled by numba once for all sizes.

The algorithm, for one item (see `work_plan`) and one KV head::

    rows = tokens of the item x query heads of the group, packed and scaled once
    for each segment k of the item:
        for each 64 keys:     transpose them; scores[rows, keys] = rows . keys            a matrix product
        per row:              hide keys outside its view; m = max, p = 2 ** (scores - m), l = sum(p)
        for each 64 keys:     acc[rows] += p[rows, keys] . values                         a matrix product
        fold (m, l, acc) into the row's running state, or store it as a partial

Transposed keys make a query row meet 16 keys per instruction, without a sum across a vector at the end; a
tile of rows shares the transposition. Values serve as they lie in the cache.

Numerics: no operation mixes rows. A score is one chain of fused multiply-adds over the head's elements, an
output element one chain over the segment's keys, the softmax's sum has 16 strands by position: all in an
order fixed by absolute positions, spelled out in vector code (`vectors.py`) and compiled without
reordering. A row's bits depend on its query and its visible keys and values only: not on its tile, its
companions, the chunk it came in, nor where its blocks lie.

The products depend on head size and storage, and are compiled for each (`chunk_products`).

Threads take (item, head) pairs from a shared counter, so a slow core takes fewer.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, njit

from radixkv_kernels.cpu.attention.chunk_products import SEGMENT
from radixkv_kernels.cpu.compiling import compile_kernel
from radixkv_kernels.cpu.memory import aligned, call, f32, f32_row, i32, pointer, take
from radixkv_kernels.cpu.vectors import CHUNK, GROUP, STRANDS, exp2, fma, softmax

# Places in the int64 argument block.
(
    COUNTER,
    NUM_ITEMS,
    NUM_KV_HEADS,
    GROUP_SIZE,
    NUM_BLOCKS,
    QUERY,
    QUERY_TOKEN_STRIDE,
    QUERY_HEAD_STRIDE,
    OUTPUT,
    KEY,
    VALUE,
    KEY_SCALE,
    VALUE_SCALE,
    ITEMS,
    TOKENS,
    POSITIONS,
    LAST_SEEN,
    TABLES,
    PARTIAL_BASE,
    PARTIAL_OUT,
    PARTIAL_MAX,
    PARTIAL_SUM,
    SINKS,
    MERGE_TOKENS,
    NUM_MERGE,
    WINDOW,
    SCALARS,
    MAX_ROWS,
    BLOCK_SIZE,
    BLOCK_SHIFT,
    HEAD_SIZE,
    VALUE_SIZE,
    VALUE_ROW,
    SQUARE,
    SCORE,
    WEIGH,
    NUM_ARGUMENTS,
) = range(37)

_LOG2E = np.float32(1.4426950408889634)
_NEG_INF = np.float32(-np.inf)


@njit(forceinline=True)
def _fold(state: Any, r: int, out: Any, seg_max: Any, seg_sum: Any, seg_out: Any) -> None:
    """Fold one segment's partial into row r: state[0] maxima, state[1] sums, out the weighted values."""
    new = max(state[0, r], seg_max)
    a = exp2(state[0, r] - new) if state[0, r] > _NEG_INF else np.float32(0.0)
    b = exp2(seg_max - new)
    state[1, r] = fma(seg_sum, b, state[1, r] * a)
    state[0, r] = new
    for i in range(len(out)):
        out[i] = fma(seg_out[i], b, out[i] * a)


@njit(forceinline=True)
def _finish(maximum: Any, total: Any, acc: Any, out: Any, sinks: int, head: int) -> None:
    """Write acc / total, with the sink's logit (natural units; `sinks` is an address or 0) in the
    denominator."""
    factor = np.float32(1.0)
    if sinks != 0:
        logit = f32(sinks + head * 4)[0] * _LOG2E
        new = max(maximum, logit)
        factor = exp2(maximum - new)
        total = fma(total, factor, exp2(logit - new))
    factor = factor / total
    for i in range(len(out)):
        out[i] = acc[i] * factor


@njit(forceinline=True)
def _soft_cap(row: Any, softcap: Any) -> None:
    """softcap * tanh(x / softcap) on a row of base-2 logits."""
    cap = softcap * _LOG2E
    for c in range(len(row)):
        # tanh through 2 ** x of a non-positive argument, which cannot overflow.
        x = row[c] / cap
        t = exp2(abs(x) * (np.float32(-2.0) * _LOG2E))
        y = (np.float32(1.0) - t) / (np.float32(1.0) + t)
        row[c] = cap * (y if x >= 0 else -y)


@functools.cache
def attention_kernels() -> tuple[int, int]:
    """Addresses of the compiled (attend, merge) functions, each `void (int64 *arguments)`.

    They serve all sizes and storages: the products of a chunk are functions of their own (`chunk_products`),
    called by their addresses in the arguments. The first call compiles for some seconds; the result is cached
    on disk (see `radixkv_kernels.cpu.compiling`).
    """
    attend, merge = _make_attend(), _make_merge()
    _keep.extend((attend, merge))
    return attend.address, merge.address


_keep: list[Any] = []


def _make_attend() -> Any:
    def attend(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (NUM_ARGUMENTS,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        max_rows = arg[MAX_ROWS]
        head_size, value_size = arg[HEAD_SIZE], arg[VALUE_SIZE]
        scratch = (
            aligned(max_rows * head_size).reshape((max_rows, head_size)),
            aligned(max_rows * SEGMENT).reshape((max_rows, SEGMENT)),
            aligned(max_rows * value_size).reshape((max_rows, value_size)),
            aligned(max_rows * value_size).reshape((max_rows, value_size)),
            np.empty((2, max_rows), np.float32),
            np.empty((2, max_rows), np.float32),
            aligned(head_size * CHUNK),
            aligned(arg[SQUARE] * head_size),
            aligned(CHUNK * arg[VALUE_ROW]),
            np.empty(SEGMENT // GROUP, np.int64),
            np.empty(CHUNK // GROUP, np.int64),
        )
        while True:
            work = take(counter)
            if work >= arg[NUM_ITEMS] * arg[NUM_KV_HEADS]:
                break
            _run_item(arg, work, scratch)

    return compile_kernel(attend)


@njit(forceinline=True)
def _run_item(arg: Any, work: int, scratch: Any) -> None:
    """Attend one item of one KV head: load its rows, then segment after segment."""
    q, weights, seg_out, acc, state, seg, _, _, _, _, _ = scratch
    head_size, value_size = arg[HEAD_SIZE], arg[VALUE_SIZE]
    kv_heads, group, window = arg[NUM_KV_HEADS], arg[GROUP_SIZE], arg[WINDOW]
    head = work % kv_heads
    item = carray(pointer(arg[ITEMS] + (work // kv_heads) * 32, np.int32), (8,))
    count = np.int64(item[1])
    rows = count * group
    tokens = carray(pointer(arg[TOKENS] + np.int64(item[0]) * 4, np.int32), (count,))
    factor = f32(arg[SCALARS])[0] * _LOG2E
    min_pos, max_pos = np.int64(1 << 40), np.int64(-1)
    for t in range(count):
        token = np.int64(tokens[t])
        pos = i32(arg[POSITIONS] + token * 4)
        min_pos, max_pos = min(min_pos, pos), max(max_pos, i32(arg[LAST_SEEN] + token * 4))
        for g in range(group):
            r = t * group + g
            place = token * arg[QUERY_TOKEN_STRIDE] + (head * group + g) * arg[QUERY_HEAD_STRIDE]
            source = f32_row(arg[QUERY] + place * 4, head_size)
            for i in range(head_size):
                q[r, i] = source[i] * factor
            for i in range(value_size):
                acc[r, i] = np.float32(0.0)
            state[0, r] = _NEG_INF
            state[1, r] = np.float32(0.0)
    first_visible = max(np.int64(0), min_pos - window + 1) if window > 0 else np.int64(0)
    tables = carray(pointer(arg[TABLES] + np.int64(item[2]) * 4, np.int32), (max_pos // arg[BLOCK_SIZE] + 1,))
    for k in range(np.int64(item[3]), np.int64(item[4])):
        low = k * SEGMENT
        high = min(low + SEGMENT, max_pos + 1)
        begin = max(low, first_visible)
        if begin >= high:
            continue
        _multiply_keys(arg, head, tables, begin, high, rows, scratch)
        _softmax_segment(arg, tokens, begin, high, weights, seg, group, window)
        _weigh_values(arg, begin, high, rows, scratch)
        for r in range(rows):
            if seg[0, r] == _NEG_INF:
                continue
            if item[5] != 0:
                _fold(state, r, acc[r], seg[0, r], seg[1, r], seg_out[r])
            else:
                token = np.int64(tokens[r // group])
                base = i32(arg[PARTIAL_BASE] + token * 4)
                slot = (base + k) * (kv_heads * group) + head * group + r % group
                f32(arg[PARTIAL_MAX] + slot * 4)[0] = seg[0, r]
                f32(arg[PARTIAL_SUM] + slot * 4)[0] = seg[1, r]
                target = f32_row(arg[PARTIAL_OUT] + slot * value_size * 4, value_size)
                for i in range(value_size):
                    target[i] = seg_out[r, i]
    if item[5] != 0:
        for r in range(rows):
            h = head * group + r % group
            place = np.int64(tokens[r // group]) * (kv_heads * group) + h
            target = f32_row(arg[OUTPUT] + place * value_size * 4, value_size)
            _finish(state[0, r], state[1, r], acc[r], target, arg[SINKS], h)


@njit(forceinline=True)
def _cache_row(arg: Any, head: int, tables: Any, n: int) -> Any:
    """Row of the layer's storage that holds key position n of a head."""
    block = np.int64(tables[n >> arg[BLOCK_SHIFT]])
    return ((head * arg[NUM_BLOCKS] + block) << arg[BLOCK_SHIFT]) + (n & (arg[BLOCK_SIZE] - 1))


@njit(forceinline=True)
def _multiply_keys(arg: Any, head: int, tables: Any, begin: int, high: int, rows: int, scratch: Any) -> None:
    """weights[:rows, :] = q . keys for the chunks of a segment that hold positions begin to high.

    Columns before begin and from high on get any value. Notes where each group of keys lies, for the values.
    """
    q, weights, _, _, _, _, columns, wide, _, places, _ = scratch
    square = arg[SQUARE]
    base = begin // square * square
    for n in range(base, high, GROUP):
        places[(n - base) // GROUP] = _cache_row(arg, head, tables, n)
    places_at = np.int64(places.ctypes.data)
    for chunk in range(begin // CHUNK * CHUNK, high, CHUNK):
        first = max(base, chunk)
        call(
            arg[SCORE],
            (
                places_at + (first - base) // GROUP * 8,
                (min(chunk + CHUNK, high) - first + square - 1) // square,
                # Squares of the rest of the segment: the next ones are prefetched.
                (high - first + square - 1) // square,
                arg[KEY],
                arg[KEY_SCALE],
                arg[VALUE],
                np.int64(q.ctypes.data),
                rows,
                np.int64(columns.ctypes.data),
                first - chunk,
                np.int64(wide.ctypes.data),
                np.int64(weights.ctypes.data) + (chunk % SEGMENT) * 4,
            ),
        )


@njit(forceinline=True)
def _softmax_segment(
    arg: Any, tokens: Any, begin: int, high: int, weights: Any, seg: Any, group: int, window: int
) -> None:
    """Rows of logits to weights, their maxima and sums to `seg`. A row that sees nothing has maximum -inf."""
    low = begin // SEGMENT * SEGMENT
    first = (begin - low) // STRANDS * STRANDS
    count = (high - low - first + STRANDS - 1) // STRANDS
    end_column = first + count * STRANDS
    softcap = f32(arg[SCALARS] + 4)[0]
    top_at, sum_at = np.int64(seg.ctypes.data), np.int64(seg[1].ctypes.data)
    for t in range(len(tokens)):
        pos = i32(arg[POSITIONS] + np.int64(tokens[t]) * 4)
        start = max(low, pos - window + 1) - low if window > 0 else np.int64(0)
        end = min(high, i32(arg[LAST_SEEN] + np.int64(tokens[t]) * 4) + 1) - low
        for g in range(group):
            r = t * group + g
            row = weights[r]
            if start >= end:
                seg[0, r] = _NEG_INF
                row[first:end_column] = np.float32(0.0)
                continue
            if softcap > 0:
                _soft_cap(row[first:end_column], softcap)
            for c in range(first, start):
                row[c] = _NEG_INF
            for c in range(end, end_column):
                row[c] = _NEG_INF
            softmax(np.int64(row.ctypes.data) + first * 4, count, top_at + r * 4, sum_at + r * 4)


@njit(forceinline=True)
def _weigh_values(arg: Any, begin: int, high: int, rows: int, scratch: Any) -> None:
    """seg_out[:rows] = weights . values over positions begin to high of one segment."""
    _, weights, seg_out, _, _, _, _, _, wide, places, addresses = scratch
    base = begin // arg[SQUARE] * arg[SQUARE]
    for r in range(rows):
        for i in range(arg[VALUE_SIZE]):
            seg_out[r, i] = np.float32(0.0)
    for chunk in range(begin // CHUNK * CHUNK, high, CHUNK):
        first = max(begin // GROUP * GROUP, chunk)
        call(
            arg[WEIGH],
            (
                np.int64(places.ctypes.data) + (first - base) // GROUP * 8,
                min(chunk + CHUNK, high) - first,
                arg[VALUE],
                arg[VALUE_SCALE],
                np.int64(weights.ctypes.data) + (first % SEGMENT) * 4,
                rows,
                np.int64(addresses.ctypes.data),
                np.int64(wide.ctypes.data),
                np.int64(seg_out.ctypes.data),
            ),
        )


def _make_merge() -> Any:
    def merge(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (NUM_ARGUMENTS,), np.int64)
        counter = pointer(arg[COUNTER] + 8, np.int64)
        heads = arg[NUM_KV_HEADS] * arg[GROUP_SIZE]
        value_size = arg[VALUE_SIZE]
        state = np.empty((2, 1), np.float32)
        acc = np.empty(value_size, np.float32)
        merge_tokens = carray(pointer(arg[MERGE_TOKENS], np.int32), (arg[NUM_MERGE],))
        while True:
            work = take(counter)
            if work >= arg[NUM_MERGE]:
                break
            token = np.int64(merge_tokens[work])
            pos, last = i32(arg[POSITIONS] + token * 4), i32(arg[LAST_SEEN] + token * 4)
            base = i32(arg[PARTIAL_BASE] + token * 4)
            first = np.int64(0)
            if arg[WINDOW] > 0:
                first = max(np.int64(0), pos - arg[WINDOW] + 1) // SEGMENT
            for h in range(heads):
                state[0, 0] = _NEG_INF
                state[1, 0] = np.float32(0.0)
                for i in range(value_size):
                    acc[i] = np.float32(0.0)
                for k in range(first, last // SEGMENT + 1):
                    slot = (base + k) * heads + h
                    seg_out = f32_row(arg[PARTIAL_OUT] + slot * value_size * 4, value_size)
                    seg_max = f32(arg[PARTIAL_MAX] + slot * 4)[0]
                    seg_sum = f32(arg[PARTIAL_SUM] + slot * 4)[0]
                    _fold(state, 0, acc, seg_max, seg_sum, seg_out)
                target = f32_row(arg[OUTPUT] + (token * heads + h) * value_size * 4, value_size)
                _finish(state[0, 0], state[1, 0], acc, target, arg[SINKS], h)

    return compile_kernel(merge)
