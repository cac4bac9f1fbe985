"""The CPU attention kernel: reads cache blocks in place, compiled by numba per head size and storage.

The algorithm, for one item (see `work_plan`) and one KV head::

    rows = tokens of the item x query heads of the group, packed and scaled once
    for each segment k of the item:
        for each block of the segment:   scores[rows, block] = rows . keys
        mask, then per row:              m = max, p = 2 ** (scores - m), l = sum(p)
        for each block of the segment:   acc[rows] += p[rows, block] . values
        fold (m, l, acc) into the row's running state, or store it as a partial

Numerics: no operation mixes rows, sums have fixed lengths (a segment is always summed over its full width,
hidden keys as zeros), and folding is compiled without reordering. A row's bits depend on its query and its
visible keys and values only: not on its tile, its companions, the chunk it came in, nor where its blocks lie.

Threads take (item, head) pairs from a shared counter, so a slow core takes fewer.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

SEGMENT = 256

# Storage kinds.
FLOAT32, BFLOAT16, FLOAT16, INT8, FP8_E4M3, FP8_E5M2 = range(6)

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
    TABLES,
    PARTIAL_BASE,
    PARTIAL_OUT,
    PARTIAL_MAX,
    PARTIAL_SUM,
    SINKS,
    SLOPES,
    MERGE_TOKENS,
    NUM_MERGE,
    WINDOW,
    SCALARS,
    MAX_ROWS,
    BLOCK_SIZE,
    NUM_ARGUMENTS,
) = range(30)

_LOG2E = np.float32(1.4426950408889634)
_NEG_INF = np.float32(-np.inf)
_FAST = {"contract", "nsz", "arcp", "reassoc"}


def _pointer_intrinsic(typing_context: Any, address: Any, element: Any) -> Any:
    """An integer address as a typed pointer."""
    signature = types.CPointer(element.dtype)(address, element)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return signature, codegen


def _take_intrinsic(typing_context: Any, counter: Any) -> Any:
    """Atomic fetch-and-add of 1 on the int64 at a pointer."""
    signature = types.int64(counter)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return signature, codegen


def _as_float_intrinsic(typing_context: Any, bits: Any) -> Any:
    """The float32 with the given int32 bits."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


def _prefetch_intrinsic(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(args[0], byte), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(address), codegen


_pointer: Any = intrinsic(_pointer_intrinsic)
_take: Any = intrinsic(_take_intrinsic)
_as_float: Any = intrinsic(_as_float_intrinsic)
_prefetch: Any = intrinsic(_prefetch_intrinsic)


@njit(forceinline=True)
def _prefetch_block(address: int, size: int) -> None:
    """Ask for a block's rows of one head: they are one run, but hardware prefetch stops at its end."""
    for at in range(address, address + size, 64):
        _prefetch(at)


@njit(forceinline=True)
def _i32(address: int) -> Any:
    """The int32 at an address, as int64."""
    return np.int64(carray(_pointer(address, np.int32), (1,))[0])


@njit(forceinline=True)
def _f32(address: int) -> Any:
    """A view of the float32 at an address."""
    return carray(_pointer(address, np.float32), (1,))


@njit(forceinline=True)
def _f32_row(address: int, size: int) -> Any:
    """A view of `size` float32 at an address."""
    return carray(_pointer(address, np.float32), (size,))


@njit(forceinline=True)
def _exp2(x: Any) -> Any:
    """2 ** x for x <= 0, exactly 0 from -125 down. Polynomial of Cephes' exp2f, exponent set by its bits."""
    v = x if x > np.float32(-125.0) else np.float32(-125.0)
    whole = np.rint(v)
    y = v - whole
    p = np.float32(1.535336188319500e-4)
    p = p * y + np.float32(1.339887440266574e-3)
    p = p * y + np.float32(9.618437357674640e-3)
    p = p * y + np.float32(5.550332471162809e-2)
    p = p * y + np.float32(2.402264791363012e-1)
    p = p * y + np.float32(6.931472028550421e-1)
    p = p * y + np.float32(1.0)
    power = _as_float(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))
    return p * power if x > np.float32(-125.0) else np.float32(0.0)


@njit(fastmath=_FAST, forceinline=True)
def _dot_rows(q: Any, k: Any, scores: Any, rows: int, column: int, head_size: int, block_size: int) -> None:
    """scores[:rows, column:column + block] = q . k, eight keys at a time so that a query element loads
    once."""
    for r in range(rows):
        for n in range(0, block_size, 8):
            a = np.float32(0)
            b = np.float32(0)
            c = np.float32(0)
            d = np.float32(0)
            e = np.float32(0)
            f = np.float32(0)
            g = np.float32(0)
            h = np.float32(0)
            for i in range(head_size):
                x = q[r, i]
                a += x * k[n, i]
                b += x * k[n + 1, i]
                c += x * k[n + 2, i]
                d += x * k[n + 3, i]
                e += x * k[n + 4, i]
                f += x * k[n + 5, i]
                g += x * k[n + 6, i]
                h += x * k[n + 7, i]
            scores[r, column + n] = a
            scores[r, column + n + 1] = b
            scores[r, column + n + 2] = c
            scores[r, column + n + 3] = d
            scores[r, column + n + 4] = e
            scores[r, column + n + 5] = f
            scores[r, column + n + 6] = g
            scores[r, column + n + 7] = h


@njit(fastmath={"contract"}, forceinline=True)
def _add_values(p: Any, v: Any, acc: Any, rows: int, column: int, head_size: int, block_size: int) -> None:
    """acc[:rows] += p[:rows, column:column + block] . v, in key order; rows is a multiple of 4.

    Four rows by four keys at a time, so that values load once for four rows. Every step is one fused
    multiply-add in a fixed chain, which leaves the compiler no choice that could differ between rows.
    """
    for r in range(0, rows, 4):
        for n in range(0, block_size, 4):
            a0, a1, a2, a3 = (
                p[r, column + n],
                p[r, column + n + 1],
                p[r, column + n + 2],
                p[r, column + n + 3],
            )
            b0, b1, b2, b3 = (
                p[r + 1, column + n],
                p[r + 1, column + n + 1],
                p[r + 1, column + n + 2],
                p[r + 1, column + n + 3],
            )
            c0, c1, c2, c3 = (
                p[r + 2, column + n],
                p[r + 2, column + n + 1],
                p[r + 2, column + n + 2],
                p[r + 2, column + n + 3],
            )
            d0, d1, d2, d3 = (
                p[r + 3, column + n],
                p[r + 3, column + n + 1],
                p[r + 3, column + n + 2],
                p[r + 3, column + n + 3],
            )
            for i in range(head_size):
                v0, v1, v2, v3 = v[n, i], v[n + 1, i], v[n + 2, i], v[n + 3, i]
                acc[r, i] = acc[r, i] + a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3
                acc[r + 1, i] = acc[r + 1, i] + b0 * v0 + b1 * v1 + b2 * v2 + b3 * v3
                acc[r + 2, i] = acc[r + 2, i] + c0 * v0 + c1 * v1 + c2 * v2 + c3 * v3
                acc[r + 3, i] = acc[r + 3, i] + d0 * v0 + d1 * v1 + d2 * v2 + d3 * v3


@njit(forceinline=True)
def _fold(state: Any, r: int, out: Any, seg_max: Any, seg_sum: Any, seg_out: Any) -> None:
    """Fold one segment's partial into row r: state[0] maxima, state[1] sums, out the weighted values."""
    new = max(state[0, r], seg_max)
    a = _exp2(state[0, r] - new) if state[0, r] > _NEG_INF else np.float32(0.0)
    b = _exp2(seg_max - new)
    state[1, r] = state[1, r] * a + seg_sum * b
    state[0, r] = new
    for i in range(len(out)):
        out[i] = out[i] * a + seg_out[i] * b


@njit(forceinline=True)
def _finish(maximum: Any, total: Any, acc: Any, out: Any, has_sink: bool, sink: Any) -> None:
    """Write acc / total, with the sink's logit (natural units) in the denominator."""
    factor = np.float32(1.0)
    if has_sink:
        logit = sink * _LOG2E
        new = max(maximum, logit)
        factor = _exp2(maximum - new)
        total = total * factor + _exp2(logit - new)
    factor = factor / total
    for i in range(len(out)):
        out[i] = acc[i] * factor


@njit(fastmath=_FAST, forceinline=True)
def _load_block(kind: int, address: int, scale: int, count: int, block: Any, size: int) -> None:
    """Widen a stored block to float32, times its scales if quantised; rows from `count` on become zero."""
    rows = len(block)
    n = count * size
    flat = _f32_row(np.int64(block.ctypes.data), rows * size)
    if kind == FLOAT32:
        wide = _f32_row(address, rows * size)
        for i in range(n):
            flat[i] = wide[i]
    elif kind == BFLOAT16:
        half = carray(_pointer(address, np.uint16), (rows * size,))
        for i in range(n):
            flat[i] = _as_float(np.int32(half[i]) << np.int32(16))
    elif kind == FLOAT16:
        half = carray(_pointer(address, np.uint16), (rows * size,))
        for i in range(n):
            x = np.int32(half[i])
            # The exponent's bias moves from 15 to 127; subnormals come out right as well.
            moved = ((x & np.int32(0x7FFF)) << np.int32(13)) | ((x & np.int32(0x8000)) << np.int32(16))
            flat[i] = _as_float(np.int32(moved)) * np.float32(2.0**112)
    elif kind == INT8:
        small = carray(_pointer(address, np.int8), (rows * size,))
        for i in range(n):
            flat[i] = np.float32(small[i])
    else:
        byte = carray(_pointer(address, np.uint8), (rows * size,))
        shift = np.int32(20) if kind == FP8_E4M3 else np.int32(21)
        bias = np.float32(2.0**120) if kind == FP8_E4M3 else np.float32(2.0**112)
        for i in range(n):
            x = np.int32(byte[i])
            moved = ((x & np.int32(0x7F)) << shift) | ((x & np.int32(0x80)) << np.int32(24))
            flat[i] = _as_float(np.int32(moved)) * bias
    if kind >= INT8:
        factors = _f32_row(scale, rows)
        for r in range(count):
            for i in range(size):
                block[r, i] *= factors[r]
    for i in range(n, rows * size):
        flat[i] = np.float32(0.0)


@njit(fastmath=_FAST, forceinline=True)
def _shape_logits(row: Any, start: int, end: int, position: int, low: int, softcap: Any, slope: Any) -> None:
    """Softcap and ALiBi on columns [start, end) of a row of base-2 logits; column c is key position low +
    c."""
    if softcap > 0:
        cap = softcap * _LOG2E
        for c in range(start, end):
            # tanh through exp of a non-positive argument, which cannot overflow.
            x = row[c] / cap
            t = np.exp(np.float32(-2.0) * abs(x))
            y = (np.float32(1.0) - t) / (np.float32(1.0) + t)
            row[c] = cap * (y if x >= 0 else -y)
    if slope != 0:
        for c in range(start, end):
            row[c] += slope * _LOG2E * np.float32(low + c - position)


@njit(forceinline=True)
def _row_max(row: Any) -> Any:
    """The largest of the row's numbers, as integers that order alike: only their maxima are vectorised."""
    bits = row.view(np.int32)
    top = np.int32(-0x80000000)
    for c in range(SEGMENT):
        b = bits[c]
        top = max(top, b ^ ((b >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return _as_float(np.int32(top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@njit(fastmath=_FAST, forceinline=True)
def _softmax_row(row: Any, start: int, end: int, position: int, low: int, softcap: Any, slope: Any) -> Any:
    """Hide columns outside [start, end), then row <- 2 ** (row - max). Returns (max, sum)."""
    _shape_logits(row, start, end, position, low, softcap, slope)
    for c in range(start):
        row[c] = _NEG_INF
    for c in range(end, SEGMENT):
        row[c] = _NEG_INF
    top = _row_max(row)
    total = np.float32(0.0)
    for c in range(SEGMENT):
        p = _exp2(row[c] - top)
        row[c] = p
        total += p
    return top, total


@functools.cache
def attention_kernels(head_size: int, kind: int) -> tuple[int, int]:
    """Addresses of the compiled (attend, merge) functions, each `void (int64 *arguments)`.

    The first call for a combination compiles for a few seconds; the result is cached on disk (numba's cache
    folder, or NUMBA_CACHE_DIR).
    """
    attend, merge = _make_attend(head_size, kind), _make_merge(head_size)
    _keep.extend((attend, merge))
    return attend.address, merge.address


_keep: list[Any] = []


def _compile(function: Any) -> Any:
    try:
        return cfunc("void(voidptr)", cache=True, fastmath=_FAST)(function)
    except RuntimeError:
        # No folder to cache in: every process compiles anew.
        return cfunc("void(voidptr)", fastmath=_FAST)(function)


def _make_attend(head_size: int, kind: int) -> Any:
    def attend(pointer):  # type: ignore[no-untyped-def]
        arg = carray(pointer, (NUM_ARGUMENTS,), np.int64)
        counter = _pointer(arg[COUNTER], np.int64)
        max_rows = arg[MAX_ROWS]
        block_size = arg[BLOCK_SIZE]
        q = np.empty((max_rows, head_size), np.float32)
        scores = np.empty((max_rows, SEGMENT), np.float32)
        seg_out = np.empty((max_rows, head_size), np.float32)
        acc = np.empty((max_rows, head_size), np.float32)
        state = np.empty((2, max_rows), np.float32)
        seg = np.empty((2, max_rows), np.float32)
        block = np.empty((block_size, head_size), np.float32)
        while True:
            work = _take(counter)
            if work >= arg[NUM_ITEMS] * arg[NUM_KV_HEADS]:
                break
            _run_item(arg, work, q, scores, seg_out, acc, state, seg, block, head_size, block_size, kind)

    return _compile(attend)


@njit(fastmath=_FAST, forceinline=True)
def _run_item(
    arg: Any,
    work: int,
    q: Any,
    scores: Any,
    seg_out: Any,
    acc: Any,
    state: Any,
    seg: Any,
    block: Any,
    head_size: int,
    block_size: int,
    kind: int,
) -> None:
    kv_heads = arg[NUM_KV_HEADS]
    group = arg[GROUP_SIZE]
    window = arg[WINDOW]
    head = work % kv_heads
    item = carray(_pointer(arg[ITEMS] + (work // kv_heads) * 32, np.int32), (8,))
    count = np.int64(item[1])
    rows = count * group
    padded = (rows + 3) // 4 * 4
    tokens = carray(_pointer(arg[TOKENS] + np.int64(item[0]) * 4, np.int32), (count,))
    table = _pointer(arg[TABLES] + np.int64(item[2]) * 4, np.int32)
    scalars = carray(_pointer(arg[SCALARS], np.float32), (2,))
    factor = scalars[0] * _LOG2E
    min_pos = np.int64(1 << 40)
    max_pos = np.int64(-1)
    for t in range(count):
        pos = _i32(arg[POSITIONS] + np.int64(tokens[t]) * 4)
        min_pos = min(min_pos, pos)
        max_pos = max(max_pos, pos)
        for g in range(group):
            r = t * group + g
            place = (
                np.int64(tokens[t]) * arg[QUERY_TOKEN_STRIDE] + (head * group + g) * arg[QUERY_HEAD_STRIDE]
            )
            source = _f32_row(arg[QUERY] + place * 4, head_size)
            for i in range(head_size):
                q[r, i] = source[i] * factor
                acc[r, i] = np.float32(0.0)
            state[0, r] = _NEG_INF
            state[1, r] = np.float32(0.0)
    first_visible = max(np.int64(0), min_pos - window + 1) if window > 0 else np.int64(0)
    block_bytes = block_size * head_size * (4 if kind == FLOAT32 else (2 if kind <= FLOAT16 else 1))
    head_base = head * arg[NUM_BLOCKS]
    tables = carray(table, ((max_pos // block_size) + 1,))
    for k in range(np.int64(item[3]), np.int64(item[4])):
        low = k * SEGMENT
        high = min(low + SEGMENT, max_pos + 1)
        begin = max(low, first_visible)
        if begin >= high:
            continue
        first_block = begin // block_size
        end_block = (high + block_size - 1) // block_size
        for j in range(first_block, end_block):
            place = head_base + np.int64(tables[j])
            key_at = arg[KEY] + place * block_bytes
            if rows <= 16:
                # Few rows: memory is what limits.
                if j + 1 < end_block:
                    _prefetch_block(
                        arg[KEY] + (head_base + np.int64(tables[j + 1])) * block_bytes, block_bytes
                    )
                _prefetch_block(arg[VALUE] + place * block_bytes, block_bytes)
            if kind != FLOAT32:
                _load_block(
                    kind, key_at, arg[KEY_SCALE] + place * block_size * 4, block_size, block, head_size
                )
                key_at = np.int64(block.ctypes.data)
            keys = carray(_pointer(key_at, np.float32), (block_size, head_size))
            _dot_rows(q, keys, scores, rows, j * block_size - low, head_size, block_size)
        for r in range(rows):
            t = r // group
            pos = _i32(arg[POSITIONS] + np.int64(tokens[t]) * 4)
            start = max(low, pos - window + 1) if window > 0 else low
            end = min(high, pos + 1)
            if start >= end:
                seg[0, r] = _NEG_INF
                for c in range(SEGMENT):
                    scores[r, c] = np.float32(0.0)
            else:
                slope = np.float32(0.0)
                if arg[SLOPES] != 0:
                    slope = _f32(arg[SLOPES] + (head * group + r % group) * 4)[0]
                top, total = _softmax_row(scores[r], start - low, end - low, pos, low, scalars[1], slope)
                seg[0, r] = top
                seg[1, r] = total
        for r in range(rows, padded):
            for c in range(SEGMENT):
                scores[r, c] = np.float32(0.0)
        for r in range(padded):
            for i in range(head_size):
                seg_out[r, i] = np.float32(0.0)
        for j in range(first_block, end_block):
            place = head_base + np.int64(tables[j])
            value_at = arg[VALUE] + place * block_bytes
            written = min(high - j * block_size, np.int64(block_size))
            # Slots past the context may hold NaN, which zero weights would not cancel.
            if kind != FLOAT32 or written < block_size:
                _load_block(
                    kind, value_at, arg[VALUE_SCALE] + place * block_size * 4, written, block, head_size
                )
                value_at = np.int64(block.ctypes.data)
            values = carray(_pointer(value_at, np.float32), (block_size, head_size))
            _add_values(scores, values, seg_out, padded, j * block_size - low, head_size, block_size)
        for r in range(rows):
            if seg[0, r] == _NEG_INF:
                continue
            if item[5] != 0:
                _fold(state, r, acc[r], seg[0, r], seg[1, r], seg_out[r])
            else:
                token = np.int64(tokens[r // group])
                base = _i32(arg[PARTIAL_BASE] + token * 4)
                slot = (base + k) * (kv_heads * group) + head * group + r % group
                _f32(arg[PARTIAL_MAX] + slot * 4)[0] = seg[0, r]
                _f32(arg[PARTIAL_SUM] + slot * 4)[0] = seg[1, r]
                target = _f32_row(arg[PARTIAL_OUT] + slot * head_size * 4, head_size)
                for i in range(head_size):
                    target[i] = seg_out[r, i]
    if item[5] != 0:
        for r in range(rows):
            h = head * group + r % group
            place = np.int64(tokens[r // group]) * (kv_heads * group) + h
            target = _f32_row(arg[OUTPUT] + place * head_size * 4, head_size)
            sink = np.float32(0.0)
            if arg[SINKS] != 0:
                sink = _f32(arg[SINKS] + h * 4)[0]
            _finish(state[0, r], state[1, r], acc[r], target, arg[SINKS] != 0, sink)


def _make_merge(head_size: int) -> Any:
    def merge(pointer):  # type: ignore[no-untyped-def]
        arg = carray(pointer, (NUM_ARGUMENTS,), np.int64)
        counter = _pointer(arg[COUNTER] + 8, np.int64)
        heads = arg[NUM_KV_HEADS] * arg[GROUP_SIZE]
        state = np.empty((2, 1), np.float32)
        acc = np.empty(head_size, np.float32)
        merge_tokens = carray(_pointer(arg[MERGE_TOKENS], np.int32), (arg[NUM_MERGE],))
        while True:
            work = _take(counter)
            if work >= arg[NUM_MERGE]:
                break
            token = np.int64(merge_tokens[work])
            pos = _i32(arg[POSITIONS] + token * 4)
            base = _i32(arg[PARTIAL_BASE] + token * 4)
            first = np.int64(0)
            if arg[WINDOW] > 0:
                first = max(np.int64(0), pos - arg[WINDOW] + 1) // SEGMENT
            for h in range(heads):
                state[0, 0] = _NEG_INF
                state[1, 0] = np.float32(0.0)
                for i in range(head_size):
                    acc[i] = np.float32(0.0)
                for k in range(first, pos // SEGMENT + 1):
                    slot = (base + k) * heads + h
                    seg_out = _f32_row(arg[PARTIAL_OUT] + slot * head_size * 4, head_size)
                    seg_max = _f32(arg[PARTIAL_MAX] + slot * 4)[0]
                    seg_sum = _f32(arg[PARTIAL_SUM] + slot * 4)[0]
                    _fold(state, 0, acc, seg_max, seg_sum, seg_out)
                target = _f32_row(arg[OUTPUT] + (token * heads + h) * head_size * 4, head_size)
                sink = np.float32(0.0)
                if arg[SINKS] != 0:
                    sink = _f32(arg[SINKS] + h * 4)[0]
                _finish(state[0, 0], state[1, 0], acc, target, arg[SINKS] != 0, sink)

    return _compile(merge)
