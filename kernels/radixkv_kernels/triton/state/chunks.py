# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of heads whose state is a matrix, in chunks of the grid: gated delta rules and linear
attention.

A chunk's GRID rows lie between two grid points. Rows of earlier steps come from the ring, later ones are
zero. With G the sum of log decays since the chunk's first row, and S the state before it::

    A_ij = beta_i (k_i k_j) e^(G_i - G_j) for j < i         T = (1 + A)^-1, row after row
    w = T beta e^G k      u = T beta v - w S                what the rows write; in linear attention u is v
    o_i = e^G_i q_i S + sum over j <= i of (q_i k_j) e^(G_i - G_j) u_j
    S'  = e^G_last S + sum over j of e^(G_last - G_j) k_j u_j

Three launches: what the chunks can do alone (T, w, u without S), the states in order, the outputs. No row
sees a later one, and a chunk is one tile at one place wherever steps begin and end. So pieces, hits and
decodes have the bits of the whole, and so have the states that they end in.

The delta rule in this form: Yang et al., "Gated Delta Networks" (2412.06464); linear attention: Dao and Gu,
"Transformers are SSMs" (2405.21060). With a decay for each channel (KDA, 2510.26692), the factors (k_i k_j)
e^(G_i - G_j) and (q_i k_j) e^(G_i - G_j) come from `channels.py`.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from radixkv_kernels.states import GRID
from radixkv_kernels.triton.state.split import halves, split_product

_GRID = tl.constexpr(GRID)
_EPSILON = tl.constexpr(1e-6)


@triton.jit
def rows_of(ring_at, input_at, in_ring, in_step):
    """Rows of a chunk, those of earlier steps from the ring, in the type of the inputs; zero elsewhere."""
    new = tl.load(input_at, mask=in_step, other=0.0)
    old = tl.load(ring_at, mask=in_ring, other=0.0)
    return tl.where(in_ring, old.to(new.dtype), new)


@triton.jit
def inverse_length(x):
    """1 / |row| of rows [n, K], or of one [K]."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, len(x.shape) - 1) + _EPSILON)


@triton.jit
def local_kernel(
    header_ptr, chunks_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, ring_k_ptr, ring_v_ptr, ring_decay_ptr,
    ring_beta_ptr,
    keys_ptr, lengths_ptr, scores_ptr, w_ptr, low_ptr, u_ptr, cumulated_ptr, k_stride, v_stride, decay_stride,
    beta_stride, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KR: tl.constexpr, KP: tl.constexpr,
    V: tl.constexpr, VR: tl.constexpr, VP: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, heads). KR, VR: sizes in rings; KP, VP: powers of two."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if chunk >= tl.load(header_ptr + 5):
        return
    group = head // (H // G)
    table = chunks_ptr + chunk * 8
    first, begin, end = tl.load(table).to(tl.int64), tl.load(table + 1), tl.load(table + 2)
    ring = tl.load(table + 3).to(tl.int64)
    row, key, column = tl.arange(0, _GRID), tl.arange(0, KP), tl.arange(0, VP)
    in_ring, in_step = row < begin, (row >= begin) & (row < end)
    is_key, is_value = (key < K)[None, :], (column < V)[None, :]
    at = first + row - begin  # rows of the step
    own = (chunk * H + head) * _GRID + row
    beta = tl.zeros([_GRID], tl.float32)
    if DELTA:
        beta = rows_of(
            ring_beta_ptr + ring * (H * _GRID) + row * H + head, beta_ptr + at * beta_stride + head, in_ring,
            in_step,
        ).to(tl.float32)  # fmt: skip
    v_at = v_ptr + at[:, None] * v_stride + head * V + column[None, :]
    if DELTA:
        # Without the delta rule, values are what is written, and lie beside the keys.
        ring_v = ring_v_ptr + ring * (H * VR * _GRID) + row[:, None] * (H * V) + head * V + column[None, :]
    else:
        ring_v = ring_v_ptr + (ring * H + head) * (_GRID * VR) + row[:, None] * VR + column[None, :]
    v = rows_of(ring_v, v_at, in_ring[:, None] & is_value, in_step[:, None] & is_value)
    u_at = u_ptr + own[:, None] * VP + column[None, :]
    if CHANNELS:
        is_row = (row < end)[:, None] & (row < _GRID)[None, :]
        a = tl.load(scores_ptr + own[:, None] * _GRID + row[None, :], mask=is_row, other=0.0)
        k = tl.load(keys_ptr + own[:, None] * KP + key[None, :])
        cumulated = tl.load(cumulated_ptr + own[:, None] * KP + key[None, :])
        faded = k.to(tl.float32) * (tl.exp(cumulated) * tl.load(lengths_ptr + own)[:, None])
    else:
        k = rows_of(
            ring_k_ptr + ring * (G * KR * _GRID) + row[:, None] * (G * K) + group * K + key[None, :],
            k_ptr + at[:, None] * k_stride + group * K + key[None, :],
            in_ring[:, None] & is_key, in_step[:, None] & is_key,
        )  # fmt: skip
        decay = rows_of(
            ring_decay_ptr + ring * (H * _GRID) + row * H + head, decay_ptr + at * decay_stride + head,
            in_ring, in_step,
        ).to(tl.float32)  # fmt: skip
        cumulated = tl.cumsum(decay, 0)
        tl.store(cumulated_ptr + own, cumulated)
        length = inverse_length(k)
        if head % (H // G) == 0:
            shared = (chunk * G + group) * _GRID + row
            tl.store(keys_ptr + shared[:, None] * KP + key[None, :], k)
            tl.store(lengths_ptr + shared, length)
    if not DELTA:
        tl.store(u_at, v)
        return
    lower = row[:, None] > row[None, :]
    if not CHANNELS:
        a = split_product(k, tl.trans(k)) * (length[:, None] * length[None, :])
        a *= tl.exp(tl.where(lower, cumulated[:, None] - cumulated[None, :], 0.0))
    t = tl.where(lower, -a * beta[:, None], 0.0)
    for i in range(1, _GRID):  # a row of the inverse from those above it
        here = (row == i)[:, None]
        from_above = tl.sum(tl.where(here, t, 0.0), 0)
        from_above += tl.sum(from_above[:, None] * t, 0)
        t = tl.where(here, from_above[None, :], t)
    t += tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    tl.store(u_at, split_product(t * beta[None, :], v))
    if CHANNELS:
        w = split_product(t * beta[None, :], faded)
    else:
        w = split_product(t * (beta * tl.exp(cumulated) * length)[None, :], k)
    high, low = halves(w)
    tl.store(w_ptr + own[:, None] * KP + key[None, :], high)
    tl.store(low_ptr + own[:, None] * KP + key[None, :], low)


@triton.jit
def state_kernel(
    header_ptr, requests_ptr, chunks_ptr, copies_ptr, keys_ptr, lengths_ptr, w_ptr, low_ptr, u_ptr,
    cumulated_ptr,
    before_ptr, slots_ptr, ring_u_ptr, H: tl.constexpr, G: tl.constexpr, KR: tl.constexpr, KP: tl.constexpr,
    V: tl.constexpr, VR: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr,
    CHANNELS: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BV columns, heads, requests): states before each chunk, u, and states that are kept.

    STAGES: chunks whose inputs are being loaded at a time. KEEP: u of the rows of a request's last chunk goes
    to its ring. The loop has no branches, so that a chunk's inputs are loaded while the one before is
    computed.
    """
    if tl.program_id(2) >= tl.load(header_ptr + 4):
        return
    request = requests_ptr + tl.program_id(2) * 8
    head = tl.program_id(1)
    ring = tl.load(request + 3).to(tl.int64)
    row, key = tl.arange(0, _GRID), tl.arange(0, KP)
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    inside = (key < KR)[:, None] & (column < VR)[None, :]
    matrix = head * (KR * VR) + key[:, None] * VR + column[None, :]
    base = tl.load(request + 2).to(tl.int64)
    s = tl.load(slots_ptr + base * (H * KR * VR) + matrix, mask=inside, other=0.0)
    first_chunk, end_chunk = tl.load(request), tl.load(request + 1)
    for chunk in tl.range(first_chunk, end_chunk, num_stages=STAGES):
        own = (tl.cast(chunk, tl.int64) * H + head) * _GRID
        if CHANNELS:
            shared = own
        else:
            shared = (tl.cast(chunk, tl.int64) * G + head // (H // G)) * _GRID
        table = chunks_ptr + chunk * 8
        begin, end, slot = tl.load(table + 1), tl.load(table + 2), tl.load(table + 4)
        u_at = u_ptr + (own + row)[:, None] * VP + column[None, :]
        u = tl.load(u_at)
        k = tl.load(keys_ptr + (shared + row)[None, :] * KP + key[:, None])
        before = before_ptr + (own // _GRID) * (KP * VP) + key[:, None] * VP + column[None, :]
        has_rows = tl.where(begin < end, column, VP) < VP
        tl.store(before, s, mask=(key < KP)[:, None] & has_rows[None, :])
        if DELTA:
            w_at = (own + row)[:, None] * KP + key[None, :]
            w, low = tl.load(w_ptr + w_at), tl.load(low_ptr + w_at)
            s_high, s_low = halves(s)
            u -= tl.dot(w, s_high, tl.dot(w, s_low, tl.dot(low, s_high)))
            tl.store(u_at, u)
            length = tl.load(lengths_ptr + shared + row)
        if KEEP:
            is_kept = tl.where(chunk == end_chunk - 1, column, V) < V
            kept = ((row >= begin) & (row < end))[:, None] & is_kept[None, :]
            place = (ring * H + head) * (_GRID * VR) + row[:, None] * VR + column[None, :]
            tl.store(ring_u_ptr + place, u, mask=kept)
        # The last sum is that of a full chunk: the state after another one is not kept.
        if CHANNELS:
            cumulated = tl.load(cumulated_ptr + (own + row)[None, :] * KP + key[:, None])
            last = tl.load(cumulated_ptr + (own + _GRID - 1) * KP + key)
            k = k.to(tl.float32) * (tl.exp(last[:, None] - cumulated) * length[None, :])
            s = s * tl.exp(last)[:, None] + split_product(k, u)
        else:
            cumulated = tl.load(cumulated_ptr + own + row)
            last = tl.load(cumulated_ptr + own + _GRID - 1)
            fading = tl.exp(last - cumulated)
            if DELTA:
                fading *= length
            s = s * tl.exp(last) + split_product(k, u.to(tl.float32) * fading[:, None])
        target = slots_ptr + tl.maximum(slot, 0).to(tl.int64) * (H * KR * VR) + matrix
        has_slot = tl.where(slot >= 0, column, VR) < VR
        tl.store(target, s, mask=(key < KR)[:, None] & has_slot[None, :])
    tl.debug_barrier()
    for copy in range(tl.load(request + 4), tl.load(request + 5)):
        source, slot = tl.load(copies_ptr + copy * 2), tl.load(copies_ptr + copy * 2 + 1)
        s = tl.load(slots_ptr + source.to(tl.int64) * (H * KR * VR) + matrix, mask=inside)
        tl.store(slots_ptr + slot.to(tl.int64) * (H * KR * VR) + matrix, s, mask=inside)


@triton.jit
def output_kernel(
    header_ptr, chunks_ptr, q_ptr, keys_ptr, lengths_ptr, scores_ptr, u_ptr, cumulated_ptr, before_ptr,
    out_ptr, q_stride,
    scale, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BV columns, chunks, heads)."""
    chunk, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    if chunk >= tl.load(header_ptr + 5):
        return
    table = chunks_ptr + chunk * 8
    first, begin, end = tl.load(table).to(tl.int64), tl.load(table + 1), tl.load(table + 2)
    if begin >= end:
        return
    group = head // (H // G)
    row, key = tl.arange(0, _GRID), tl.arange(0, KP)
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    in_step = (row >= begin) & (row < end)
    at = first + row - begin
    q = tl.load(
        q_ptr + at[:, None] * q_stride + group * K + key[None, :], mask=in_step[:, None] & (key < K)[None, :],
        other=0.0,
    )  # fmt: skip
    own = (chunk * H + head) * _GRID + row
    shared = own if CHANNELS else (chunk * G + group) * _GRID + row
    s = tl.load(before_ptr + (chunk * H + head) * (KP * VP) + key[:, None] * VP + column[None, :])
    u = tl.load(u_ptr + own[:, None] * VP + column[None, :])
    seen = row[:, None] >= row[None, :]
    if CHANNELS:
        seen = seen & (row < end)[:, None]
        p = tl.load(scores_ptr + own[:, None] * _GRID + row[None, :], mask=seen, other=0.0)
        cumulated = tl.load(cumulated_ptr + own[:, None] * KP + key[None, :])
        out = split_product(q.to(tl.float32) * tl.exp(cumulated), s)
    else:
        cumulated = tl.load(cumulated_ptr + own)
        out = split_product(q, s) * tl.exp(cumulated)[:, None]
        k = tl.load(keys_ptr + shared[:, None] * KP + key[None, :])
        p = split_product(q, tl.trans(k))
        if DELTA:
            p *= tl.load(lengths_ptr + shared)[None, :]
        p = tl.where(seen, p * tl.exp(tl.where(seen, cumulated[:, None] - cumulated[None, :], 0.0)), 0.0)
    out += split_product(p, u)
    if DELTA:
        out *= (inverse_length(q) * scale)[:, None]
    is_out = in_step[:, None] & (column < V)[None, :]
    tl.store(out_ptr + (at[:, None] * H + head) * V + column[None, :], out, mask=is_out)
