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
        partial item: store (acc, m, l) of every row that saw a key
    final item: write O / L

    merge kernel, per row that has partials:  the same fold over the stored segments, in order of k

Which rows share a tile, and which segments share an item, never enters a row's arithmetic.

Everything that changes from step to step is read from device memory, from one int32 array (the *blob*): item
counts, where each list starts, positions, block tables. Grids come from buckets, and programs past the count
return. A captured CUDA graph therefore replays with a new plan. A row's KV end is its position.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from radixkv_kernels.triton.merge import LOG2E, finish, fold


@triton.jit
def _tile_step(
    q, acc, top, sums, start, first_key, end_key, position, head_base, key_ptr, value_ptr,
    key_scale_ptr, value_scale_ptr, table_ptr, logit_scale, softcap, window,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """One online softmax step over keys [start, start + BN); masked: only keys in [first_key, end_key) exist.

    A logit is `s` times a positive factor, and enters its exponent by an explicit fused multiply-add. Left to
    itself, a compiler would fuse the two in the unmasked variant and not in the masked one, and the bits of a
    row would depend on which of them its mates need.
    """
    n = start + tl.arange(0, BN)
    d = tl.arange(0, DP)
    exists = n < end_key
    if WINDOW:
        exists = exists & (n >= first_key)
    if MASK:
        block = tl.load(table_ptr + n // BLOCK, mask=exists, other=0).to(tl.int64)
    else:
        block = tl.load(table_ptr + n // BLOCK).to(tl.int64)
    # int64 from here on: a large cache has more than 2^31 elements.
    row = head_base + block * BLOCK + (n % BLOCK)
    key_at = key_ptr + row[None, :] * D + d[:, None]
    value_at = value_ptr + row[:, None] * D + d[None, :]
    if MASK:
        if D == DP:
            k = tl.load(key_at, mask=exists[None, :], other=0.0)
            v = tl.load(value_at, mask=exists[:, None], other=0.0)
        else:
            k = tl.load(key_at, mask=exists[None, :] & (d < D)[:, None], other=0.0)
            v = tl.load(value_at, mask=exists[:, None] & (d < D)[None, :], other=0.0)
    else:
        if D == DP:
            k = tl.load(key_at)
            v = tl.load(value_at)
        else:
            k = tl.load(key_at, mask=(d < D)[:, None], other=0.0)
            v = tl.load(value_at, mask=(d < D)[None, :], other=0.0)
    k = k.to(q.dtype)
    s = tl.dot(q, k, input_precision="ieee")
    factor = logit_scale
    if QUANTIZED:
        if MASK:
            key_scale = tl.load(key_scale_ptr + row, mask=exists, other=0.0)
            value_scale = tl.load(value_scale_ptr + row, mask=exists, other=0.0)
        else:
            key_scale = tl.load(key_scale_ptr + row)
            value_scale = tl.load(value_scale_ptr + row)
        # Rows of zeros have no scale; what is hidden must stay -inf all the same.
        factor = (tl.maximum(key_scale, 1e-30) * logit_scale)[None, :]
    if SOFTCAP:
        # cap * tanh(s / cap), tanh by way of exp2 of a non-positive argument, which cannot overflow.
        cap = softcap * LOG2E
        x = s * factor / cap
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        y = (1.0 - e) / (1.0 + e)
        s = tl.where(x < 0, -y, y)
        factor = cap
    if MASK:
        seen = (n[None, :] <= position[:, None]) & exists[None, :]
        if WINDOW:
            seen = seen & (position[:, None] - n[None, :] < window)
        s = tl.where(seen, s, float("-inf"))
    if QUANTIZED and not SOFTCAP:
        highest = tl.max(s * factor, 1)
        factors = tl.broadcast_to(factor, s.shape)
    else:
        highest = tl.max(s, 1) * factor  # the same bits for less: the factor is one number
        factors = tl.full(s.shape, factor, tl.float32)
    new = tl.maximum(top, highest)
    if MASK:
        safe = tl.where(new == float("-inf"), 0.0, new)
    else:
        safe = new
    p = tl.exp2(tl.fma(s, factors, tl.broadcast_to(-safe[:, None], s.shape)))
    keep = tl.exp2(top - safe)
    sums = tl.fma(sums, keep, tl.sum(p, 1))
    if QUANTIZED:
        if q.dtype == tl.float16:
            # The scales are small: times a weight they would be subnormal in float16.
            v = (v.to(tl.float32) * value_scale[:, None]).to(q.dtype)
        else:
            p = p * value_scale[None, :]
            v = v.to(q.dtype)
    acc = tl.dot(p.to(q.dtype), v, acc * keep[:, None], input_precision="ieee")
    return acc, new, sums


@triton.jit
def attention_kernel(
    query_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, out_ptr, partial_out_ptr, partial_stat_ptr,
    blob_ptr, sinks_ptr, scale, softcap, window, query_token_stride, query_head_stride, num_slots,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    SPLIT: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, LONG: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Grid (item bucket * SPLIT, HKV): SPLIT programs share an item's tokens, BM // G each.

    `num_slots` is num_blocks * BLOCK, the rows of one head of one layer. One long function: every value
    below lives across the loops, and a helper would need most of them as arguments.
    """
    G: tl.constexpr = HQ // HKV
    index = tl.program_id(0) // SPLIT
    first_token = tl.program_id(0) % SPLIT * (BM // G)
    kv_head = tl.program_id(1)
    if index >= tl.load(blob_ptr + (1 if LONG else 0)):
        return
    item = blob_ptr + tl.load(blob_ptr + (4 if LONG else 3)) + index * 8
    token_count = tl.load(item + 1) - first_token
    if token_count <= 0:
        return
    table_ptr = blob_ptr + tl.load(blob_ptr + 9) + tl.load(item + 2)
    segment_start = tl.load(item + 3)
    segment_end = tl.load(item + 4)
    final = tl.load(item + 5)
    r = tl.arange(0, BM)
    d = tl.arange(0, DP)
    valid = (r // G < token_count) & (r < (BM // G) * G)
    head = kv_head * G + r % G
    token = tl.load(
        blob_ptr + tl.load(blob_ptr + 6) + tl.load(item) + first_token + r // G, mask=valid, other=0
    )
    position = tl.load(blob_ptr + tl.load(blob_ptr + 7) + token, mask=valid, other=0)
    min_position = tl.min(tl.where(valid, position, 2147483647), 0)
    max_position = tl.max(tl.where(valid, position, -1), 0)
    inside = valid[:, None] & (d < D)[None, :]
    query_at = token.to(tl.int64) * query_token_stride + head * query_head_stride
    q = tl.load(query_ptr + query_at[:, None] + d[None, :], mask=inside, other=0.0)
    logit_scale = scale * LOG2E
    head_base = kv_head.to(tl.int64) * num_slots
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(min_position - window + 1, 0)
    total_out = tl.zeros((BM, DP), tl.float32)
    total_max = tl.full((BM,), float("-inf"), tl.float32)
    total_sum = tl.zeros((BM,), tl.float32)
    base = tl.load(blob_ptr + tl.load(blob_ptr + 8) + token, mask=valid, other=0)
    for k in range(segment_start, segment_end):
        low = k * SEGMENT
        high = tl.minimum(low + SEGMENT, max_position + 1)
        start = low
        free_start = low
        if WINDOW:
            start = tl.minimum(tl.maximum(low, first_key // BN * BN), high)
            last_hidden = max_position - window + 1
            free_start = tl.maximum(start, (last_hidden + BN - 1) // BN * BN)
            free_start = tl.minimum(free_start, (high + BN - 1) // BN * BN)
        free_end = tl.maximum(free_start, tl.minimum(high, min_position + 1) // BN * BN)
        acc = tl.zeros((BM, DP), tl.float32)
        top = tl.full((BM,), float("-inf"), tl.float32)
        sums = tl.zeros((BM,), tl.float32)
        if WINDOW:
            for n in range(start, free_start, BN):
                acc, top, sums = _tile_step(
                    q, acc, top, sums, n, first_key, high, position, head_base, key_ptr, value_ptr,
                    key_scale_ptr, value_scale_ptr, table_ptr, logit_scale, softcap, window,
                    D, DP, BN, BLOCK, True, WINDOW, SOFTCAP, QUANTIZED,
                )  # fmt: skip
        for n in range(free_start, free_end, BN):
            acc, top, sums = _tile_step(
                q, acc, top, sums, n, first_key, high, position, head_base, key_ptr, value_ptr,
                key_scale_ptr, value_scale_ptr, table_ptr, logit_scale, softcap, window,
                D, DP, BN, BLOCK, False, WINDOW, SOFTCAP, QUANTIZED,
            )  # fmt: skip
        for n in range(free_end, high, BN):
            acc, top, sums = _tile_step(
                q, acc, top, sums, n, first_key, high, position, head_base, key_ptr, value_ptr,
                key_scale_ptr, value_scale_ptr, table_ptr, logit_scale, softcap, window,
                D, DP, BN, BLOCK, True, WINDOW, SOFTCAP, QUANTIZED,
            )  # fmt: skip
        if final != 0:
            total_out, total_max, total_sum = fold(total_out, total_max, total_sum, acc, top, sums)
        else:
            # A row that saw no key of this segment owns no slot for it.
            stored = valid & (top > float("-inf"))
            slot = (base + k).to(tl.int64) * HQ + head
            tl.store(
                partial_out_ptr + slot[:, None] * D + d[None, :], acc, mask=stored[:, None] & (d < D)[None, :]
            )
            tl.store(partial_stat_ptr + slot * 2, top, mask=stored)
            tl.store(partial_stat_ptr + slot * 2 + 1, sums, mask=stored)
    if final != 0:
        sink = tl.zeros((BM,), tl.float32)
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=valid, other=0.0)
        result = finish(total_out, total_max, total_sum, sink, SINKS)
        out_at = (token.to(tl.int64) * HQ + head) * D
        tl.store(out_ptr + out_at[:, None] + d[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)
