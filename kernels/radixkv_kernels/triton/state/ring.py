# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of a few rows, decodes and guesses, over a state and its ring in parallel.

With G the sum of log decays since the base, and u_j what earlier rows wrote, which the ring holds::

    u_i = beta_i (v_i - e^G_i k_i S - sum over j < i of (k_i k_j) e^(G_i - G_j) u_j)     delta rules; else v_i
    o_i = e^G_i q_i S + sum over j <= i of (q_i k_j) e^(G_i - G_j) u_j

All rows of the ring enter at once. Sums are in another order than in a chunk (`chunks.py`), so that outputs
differ in their last bits. States do not: they are folded from the ring's keys and values by the kernels of
chunks.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from radixkv_kernels.states import GRID
from radixkv_kernels.triton.state.chunks import inverse_length

_GRID = tl.constexpr(GRID)


@triton.jit(do_not_specialize=["num_rows"])
def ring_kernel(
    header_ptr, shorts_ptr, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, ring_k_ptr, ring_u_ptr,
    ring_decay_ptr, slots_ptr,
    out_ptr, q_stride, k_stride, v_stride, decay_stride, beta_stride, scale, num_rows, H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr, KR: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VR: tl.constexpr, BV: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Grid (heads times blocks of BV columns, requests and rows of padding), or more.

    num_rows: rows of the layer; those that belong to no request become zero.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    num_shorts = tl.load(header_ptr + 7)
    if tl.program_id(1) >= num_shorts:
        padding = tl.load(header_ptr + 2) + tl.program_id(1) - num_shorts
        if padding < num_rows:
            place = tl.program_id(0) % blocks * BV + tl.arange(0, BV)
            at_padding = (padding.to(tl.int64) * H + tl.program_id(0) // blocks) * V + place
            tl.store(out_ptr + at_padding, tl.zeros([BV], tl.float32), mask=place < V)
        return
    head = tl.program_id(0) // blocks
    group = head // (H // G)
    request = shorts_ptr + tl.program_id(1) * 8
    first, count = tl.load(request).to(tl.int64), tl.load(request + 1)
    ring, held = tl.load(request + 2).to(tl.int64), tl.load(request + 3)
    base = tl.load(request + 4).to(tl.int64)
    row, key = tl.arange(0, _GRID), tl.arange(0, KP)
    column = tl.program_id(0) % blocks * BV + tl.arange(0, BV)
    is_key, is_value, in_ring = key < K, column < V, row < held
    matrix = head * (KR * VR) + key[:, None] * VR + column[None, :]
    s = tl.load(
        slots_ptr + base * (H * KR * VR) + matrix, mask=is_key[:, None] & is_value[None, :], other=0.0
    )
    keys = tl.load(
        ring_k_ptr + ring * (G * KR * _GRID) + row[:, None] * (G * K) + group * K + key[None, :],
        mask=in_ring[:, None] & is_key[None, :], other=0.0,
    )  # fmt: skip
    if DELTA:
        keys *= inverse_length(keys)[:, None]
    ring_u_ptr += (ring * H + head) * (_GRID * VR) + column
    writes = tl.load(
        ring_u_ptr[None, :] + row[:, None] * VR, mask=in_ring[:, None] & is_value[None, :], other=0.0
    )
    # Sums of decays up to each row of the ring, and up to its end.
    if CHANNELS:
        place = ring * (H * KR * _GRID) + row[:, None] * (H * K) + head * K + key[None, :]
        decays = tl.load(ring_decay_ptr + place, mask=in_ring[:, None] & is_key[None, :], other=0.0)
    else:
        decays = tl.load(ring_decay_ptr + ring * (H * _GRID) + row * H + head, mask=in_ring, other=0.0)
    sums, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
    for i in range(count):
        at = first + i
        k = tl.load(k_ptr + at * k_stride + group * K + key, mask=is_key, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + at * q_stride + group * K + key, mask=is_key, other=0.0).to(tl.float32)
        u = tl.load(v_ptr + at * v_stride + head * V + column, mask=is_value, other=0.0).to(tl.float32)
        if DELTA:
            k *= inverse_length(k)
            q *= inverse_length(q) * scale
        earlier = row < held + i
        if CHANNELS:
            total += tl.load(decay_ptr + at * decay_stride + head * K + key, mask=is_key, other=0.0).to(
                tl.float32
            )
            faded = keys * tl.exp(tl.where(earlier[:, None], total[None, :] - sums, 0.0))
            is_new = (row == held + i)[:, None]
            sums = tl.where(is_new, total[None, :], sums)
        else:
            total += tl.load(decay_ptr + at * decay_stride + head).to(tl.float32)
            fading = tl.exp(tl.where(earlier, total - sums, 0.0))
            is_new = (row == held + i)[:, None]
            sums = tl.where(row == held + i, total, sums)
        fade = tl.exp(total)
        own = tl.sum(q * k, 0)
        if CHANNELS:
            p = tl.where(earlier, tl.sum(faded * q[None, :], 1), 0.0)
        else:
            p = tl.where(earlier, tl.sum(keys * q[None, :], 1) * fading, 0.0)
        out = tl.sum((q * fade)[:, None] * s, 0) + tl.sum(p[:, None] * writes, 0)
        if DELTA:
            if CHANNELS:
                a = tl.where(earlier, tl.sum(faded * k[None, :], 1), 0.0)
            else:
                a = tl.where(earlier, tl.sum(keys * k[None, :], 1) * fading, 0.0)
            u -= tl.sum((k * fade)[:, None] * s, 0) + tl.sum(a[:, None] * writes, 0)
            u *= tl.load(beta_ptr + at * beta_stride + head).to(tl.float32)
        tl.store(out_ptr + (at * H + head) * V + column, out + own * u, mask=is_value)
        tl.store(ring_u_ptr + (held + i) * VR, u, mask=is_value)
        keys = tl.where(is_new, k[None, :], keys)
        writes = tl.where(is_new, u[None, :], writes)
