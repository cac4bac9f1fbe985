# SPDX-License-Identifier: Apache-2.0
"""The Triton attention kernel: one kernel for prompt chunks, prefix hits, decodes and shared prefixes.

A program takes one work item (see `work_plan`) and one KV head. Its rows are the item's query tokens times
the query heads of that KV head, so a decode of a 32:8 model is 4 rows and a chunk of 16 tokens is 64. In
loops::

    for k in segments of the item:                       S positions each, at absolute multiples of S
        m, l, acc = -inf, 0, 0
        for keys in tiles of BN within segment k:        through the block table
            s = rows . keys * scale                      masked only where a row does not see it all
            m, l, acc = online softmax step
        final item:   O, M, L = fold(O, M, L, acc, m, l)
        partial item: store (acc, m, l) of every row
    final item: write O / L

    merge kernel, per row that has partials:  the same fold over the stored partials, in order of k

Outside deterministic mode an item's keys are one run: nothing is folded in registers, and a partial item
stores one partial of each row. By segments, results do not depend on how work was cut.

Which rows share a tile, and which segments share an item, never enters a row's arithmetic.

Everything that changes from step to step is read from device memory, from one int32 array (the *blob*): item
counts, where each list starts, positions, slots of partials, block tables. Grids come from buckets, and
programs past the count return. A captured CUDA graph therefore replays with a new plan. A row's KV end is its
position, or, in steps with images whose tokens see each other (AHEAD), read from a list of its own.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from radixkv_kernels.triton.merge import LOG2E, finish, fold


@triton.jit
def _widened(x, DTYPE: tl.constexpr):
    """Elements of a cache in the type that is multiplied."""
    is_narrow: tl.constexpr = tl.float16 == DTYPE
    if x.dtype == tl.int8 and is_narrow:
        # 1024 + 128 + x has x in its last bits: conversions of integers take several times as long.
        return (x.to(tl.int16) + 0x6480).to(tl.float16, bitcast=True) - 1152.0
    else:
        return x.to(DTYPE)


@triton.jit
def _tile_step(
    q, rest, acc, odd, top, sums, block, start, first_key, end_key, position, last, head_base, key_ptr,
    value_ptr, key_scale_ptr, value_scale_ptr, logit_scale, softcap, window,
    D: tl.constexpr, DP: tl.constexpr, DR: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    VALUE_ROW: tl.constexpr, REUSE: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Do one online softmax step over keys [start, start + BN); masked: only keys [first_key, end_key) exist.

    `block` [BN] are the blocks that hold them. Of quantised values, `acc` has the even elements and `odd` the
    others: words of two bytes are copied in the pieces, and read from shared memory by the instructions, that
    other types have.

    A logit is `s` times a positive factor, and enters its exponent by an explicit fused multiply-add. Left to
    itself, a compiler would fuse the two in the unmasked variant and not in the masked one, and the bits of a
    row would depend on which of them its mates need.

    Weights of quantised values hold their scales, whose powers of two are summands of exponents: with top the
    largest of these sums, weights are below 2, and float16 has room for all that count. `sums` has none.
    """
    n = start + tl.arange(0, BN)
    d = tl.arange(0, DP)
    exists = n < end_key
    if WINDOW:
        exists = exists & (n >= first_key)
    # int64 from here on: a large cache has more than 2^31 elements.
    row = head_base + block.to(tl.int64) * BLOCK + (n % BLOCK)
    key_at = key_ptr + row[None, :] * D + d[:, None]
    # Quantised values come in pairs: words of two bytes.
    WIDTH: tl.constexpr = V // 2 if QUANTIZED else V
    STRIDE: tl.constexpr = VALUE_ROW // 2 if QUANTIZED else VALUE_ROW
    w = tl.arange(0, VP // 2 if QUANTIZED else VP)
    value_at = value_ptr + row[:, None] * STRIDE + w[None, :]
    if REUSE:
        if MASK:
            v = tl.load(value_at, mask=exists[:, None], other=0)
        else:
            v = tl.load(value_at)
        k = tl.trans(v)
    elif MASK:
        if D >= DP:
            k = tl.load(key_at, mask=exists[None, :], other=0.0)
        else:
            k = tl.load(key_at, mask=exists[None, :] & (d < D)[:, None], other=0.0)
        if V == VP:
            v = tl.load(value_at, mask=exists[:, None], other=0)
        else:
            v = tl.load(value_at, mask=exists[:, None] & (w < WIDTH)[None, :], other=0)
    else:
        if D >= DP:
            k = tl.load(key_at)
        else:
            k = tl.load(key_at, mask=(d < D)[:, None], other=0.0)
        if V == VP:
            v = tl.load(value_at)
        else:
            v = tl.load(value_at, mask=(w < WIDTH)[None, :], other=0)
    k = _widened(k, q.dtype)
    s = tl.dot(q, k, input_precision="ieee")
    if DR > 0:
        more = DP + tl.arange(0, DR)
        rest_at = key_ptr + row[None, :] * D + more[:, None]
        if MASK:
            if D == DP + DR:
                k = tl.load(rest_at, mask=exists[None, :], other=0.0)
            else:
                k = tl.load(rest_at, mask=exists[None, :] & (more < D)[:, None], other=0.0)
        else:
            if D == DP + DR:
                k = tl.load(rest_at)
            else:
                k = tl.load(rest_at, mask=(more < D)[:, None], other=0.0)
        s = tl.dot(rest, _widened(k, q.dtype), s, input_precision="ieee")
    factor = logit_scale
    if QUANTIZED:
        if MASK:
            key_scale = tl.load(key_scale_ptr + row, mask=exists, other=0.0)
            value_scale = tl.load(value_scale_ptr + row, mask=exists, other=0.0)
        else:
            key_scale = tl.load(key_scale_ptr + row)
            value_scale = tl.load(value_scale_ptr + row)
        # Scales of keys that do not exist are 0; these must stay -inf all the same.
        factor = tl.maximum(key_scale, 1e-30)[None, :] * logit_scale[:, None]
        # value_scale is fraction * 2 ** shift.
        bits = value_scale.to(tl.int32, bitcast=True)
        exponent = bits & 0x7F800000
        fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
        shift = ((exponent >> 23) - 127).to(tl.float32)
        unshift = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    if SOFTCAP:
        # cap * tanh(s / cap), tanh by way of exp2 of a non-positive argument, which cannot overflow.
        cap = softcap * LOG2E
        x = s * factor / cap
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        y = (1.0 - e) / (1.0 + e)
        s = tl.where(x < 0, -y, y)
        factor = cap
    if MASK:
        seen = (n[None, :] <= last[:, None]) & exists[None, :]
        if WINDOW:
            seen = seen & (position[:, None] - n[None, :] < window)
        s = tl.where(seen, s, float("-inf"))
    if QUANTIZED:
        s = tl.fma(s, tl.broadcast_to(factor, s.shape), tl.broadcast_to(shift[None, :], s.shape))
        highest = tl.max(s, 1)
    else:
        highest = tl.max(s, 1) * factor  # the same bits for less: the factor is one number
    new = tl.maximum(top, highest)
    if MASK:
        safe = tl.where(new == float("-inf"), 0.0, new)
    else:
        safe = new
    keep = tl.exp2(top - safe)
    if QUANTIZED:
        p = tl.exp2(s - safe[:, None])
        sums = tl.fma(sums, keep, tl.sum(p * unshift[None, :], 1))
        p = p * fraction[None, :]
        stored: tl.constexpr = key_ptr.dtype.element_ty
        first = _widened(v.to(tl.int8).to(stored, bitcast=True), q.dtype)
        second = _widened((v >> 8).to(tl.int8).to(stored, bitcast=True), q.dtype)
        odd = tl.dot(p.to(q.dtype), second, odd * keep[:, None], input_precision="ieee")
        v = first
    else:
        p = tl.exp2(tl.fma(s, tl.full(s.shape, factor, tl.float32), tl.broadcast_to(-safe[:, None], s.shape)))
        sums = tl.fma(sums, keep, tl.sum(p, 1))
    acc = tl.dot(p.to(q.dtype), v, acc * keep[:, None], input_precision="ieee")
    return acc, odd, new, sums


@triton.jit
def _blocks(table_ptr, start, first_key, end_key, BN: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks of keys [start, start + BN), 0 where keys do not exist."""
    n = start + tl.arange(0, BN)
    return tl.load(table_ptr + n // BLOCK, mask=(n >= first_key) & (n < end_key), other=0)


@triton.jit
def _steps(
    q, rest, acc, odd, top, sums, start, end, first_key, end_key, position, last, head_base, key_ptr,
    value_ptr, key_scale_ptr, value_scale_ptr, table_ptr, logit_scale, softcap, window,
    D: tl.constexpr, DP: tl.constexpr, DR: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    VALUE_ROW: tl.constexpr, REUSE: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the tiles that begin in [start, end).

    Each step loads the next one's block ids: the addresses of keys and values are known before it begins, so
    that the compiler can start these loads some steps ahead.
    """
    block = _blocks(table_ptr, start, first_key, end_key, BN, BLOCK)
    for n in range(start, end, BN):
        following = _blocks(table_ptr, n + BN, first_key, end_key, BN, BLOCK)
        acc, odd, top, sums = _tile_step(
            q, rest, acc, odd, top, sums, block, n, first_key, end_key, position, last, head_base, key_ptr,
            value_ptr, key_scale_ptr, value_scale_ptr, logit_scale, softcap, window,
            D, DP, DR, V, VP, VALUE_ROW, REUSE, BN, BLOCK, MASK, WINDOW, SOFTCAP, QUANTIZED,
        )  # fmt: skip
        block = following
    return acc, odd, top, sums


@triton.jit
def _attend_keys(
    q, rest, low, high, first_key, min_last, max_position, position, last, head_base, key_ptr, value_ptr,
    key_scale_ptr, value_scale_ptr, table_ptr, logit_scale, softcap, window,
    BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DR: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    VALUE_ROW: tl.constexpr, REUSE: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """The partial (acc, top, sums) of keys [low, high): masked tiles only where some row does not see all."""
    start = low
    free_start = low
    if WINDOW:
        start = tl.minimum(tl.maximum(low, first_key // BN * BN), high)
        last_hidden = max_position - window + 1
        free_start = tl.maximum(start, (last_hidden + BN - 1) // BN * BN)
        free_start = tl.minimum(free_start, (high + BN - 1) // BN * BN)
    free_end = tl.maximum(free_start, tl.minimum(high, min_last + 1) // BN * BN)
    acc = tl.zeros((BM, VP // 2 if QUANTIZED else VP), tl.float32)
    odd = acc if QUANTIZED else 0.0
    top = tl.full((BM,), float("-inf"), tl.float32)
    sums = tl.zeros((BM,), tl.float32)
    if WINDOW:
        acc, odd, top, sums = _steps(
            q, rest, acc, odd, top, sums, start, free_start, first_key, high, position, last, head_base,
            key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, table_ptr, logit_scale, softcap, window,
            D, DP, DR, V, VP, VALUE_ROW, REUSE, BN, BLOCK, True, WINDOW, SOFTCAP, QUANTIZED,
        )  # fmt: skip
    acc, odd, top, sums = _steps(
        q, rest, acc, odd, top, sums, free_start, free_end, first_key, high, position, last, head_base,
        key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, table_ptr, logit_scale, softcap, window,
        D, DP, DR, V, VP, VALUE_ROW, REUSE, BN, BLOCK, False, WINDOW, SOFTCAP, QUANTIZED,
    )  # fmt: skip
    acc, odd, top, sums = _steps(
        q, rest, acc, odd, top, sums, free_end, high, first_key, high, position, last, head_base,
        key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, table_ptr, logit_scale, softcap, window,
        D, DP, DR, V, VP, VALUE_ROW, REUSE, BN, BLOCK, True, WINDOW, SOFTCAP, QUANTIZED,
    )  # fmt: skip
    if QUANTIZED:
        acc = tl.reshape(tl.join(acc, odd), (BM, VP))
    return acc, top, sums


@triton.jit
def _store_partial(partial_out_ptr, partial_stat_ptr, slot, head, acc, top, sums, valid,
                   HQ: tl.constexpr, V: tl.constexpr, VP: tl.constexpr):  # fmt: skip
    """Store one partial of each row; of a row that has seen no key, one that changes no fold."""
    w = tl.arange(0, VP)
    at = slot.to(tl.int64) * HQ + head
    tl.store(partial_out_ptr + at[:, None] * V + w[None, :], acc, mask=valid[:, None] & (w < V)[None, :])
    tl.store(partial_stat_ptr + at * 2, top, mask=valid)
    tl.store(partial_stat_ptr + at * 2 + 1, sums, mask=valid)


@triton.jit
def attention_kernel(
    query_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, out_ptr, partial_out_ptr, partial_stat_ptr,
    blob_ptr, sinks_ptr, scale, softcap, window, query_token_stride, query_head_stride, num_slots,
    HQ: tl.constexpr, HKV: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DR: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, VALUE_ROW: tl.constexpr, REUSE: tl.constexpr,
    BM: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr,
    LONG: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    QUANTIZED: tl.constexpr, BY_SEGMENT: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (item bucket * SPLIT, HKV * PARTS): SPLIT programs share an item's tokens, BM // G each, and PARTS
    programs the query heads of a KV head, G each.

    Keys of D elements are loaded as DP and DR (0: none), values of V as VP; VALUE_ROW elements lie from one
    token's value to the next one's. REUSE: the first DP elements of a key are its value. EARLY: the merge may
    begin (`dependent_launch`).

    `num_slots` is num_blocks * BLOCK, the rows of one head of one layer. Partial j of an item and its token i
    are in slot `base + j * tokens + i`: one for each segment, or, without BY_SEGMENT, one in all.
    """
    G: tl.constexpr = HQ // HKV // PARTS
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0) // SPLIT
    first_token = tl.program_id(0) % SPLIT * (BM // G)
    part = tl.program_id(1)
    kv_head = part // PARTS
    if index >= tl.load(blob_ptr + (1 if LONG else 0)):
        return
    item = blob_ptr + tl.load(blob_ptr + (4 if LONG else 3)) + index * 8
    item_tokens = tl.load(item + 1)
    token_count = item_tokens - first_token
    if token_count <= 0:
        return
    table_ptr = blob_ptr + tl.load(blob_ptr + 10) + tl.load(item + 2)
    segment_start = tl.load(item + 3)
    segment_end = tl.load(item + 4)
    final = tl.load(item + 5)
    r = tl.arange(0, BM)
    d = tl.arange(0, DP)
    valid = (r // G < token_count) & (r < (BM // G) * G)
    head = part * G + r % G
    token = tl.load(
        blob_ptr + tl.load(blob_ptr + 6) + tl.load(item) + first_token + r // G, mask=valid, other=0
    )
    position = tl.load(blob_ptr + tl.load(blob_ptr + 7) + token, mask=valid, other=0)
    min_position = tl.min(tl.where(valid, position, 2147483647), 0)
    max_position = tl.max(tl.where(valid, position, -1), 0)
    last = position
    min_last = min_position
    max_last = max_position
    if AHEAD:
        last = tl.load(blob_ptr + tl.load(blob_ptr + 11) + token, mask=valid, other=0)
        min_last = tl.min(tl.where(valid, last, 2147483647), 0)
        max_last = tl.max(tl.where(valid, last, -1), 0)
    inside = valid[:, None] & (d < D)[None, :]
    query_at = token.to(tl.int64) * query_token_stride + head * query_head_stride
    q = tl.load(query_ptr + query_at[:, None] + d[None, :], mask=inside, other=0.0)
    rest = tl.zeros((BM, 16), tl.float32)
    if DR > 0:
        more = DP + tl.arange(0, DR)
        rest_inside = valid[:, None] & (more < D)[None, :]
        rest = tl.load(query_ptr + query_at[:, None] + more[None, :], mask=rest_inside, other=0.0)
    logit_scale = scale * LOG2E
    if QUANTIZED:
        logit_scale = tl.full((BM,), logit_scale, tl.float32)
        if q.dtype != tl.float32:
            # float16 holds all elements of quantised caches, which an instruction converts in pairs; there is
            # none for bfloat16. Queries are divided by a power of two, without a rounding that counts.
            largest = tl.max(tl.abs(q.to(tl.float32)), 1)
            if DR > 0:
                largest = tl.maximum(largest, tl.max(tl.abs(rest.to(tl.float32)), 1))
            exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
            power = tl.where(exponent > 0, exponent, 0x3F800000).to(tl.float32, bitcast=True)
            q = (q.to(tl.float32) / power[:, None]).to(tl.float16)
            if DR > 0:
                rest = (rest.to(tl.float32) / power[:, None]).to(tl.float16)
            logit_scale = logit_scale * power
    head_base = kv_head.to(tl.int64) * num_slots
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(min_position - window + 1, 0)
    slot = tl.load(item + 6) + first_token + r // G
    if BY_SEGMENT:
        total_out = tl.zeros((BM, VP), tl.float32)
        total_max = tl.full((BM,), float("-inf"), tl.float32)
        total_sum = tl.zeros((BM,), tl.float32)
        for k in range(segment_start, segment_end):
            acc, top, sums = _attend_keys(
                q, rest, k * SEGMENT, tl.minimum((k + 1) * SEGMENT, max_last + 1), first_key,
                min_last, max_position, position, last, head_base, key_ptr, value_ptr, key_scale_ptr,
                value_scale_ptr, table_ptr, logit_scale, softcap, window, BM, D, DP, DR, V, VP, VALUE_ROW,
                REUSE, BN, BLOCK, WINDOW, SOFTCAP, QUANTIZED,
            )  # fmt: skip
            if final != 0:
                total_out, total_max, total_sum = fold(total_out, total_max, total_sum, acc, top, sums)
            else:
                _store_partial(
                    partial_out_ptr, partial_stat_ptr, slot, head, acc, top, sums, valid, HQ, V, VP
                )  # fmt: skip
                slot += item_tokens
    else:
        total_out, total_max, total_sum = _attend_keys(
            q, rest, segment_start * SEGMENT, tl.minimum(segment_end * SEGMENT, max_last + 1), first_key,
            min_last, max_position, position, last, head_base, key_ptr, value_ptr, key_scale_ptr,
            value_scale_ptr, table_ptr, logit_scale, softcap, window, BM, D, DP, DR, V, VP, VALUE_ROW, REUSE,
            BN, BLOCK, WINDOW, SOFTCAP, QUANTIZED,
        )  # fmt: skip
        if final == 0:
            _store_partial(
                partial_out_ptr, partial_stat_ptr, slot, head, total_out, total_max, total_sum, valid,
                HQ, V, VP,
            )  # fmt: skip
    if final != 0:
        sink = tl.zeros((BM,), tl.float32)
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=valid, other=0.0)
        result = finish(total_out, total_max, total_sum, sink, SINKS)
        w = tl.arange(0, VP)
        out_inside = valid[:, None] & (w < V)[None, :]
        out_at = (token.to(tl.int64) * HQ + head) * V
        tl.store(out_ptr + out_at[:, None] + w[None, :], result.to(out_ptr.dtype.element_ty), mask=out_inside)
